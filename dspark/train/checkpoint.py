"""Training checkpoints: safetensors and JSON, whole or not at all, the same whatever ran the training."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dspark.config import TrainSection
from dspark.distributed import spread, sum_over_ranks, whole
from dspark.draft.model import DraftModel
from dspark.errors import CheckpointError
from dspark.files import file_sha256, save_tensors, whole_folder
from dspark.train.optimizer import ADAMW, EMA, moment_names

KEPT_CHECKPOINTS = 2
Tensors = dict[str, Tensor]
STATE, PARAMETERS, MOMENTS = "state.json", "draft.safetensors", "moments.safetensors"


class Progress(NamedTuple):
    """How far a run is: optimisation steps done and sequences read, which fix the data order, anchors and schedule."""

    step: int
    sequences_seen: int


def gather_state(draft: nn.Module, optimizer: Any) -> tuple[Tensors, Tensors]:
    """The draft's float32 parameters and what the optimizer keeps of them (``exp_avg.NAME`` and so on), on the CPU.
    ``draft`` is the bare model and ``optimizer`` accelerate's. Under ZeRO and FSDP2 every rank must call it.
    """
    parameters, moments = Tensors(), Tensors()
    for name, parameter in draft.named_parameters():
        if not hasattr(parameter, "_hp_mapping"):
            parameters[name] = _on_cpu(whole(parameter.detach()))  # at once: no GPU has room for all of a spread state
            found = {moment: whole(tensor) for moment, tensor in optimizer.state[parameter].items()}
        else:
            state = next(iter(optimizer.optimizer.optimizer.state.values()))
            names = [moment for moment in (*ADAMW, EMA) if moment in state]
            pieces, begin = _slices(parameter, optimizer, names)
            sums = [sum_over_ranks(_unflatten(parameter, piece, begin)) for piece in pieces]
            parameters[name], found = _on_cpu(sums[0]), dict(zip(names, sums[1:], strict=True))
        moments |= {f"{moment}.{name}": _on_cpu(tensor) for moment, tensor in found.items() if moment != "step"}
    return parameters, moments


def whole_draft(draft: DraftModel) -> DraftModel:
    """The draft with all of its weights: itself, or a copy where FSDP2 spread them. Every rank must call it."""
    if not any(isinstance(parameter, DTensor) for parameter in draft.parameters()):
        return draft
    with torch.device("meta"):
        copy = DraftModel(draft.config)
    copy.load_state_dict({name: whole(tensor) for name, tensor in draft.state_dict().items()}, assign=True)
    copy.embedding_VD, copy.head_VD = draft.embedding_VD, draft.head_VD
    return copy


@torch.no_grad()
def finished_draft(draft: DraftModel, optimizer: Any, train: TrainSection) -> DraftModel:
    """The whole draft to write; its moving average takes the place of its parameters where the run keeps one. Every
    rank must call it.
    """
    if train.ema_decay:
        _, kept = gather_state(draft, optimizer)
        for name, parameter in draft.named_parameters():
            parameter.copy_(spread(kept[f"{EMA}.{name}"], parameter))
    return whole_draft(draft)


def save_checkpoint(folder: Path, progress: Progress, parameters: Tensors, moments: Tensors) -> Path:
    """Write ``folder/step-NNNNNNNN`` and drop all but the newest two. One process calls it.
    It is written beside its place, flushed and renamed: a kill at any moment leaves the whole of it or the ones before.
    """
    place = folder / f"step-{progress.step:08d}"
    with whole_folder(place) as partial:
        save_tensors(parameters, partial / PARAMETERS)
        save_tensors(moments, partial / MOMENTS)
        state = progress._asdict() | {"sha256": {name: file_sha256(partial / name) for name in (PARAMETERS, MOMENTS)}}
        (partial / STATE).write_text(json.dumps(state | {"seal": _seal(state)}, indent=2) + "\n", encoding="utf-8")
    for old in checkpoints(folder)[:-KEPT_CHECKPOINTS]:
        shutil.rmtree(old)
    return place


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first."""
    return sorted(folder.glob("step-" + "[0-9]" * 8))


def load_checkpoint(place: Path, draft: nn.Module, optimizer: Any) -> Progress:
    """Put a checkpoint's parameters and moments into a fresh draft and optimizer. Every process calls it.
    Raises: CheckpointError when a file is missing, damaged, or made for another draft or with another optimizer.
    """
    state = _read_state(place)
    parameters, moments = _read_tensors(place, PARAMETERS, state), _read_tensors(place, MOMENTS, state)
    own = {name: tuple(parameter.shape) for name, parameter in draft.named_parameters()}
    saved = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    if own != saved:
        wrong = min(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        there, here = saved.get(wrong), own.get(wrong)
        raise CheckpointError(f"{place}: made for another draft; {wrong} is {there}, the run's is {here}")
    progress = Progress(int(state["step"]), int(state["sequences_seen"]))
    kept, average = moment_names(optimizer), [EMA] if any(key.startswith(f"{EMA}.") for key in moments) else []
    names = {name: [*kept.get(parameter, ADAMW), *average] for name, parameter in draft.named_parameters()}
    if moments.keys() != {f"{moment}.{name}" for name, own_names in names.items() for moment in own_names}:
        raise CheckpointError(f"{place}: made with another optimizer; resume with the train.optimizer it was made with")
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(spread(parameters[name], parameter))
            found = {moment: moments[f"{moment}.{name}"] for moment in names[name]}
            if not hasattr(parameter, "_hp_mapping"):
                optimizer.state[parameter] = {key: spread(value, parameter) for key, value in found.items()}
                if ADAMW[0] in found:  # Muon counts no steps
                    optimizer.state[parameter]["step"] = torch.tensor(float(progress.step), device=parameter.device)
            else:
                pieces, begin = _slices(parameter, optimizer, names[name], progress.step)
                for piece, value in zip(pieces, [parameters[name], *found.values()], strict=True):
                    piece.copy_(value.flatten()[begin : begin + len(piece)])
    return progress


def _slices(
    parameter: Any, optimizer: Any, moments: Sequence[str], step: int | None = None
) -> tuple[list[Tensor], int]:
    """This rank's slices of value and moments in ZeRO's flat float32 partitions, views of them, and where in the
    flattened parameter they begin.

    DeepSpeed's own functions fail for the second parameter group (0.19.8): it links the moments of all groups after the
    first group's step. ``step`` makes the moments of a fresh optimizer exist.
    """
    mapping = parameter._hp_mapping
    if mapping is None:
        return [torch.zeros(0, device=parameter.device)] * (1 + len(moments)), 0
    flat = optimizer.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    state = optimizer.optimizer.optimizer.state[flat]
    if step is not None and not state:
        state["step"] = torch.tensor(float(step), device=flat.device)
        state |= {moment: torch.zeros_like(flat) for moment in moments}
    begin, length = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
    parts = [flat, *(state[moment] for moment in moments)]
    return [part.detach()[begin : begin + length] for part in parts], mapping.lp_fragment_address.start


def _unflatten(parameter: nn.Parameter, piece: Tensor, begin: int) -> Tensor:
    """A tensor of the parameter's shape with this rank's slice filled in and zeros elsewhere."""
    whole = torch.zeros(parameter.numel(), device=parameter.device)
    whole[begin : begin + len(piece)] = piece
    return whole.view(parameter.shape)


def _read_state(place: Path) -> dict[str, Any]:
    path = place / STATE
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        seal = state.pop("seal")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged ({error!r}); delete {place}, then resume") from error
    if seal != _seal(state):
        raise CheckpointError(f"{path}: was altered; delete {place}, then resume")
    return state


def _read_tensors(place: Path, name: str, state: dict[str, Any]) -> Tensors:
    path, expected = place / name, state["sha256"][name]
    found = file_sha256(path) if path.is_file() else "no file"
    if found != expected:
        raise CheckpointError(f"{path}: damaged: sha256 {found}, expected {expected}; delete {place}, then resume")
    return Tensors(load_file(path))


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.float32).contiguous()


def _seal(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
