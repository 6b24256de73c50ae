"""The residual stream over ranks: ``residual.add_norm`` with the sum of all ranks' parts, over peer memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.dispatch import check

NUM_TURNS = 3


class Exchange(NamedTuple):
    """One rank's memory for ``add_norm`` and ``gather``, kept for the process's life and shared by all its calls.

    Shapes: slots_SRPD this rank's slots, as ``empty_slots`` makes them, in memory that every rank can write; peers_R
    int64, the address of every rank's slots as this process sees them, a multiple of 16; turns_P and errors_P int32,
    zeros at the start. P is the most tokens of a call. errors_P may lie in pinned host memory, where the host sees it
    without waiting; an error that is not 0 is one more than the rank that was waited for longer than ``limit_seconds``
    (at most 2000): the row was NaN, and nothing after it counts until every rank begins again with empty slots and
    zero turns.
    """

    rank: int
    peers_R: Tensor
    slots_SRPD: Tensor
    turns_P: Tensor
    errors_P: Tensor
    limit_seconds: float = 20.0


def empty_slots(memory: Tensor, num_ranks: int, num_rows: int, width: int) -> Tensor:
    """Empty flat memory of a rank as slots [3, num_ranks, num_rows, width]; all ranks do it, then meet, then call.

    The memory's dtype is what travels: float32, or the working dtype for half the bytes and one more rounding.
    """
    return memory.fill_(-0.0).view(NUM_TURNS, num_ranks, num_rows, width)


def add_norm(
    parts_TKD: Tensor, weights_TK: Tensor | None, residual_TD: Tensor, norm_weight_D: Tensor, eps: float,
    exchange: Exchange, *, is_chained: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``residual.add_norm`` with the parts of all ranks: the same bits on every rank. All ranks call with the same T.

    Shapes: as there, T = 1..P, on a GPU. The partial sums travel in the slots' dtype and are added in float32 in the
    order of the ranks.
    Raises: ValueError for another shape or dtype, or another device.
    """
    dtype, sizes = residual_TD.dtype, {"S": NUM_TURNS, "R": len(exchange.peers_R), "P": len(exchange.turns_P)}
    _expect_rows("residual_TD", residual_TD, exchange)
    sizes = check(sizes, dtype, residual_TD=residual_TD, norm_weight_D=norm_weight_D)
    sizes = check(sizes, dtype, torch.float32, parts_TKD=parts_TKD)
    check(sizes, dtype, torch.float32, slots_SRPD=exchange.slots_SRPD)
    check(sizes, torch.float32, weights_TK=weights_TK)
    from dspark.kernels.exchange import kernel  # Triton, which a CPU may lack

    return kernel.add_norm(parts_TKD, weights_TK, residual_TD, norm_weight_D, eps, exchange, is_chained=is_chained)


def gather(values_TC: Tensor, exchange: Exchange, *, is_chained: bool = False) -> Tensor:
    """Every rank's values: int32 [R, T, C], the same on every rank. All ranks call with the same shape.

    Shapes: int32 [T, C] on a GPU, T = 1..P and C at most the slots' width, which must be float32; a view of other
    numbers, of which -2**31 (the bits of -0.0) arrives as 0.
    Raises: ValueError for another shape or dtype, or another device.
    """
    _expect_rows("values_TC", values_TC, exchange)
    width = check({}, torch.float32, slots_SRPD=exchange.slots_SRPD)["D"]
    check({"C": min(values_TC.shape[-1], width)}, torch.int32, values_TC=values_TC)
    from dspark.kernels.exchange import kernel

    return kernel.gather(values_TC, exchange, is_chained=is_chained)


def _expect_rows(name: str, tensor: Tensor, exchange: Exchange) -> None:
    num_rows = len(exchange.turns_P)
    if not tensor.is_cuda or not 1 <= len(tensor) <= num_rows:
        raise ValueError(f"{name}: expected 1..{num_rows} rows on a GPU, found {len(tensor)} on {tensor.device}")
