"""The language head without its logits: every token's largest one, and what that says about a greedy draft."""

import torch

from dspark.kernels import MAX_TOKENS
from dspark.kernels.head import reference

__all__ = ["NUM_COUNTERS", "accept", "greedy"]

NUM_COUNTERS = 1
"""How many zeroed int32 numbers ``counters`` needs; a call leaves them zero."""


def greedy(
    hidden_TD: torch.Tensor,
    head_VD: torch.Tensor,
    first_id: int,
    counters: torch.Tensor,
    *,
    is_chained: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit of T tokens over the V rows of this rank: best_T float32 and ids_T int64 (row plus ``first_id``).

    The logits are summed in float32 and not rounded. Of equal ones the smaller id; NaN counts as -inf; with nothing
    above -inf the best is -inf and the id ``first_id``.

    Shapes: T in 1..16; both tensors in one dtype, contiguous in the last dimension. Raises ValueError otherwise.
    """
    found = f"{hidden_TD.dtype} {tuple(hidden_TD.shape)} and {head_VD.dtype} {tuple(head_VD.shape)}"
    is_pair = hidden_TD.dim() == head_VD.dim() == 2 and hidden_TD.shape[1] == head_VD.shape[1]
    if not is_pair or hidden_TD.dtype != head_VD.dtype or not 1 <= hidden_TD.shape[0] <= MAX_TOKENS:
        raise ValueError(f"head: found {found}, expected [T, D] with T of 1 to {MAX_TOKENS} and [V, D] in one dtype")
    if hidden_TD.stride(1) != 1 or head_VD.stride(1) != 1:
        raise ValueError(f"head: found strides {hidden_TD.stride()}, {head_VD.stride()}, expected a last one of 1")
    if counters.dtype != torch.int32 or counters.numel() < NUM_COUNTERS:
        raise ValueError(f"head: found {counters.numel()} counters {counters.dtype}, expected {NUM_COUNTERS} of int32")
    if not hidden_TD.is_cuda:
        return reference.greedy(hidden_TD, head_VD, first_id)
    from dspark.kernels.head import kernel

    return kernel.greedy(hidden_TD, head_VD, first_id, counters, is_chained=is_chained)


def accept(
    ids_T: torch.Tensor,
    best_RT: torch.Tensor,
    best_ids_RT: torch.Tensor,
    *,
    is_chained: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of a window's tokens are committed (count_1 int64, 1..T) and the token after them (next_id_1 int64).

    ids_T is the last token and T-1 drafts; best_RT and best_ids_RT are what R ranks' ``greedy`` gave. The target's
    choice at a slot is the larger maximum, of equal ones the smaller id. A draft stays if it is the choice one slot
    before and all drafts before it stay; the next token is the choice at the last slot that stays.

    Shapes: ids int64, T in 1..16; best_RT float32 and best_ids_RT int64 [R, T], contiguous.
    Raises ValueError otherwise.
    """
    found = f"{tuple(ids_T.shape)}, {tuple(best_RT.shape)}, {tuple(best_ids_RT.shape)}"
    is_shaped = ids_T.dim() == 1 and best_RT.dim() == 2 and best_RT.shape[1:] == ids_T.shape
    if not is_shaped or best_ids_RT.shape != best_RT.shape or not 1 <= len(ids_T) <= MAX_TOKENS:
        raise ValueError(f"head: found {found}, expected [T], [R, T] and [R, T] with T of 1 to {MAX_TOKENS}")
    tensors = (ids_T, best_ids_RT)
    if best_RT.dtype != torch.float32 or any(x.dtype != torch.int64 for x in tensors):
        found = ", ".join(str(x.dtype) for x in (best_RT, *tensors))
        raise ValueError(f"head: found {found}, expected float32 maxima and everything else int64")
    if not all(x.is_contiguous() for x in (best_RT, *tensors)):
        raise ValueError("head: found strided tensors, expected contiguous ones")
    if not ids_T.is_cuda:
        return reference.accept(ids_T, best_RT, best_ids_RT)
    from dspark.kernels.head import kernel

    return kernel.accept(ids_T, best_RT, best_ids_RT, is_chained=is_chained)
