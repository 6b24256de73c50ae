"""The router of a mixture of experts, defined. K experts picked a row."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dspark.kernels import MAX_TOKENS

Law = tuple[int, int, int, float]
"""Of the router: groups, groups kept, experts picked, what the weights sum to."""


def route(logits_NX: Tensor, bias_X: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """Choose the law's number of experts for every row inside its best groups.

    Scores are sigmoid(logits). The bias takes part in choosing only: a group counts by the sum of its two largest
    biased scores, and the weights are the plain scores of the chosen experts, made to sum to the law's last number. Of
    two equal experts or groups the one with the smaller index wins.

    Shapes: logits_NX and bias_X float32 or float64. Returns ids_NK int64 by falling biased score, and weights_NK.
    Source: DeepSeek-V3 (arXiv 2412.19437) section 2.1.2; specs/ling-3.0.md section 6.2.
    """
    num_groups, num_kept_groups, num_picks, scaling = law
    scores_NX = logits_NX.sigmoid()
    biased = (scores_NX + bias_X).unflatten(1, (num_groups, -1))
    group_scores_NG = biased.topk(2).values.sum(-1)
    kept_NG = group_scores_NG.sort(stable=True, descending=True).indices[:, :num_kept_groups]
    is_dropped_NG = torch.ones_like(group_scores_NG, dtype=torch.bool).scatter_(1, kept_NG, False)
    eligible_NX = biased.masked_fill(is_dropped_NG.unsqueeze(-1), -torch.inf).flatten(1)
    ids_NK = eligible_NX.sort(stable=True, descending=True).indices[:, :num_picks]
    weights_NK = scores_NX.gather(1, ids_NK)
    return ids_NK, weights_NK * (scaling / (weights_NK.sum(1, keepdim=True) + 1e-20))


class Dispatch(NamedTuple):
    """Which experts a step's T tokens visit, at most 16 of them. J = K+1 slots of a token, the shared expert's last.

    A pair is a token at an expert; pair row t*J + j belongs to slot j of token t.
    Shapes: weights_TJ float32. experts_P int32: the visited experts, ascending, -1 behind them.
    pairs_PN int32 [P, 16]: an expert's pair rows in the order of their tokens, -1 behind them.
    num_active_1 int32: how many experts are visited.
    """

    weights_TJ: Tensor
    experts_P: Tensor
    pairs_PN: Tensor
    num_active_1: Tensor


def choose(logits_NX: Tensor, bias_X: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """``route``, then the shared expert, with the last id X and weight 1: ids_NJ int32 and weights_NJ, J = K + 1."""
    ids_NK, weights_NK = route(logits_NX, bias_X, law)
    ids_NJ = functional.pad(ids_NK.int(), (0, 1), value=logits_NX.shape[1])
    return ids_NJ, functional.pad(weights_NK, (0, 1), value=1.0)


def dispatch(x_TD: Tensor, gate_XD: Tensor, bias_X: Tensor, law: Law) -> Dispatch:
    """``choose`` by x gate^T in float32 or higher, sorted by expert. P = min(X, T*K) + 1.

    Weights are float32, or float64 for float64.
    """
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return list_pairs(*choose(functional.linear(x_TD.to(wide), gate_XD.to(wide)), bias_X, law), len(gate_XD))


def list_pairs(ids_TJ: Tensor, weights_TJ: Tensor, num_experts: int) -> Dispatch:
    """What ``choose`` chose, sorted by expert."""
    sorted_M, order_M = ids_TJ.flatten().sort(stable=True)
    is_first_M = functional.pad(sorted_M[1:] != sorted_M[:-1], (1, 0), value=True)
    slot_M, places_M = is_first_M.cumsum(0) - 1, torch.arange(sorted_M.shape[0], device=ids_TJ.device)
    num_slots = min(num_experts, len(ids_TJ) * (ids_TJ.shape[1] - 1)) + 1
    experts_P = torch.full((num_slots,), -1, dtype=torch.int32, device=ids_TJ.device)
    pairs_PN = torch.full((num_slots, MAX_TOKENS), -1, dtype=torch.int32, device=ids_TJ.device)
    experts_P[slot_M] = sorted_M
    pairs_PN[slot_M, places_M - places_M[is_first_M][slot_M]] = order_M.int()
    return Dispatch(weights_TJ, experts_P, pairs_PN, slot_M[-1:].int() + 1)


def dense_dispatch(num_tokens: int, device: torch.device) -> Dispatch:
    """All tokens at one expert, id 0, with weight 1: a dense MLP as a mixture. J = 1."""
    places_N = torch.arange(MAX_TOKENS, dtype=torch.int32, device=device)
    pairs_1N = places_N.where(places_N < num_tokens, -1)[None]
    weights_TJ = torch.ones(num_tokens, 1, device=device)
    return Dispatch(weights_TJ, places_N.new_zeros(1), pairs_1N, places_N.new_ones(1))
