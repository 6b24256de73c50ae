"""How packed sequences are cut into chunks of rows, for the operations that read whole sequences."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.transfer import onto

CHUNK_TOKENS = 64
"""Tokens that a program of linear attention takes together; a sequence's last chunk may hold fewer."""


class Chunks(NamedTuple):
    """How packed sequences lie, and their chunks in order; a chunk never spans two sequences.

    Shapes, int32 on the device: chunks_M4 a chunk's first row, its number of tokens, its sequence, and the place of its
    first token in that; ends_B how many chunks end with each sequence.
    """

    lengths: tuple[int, ...]
    chunk_tokens: int
    chunks_M4: Tensor
    ends_B: Tensor


def lay_out(lengths: Sequence[int], device: torch.device, chunk_tokens: int = CHUNK_TOKENS) -> Chunks:
    """Cut sequences of these lengths into chunks. Raises: ValueError when one is empty."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"sequences: found lengths {list(lengths)}, expected at least one token each")
    rows, ends, first = [], [], 0
    for sequence, length in enumerate(lengths):
        for place in range(0, length, chunk_tokens):
            rows.append((first + place, min(chunk_tokens, length - place), sequence, place))
        first += length
        ends.append(len(rows))
    tables = [onto(device, torch.tensor(x, dtype=torch.int32)) for x in (rows, ends)]
    return Chunks(tuple(lengths), chunk_tokens, *tables)
