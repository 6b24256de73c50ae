"""Which text positions a draft is trained on: anchors, the slots behind them, their labels and what they may see."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockTargets:
    """What the slots should say: label_ids_BAK int64 where valid_BAK (bool, true on a prefix of each block)."""

    label_ids_BAK: Tensor
    valid_BAK: Tensor


def anchor_candidates(loss_mask_BT: Tensor, lengths_B: Tensor) -> Tensor:
    """Positions that may start a block, bool [B, T]: they and their successor are supervised and inside the sequence.
    Source: DeepSpec, anchor candidates (specs/dspark.md 4.1).
    """
    inside_BT = torch.arange(loss_mask_BT.shape[1], device=loss_mask_BT.device) < lengths_B[:, None]
    supervised_BT = loss_mask_BT & inside_BT
    candidates_BT = torch.zeros_like(supervised_BT)
    candidates_BT[:, :-1] = supervised_BT[:, :-1] & supervised_BT[:, 1:]
    return candidates_BT


def sample_anchors(
    loss_mask_BT: Tensor, lengths_B: Tensor, num_anchors: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw up to num_anchors candidates of every sequence, uniformly without replacement, in text order.

    A is the largest number drawn for any sequence (at least 1); shorter rows are filled with anchor 0 and keep false.
    The draw depends on the generator's device alone, so a CPU generator gives the same anchors everywhere.
    Shapes: loss_mask_BT bool, lengths_B int64. Returns: anchors_BA int64 and keep_BA bool.
    """
    candidates_BT = anchor_candidates(loss_mask_BT, lengths_B)
    num_tokens = loss_mask_BT.shape[1]
    lots_BT = torch.rand(candidates_BT.shape, generator=generator, device=generator.device).to(loss_mask_BT.device)
    lots_BT = lots_BT.masked_fill(~candidates_BT, 2.0)
    drawn_BT = torch.zeros_like(candidates_BT).scatter(1, lots_BT.argsort(dim=1, stable=True)[:, :num_anchors], True)
    drawn_BT &= candidates_BT
    width = max(1, int(drawn_BT.sum(1).max()))
    positions_T = torch.arange(num_tokens, device=loss_mask_BT.device)
    anchors_BA = positions_T.where(drawn_BT, num_tokens).sort(dim=1).values[:, :width]
    keep_BA = anchors_BA < num_tokens
    return anchors_BA * keep_BA, keep_BA


def slot_positions(anchors_BA: Tensor, block_size: int) -> Tensor:
    """Text position of every slot: slot j of the block anchored at p stands at p + j. Returns: int64 [B, A, K]."""
    return anchors_BA[..., None] + torch.arange(block_size, device=anchors_BA.device)


def gather_positions(rows: Tensor, positions_BAK: Tensor) -> Tensor:
    """The rows [B, T, ...] at positions_BAK; a position past the end reads the last row. Returns: [B, A, K, ...]."""
    index_BAK = positions_BAK.clamp(max=rows.shape[1] - 1)
    return rows[torch.arange(rows.shape[0], device=rows.device)[:, None, None], index_BAK]


def block_targets(
    ids_BT: Tensor, loss_mask_BT: Tensor, lengths_B: Tensor, anchors_BA: Tensor, keep_BA: Tensor, block_size: int
) -> BlockTargets:
    """Labels of every slot and whether they count: slot j predicts token p + j + 1.

    A slot is valid when its label is supervised and inside the sequence, every slot before it is valid, and the block
    is kept; the first invalid slot ends the block. Source: DeepSpec, cumulative evaluation mask (specs/dspark.md 4.1).
    """
    positions_BAK = slot_positions(anchors_BA, block_size) + 1
    supervised_BAK = gather_positions(loss_mask_BT, positions_BAK) & (positions_BAK < lengths_B[:, None, None])
    valid_BAK = (supervised_BAK & keep_BA[..., None]).long().cumprod(dim=-1).bool()
    return BlockTargets(gather_positions(ids_BT, positions_BAK), valid_BAK)


def block_visibility(anchors_BA: Tensor, keep_BA: Tensor, num_tokens: int, block_size: int) -> Tensor:
    """Which keys each slot reads: context strictly before its anchor, and every slot of its own block.

    Keys are the T context rows followed by the A * K slots. A padding block reads its own slots only, so that its
    softmax stays finite on every backend. Padding behind a sequence is never read: every anchor lies before it.
    Shapes: anchors_BA int64, keep_BA bool. Returns: bool [B, 1, A * K, T + A * K], true where visible.
    Source: DeepSpec, block mask (specs/dspark.md 1.2); DeepSpec lets a padding block see nothing.
    """
    num_blocks = anchors_BA.shape[1]
    context_T = torch.arange(num_tokens, device=anchors_BA.device)
    context_BAT = (context_T < anchors_BA[..., None]) & keep_BA[..., None]
    block_A = torch.arange(num_blocks, device=anchors_BA.device).repeat_interleave(block_size)
    own_NN = block_A[:, None] == block_A
    context_BNT = context_BAT.repeat_interleave(block_size, dim=1)
    return torch.cat([context_BNT, own_NN.expand(len(anchors_BA), -1, -1)], dim=-1)[:, None]
