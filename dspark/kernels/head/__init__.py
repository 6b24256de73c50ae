"""The language head without its logits: every token's largest one, and what that says about a greedy draft."""

import torch
from torch import Tensor

from dspark.kernels.dispatch import check, check_counters, form_for
from dspark.kernels.head import reference


def greedy(
    hidden_TD: Tensor, head_VD: Tensor, first_id: int, counters: Tensor, *, is_chained: bool = False
) -> tuple[Tensor, Tensor]:
    """Largest logit of T tokens over the V rows of this rank: best_T float32 and ids_T int64 (row plus ``first_id``).

    The logits are summed in float32 and not rounded. Of equal ones the smaller id; NaN counts as -inf; with nothing
    above -inf the best is -inf and the id ``first_id``.

    Shapes: T in 1..16; both tensors in one dtype (the head may also be float32), contiguous in the last dimension;
    counters one int32 number or more, zero before and after. Raises ValueError otherwise.
    """
    dtype, wide = hidden_TD.dtype, torch.promote_types(hidden_TD.dtype, torch.float32)
    sizes = check({}, dtype, num_strided=1, is_window=True, hidden_TD=hidden_TD)
    check(sizes, dtype, wide, num_strided=1, head_VD=head_VD)
    check_counters(counters)
    return form_for(hidden_TD, reference.greedy, counters=counters, is_chained=is_chained)(hidden_TD, head_VD, first_id)


def accept(ids_T: Tensor, best_RT: Tensor, best_ids_RT: Tensor, *, is_chained: bool = False) -> tuple[Tensor, Tensor]:
    """How many of a window's tokens are committed (count_1 int64, 1..T) and the token after them (next_id_1 int64).

    ids_T is the last token and T-1 drafts; best_RT and best_ids_RT are what R ranks' ``greedy`` gave. The target's
    choice at a slot is the larger maximum, of equal ones the smaller id. A draft stays if it is the choice one slot
    before and all drafts before it stay; the next token is the choice at the last slot that stays.

    Shapes: ids int64, T in 1..16; best_RT float32 and best_ids_RT int64 [R, T], contiguous.
    Raises ValueError otherwise.
    """
    sizes = check({}, torch.int64, is_window=True, ids_T=ids_T, best_ids_RT=best_ids_RT)
    check(sizes, torch.float32, best_RT=best_RT)
    return form_for(ids_T, reference.accept, is_chained=is_chained)(ids_T, best_RT, best_ids_RT)
