"""One rank's blocks over packed rows, from the normed hidden state to the rank's partial sum [N, D].

Matrix products are torch's; both attentions and the experts are kernels of ours.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dspark.kernels import kda_chunk, mla, moe, router
from dspark.kernels.chunks import Chunks
from dspark.layers.rotary import rotate_interleaved_pairs
from dspark.target.config import TargetConfig
from dspark.verifier.weights import LatentWeights, LayerWeights, LinearWeights


class Rows(NamedTuple):
    """How the rows of a pass lie: their chunks for linear and for latent attention, the cosine and sine of their
    positions, and the model's config. ``start`` tokens of the only sequence were read before; 0 for several sequences.
    """

    chunks: Chunks
    latent_chunks: Chunks
    angles: tuple[Tensor, Tensor]
    start: int
    config: TargetConfig


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
