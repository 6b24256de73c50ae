"""One optimisation step: forward and backward over the accumulation window, then, if all is finite, the move."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from dspark.config import RunConfig
from dspark.distributed import gather_over_ranks, sum_over_ranks, world_size
from dspark.draft.model import DraftModel, DraftOutput
from dspark.errors import TrainingError
from dspark.train.batches import Batch
from dspark.train.objective import Metrics, Teacher, denominators, objective
from dspark.train.optimizer import acceptance_weight, learning_rate, set_learning_rate


@dataclass(frozen=True)
class Learner:
    """What a step works on: the draft, the same draft and its optimizer as accelerate prepared them, and the run."""

    accelerator: Accelerator
    draft: DraftModel
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    run: RunConfig

    @property
    def engine(self) -> Any:
        """``wrapped`` when it is a DeepSpeed engine, which clips and moves by itself; else None."""
        return self.wrapped if self.accelerator.distributed_type == DistributedType.DEEPSPEED else None


def train_step(learner: Learner, window: Sequence[Batch], step: int) -> Metrics:
    """Take step ``step`` on this process's micro-batches; every process calls it with its own.

    Losses are summed over processes and micro-steps and divided by denominators pooled over all of them beforehand, so
    the gradient does not depend on how the sequences were split.
    Returns: this process's (numerator, denominator) pairs, detached, to be summed before dividing.
    Raises: TrainingError on every process when a loss or gradient is not finite; the optimizer has not moved then.
    """
    run, device = learner.run, learner.accelerator.device
    local = torch.stack([denominators(batch.targets, run.objective.decay_positions) for batch in window]).sum(0)
    pooled = sum_over_ranks(local.to(device))
    losses, metrics = [], []
    for place, batch in enumerate(window):
        is_last = place == len(window) - 1
        loss, found = micro_step(learner, batch, batch.to(device), pooled, step, is_last)
        losses.append(loss)
        metrics.append(found | {"tokens": (torch.tensor(float(len(batch.ids_T))), torch.ones(()))})
    _refuse_non_finite_losses(torch.stack(losses), window, step)
    set_learning_rate(learner.optimizer, learning_rate(step, run.train))
    norm = _move(learner, window, step)
    share = torch.tensor(1 / world_size())
    once = {"loss": (torch.stack(losses).sum(), share), "gradient_norm": (norm * share, share)}
    return _summed([*metrics, once], device)


def micro_step(
    learner: Learner, batch: Batch, here: Batch, pooled: Tensor, step: int, is_last: bool
) -> tuple[Tensor, Metrics]:
    """Forward and backward of one micro-batch; its gradients are added to those that are there.

    ``here`` is ``batch`` with its tensors on the device, pooled the step's denominators on it.
    Returns: the loss and what to log, detached.
    """
    with gradient_exchange(learner, is_last):
        loss, found = judge_blocks(learner, draft_blocks(learner, here), batch, here, pooled, step)
        if learner.engine:
            learner.engine.backward(loss * world_size(), scale_wrt_gas=False)
        else:
            torch.autograd.backward(loss * world_size())
    return loss.detach(), found


def draft_blocks(learner: Learner, here: Batch) -> DraftOutput:
    """What the draft says about a batch on the device."""
    output: DraftOutput = learner.wrapped(here.ids_T, here.positions_T, here.taps_TLD, here.starts_A, here.anchors_A)
    return output


def judge_blocks(
    learner: Learner, output: DraftOutput, batch: Batch, here: Batch, pooled: Tensor, step: int
) -> tuple[Tensor, Metrics]:
    """The loss of what the draft said and what to log of it, as ``objective``; batch, here as ``micro_step``'s."""
    section = learner.run.objective
    assert learner.draft.head_VD is not None
    teacher = Teacher(learner.draft.head_VD, here.last_hidden_TD, batch.anchors_A)
    with learner.accelerator.autocast():
        return objective(output, teacher, batch.targets, section, acceptance_weight(step, section), pooled)


def gradient_exchange(learner: Learner, is_last: bool) -> AbstractContextManager[None]:
    """Exchange gradients in the last micro-step only (ZeRO-2 keeps a part of them, so it reduces in each)."""
    if learner.engine:
        learner.engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()
    exchange: AbstractContextManager[None] = learner.accelerator.no_sync(learner.wrapped)
    return nullcontext() if is_last else exchange


def _move(learner: Learner, window: Sequence[Batch], step: int) -> Tensor:
    """Clip and move unless a gradient is not finite. Returns: the gradient norm before clipping."""
    if learner.engine:
        learner.engine.step()
        is_finite = not learner.engine.optimizer.overflow
        norm = torch.as_tensor(learner.engine.get_global_grad_norm(), device=learner.accelerator.device)
    else:
        limit = learner.run.train.max_grad_norm
        norm = learner.accelerator.clip_grad_norm_(learner.draft.parameters(), limit)
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            learner.optimizer.step()
        learner.optimizer.zero_grad()
    if not is_finite:
        raise TrainingError(_message("gradient", step, _indices(window, norm.device)))
    return norm.detach()


def _refuse_non_finite_losses(losses_M: Tensor, window: Sequence[Batch], step: int) -> None:
    is_bad_WM = gather_over_ranks((~torch.isfinite(losses_M)).long()).bool()
    if is_bad_WM.any():
        raise TrainingError(_message("loss", step, _indices(window, losses_M.device)[is_bad_WM]))


def _indices(window: Sequence[Batch], device: torch.device) -> Tensor:
    """Record indices of the step's sequences on all processes: [world_size, micro-steps, B]."""
    return gather_over_ranks(torch.tensor([batch.indices for batch in window], device=device))


def _message(what: str, step: int, indices: Tensor) -> str:
    return (
        f"step {step}: the {what} is not finite; the optimizer has not moved. Sequences of the record: "
        f"{sorted(set(indices.flatten().tolist()))}; look at them, or lower train.learning_rate and resume"
    )


def _summed(parts: Sequence[Metrics], device: torch.device) -> Metrics:
    sums: Metrics = {}
    for part in parts:
        for name, pair in part.items():
            numerator, denominator = (value.to(device, torch.float64) for value in pair)
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + numerator, before[1] + denominator)
    return sums
