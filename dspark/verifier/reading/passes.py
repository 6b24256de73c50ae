"""A pass of a rank over packed sequences of any length: embedding, every layer, final norm.

Matrix products are torch's; both attentions and the experts are kernels of ours.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dspark.errors import ConfigError
from dspark.kernels import kda_chunk, mla, moe, router
from dspark.kernels.chunks import Chunks, lay_out
from dspark.kernels.rotary import rotary_angles, rotate_interleaved_pairs
from dspark.kernels.transfer import onto
from dspark.target.config import TargetConfig
from dspark.target.loading import check_ids
from dspark.types import TargetOutput
from dspark.verifier.buffers import Buffers
from dspark.verifier.plan import PIECE_TOKENS, free_bytes, reading_bytes
from dspark.verifier.ranks import ALONE, Ranks
from dspark.verifier.weights import LatentWeights, LayerWeights, LinearWeights, MtpWeights, VerifierWeights


class Rows(NamedTuple):
    """How the rows of a pass lie: their chunks for linear and for latent attention, the cosine and sine of their
    positions, and the model's config. ``start`` tokens of the only sequence were read before; 0 for several sequences.
    """

    chunks: Chunks
    latent_chunks: Chunks
    angles: tuple[Tensor, Tensor]
    start: int
    config: TargetConfig


@torch.no_grad()
def read_packed(
    weights: VerifierWeights, ids: Sequence[Tensor], target_layer_ids: tuple[int, ...] = (),
    buffers: Buffers | None = None, start: int = 0, ranks: Ranks = ALONE,
) -> TargetOutput:  # fmt: skip
    """Taps and last hidden state of every token of B sequences (each int64 [T_b], T_b >= 1), in one pass.

    With ``buffers``, of the one sequence that they hold ``start`` tokens of: it is read on and its states, history,
    latent rows and length are brought on. They differ from those of reading it window by window, and a row from that of
    another packing, by roundings only. ``ranks`` add their partial sums; a rank alone adds its own only.
    Raises: ConfigError when the memory for the intermediates is missing or ids are none of the target's; ValueError for
    an empty sequence.
    """
    config, device, lengths = weights.config, weights.device, [len(ids_T) for ids_T in ids]
    is_held = start == 0 if buffers is None else len(ids) == 1 and start + lengths[0] <= buffers.capacity_tokens
    assert is_held, "buffers hold one sequence: what was read of it and what comes now"
    check_ids(torch.cat([ids_T.flatten() for ids_T in ids] or [torch.zeros(0, dtype=torch.int64)]), config.vocab_size)
    _check_memory(weights, sum(lengths), len(target_layer_ids), start)
    rows = _lay_out(config, lengths, start, weights.dtype, device)
    residual_ND = weights.embedding_VD[onto(device, torch.cat(list(ids)))]
    norms = [layer.input_norm_D for layer in weights.layers[1:]] + [weights.norm_D]
    taps: dict[int, Tensor] = {}
    first_D, eps = weights.layers[0].input_norm_D, config.rms_norm_eps
    x_ND = functional.rms_norm(residual_ND, first_D.shape, first_D, eps)
    num_linear = 0
    for index, (layer, next_norm_D) in enumerate(zip(weights.layers, norms, strict=True)):
        if layer.latent is None:
            assert weights.linear is not None
            memory = _linear_memory(weights.linear, buffers, num_linear, len(lengths))
            partial_ND = linear_attention(x_ND, weights.linear, num_linear, rows, memory)
            num_linear += 1
        else:
            kept_JC = None if buffers is None else buffers.rows_MJC[index - num_linear]
            partial_ND = latent_attention(x_ND, layer.latent, rows, kept_JC)
        residual_ND, x_ND = ranks.add_norm(partial_ND[:, None], None, residual_ND, layer.post_norm_D, eps)
        parts = zip(torch.split(x_ND, PIECE_TOKENS), torch.split(residual_ND, PIECE_TOKENS), strict=True)
        pieces = [ranks.add_norm(*feed(x, layer, config), stream, next_norm_D, eps) for x, stream in parts]
        residual_ND, x_ND = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*pieces, strict=True))
        if index in target_layer_ids:
            taps[index] = residual_ND
    if buffers is not None:
        buffers.length_1.fill_(start + lengths[0])
    chosen = [taps[layer] for layer in target_layer_ids]
    return TargetOutput(torch.stack(chosen, 1) if chosen else x_ND.new_empty(len(x_ND), 0, x_ND.shape[1]), x_ND)


@torch.no_grad()
def read_mtp(
    weights: MtpWeights, next_embedding_ND: Tensor, hidden_ND: Tensor, rows_JC: Tensor,
    start: int = 0, ranks: Ranks = ALONE,
) -> Tensor:  # fmt: skip
    """The prediction layer over N tokens from position ``start`` on: last_ND, its hidden states after the final norm.

    Reads the embeddings of the ids that follow, the target's last hidden states, and ``start`` latent rows of rows_JC;
    writes N more there. Source: as ``MtpDrafter``.
    """
    layer, config, eps = weights.layer, weights.config, weights.config.rms_norm_eps
    assert layer.latent is not None
    rows = _lay_out(config, [len(hidden_ND)], start, hidden_ND.dtype, hidden_ND.device)
    shape = (config.hidden_size,)
    embedded_ND = functional.rms_norm(next_embedding_ND, shape, weights.enorm_D, eps)
    joined_NC = torch.cat((embedded_ND, functional.rms_norm(hidden_ND, shape, weights.hnorm_D, eps)), 1)
    residual_ND = functional.linear(joined_NC, weights.eh_DC)
    x_ND = functional.rms_norm(residual_ND, shape, layer.input_norm_D, eps)
    partial_ND = latent_attention(x_ND, layer.latent, rows, rows_JC)
    residual_ND, x_ND = ranks.add_norm(partial_ND[:, None], None, residual_ND, layer.post_norm_D, eps)
    return ranks.add_norm(*feed(x_ND, layer, config), residual_ND, weights.norm_D, eps)[1]


def _lay_out(
    config: TargetConfig, lengths: Sequence[int], start: int, dtype: torch.dtype, device: torch.device
) -> Rows:
    chunks = (lay_out(lengths, device), lay_out(lengths, device, mla.PACKED_ROWS))
    positions_N = torch.cat([torch.arange(start, start + length, device=device) for length in lengths])
    wide = torch.promote_types(dtype, torch.float32)
    angles = rotary_angles(positions_N, config.qk_rope_head_dim, config.rope_theta, wide)
    return Rows(*chunks, angles, start, config)


def _linear_memory(
    linear: LinearWeights, buffers: Buffers | None, index: int, num_sequences: int
) -> tuple[Tensor, Tensor]:
    """State and history of linear attention layer ``index``: the buffers' own, or fresh ones."""
    if buffers is not None:
        return buffers.state_LHEF[index][None], buffers.history_LWC[index][None]
    (_, heads, width), (_, channels, num_taps) = linear.dt_bias_LHE.shape, linear.conv_LCJ.shape
    state_BHEF = linear.dt_bias_LHE.new_zeros(num_sequences, heads, width, width)
    return state_BHEF, linear.conv_LCJ.new_zeros(num_sequences, num_taps - 1, channels)


def _check_memory(weights: VerifierWeights, num_tokens: int, num_taps: int, start: int) -> None:
    needed = reading_bytes(weights.config, weights.shard, num_tokens, weights.dtype, num_taps, start)
    free = free_bytes(weights.device)
    if needed > free:
        sizes = f"{needed / 1e9:.2f} GB, {weights.device} has {free / 1e9:.2f} GB free"
        raise ConfigError(f"reading {num_tokens} tokens together takes {sizes}; read fewer at a time")


def linear_attention(
    x_ND: Tensor, weights: LinearWeights, index: int, rows: Rows, memory: tuple[Tensor, Tensor]
) -> Tensor:
    """Linear attention layer ``index`` (counting these layers only); brings ``memory`` on, in place.
    Shapes: memory state_BHEF and history_BWC; the history of several sequences is read but not kept.
    """
    state_BHEF, history_BWC = memory
    _, num_history, num_mixed = history_BWC.shape
    projected_NC = functional.linear(x_ND, weights.in_LCD[index])
    layer = (weights.conv_LCJ[index], weights.a_log_LH[index], weights.dt_bias_LHE[index], weights.norm_LF[index])
    law = (rows.config.kda_lower_bound, rows.config.rms_norm_eps)
    o_NHF = kda_chunk.read(projected_NC, history_BWC, *layer, state_BHEF, *law, rows.chunks)
    if len(history_BWC) == 1:
        inputs_NC = projected_NC[-num_history:, :num_mixed]
        history_BWC[0] = torch.cat((history_BWC[0], inputs_NC))[-num_history:]
    return functional.linear(o_NHF.flatten(1), weights.out_LDC[index])


def latent_attention(x_ND: Tensor, weights: LatentWeights, rows: Rows, kept_JC: Tensor | None) -> Tensor:
    """A latent attention layer in its plain form. Rows of one sequence are kept in ``kept_JC`` behind the first start.
    Keys and values of the tokens before are expanded again from the kept rows.
    """
    config, projected_NC = rows.config, functional.linear(x_ND, weights.in_CD)
    heads, nope, latent = weights.keys_HEC.shape
    sizes = [latent, config.qk_rope_head_dim, heads]
    q_NC, latent_NC, turning_NE, gate_NH = torch.split(projected_NC, [projected_NC.shape[1] - sum(sizes), *sizes], 1)
    if weights.q_norm_C is not None and weights.q_b_CQ is not None:
        q_NC = functional.rms_norm(q_NC, weights.q_norm_C.shape, weights.q_norm_C, config.rms_norm_eps)
        q_NC = functional.linear(q_NC, weights.q_b_CQ)
    q_NHE = torch.unflatten(q_NC, 1, (heads, -1))
    turning_NHE = torch.cat((q_NHE[..., nope:], turning_NE[:, None]), 1)
    turned_NHE = rotate_interleaved_pairs(turning_NHE, *(angle[:, None] for angle in rows.angles))
    latent_NC = functional.rms_norm(latent_NC, weights.kv_norm_C.shape, weights.kv_norm_C, config.rms_norm_eps)
    rows_JC = torch.cat((latent_NC, turned_NHE[:, -1]), 1)
    if kept_JC is not None:
        end = rows.start + len(rows_JC)
        kept_JC[rows.start : end] = rows_JC
        rows_JC = kept_JC[:end]
    latent_JC = rows_JC[:, :latent]
    k_JHE, v_JHF = (
        functional.linear(latent_JC, part_HEC.flatten(0, 1)).view(-1, *part_HEC.shape[:2])
        for part_HEC in (weights.keys_HEC, weights.values_HFC)
    )
    turned = (turned_NHE[:, :-1], k_JHE, rows_JC[:, latent:])
    scale = q_NHE.shape[-1] ** -0.5
    o_NHF = mla.attend_packed(q_NHE[..., :nope], *turned, v_JHF, gate_NH, rows.latent_chunks, scale)
    return functional.linear(o_NHF.flatten(1), weights.out_DC)


def feed(x_ND: Tensor, layer: LayerWeights, config: TargetConfig) -> tuple[Tensor, Tensor | None]:
    """What the experts chosen for each row say and their weights, or what the dense MLP says: parts of ``add_norm``."""
    experts = layer.experts
    if layer.router is None:
        gate_NI, up_NI = functional.linear(x_ND, experts.gate_up_XCD[0]).chunk(2, 1)
        return functional.linear(moe.swiglu(gate_NI, up_NI), experts.down_XDI[0])[:, None], None
    logits_NX = wide_product(x_ND, layer.router.gate_XD)
    ids_NJ, weights_NJ = router.choose(logits_NX, layer.router.bias_X, config.router_law)
    return moe.run_each(x_ND, ids_NJ, experts.gate_up_XCD, experts.down_XDI, experts.limits_X), weights_NJ


def wide_product(x_ND: Tensor, weight_XD: Tensor) -> Tensor:
    """``x W^T`` in float32 or higher; a GPU sums products of the weight's dtype, as the engine's router does."""
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    if x_ND.is_cuda and weight_XD.dtype != wide:
        return torch.mm(x_ND, weight_XD.T, out_dtype=wide)
    return functional.linear(x_ND.to(wide), weight_XD.to(wide))
