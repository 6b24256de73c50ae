"""The greedy choice of the language head and the acceptance of a greedy draft, defined.

V rows of the head on this rank, R ranks. Larger value first, then smaller id. A NaN counts
as -inf, so a row without a number above -inf gives -inf and the smallest id.
"""

import torch
from torch import Tensor


def greedy(hidden_TD: Tensor, head_VD: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    """The largest logit of every token, summed in float32 or higher and not rounded, and its row plus ``first_id``."""
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    logits_TV = hidden_TD.to(wide) @ head_VD.to(wide).T
    rows_V = torch.arange(len(head_VD), device=logits_TV.device)
    best_T, ids_T = larger_then_smaller_id(logits_TV, rows_V.expand_as(logits_TV))
    return best_T.float(), ids_T + first_id


def accept(ids_T: Tensor, best_RT: Tensor, best_ids_RT: Tensor) -> tuple[Tensor, Tensor]:
    """Count of committed tokens and the token after them: a draft stays if the target chose it and all before stay."""
    _, choice_T = larger_then_smaller_id(best_RT.T, best_ids_RT.T)
    is_kept_T = ids_T[1:] == choice_T[:-1]
    count_1 = 1 + is_kept_T.long().cumprod(0).sum(0, keepdim=True)
    return count_1, choice_T.gather(0, count_1 - 1)


def larger_then_smaller_id(values_NV: Tensor, ids_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest value, NaN as -inf, and the smallest id that has it."""
    values_NV = torch.where(values_NV.isnan(), -torch.inf, values_NV)
    best_N = values_NV.amax(1)
    is_best_NV = values_NV == best_N[:, None]
    return best_N, torch.where(is_best_NV, ids_NV, torch.iinfo(torch.int64).max).amin(1)
