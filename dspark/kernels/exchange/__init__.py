"""The residual stream over ranks: ``residual.add_norm`` with the sum of all ranks' parts, over peer memory."""

from dataclasses import dataclass

import torch

__all__ = ["Exchange", "add_norm", "empty_slots"]

NUM_TURNS = 3


@dataclass(frozen=True)
class Exchange:
    """One rank's memory for ``add_norm``, kept for the process's life and shared by all its calls.

    Shapes: slots_SRPD this rank's slots, as ``empty_slots`` makes them, in memory that every rank can write; peers_R
    int64, the address of every rank's slots as this process sees them; turns_P and errors_P int32, zeros at the start.
    P is the most tokens of a call. An error that is not 0 says that a rank was waited for in vain: the row was NaN, and
    nothing after it counts until every rank begins again with empty slots and zero turns.
    """

    rank: int
    peers_R: torch.Tensor
    slots_SRPD: torch.Tensor
    turns_P: torch.Tensor
    errors_P: torch.Tensor


def empty_slots(memory: torch.Tensor, num_ranks: int, num_rows: int, width: int) -> torch.Tensor:
    """Empty flat memory of a rank as slots [3, num_ranks, num_rows, width]; all ranks do it, then meet, then call.

    The memory's dtype is what travels: float32, or the working dtype for half the bytes and one more rounding.
    """
    return memory.fill_(-0.0).view(NUM_TURNS, num_ranks, num_rows, width)


def add_norm(
    parts_TKD: torch.Tensor,
    weights_TK: torch.Tensor | None,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    exchange: Exchange,
    *,
    is_chained: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual.add_norm`` with the parts of all ranks: the same bits on every rank. All ranks call with the same T.

    Shapes: as there, T = 1..P, on a GPU. The partial sums travel in the slots' dtype and are added in float32 in the
    order of the ranks.
    Raises: ValueError for another shape or dtype, or another device.
    """
    num_tokens, width = residual_TD.shape
    num_parts = parts_TKD.shape[1] if parts_TKD.dim() == 3 else 1
    dtype, num_ranks, num_rows = residual_TD.dtype, len(exchange.peers_R), len(exchange.turns_P)
    if not residual_TD.is_cuda or not 1 <= num_tokens <= num_rows:
        raise ValueError(
            f"residual_TD: expected 1..{num_rows} rows on a GPU, found {num_tokens} on {residual_TD.device}"
        )
    _expect("residual_TD", residual_TD, (num_tokens, width), dtype)
    _expect("parts_TKD", parts_TKD, (num_tokens, num_parts, width), dtype, torch.float32)
    _expect("norm_weight_D", norm_weight_D, (width,), dtype)
    shape = (NUM_TURNS, num_ranks, num_rows, width)
    _expect("slots_SRPD", exchange.slots_SRPD, shape, dtype, torch.float32)
    if weights_TK is not None:
        _expect("weights_TK", weights_TK, (num_tokens, num_parts), torch.float32)
    from dspark.kernels.exchange import kernel  # Triton, which a CPU may lack

    memory = (exchange.peers_R, exchange.slots_SRPD, exchange.turns_P, exchange.errors_P, exchange.rank)
    return kernel.add_norm(parts_TKD, weights_TK, residual_TD, norm_weight_D, eps, *memory, is_chained=is_chained)


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous {list(shape)} {' or '.join(map(str, dtypes))}, "
            f"found {list(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
        )
