"""Which slots count, which target positions teach them, and how both are cut into pieces."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.draft.anchors import BlockTargets, slot_positions

PIECE_NUMBERS = {"cpu": 1 << 19, "cuda": 161_000_000}
"""Logits of a piece: on a CPU what its caches hold, on a GPU what keeps a product busy (1,024 rows of Ling's)."""


@dataclass(frozen=True)
class Slots:
    """The slots of A blocks, valid_AK bool, and the N valid ones in the order of the batch.

    places_N int64 says where in [A, K] a valid slot lies, labels_N int64 what it should say. teachers_M int64: places
    in [T] of the states that teach, piece after piece; slots that share a position share its row within a piece, and
    teacher_rows_N int64 says which of the piece's rows a slot has. block_rows_A1 int64, one longer than A: how many
    valid slots lie before a block. On the host are the pieces: ranges of N, of M and of A.
    """

    valid_AK: Tensor
    places_N: Tensor
    labels_N: Tensor
    teacher_rows_N: Tensor
    teachers_M: Tensor
    block_rows_A1: Tensor
    pieces: list[tuple[slice, slice, slice]]


def lay_out(targets: BlockTargets, anchors_A: Tensor, numbers: int, vocab_size: int) -> Slots:
    """Cut the valid slots into pieces of whole blocks, of about ``numbers`` logits each. All tensors on the CPU."""
    num_blocks, num_slots = targets.valid_AK.shape
    places_N = targets.valid_AK.flatten().nonzero()[:, 0]
    teachers_N = slot_positions(anchors_A, num_slots).flatten()[places_N]
    block_rows_A1 = torch.cat((places_N.new_zeros(1), targets.valid_AK.sum(1).cumsum(0)))
    rows_N, pieces, teachers, start, end = torch.empty_like(places_N), [], [], 0, 0
    blocks_a_piece = max(1, numbers // (num_slots * vocab_size))
    for first in range(0, num_blocks, blocks_a_piece):
        last = min(first + blocks_a_piece, num_blocks)
        stop = int(block_rows_A1[last])
        if stop > start:
            here_M, rows_N[start:stop] = teachers_N[start:stop].unique(return_inverse=True)  # type: ignore[no-untyped-call]
            pieces.append((slice(start, stop), slice(end, end + len(here_M)), slice(first, last)))
            teachers.append(here_M)
            start, end = stop, end + len(here_M)
    teachers_M = torch.cat(teachers) if teachers else places_N
    labels_N = targets.label_ids_AK.flatten()[places_N]
    return Slots(targets.valid_AK, places_N, labels_N, rows_N, teachers_M, block_rows_A1, pieces)
