"""Probes during training: target and prompts loaded and tried before the first step, and the best draft kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspark.cli.identity import folder_fields
from dspark.config import PROBE_TOKENS, RunConfig
from dspark.data.chat import ChatFormat, encode_prompt
from dspark.decode.generation import PlainSpeaker
from dspark.decode.sampling import Sampling
from dspark.draft.model import DraftModel
from dspark.errors import CheckpointError, ConfigError, PromptError
from dspark.eval.measure import decode_prompts
from dspark.eval.probe import Probe
from dspark.eval.tasks import load_task
from dspark.export.draft_folder import read_draft, write_draft
from dspark.model_folder import Checkpoint
from dspark.target.loading import load_target, locate_target, target_facts
from dspark.target.tokenizer import load_tokenizer
from dspark.train.checkpoint import whole_draft
from dspark.train.log import DECODED, Row
from dspark.train.run_folder import BEST, PROVENANCE
from dspark.train.step import Learner
from dspark.verifier.plan import free_bytes

TEMPERATURE = 1.0


def load_probe(run: RunConfig, device: torch.device) -> Probe:
    """The probe of a run, its target on ``device``. What no probe could do is refused here, not at a later step.
    Raises: ConfigError when the target does not fit; PromptError when it ends every text at once, or as ``load_task``.
    """
    folder = locate_target(run.target.path)
    stop_ids, dtype = target_facts(folder).stop_token_ids, getattr(torch, run.target.dtype)
    chat = ChatFormat(load_tokenizer(folder), stop_ids, run.data.thinking[0])
    task = run.eval.tasks[0]
    prompts = tuple(encode_prompt(chat, each) for each in load_task(task, run.train.probe_prompts))
    check_room(folder, dtype, device)
    target = load_target(folder, target_layer_ids=run.draft.target_layer_ids, dtype=dtype, device=device)
    sampling = Sampling(TEMPERATURE, min(PROBE_TOKENS, run.eval.max_new_tokens), stop_ids)
    # The first token is the target's own in every probe: a draft has no say in it.
    texts = decode_prompts(PlainSpeaker(target), prompts, replace(sampling, max_new_tokens=1), run.seed)
    if all(int(text.ids_T[0]) in stop_ids for text in texts):
        number = f"train.probe_prompts: all {len(texts)} texts of {task}"
        raise PromptError(f"{number} stop at their first token; use prompts that the target answers")
    return Probe(target, prompts, sampling, run.seed)


def decode_and_keep_best(learner: Learner, probe: Probe | None, step: int, origin: dict[str, Any]) -> Row:
    """Probe the draft as it is and, when it decodes longer than the one that is kept, keep it; other processes wait.
    It is written before its row and its checkpoint: whatever a kill undoes is decoded again by the run that goes on.
    Returns: what the row gains, on the main process. Raises: CheckpointError when the kept one's provenance is damaged.
    """
    found: Row = {}
    draft, run = whole_draft(learner.draft), learner.run
    if probe:
        with torch.compiler.set_stance("force_eager"):  # decoding has another shape in each round
            found = {DECODED: probe(draft)}
        if found[DECODED] > kept_length(run.train.folder / BEST):
            made = origin | {"step": step} | found
            write_draft(draft, run.train.folder / BEST, folder_fields(run), provenance=made)
    learner.accelerator.wait_for_everyone()
    return found


def told_change(run: RunConfig, probe: Probe | None, draft: DraftModel) -> str:
    """What training changed in the draft that it began from, on the probe's prompts; without a probe, how to ask."""
    began = str(run.train.init_from)
    if probe is None:
        hint = f"dspark eval it, then {run.train.folder / 'draft'} with --against"
        return f"what changed since {began} was not measured (train.probe_every_steps is 0): {hint}"
    assert draft.embedding_VD is not None and draft.head_VD is not None  # noqa: PT018
    start = read_draft(Path(began), (draft.embedding_VD, draft.head_VD), device=str(draft.embedding_VD.device))
    found = probe.change(start, draft)
    low, high = found.interval
    difference = f"{found.difference:+.2f} ({low:+.2f} to {high:+.2f}, {found.num_prompts} prompts)"
    return f"since {began}: acceptance length {found.second:.2f} -> {found.first:.2f}, {difference}"


def kept_length(best: Path) -> float:
    """The decoded acceptance length of the draft that is kept; 0 before the first."""
    path = best / PROVENANCE
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))[DECODED]) if path.is_file() else 0.0
    except (ValueError, LookupError, TypeError) as error:
        found = f"{path}: expected {DECODED} ({error!r})"
        raise CheckpointError(f"{found}; delete {best} to choose the best anew") from error


def check_room(folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a target whose weights are more than the GPU's free memory, or the machine's memory for a CPU.
    Raises: ConfigError with both sizes.
    """
    needed, room = Checkpoint(folder).num_parameters * dtype.itemsize, free_bytes(device)
    if needed > room:
        raise ConfigError(
            f"train.probe_every_steps: a probe holds the whole target in one process: {folder} takes "
            f"{needed / 1e9:.1f} GB, {device} has {room / 1e9:.1f} GB; set it to 0, or train where the target fits"
        )
