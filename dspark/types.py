"""What travels between rooms, the shape letters, and the conventions that fail silently.

Shape letters (a tensor's name ends in its shape):
    B sequences, T tokens of a sequence, N rows flattened over sequences, A anchors, K slots of a block,
    Q rows of a block (one more where the anchor drafts nothing),
    D model width, V vocabulary, H heads, G key-value heads, E width of a head, L tapped layers,
    R rank of the Markov head, X experts.

Conventions:
    * ``target_layer_ids`` are zero-based layer outputs (hidden plus residual after layer i). No file of ours adds one.
    * The recorded last hidden state is after the final norm; the head on it gives the target's logits.
    * Slot j of the block anchored at position p predicts token p+j+1. The anchor slot (j = 0) predicts, unless
      ``sample_from_anchor`` is false: then the anchor's row is dropped, and the slots are the rows behind it.
    * A block sees context positions strictly before p, and every slot of itself.
    * The Markov head's previous token of slot j is x[p+j]; the teacher of slot j is the last hidden state at p+j.
    * Acceptance length includes the bonus token; the count without it is ``accepted_drafts``.
    * The loss mask marks target positions to predict: assistant content and its end-of-turn token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

CacheT = TypeVar("CacheT")


@dataclass(frozen=True)
class TargetOutput:
    """What one forward pass of the target says about N tokens, sequence after sequence, in its working dtype.
    Shapes: taps_NLD in the order of ``target_layer_ids`` (L may be 0); last_hidden_ND after the final norm.
    """

    taps_NLD: torch.Tensor
    last_hidden_ND: torch.Tensor


class Reading(Protocol):
    """The frozen big model as recording sees it: it reads whole sequences and says what it makes of them."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    target_layer_ids: tuple[int, ...]
    """The tapped layers, in the order in which taps_NLD holds them."""

    @property
    def embedding_VD(self) -> torch.Tensor: ...

    @property
    def head_VD(self) -> torch.Tensor: ...

    def prefill(self, ids: Sequence[torch.Tensor]) -> tuple[Any, TargetOutput]:
        """Read B sequences of ids (each int64 [T_b], T_b >= 1). N is the sum of the T_b, in order.
        Returns: what to go on from, where there is such a thing, and the output.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 (or float64) logits [..., V] of last hidden states [..., D]."""
        ...


class Target(Reading, Protocol[CacheT]):
    """The same as decoding and evaluation see it.

    ``prefill`` reads whole sequences from position 0 and commits them. ``verify`` reads T further tokens of every
    sequence and stages what they would change; committed state is untouched and a second ``verify`` replaces the
    stage. ``commit`` makes the first ``counts_B[b]`` (0..T) staged tokens of sequence b permanent and drops the rest.
    Plain decoding is ``verify`` of one token and ``commit`` of one.
    """

    def prefill(self, ids: Sequence[torch.Tensor]) -> tuple[CacheT, TargetOutput]: ...

    def verify(self, ids_BT: torch.Tensor, cache: CacheT) -> TargetOutput:
        """Read T >= 1 more ids of every sequence; row b*T+t of the output belongs to ids_BT[b, t]."""
        ...

    def commit(self, cache: CacheT, counts_B: torch.Tensor) -> None:
        """Commit the first counts_B[b] staged tokens (int64 [B], 0..T). Raises ValueError outside that range."""
        ...


@dataclass(frozen=True)
class Proposal:
    """K tokens (int64) that a draft proposes after an anchor.
    Shapes: logits_KV float32, the very logits the ids were drawn from before temperature (Markov bias included);
    confidence_logits_K float32, or None for a draft without the head.
    """

    ids_K: torch.Tensor
    logits_KV: torch.Tensor
    confidence_logits_K: torch.Tensor | None


@dataclass(frozen=True)
class RecordedSequence:
    """One conversation with what the target said about it, as a record gives it back.
    Shapes: ids_T int64; loss_mask_T bool, true at positions to predict; last_hidden_TD with zeros where nothing is
    supervised (row t is stored exactly when loss_mask_T[t+1] is true). taps_TLD are as the target said them, or
    float8 to be multiplied by tap_scales_TL, float32.
    """

    ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    taps_TLD: torch.Tensor
    last_hidden_TD: torch.Tensor
    tap_scales_TL: torch.Tensor | None = None
