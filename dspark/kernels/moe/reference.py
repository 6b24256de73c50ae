"""The router and the experts, defined. I inner width of an expert, K experts of a row."""

import torch
from torch.nn import functional


def route(
    logits_NX: torch.Tensor,
    bias_X: torch.Tensor,
    num_groups: int,
    num_kept_groups: int,
    num_picks: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``num_picks`` experts for every row inside its best groups.

    Scores are sigmoid(logits). The bias takes part in choosing only: a group counts by the sum of its two largest
    biased scores, and the weights are the plain scores of the chosen experts, made to sum to ``scaling``. Of two
    equal experts or groups the one with the smaller index wins.

    Shapes: logits_NX and bias_X float32 or float64. Returns ids_NK int64 by falling biased score, and weights_NK.
    Source: DeepSeek-V3 (arXiv 2412.19437) section 2.1.2; specs/ling-3.0.md section 6.2.
    """
    scores_NX = logits_NX.sigmoid()
    biased = (scores_NX + bias_X).unflatten(1, (num_groups, -1))
    group_scores_NG = biased.topk(2).values.sum(-1)
    kept_NG = group_scores_NG.sort(stable=True, descending=True).indices[:, :num_kept_groups]
    is_dropped_NG = torch.ones_like(group_scores_NG, dtype=torch.bool).scatter_(1, kept_NG, False)
    eligible_NX = biased.masked_fill(is_dropped_NG.unsqueeze(-1), -torch.inf).flatten(1)
    ids_NK = eligible_NX.sort(stable=True, descending=True).indices[:, :num_picks]
    weights_NK = scores_NX.gather(1, ids_NK)
    return ids_NK, weights_NK * (scaling / (weights_NK.sum(1, keepdim=True) + 1e-20))


def run_experts(
    x_ND: torch.Tensor,
    ids_NK: torch.Tensor,
    weights_NK: torch.Tensor,
    gate_up_XID: torch.Tensor,
    down_XDI: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """``sum over k of weight_k * expert_k(x)``, one expert after the other over the rows that chose it.

    Shapes: gate_up_XID holds an expert's gate rows, then its up rows ([X, 2I, D]); down_XDI [X, D, I].
    Returns [N, D] in the dtype of weights_NK (float32 or float64).
    """
    order_M, ends_X = sort_by_expert(ids_NK, down_XDI.shape[0])
    rows = x_ND[order_M // ids_NK.shape[1]].tensor_split(ends_X.tolist()[:-1])
    outputs = []
    for expert, rows_MD in enumerate(rows):
        if rows_MD.shape[0]:
            gate_MI, up_MI = functional.linear(rows_MD, gate_up_XID[expert]).chunk(2, -1)
            outputs.append(functional.linear(swiglu(gate_MI, up_MI, limit), down_XDI[expert]))
    return combine(torch.cat(outputs), order_M, weights_NK)


def sort_by_expert(ids_NK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The N*K picks in the order of their experts, and where each expert's picks end in that order (int32 [X])."""
    sorted_M, order_M = ids_NK.flatten().sort(stable=True)
    experts_X = torch.arange(num_experts, device=ids_NK.device)
    return order_M, torch.searchsorted(sorted_M, experts_X, right=True, out_int32=True)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """``min(silu(gate), limit) * clamp(up, -limit, limit)``; no limit means no clamp.

    The limit applies after SiLU and only from above on the gate's side.
    Source: SGLang 0.5.23 (Ling-3.0 routed and shared experts); the vendor's modelling file leaves it out.
    """
    activated = functional.silu(gate)
    if limit is not None:
        activated, up = activated.clamp(max=limit), up.clamp(-limit, limit)
    return activated * up


def combine(outputs_MD: torch.Tensor, order_M: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
    """Put sorted outputs back in the order of the picks and sum each row's by weight, in the weights' dtype."""
    place_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(order_M.shape[0], device=order_M.device))
    outputs_NKD = outputs_MD.index_select(0, place_M).view(*weights_NK.shape, -1).to(weights_NK.dtype)
    return (outputs_NKD * weights_NK.unsqueeze(-1)).sum(1)
