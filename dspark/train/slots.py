"""Which slots count, which target positions teach them, and how both are cut into pieces."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dspark.draft.anchors import slot_positions
from dspark.kernels.agreement import Piece

PIECE_NUMBERS = {"cpu": 1 << 19, "cuda": 1 << 27}
"""Logits of a piece: on a CPU what its caches hold, on a GPU what keeps a matrix product busy."""


@dataclass(frozen=True)
class Slots:
    """N valid slots in the order of the batch. places_N int64 says where in [A, K] each lies.

    teachers_M int64: places in [T] of the states that teach, piece after piece; slots that share a position share
    its row within a piece. ``blocks`` is a list on the host: the block of each slot.
    """

    places_N: Tensor
    teachers_M: Tensor
    blocks: list[int]
    pieces: list[Piece]

    def to(self, device: torch.device) -> Self:
        """The same with its tensors on ``device``."""
        pieces = [piece._replace(teacher_rows_P=_onto(device, piece.teacher_rows_P)) for piece in self.pieces]
        places_N, teachers_M = _onto(device, self.places_N), _onto(device, self.teachers_M)
        return replace(self, places_N=places_N, teachers_M=teachers_M, pieces=pieces)


def lay_out(valid_AK: Tensor, anchors_A: Tensor, numbers: int, vocab_size: int) -> Slots:
    """Cut the valid slots into pieces of whole blocks, of about ``numbers`` logits each. All tensors on the CPU."""
    num_blocks, num_slots = valid_AK.shape
    places_N = valid_AK.flatten().nonzero()[:, 0]
    teachers_N = slot_positions(anchors_A, num_slots).flatten()[places_N]
    block_N = places_N // num_slots
    pieces, teachers, start, end = [], [], 0, 0
    blocks_a_piece = max(1, numbers // (num_slots * vocab_size))
    bounds = torch.arange(blocks_a_piece, num_blocks + blocks_a_piece, blocks_a_piece)
    for stop in torch.searchsorted(block_N, bounds).tolist():
        if stop > start:
            here_M, rows_P = teachers_N[start:stop].unique(return_inverse=True)  # type: ignore[no-untyped-call]
            pieces.append(Piece(slice(start, stop), slice(end, end + len(here_M)), rows_P))
            teachers.append(here_M)
            start, end = stop, end + len(here_M)
    teachers_M = torch.cat(teachers) if teachers else places_N
    return Slots(places_N, teachers_M, block_N.tolist(), pieces)


def _onto(device: torch.device, x: Tensor) -> Tensor:
    """From pinned memory, where a copy waits for nothing."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
