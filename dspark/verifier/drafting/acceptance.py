"""The acceptance rule of sampled drafts, on the device."""

import torch
from torch.nn import functional

SMALLEST_RESIDUAL = 1e-8


def accept(
    ids_T: torch.Tensor, draft_logits_KV: torch.Tensor, target_logits_TV: torch.Tensor,
    inverse_temperature_1: torch.Tensor, uniforms_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """How many of a window's tokens are committed (count_1 int64, 1..T) and the token after them (next_id_1 int64).

    Draft x_j stays while u_j < p_j(x_j) / q_j(x_j) and all before it stay. The token after the first refusal is drawn
    from max(p - q, 0), normalised, unless its mass is 1e-8 or less, and the one after a window kept whole from p: both
    by inverse CDF with the last uniform. The numbers are those of ``dspark.decode.acceptance`` for the same uniforms,
    which is why torch's own operations do and no kernel of ours; nothing here is waited for.
    Shapes: ids_T int64, the anchor and K = T - 1 drafts; logits float32 or better, before temperature; uniforms_T
    float64 in [0, 1). Source: specs/dspark.md 6 step 4.
    """
    target_TV = torch.softmax(target_logits_TV * inverse_temperature_1, -1)
    draft_KV = torch.softmax(draft_logits_KV * inverse_temperature_1, -1)
    ids_K1 = ids_T[1:, None]
    ratios_K = (target_TV[:-1].gather(1, ids_K1) / draft_KV.gather(1, ids_K1)).squeeze(1)
    count_1 = 1 + (uniforms_T[:-1] < ratios_K).long().cumprod(0).sum(0, keepdim=True)
    row_1V = target_TV.index_select(0, count_1 - 1)
    residual_1V = (row_1V - functional.pad(draft_KV, (0, 0, 0, 1)).index_select(0, count_1 - 1)).clamp_(min=0)
    is_left_11 = residual_1V.sum(1, keepdim=True) > SMALLEST_RESIDUAL
    cumulative_1V = torch.where(is_left_11, residual_1V, row_1V).cumsum(1, dtype=torch.float64)
    level_11 = cumulative_1V[:, -1:] * uniforms_T[-1]
    next_id_1 = torch.searchsorted(cumulative_1V, level_11, right=True).squeeze(1)
    return count_1, next_id_1.clamp_(max=cumulative_1V.shape[1] - 1)  # NaN logits give no id outside the tables
