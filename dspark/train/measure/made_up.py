"""Made-up data of a target's size: a record, the target's tables, and what training on them surely takes."""

from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor

from dspark.config import RunConfig
from dspark.draft.model import DraftModel
from dspark.train.setup import fresh_draft, prepare
from dspark.train.step import Learner
from dspark.types import RecordedSequence

LOGIT_DEVIATION = 2.0
"""Of the made-up teacher's logits over the vocabulary."""


class RandomRecord(list[RecordedSequence]):
    """Sequences of ``record.max_tokens`` random tokens in host memory, all to be predicted, with states from a normal
    law in the target's dtype. They are drawn from the run's seed.
    """

    def __init__(self, run: RunConfig, num_sequences: int) -> None:
        draft, num_tokens, dtype = run.draft, run.record.max_tokens, getattr(torch, run.target.dtype)
        generator = torch.Generator().manual_seed(run.seed)
        normal = partial(torch.randn, generator=generator, dtype=dtype)
        super().__init__(
            RecordedSequence(
                ids_T=torch.randint(draft.vocab_size, (num_tokens,), generator=generator),
                loss_mask_T=torch.ones(num_tokens, dtype=torch.bool),
                taps_TLD=normal(num_tokens, len(draft.target_layer_ids), draft.hidden_size),
                last_hidden_TD=normal(num_tokens, draft.hidden_size),
            )
            for _ in range(num_sequences)
        )

    @property
    def starts(self) -> list[int]:
        """As of a record of one shard."""
        return [0, len(self)]

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """ids_T and loss_mask_T of a sequence."""
        return self[index].ids_T, self[index].loss_mask_T


def random_learner(accelerator: Accelerator, run: RunConfig) -> Learner:
    """The run's new draft on tables from a normal law, the same on every rank, as training would hold it.
    Last hidden states of deviation 1 get logits of deviation ``LOGIT_DEVIATION`` from the head.
    """
    generator = torch.Generator(accelerator.device).manual_seed(run.seed)
    draft, dtype = fresh_draft(run.draft, run.seed), getattr(torch, run.target.dtype)
    shape = (run.draft.vocab_size, run.draft.hidden_size)
    normal = partial(torch.randn, shape, generator=generator, device=accelerator.device, dtype=dtype)
    head_VD = normal().mul_(LOGIT_DEVIATION / run.draft.hidden_size**0.5)
    draft.bind(normal().mul_(0.02), head_VD)
    return prepare(accelerator, draft, run)


def least_bytes(run: RunConfig) -> int:
    """Bytes that training surely takes on the device: the draft's float32 weights and gradients, its optimizer's
    moments and moving average, the target's tables and one batch. Activations and pieces of logits come on top.
    """
    draft, itemsize = run.draft, int(getattr(torch, run.target.dtype).itemsize)
    with torch.device("meta"):
        num_weights = sum(parameter.numel() for parameter in DraftModel(draft).parameters())
    copies = (4 if run.train.optimizer == "adamw" else 3) + bool(run.train.ema_decay)
    rows = 2 * draft.vocab_size + run.train.batch_size * run.record.max_tokens * (len(draft.target_layer_ids) + 1)
    return copies * 4 * num_weights + itemsize * rows * draft.hidden_size
