"""From a run description to what a step works on, and the checks that draft, record and target belong together."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, convert_outputs_to_fp32
from torch import Tensor

from dspark.config import DraftConfig, ObjectiveSection, RunConfig, TrainSection
from dspark.draft.model import DraftModel
from dspark.errors import ConfigError, RecordError
from dspark.files import differences
from dspark.record.format import Manifest
from dspark.train.log import Stopwatch
from dspark.train.optimizer import build_optimizer, keep_average
from dspark.train.step import Learner

SMALLEST_MASK_ROW = 1e-2
"""Least norm of the mask token's embedding, as a part of the median row's; below it the slots cannot be told apart."""


def check_record(manifest: Manifest, draft: DraftConfig, target_fingerprint: str) -> None:
    """Refuse a record of another target, or with other taps than the draft reads.
    Raises: RecordError naming every difference.
    """
    wanted = draft.model_dump(include={"target_layer_ids", "hidden_size", "vocab_size"})
    if told := differences(manifest.model_dump(), wanted | {"target_fingerprint": target_fingerprint}):
        raise RecordError(f"the record of {manifest.target} was made with {told}; mend the run, or record again")


def average_note(section: TrainSection) -> str:
    """A clause when the draft that is written is not the last step's; else empty."""
    return f"; the draft written is the moving average of decay {section.ema_decay}" if section.ema_decay else ""


def bias_note(manifest: Manifest, objective: ObjectiveSection) -> str:
    """A sentence when the record's text makes the ratio form of the acceptance length biased; else empty.
    It is unbiased on text that the target itself drew at temperature 1 without truncation (specs/dspark.md 5.1).
    """
    is_exact = manifest.answers == "target" and set(manifest.temperatures) == {1.0}
    if is_exact or objective.acceptance_form != "ratio" or not objective.acceptance_length:
        return ""
    at = ", ".join(f"{temperature:g}" for temperature in manifest.temperatures)
    drawn = f"at temperature {at}" if manifest.answers == "target" else "by somebody else"
    return f"\nNote: the text was written {drawn}, so the acceptance length that is trained and logged is biased."


def check_mask_row(embedding_VD: Tensor, draft: DraftConfig) -> None:
    """Refuse a mask token whose embedding is (nearly) zero: such slots would start out all alike. Raises: ConfigError.
    Rows that no text ever used can be driven to zero by the target's weight decay.
    """
    norms_V = embedding_VD.float().norm(dim=1)
    row, median = float(norms_V[draft.mask_token_id]), float(norms_V.median())
    if row < SMALLEST_MASK_ROW * median:
        mask, found = draft.mask_token_id, f"its embedding has norm {row:.2e}, the median {median:.2e}"
        raise ConfigError(f"draft.mask_token_id {mask}: {found}; choose a trained special token that no text holds")


def fresh_draft(config: DraftConfig, seed: int) -> DraftModel:
    """A new draft with weights drawn from the run's seed; float32, on the CPU."""
    draft = DraftModel(config)
    draft.initialise(torch.Generator().manual_seed(seed))
    return draft


def prepare(accelerator: Accelerator, draft: DraftModel, run: RunConfig) -> Learner:
    """Hand the draft, bound to the target's tables, and its optimizer to accelerate: devices, precision, processes.
    Raises: ConfigError when the draft's architecture is not the run's.
    """
    if told := differences(dict(draft.config), dict(run.draft)):
        raise ConfigError(f"train.init_from {run.train.init_from}: a draft of {told}; mend the run's draft")
    draft.train().requires_grad_(True)
    draft.activation_checkpointing = run.train.activation_checkpointing
    if accelerator.device.type == "cuda":
        draft.compile_layers()
    if accelerator.distributed_type == DistributedType.FSDP:
        # As accelerate does in every other way; with FSDP2 it would round residuals, norms and gradients to bfloat16.
        draft.forward = convert_outputs_to_fp32(accelerator.autocast()(draft.forward))  # type: ignore[method-assign]
    wrapped, optimizer = accelerator.prepare(draft, build_optimizer(draft, run.train))
    if run.train.ema_decay:
        inner = optimizer.optimizer
        keep_average(getattr(inner, "optimizer", inner), run.train.ema_decay)  # ZeRO's holds the one that moves
    return Learner(accelerator, draft, wrapped, optimizer, run, Stopwatch(accelerator.device, wrapped))
