"""One rank's pass over a window of tokens: its chain of kernels through each kind of block. Nothing is committed."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dspark.kernels import kda, mla, moe, projection, residual, router
from dspark.target.config import TargetConfig
from dspark.verifier.buffers import Buffers
from dspark.verifier.calls import Caller
from dspark.verifier.ranks import Ranks
from dspark.verifier.weights import ExpertWeights, LatentWeights, LinearWeights, RouterWeights, VerifierWeights

PROGRAMS, USUAL_TOKENS, MOST_SPLITS = 132, 9, 66
"""Multiprocessors of an H200, each full with one program of latent attention; the window that it is cut for; as many
parts as are merged without spills."""


class Partial(NamedTuple):
    """A block's output on one rank: K parts a token, and their weights if they are not 1. Ranks add their sums."""

    parts_TKD: Tensor
    weights_TK: Tensor | None


class Staged(NamedTuple):
    """What the linear attention layers leave for a commit: their in-projections, raw and prepared (``kda.prepare``)."""

    projected_LTC: Tensor
    prepared_LTC: Tensor


class Chain(NamedTuple):
    """What every kernel of a pass is called with: ``run`` its kernels, chained or not, ``call`` torch's operations;
    ``forced``: the mixture layers' dispatches, if not the router's.
    """

    call: Caller
    run: Caller
    config: TargetConfig
    buffers: Buffers
    forced: Sequence[router.Dispatch] = ()


def num_splits(num_rows: int, num_heads: int) -> int:
    """Into how many parts the latent rows are cut: of a block at least, and so that all programs of a usual window run
    at once in 16 bits. A part is a program for every 64 (token, head) rows while all parts hold their rows, two blocks;
    else for every 32 (``attend_tiles`` of the kernel).
    """
    num_blocks, num_queries = -(-num_rows // mla.BLOCK_ROWS), USUAL_TOKENS * num_heads
    short, long = (min(MOST_SPLITS, max(1, PROGRAMS // -(-num_queries // tile))) for tile in (64, 32))
    return min(num_blocks, short if num_blocks <= 2 * short else long)


def linear_attention(x_TD: Tensor, weights: LinearWeights, index: int, staged: Staged, chain: Chain) -> Partial:
    """Linear attention layer ``index`` (counting these layers only); fills its part of what is staged."""
    config, buffers = chain.config, chain.buffers
    heads, width = weights.dt_bias_LHE.shape[1:]
    rows = heads * width
    projected_TC, prepared_TC = staged.projected_LTC[index], staged.prepared_LTC[index]
    inputs = (x_TD, weights.in_LCD[index], buffers.history_LWC[index], weights.conv_LCJ[index])
    decay = (weights.a_log_LH[index], weights.dt_bias_LHE[index], config.kda_lower_bound)
    out = (projected_TC, prepared_TC)
    chain.run("KDA in-projection", projection.project_prepared, *inputs, *decay, buffers.counters, out=out)
    o_THF = chain.run("KDA verify", kda.verify, prepared_TC, buffers.state_LHEF[index], x_TD.dtype)
    gate_THF = torch.unflatten(projected_TC[:, 4 * rows : 5 * rows], 1, (heads, width))
    gated = (o_THF, weights.norm_LF[index], gate_THF, weights.out_LDC[index], config.rms_norm_eps)
    y_TD = chain.run("KDA norm and o_proj", projection.project_gated, *gated, buffers.counters)
    return Partial(y_TD[:, None], None)


def empty_stage(x_TD: Tensor, weights: LinearWeights) -> Staged:
    """Memory for what T tokens stage."""
    num_layers, num_channels, _ = weights.in_LCD.shape
    projected_LTC = x_TD.new_empty(num_layers, len(x_TD), num_channels)
    return Staged(projected_LTC, torch.empty_like(projected_LTC, dtype=weights.dt_bias_LHE.dtype))


def latent_attention(x_TD: Tensor, weights: LatentWeights, index: int, chain: Chain) -> Partial:
    """Latent attention layer ``index`` (counting these layers only); writes T rows behind the committed ones."""
    config, buffers, eps = chain.config, chain.buffers, chain.config.rms_norm_eps
    rows_JC, length_1, counters = buffers.rows_MJC[index], buffers.length_1, buffers.counters
    projected_TC = chain.run("MLA in-projection", projection.project, x_TD, weights.in_CD, counters)
    if weights.q_norm_C is not None and weights.q_b_CQ is not None:
        low_rank = (projected_TC, weights.q_norm_C, weights.q_b_CQ, eps, counters)
        projected_TC = chain.call("MLA low-rank queries", _low_rank_queries, *low_rank)
    cache = (buffers.angles_JE2, rows_JC, length_1)
    q_THC = chain.run("MLA absorb", mla.absorb, projected_TC, weights.kv_norm_C, eps, weights.keys_HEC, *cache)
    sizes = (config.kv_lora_rank, config.qk_head_dim**-0.5, num_splits(len(rows_JC), len(weights.keys_HEC)))
    context_STHC, lse_STH = chain.run("MLA attention", mla.attend, q_THC, rows_JC, length_1, *sizes)
    gate_TH = projected_TC[:, -len(weights.keys_HEC) :]
    o_THF = chain.run("MLA values and gate", mla.finish, context_STHC, lse_STH, weights.values_HFC, gate_TH)
    y_TD = chain.run("MLA o_proj", projection.project, o_THF.flatten(1), weights.out_DC, counters)
    return Partial(y_TD[:, None], None)


def feed(
    x_TD: Tensor, gate: RouterWeights | None, experts: ExpertWeights, given: router.Dispatch | None, chain: Chain
) -> Partial:
    """The mixture of experts by ``given`` or else by its router, which always runs; or the dense MLP as one expert."""
    kind, dispatch, weights_TK = "Dense MLP", given, None
    if gate is not None:
        law, counters = chain.config.router_law, chain.buffers.counters
        routed = chain.run("Router", router.dispatch, x_TD, gate.gate_XD, gate.bias_X, law, counters)
        dispatch = given or routed
        kind, weights_TK = "MoE", dispatch.weights_TJ
    assert dispatch is not None
    act_MI = chain.run(f"{kind} up", moe.up, x_TD, experts.gate_up_XCD, dispatch, experts.limits_X)
    parts_TKD = chain.run(f"{kind} down", moe.down, act_MI, experts.down_XDI, dispatch)
    return Partial(parts_TKD, weights_TK)


def _low_rank_queries(projected_TC: Tensor, norm_C: Tensor, q_b_CQ: Tensor, eps: float, counters: Tensor) -> Tensor:
    """q_a | rest becomes q | rest. Only Ling-3.0-tiny has low-rank queries: no kernel of its own."""
    rank = len(norm_C)
    normed_TC = functional.rms_norm(projected_TC[:, :rank], (rank,), norm_C, eps)
    return torch.cat((projection.project(normed_TC, q_b_CQ, counters), projected_TC[:, rank:]), 1)


class Window(NamedTuple):
    """What a pass says about T tokens, and what a commit of them needs (None without linear attention layers).
    Shapes: taps_TLD the outputs of the tapped layers; hidden_TD after the final norm.
    """

    taps_TLD: Tensor
    hidden_TD: Tensor
    staged: Staged | None


def read_window(
    ids_T: Tensor, weights: VerifierWeights, target_layer_ids: tuple[int, ...], dense: router.Dispatch,
    chain: Chain, ranks: Ranks,
) -> Window:  # fmt: skip
    """Read T tokens after the committed ones; ``ranks`` add the partial sums of every block."""
    input_norms = [layer.input_norm_D for layer in weights.layers]
    begin = (ids_T, weights.embedding_VD, input_norms[0], chain.config.rms_norm_eps)
    residual_TD, x_TD = chain.run("Embedding and norm", residual.embed_norm, *begin)
    outputs: list[Tensor] = []
    staged = None if weights.linear is None else empty_stage(x_TD, weights.linear)
    num_linear, forced = 0, iter(chain.forced)
    for layer, next_norm_D in zip(weights.layers, [*input_norms[1:], weights.norm_D], strict=True):
        if layer.latent is None:
            assert weights.linear is not None
            assert staged is not None
            partial = linear_attention(x_TD, weights.linear, num_linear, staged, chain)
            num_linear += 1
        else:
            partial = latent_attention(x_TD, layer.latent, len(outputs) - num_linear, chain)
        residual_TD, x_TD = _add("Attention", partial, residual_TD, layer.post_norm_D, chain, ranks)
        kind, given = ("Dense MLP", dense) if layer.router is None else ("MoE", next(forced, None))
        partial = feed(x_TD, layer.router, layer.experts, given, chain)
        residual_TD, x_TD = _add(kind, partial, residual_TD, next_norm_D, chain, ranks)
        outputs.append(residual_TD)
    taps = [outputs[layer] for layer in target_layer_ids]
    taps_TLD = chain.call("Taps", torch.stack, taps, 1) if taps else x_TD.new_empty(len(x_TD), 0, x_TD.shape[1])
    return Window(taps_TLD, x_TD, staged)


def _add(
    kind: str, partial: Partial, residual_TD: Tensor, norm_weight_D: Tensor, chain: Chain, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    stage = f"{kind} {'sum' if ranks.world_size == 1 else 'all-reduce'} and norm"
    return chain.run(stage, ranks.add_norm, *partial, residual_TD, norm_weight_D, chain.config.rms_norm_eps)
