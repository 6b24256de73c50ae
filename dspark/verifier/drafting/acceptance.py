"""The acceptance rule: which drafted tokens are kept, and the token that follows them, decided on the device."""

import torch
from torch.nn import functional

SMALLEST_RESIDUAL = 1e-8


def accept(
    ids_T: torch.Tensor, draft_logits_KV: torch.Tensor, target_logits_TV: torch.Tensor,
    inverse_temperature_1: torch.Tensor, uniforms_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``keep`` of a window's drafts. Shapes: ids_T int64, the anchor and K = T - 1 drafts; logits float32 or better,
    before temperature.
    """
    target_TV = torch.softmax(target_logits_TV * inverse_temperature_1, -1)
    return keep(ids_T[1:], torch.softmax(draft_logits_KV * inverse_temperature_1, -1), target_TV, uniforms_T)


def keep(
    ids_K: torch.Tensor, draft_probs_KV: torch.Tensor, target_probs_TV: torch.Tensor, uniforms_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep a prefix of the drafted tokens so that what is committed is distributed as the target's own text.

    Draft x_j stays while u_j < p_j(x_j) / q_j(x_j) and all before it stay. The token after the first refusal is drawn
    from max(p - q, 0), normalised, and the one after drafts that all stay from p: both by inverse CDF with the last
    uniform. With one-hot rows this is greedy. Torch's own operations do and no kernel of ours, so that the same
    uniforms decide the same on every device; nothing here is waited for.
    Shapes: ids_K int64, K >= 0; draft_probs_KV the rows the ids were drawn from; target_probs_TV, T = K + 1; uniforms_T
    float64 in [0, 1).
    Returns: how many tokens are committed with the anchor (count_1 int64, 1..T), and the id after them (next_id_1).
    Source: dspark.md 6 step 4, with DeepSpec's bound: a residual of mass 1e-8 or less gives way to p. DeepSpec also
    divides by at least 1e-8, which refuses a very unlikely draft too often; a drawn token has q > 0, so we need none.
    """
    ids_K1 = ids_K[:, None]
    ratios_K = (target_probs_TV[:-1].gather(1, ids_K1) / draft_probs_KV.gather(1, ids_K1)).squeeze(1)
    count_1 = 1 + (uniforms_T[:-1] < ratios_K).long().cumprod(0).sum(0, keepdim=True)
    row_1V = target_probs_TV.index_select(0, count_1 - 1)
    residual_1V = (row_1V - functional.pad(draft_probs_KV, (0, 0, 0, 1)).index_select(0, count_1 - 1)).clamp_(min=0)
    is_left_11 = residual_1V.sum(1, keepdim=True) > SMALLEST_RESIDUAL
    cumulative_1V = torch.where(is_left_11, residual_1V, row_1V).cumsum(1, dtype=torch.float64)
    level_11 = cumulative_1V[:, -1:] * uniforms_T[-1]
    next_id_1 = torch.searchsorted(cumulative_1V, level_11, right=True).squeeze(1)
    return count_1, next_id_1.clamp_(max=cumulative_1V.shape[1] - 1)  # NaN logits give no id outside the tables
