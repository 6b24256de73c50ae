"""Latent attention, defined. E width of a key, F width of a value, C width of a cached row, J cached rows."""

import torch
from torch import Tensor
from torch.nn import functional

from dspark.kernels.chunks import Chunks
from dspark.kernels.rotary import rotate_interleaved_pairs

PACKED_ROWS = 128
"""Rows of a chunk, for ``attend_packed``."""

BLOCK_ROWS = 64
"""Cached rows a block, the unit that splits share out: part of a result's bits."""


def causal_attention(q_BTHE: Tensor, k_BTHE: Tensor, v_BTHF: Tensor, scale: float) -> Tensor:
    """Attention of every token on itself and the tokens before it, rows starting together at position 0.

    Rows padded on the right need no mask: no true token sees the padding.
    Shapes: returns [B, T, H, F].
    """
    q_BHTE, k_BHTE, v_BHTF = (x.transpose(1, 2) for x in (q_BTHE, k_BTHE, v_BTHF))
    return functional.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTF, is_causal=True, scale=scale).transpose(1, 2)


def attend_packed(
    q_NHE: Tensor, turned_NHR: Tensor, k_JHE: Tensor, turned_JR: Tensor, v_JHF: Tensor, gate_NH: Tensor, chunks: Chunks,
    scale: float,
) -> Tensor:  # fmt: skip
    """Sequence by sequence, the last query on all keys; output and gate are each rounded before their product."""
    from torch.nn.attention.bias import causal_lower_right  # it loads torch._dynamo, a third of a command's start

    past, lengths, heads = len(k_JHE) - len(q_NHE), list(chunks.lengths), k_JHE.shape[1]
    seen = [past + lengths[0], *lengths[1:]]
    q = torch.cat((q_NHE, turned_NHR), -1).split(lengths)
    k = torch.cat((k_JHE, turned_JR[:, None].expand(-1, heads, -1)), -1).split(seen)
    outputs = []
    for each in zip(q, k, v_JHF.split(seen), strict=True):
        q_HTE, k_HSE, v_HSF = (x.transpose(0, 1) for x in each)
        mask = causal_lower_right(q_HTE.shape[1], k_HSE.shape[1])
        o_BHTF = functional.scaled_dot_product_attention(q_HTE[None], k_HSE[None], v_HSF[None], mask, scale=scale)
        outputs.append(o_BHTF[0].transpose(0, 1))
    wide = torch.promote_types(gate_NH.dtype, torch.float32)
    return torch.cat(outputs) * gate_NH.to(wide).sigmoid().to(gate_NH.dtype).unsqueeze(-1)


def absorbed_attention(q_BTHC: Tensor, rows_BJC: Tensor, bias_BTJ: Tensor, value_width: int, scale: float) -> Tensor:
    """Attention of absorbed queries on cached rows ``latent | rotated key``; all heads share the rows.

    Shapes: bias_BTJ is 0 where token t may see row j and -inf elsewhere; returns the weighted sum of the first
    ``value_width`` columns, [B, T, H, value_width], in q's dtype. Rows of the cache must be finite even where masked.
    Softmax in float32 or higher. Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.
    """
    num_tokens, num_heads = q_BTHC.shape[1:3]
    wide = torch.promote_types(q_BTHC.dtype, torch.float32)
    rows_BJC = rows_BJC.to(wide)
    bias_BNJ = bias_BTJ.to(wide).repeat_interleave(num_heads, 1)
    scores_BNJ = torch.baddbmm(bias_BNJ, q_BTHC.flatten(1, 2).to(wide), rows_BJC.transpose(1, 2), alpha=scale)
    context_BNC = scores_BNJ.softmax(-1) @ rows_BJC[..., :value_width]
    return torch.unflatten(context_BNC, 1, (num_tokens, num_heads)).to(q_BTHC.dtype)


def absorb(
    projected_TC: Tensor, norm_weight_C: Tensor, eps: float, keys_HEC: Tensor, angles_JE2: Tensor, rows_JC: Tensor,
    length_1: Tensor,
) -> Tensor:  # fmt: skip
    """Absorbed queries [T, H, latent + rope]; writes the tokens' cache rows behind the first ``length``.

    Roundings as in a latent attention block: the rotation and the norm in float32 or higher, each rounded once; the
    absorbed query is a matrix product's output. Source: specs/ling-3.0.md section 5; DeepSeek-V2 section 2.1.
    """
    num_heads, nope, latent = keys_HEC.shape
    rope = rows_JC.shape[1] - latent
    heads = num_heads * (nope + rope)
    q_THE = projected_TC[:, :heads].unflatten(1, (num_heads, nope + rope))
    latent_TC, k_rope_TE = projected_TC[:, heads : heads + latent + rope].split((latent, rope), 1)
    positions_T = length_1 + torch.arange(len(projected_TC), device=length_1.device)
    is_held_T = positions_T < len(rows_JC)
    angles_TE2 = angles_JE2[positions_T.clamp(max=len(rows_JC) - 1)]
    cos_TE, sin_TE = angles_TE2.where(is_held_T[:, None, None], 0).unbind(-1)
    normalised_TC = functional.rms_norm(latent_TC, norm_weight_C.shape, norm_weight_C, eps)
    rows_JC[positions_T[is_held_T]] = torch.cat(
        (normalised_TC, rotate_interleaved_pairs(k_rope_TE, cos_TE, sin_TE)), 1
    )[is_held_T]
    absorbed_HTC = q_THE[..., :nope].transpose(0, 1) @ keys_HEC
    q_rope_THE = rotate_interleaved_pairs(q_THE[..., nope:], cos_TE[:, None], sin_TE[:, None])
    return torch.cat((absorbed_HTC.transpose(0, 1), q_rope_THE), -1)


def attend(
    q_THC: Tensor, rows_JC: Tensor, length_1: Tensor, value_width: int, scale: float, num_splits: int
) -> tuple[Tensor, Tensor]:
    """Softmax and weighted sum over the rows of each split alone; split s has the blocks s, s + num_splits, ...

    Shapes: context_STHC [num_splits, T, H, value_width] in q's dtype (0 where a split sees no row) and lse_STH, float32
    or higher. Rows that no token sees may hold anything.
    """
    wide = torch.promote_types(q_THC.dtype, torch.float32)
    places_J = torch.arange(len(rows_JC), device=rows_JC.device)
    ends_T = length_1 + torch.arange(len(q_THC), device=length_1.device)
    rows_JC = rows_JC.to(wide).where((places_J <= ends_T[-1])[:, None], 0)
    scores_THJ = q_THC.to(wide) @ rows_JC.T * scale
    splits_S = torch.arange(num_splits, device=rows_JC.device)
    is_own_SJ = places_J // BLOCK_ROWS % num_splits == splits_S[:, None]
    is_seen_STJ = is_own_SJ[:, None] & (places_J <= ends_T[:, None])
    scores_STHJ = torch.where(is_seen_STJ[:, :, None], scores_THJ, -torch.inf)
    context_STHC = scores_STHJ.softmax(-1).nan_to_num(0) @ rows_JC[:, :value_width]
    return context_STHC.to(q_THC.dtype), scores_STHJ.logsumexp(-1)


def finish(context_STHC: Tensor, lse_STH: Tensor, values_HFC: Tensor, gate_TH: Tensor) -> Tensor:
    """Merge the splits (the merged context rounded to the gate's dtype), expand to values, gate every head: o_THF."""
    weights_STH = lse_STH.softmax(0).unsqueeze(-1)
    context_THC = (weights_STH * context_STHC.where(weights_STH > 0, 0)).sum(0).to(gate_TH.dtype)
    o_THF = (context_THC.transpose(0, 1) @ values_HFC.transpose(1, 2)).transpose(0, 1)
    wide = torch.promote_types(gate_TH.dtype, torch.float32)
    return (o_THF * gate_TH.to(wide).sigmoid().to(gate_TH.dtype).unsqueeze(-1)).contiguous()
