"""Which text positions a draft is trained on: anchors, the slots behind them, and their labels."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockTargets:
    """What the slots should say: label_ids_AK int64 where valid_AK (bool, true on a prefix of each block)."""

    label_ids_AK: Tensor
    valid_AK: Tensor


def anchor_candidates(loss_mask_T: Tensor) -> Tensor:
    """Positions of a sequence that may start a block, bool [T]: they and their successor are supervised.
    Source: DeepSpec, anchor candidates (specs/dspark.md 4.1).
    """
    candidates_T = torch.zeros_like(loss_mask_T)
    candidates_T[:-1] = loss_mask_T[:-1] & loss_mask_T[1:]
    return candidates_T


def sample_anchors(loss_mask_T: Tensor, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Draw up to num_anchors candidates of a sequence, uniformly without replacement. All tensors on the CPU.
    Returns: int64 [A] in text order; A is 0 for a sequence without a candidate.
    """
    candidates_T = anchor_candidates(loss_mask_T)
    lots_T = torch.rand(len(loss_mask_T), generator=generator).masked_fill(~candidates_T, 2.0)
    drawn_T = torch.zeros_like(candidates_T)
    drawn_T[lots_T.argsort(stable=True)[:num_anchors]] = True
    return (drawn_T & candidates_T).nonzero()[:, 0]


def slot_positions(anchors_A: Tensor, block_size: int) -> Tensor:
    """Where every slot stands: slot j of the block anchored at p stands at p + j. Returns: int64 [A, K]."""
    return anchors_A[:, None] + torch.arange(block_size, device=anchors_A.device)


def gather_positions(rows: Tensor, positions_AK: Tensor) -> Tensor:
    """The rows [T, ...] at positions_AK; a position past the end reads the last row. Returns: [A, K, ...]."""
    return rows[positions_AK.clamp(max=len(rows) - 1)]


def block_targets(ids_T: Tensor, loss_mask_T: Tensor, anchors_A: Tensor, block_size: int) -> BlockTargets:
    """Labels of every slot of a sequence's blocks and whether they count: slot j predicts token p + j + 1.

    A slot is valid when its label is supervised and inside the sequence and every slot before it is valid: the first
    invalid slot ends the block. Source: DeepSpec, cumulative evaluation mask (specs/dspark.md 4.1).
    """
    positions_AK = slot_positions(anchors_A, block_size) + 1
    supervised_AK = gather_positions(loss_mask_T, positions_AK) & (positions_AK < len(ids_T))
    return BlockTargets(gather_positions(ids_T, positions_AK), supervised_AK.long().cumprod(1).bool())
