"""Attention of a draft's block on its context, defined. H heads of E values, J cached rows, T slots or context rows."""

import torch
from torch import Tensor
from torch.nn import functional

from dspark.kernels.rotary import rotate_half_pairs

BLOCK_ROWS = 64
"""Cached rows a block: the unit that splits share out."""


def write(
    qkv_TC: Tensor, q_norm_E: Tensor, k_norm_E: Tensor, eps: float, angles_JE2: Tensor, start_1: Tensor,
    keys_HJE: Tensor, values_HJE: Tensor, num_query_heads: int,
) -> Tensor:  # fmt: skip
    """Normed and rotated queries [T, H, E]; keys, likewise, and values go to the rows start .. start+T-1.

    Roundings as in the draft's attention: the norm, then the rotation, each in float32 or higher and rounded once.
    """
    num_heads, num_rows, width = keys_HJE.shape
    q_THE, k_THE, v_THE = qkv_TC.unflatten(1, (-1, width)).split((num_query_heads, num_heads, num_heads), 1)
    positions_T = start_1 + torch.arange(len(qkv_TC), device=start_1.device)
    cos_T1E, sin_T1E = angles_JE2[positions_T.clamp(max=num_rows - 1)][:, None].unbind(-1)
    kept = int((positions_T < num_rows).sum())
    k_THE = rotate_half_pairs(functional.rms_norm(k_THE, (width,), k_norm_E, eps), cos_T1E, sin_T1E)
    keys_HJE[:, positions_T[:kept]] = k_THE[:kept].transpose(0, 1)
    values_HJE[:, positions_T[:kept]] = v_THE[:kept].transpose(0, 1)
    return rotate_half_pairs(functional.rms_norm(q_THE, (width,), q_norm_E, eps), cos_T1E, sin_T1E)


def attend(
    q_THE: Tensor, keys_HJE: Tensor, values_HJE: Tensor, length_1: Tensor, scale: float, num_splits: int
) -> tuple[Tensor, Tensor]:
    """Softmax and weighted sum over the rows of each split alone: context_STHE (0 where a split sees no row), lse_STH.

    Split s has the blocks s, s + num_splits, ... of the rows before ``length+T``; the rows behind may hold anything.
    Both results in float32 or higher.
    """
    wide = torch.promote_types(q_THE.dtype, torch.float32)
    end = min(int(length_1) + len(q_THE), keys_HJE.shape[1])
    group = q_THE.shape[1] // len(keys_HJE)
    keys_HJE, values_HJE = (x[:, :end].to(wide).repeat_interleave(group, 0) for x in (keys_HJE, values_HJE))
    scores_THJ = (q_THE.to(wide).transpose(0, 1) @ keys_HJE.transpose(1, 2)).transpose(0, 1) * scale
    splits_J = torch.arange(end, device=q_THE.device) // BLOCK_ROWS % num_splits
    is_own_SJ = splits_J == torch.arange(num_splits, device=q_THE.device)[:, None]
    scores_STHJ = torch.where(is_own_SJ[:, None, None], scores_THJ, -torch.inf)
    weights_SHTJ = scores_STHJ.softmax(-1).nan_to_num(0).transpose(1, 2)
    return (weights_SHTJ @ values_HJE).transpose(1, 2).contiguous(), scores_STHJ.logsumexp(-1)


def merge(context_STHE: Tensor, lse_STH: Tensor, dtype: torch.dtype) -> Tensor:
    """The splits' results weighted by their sums of exponents, rounded once: o_TC."""
    weights_STH1 = lse_STH.softmax(0).unsqueeze(-1)
    return (weights_STH1 * context_STHE.where(weights_STH1 > 0, 0)).sum(0).flatten(1).to(dtype)
