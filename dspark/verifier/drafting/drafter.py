"""What a cycle asks of whatever drafts, and what all drafters do alike."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dspark.types import TargetOutput
from dspark.verifier.blocks import Window
from dspark.verifier.calls import Caller
from dspark.verifier.engine import Verifier
from dspark.verifier.step import Choice, accept_best


class Sampler(NamedTuple):
    """How tokens are drawn: 1 / temperature ([1], float32 or better, on the device), and where chance comes from (None:
    the device's own generator). All ranks must draw the same numbers.
    """

    inverse_temperature_1: Tensor
    generator: torch.Generator | None


class Drafts(NamedTuple):
    """What a draft says beside its ids: logits_KV float32 or better, those of the whole vocabulary that the ids were
    drawn from (None if greedy); confidence_K as ``ConfidenceHead`` (None without).
    """

    logits_KV: Tensor | None
    confidence_K: Tensor | None


class Drafter(Protocol):
    """Drafts ``num_drafts`` tokens after the anchor, in memory that stays where it is, never waiting for the device.
    Its context holds the verifier's committed positions; the anchor comes after them, at the verifier's length_1.
    """

    verifier: Verifier
    num_drafts: int
    has_confidence: bool
    """Whether every draft comes with a confidence."""

    def begin(self, next_ids_N: Tensor, output: TargetOutput) -> None:
        """Take in what the target said about a prompt, in place of what was there: rows of the positions from 0 on, of
        any number, and the id that follows each (int64, on the device).
        """

    def draft(self, sampler: Sampler | None, call: Caller) -> Drafts:
        """Put drafts into the verifier's ids_T[1 .. num_drafts], after the anchor ids_T[0]; greedy ones for None."""

    def update(self, window: Window, start_1: Tensor, count_1: Tensor, call: Caller) -> None:
        """Take in the first count_1 of a window's 1..16 tokens, committed at positions from start_1 on (int64 both).
        ids_T holds the id after the committed tokens, then the window's tokens from its second on: the id that follows
        row t is ids_T[t + 1], and ids_T[0] for the last committed row.
        """


class NoDrafter:
    """A ``Drafter`` of nothing: its cycles are plain decoding, a token each."""

    num_drafts, has_confidence = 0, False

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        wide = torch.promote_types(verifier.weights.dtype, torch.float32)
        self._logits_0V = torch.empty(0, verifier.vocab_size, dtype=wide, device=verifier.weights.device)

    def begin(self, next_ids_N: Tensor, output: TargetOutput) -> None:
        """There is nothing to take in."""

    def draft(self, sampler: Sampler | None, call: Caller) -> Drafts:
        return Drafts(self._logits_0V, None)

    def update(self, window: Window, start_1: Tensor, count_1: Tensor, call: Caller) -> None:
        """Nor is there here."""


def gumbel_noise(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Gumbel noise on the device of ``like``, the same on all ranks when it is that of the whole vocabulary.
    In float64, because what an unlikely token needs is in a uniform's last bits, of which float32 has too few.
    """
    noise = torch.empty(shape, dtype=torch.float64, device=like.device)
    return noise.exponential_(generator=generator).log_().neg_().to(dtype)


def best_id(verifier: Verifier, best: Choice, run: Caller) -> Tensor:
    """The id of one slot's largest score over all ranks."""
    return best[1] if verifier.ranks.world_size == 1 else accept_best(best[1], best, verifier.ranks, run)[1]


def gather_logits(verifier: Verifier, logits_KV: Tensor, run: Caller) -> Tensor:
    """Those of the whole vocabulary, from every rank's own."""
    if verifier.ranks.world_size == 1:
        return logits_KV
    return torch.cat([*run("exchange", verifier.ranks.gather, logits_KV)], 1)
