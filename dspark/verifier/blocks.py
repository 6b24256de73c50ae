"""One rank's chain of kernels through each kind of block, from the normed hidden state to the rank's partial sum."""

from typing import NamedTuple

import torch
from torch.nn import functional

from dspark.kernels import kda, mla, moe, projection, router
from dspark.target.config import TargetConfig
from dspark.verifier.buffers import Buffers
from dspark.verifier.calls import Caller
from dspark.verifier.weights import ExpertWeights, LatentWeights, LinearWeights, RouterWeights

SPLIT_TOKENS, MAX_SPLITS = 64, 44


class Partial(NamedTuple):
    """A block's output on one rank: K parts a token, and their weights if they are not 1. Ranks add their sums."""

    parts_TKD: torch.Tensor
    weights_TK: torch.Tensor | None


class Chain(NamedTuple):
    """What every kernel of a pass is called with."""

    call: Caller
    config: TargetConfig
    buffers: Buffers
    is_chained: bool


def num_splits(num_rows: int) -> int:
    """Into how many parts the latent rows are cut: of 64 rows at least, and 44 at most.

    At 9 tokens of 8 heads a part is three programs, so 44 fill 132 multiprocessors once; more parts would write and
    merge more than the cache holds.
    """
    return min(MAX_SPLITS, -(-num_rows // SPLIT_TOKENS))


def linear_attention(
    x_TD: torch.Tensor, weights: LinearWeights, index: int, chain: Chain
) -> tuple[Partial, torch.Tensor]:
    """Linear attention layer ``index`` (counting these layers only); also returns its projected_TC, for the commit."""
    call, config, buffers, is_chained = chain
    heads, width = weights.dt_bias_LHE.shape[1:]
    rows = heads * width
    projected_TC = call(
        "KDA in-projection", projection.project, x_TD, weights.in_LCD[index], buffers.counters, is_chained=is_chained
    )
    o_THF = call(
        "KDA verify",
        kda.verify,
        projected_TC,
        buffers.history_LWC[index],
        weights.conv_LCJ[index],
        weights.a_log_LH[index],
        weights.dt_bias_LHE[index],
        buffers.state_LHEF[index],
        config.kda_lower_bound,
        is_chained=is_chained,
    )
    y_TD = call(
        "KDA norm and o_proj",
        projection.project_gated,
        o_THF,
        weights.norm_LF[index],
        torch.unflatten(projected_TC[:, 4 * rows : 5 * rows], 1, (heads, width)),
        weights.out_LDC[index],
        config.rms_norm_eps,
        buffers.counters,
        is_chained=is_chained,
    )
    return Partial(y_TD[:, None], None), projected_TC


def latent_attention(x_TD: torch.Tensor, weights: LatentWeights, index: int, chain: Chain) -> Partial:
    """Latent attention layer ``index`` (counting these layers only); writes T rows behind the committed ones."""
    call, config, buffers, is_chained = chain
    rows_JC = buffers.rows_MJC[index]
    projected_TC = call(
        "MLA in-projection", projection.project, x_TD, weights.in_CD, buffers.counters, is_chained=is_chained
    )
    if weights.q_norm_C is not None and weights.q_b_CQ is not None:
        projected_TC = call(
            "MLA low-rank queries",
            _low_rank_queries,
            projected_TC,
            weights.q_norm_C,
            weights.q_b_CQ,
            config.rms_norm_eps,
            buffers.counters,
        )
    q_THC = call(
        "MLA absorb",
        mla.absorb,
        projected_TC,
        weights.kv_norm_C,
        config.rms_norm_eps,
        weights.keys_HEC,
        buffers.angles_JE2,
        rows_JC,
        buffers.length_1,
        is_chained=is_chained,
    )
    context_STHC, lse_STH = call(
        "MLA attention",
        mla.attend,
        q_THC,
        rows_JC,
        buffers.length_1,
        config.kv_lora_rank,
        config.qk_head_dim**-0.5,
        num_splits(len(rows_JC)),
        is_chained=is_chained,
    )
    gate_TH = projected_TC[:, -len(weights.keys_HEC) :]
    o_THF = call(
        "MLA values and gate", mla.finish, context_STHC, lse_STH, weights.values_HFC, gate_TH, is_chained=is_chained
    )
    y_TD = call(
        "MLA o_proj", projection.project, o_THF.flatten(1), weights.out_DC, buffers.counters, is_chained=is_chained
    )
    return Partial(y_TD[:, None], None)


def feed(
    x_TD: torch.Tensor, gate: RouterWeights | None, experts: ExpertWeights, dense: router.Dispatch, chain: Chain
) -> Partial:
    """The mixture of experts, or the dense MLP as one expert that every token takes (``dense``)."""
    call, config, buffers, is_chained = chain
    kind, dispatch, weights_TK = "Dense MLP", dense, None
    if gate is not None:
        law = (config.n_group, config.topk_group, config.num_experts_per_tok, config.routed_scaling_factor)
        dispatch = call(
            "Router",
            router.dispatch,
            x_TD,
            gate.gate_XD,
            gate.bias_X,
            law,
            buffers.counters,
            is_chained=is_chained,
        )
        kind, weights_TK = "MoE", dispatch.weights_TJ
    act_MI = call(f"{kind} up", moe.up, x_TD, experts.gate_up_XCD, dispatch, experts.limits_X, is_chained=is_chained)
    parts_TKD = call(f"{kind} down", moe.down, act_MI, experts.down_XDI, dispatch, is_chained=is_chained)
    return Partial(parts_TKD, weights_TK)


def _low_rank_queries(
    projected_TC: torch.Tensor, norm_C: torch.Tensor, q_b_CQ: torch.Tensor, eps: float, counters: torch.Tensor
) -> torch.Tensor:
    """q_a | rest becomes q | rest. Only Ling-3.0-tiny has low-rank queries: no kernel of its own."""
    rank = len(norm_C)
    normed_TC = functional.rms_norm(projected_TC[:, :rank], (rank,), norm_C, eps)
    return torch.cat((projection.project(normed_TC, q_b_CQ, counters), projected_TC[:, rank:]), 1)
