"""The residual stream between two blocks: add what a block said, and normalise for the next."""

import torch
from torch import Tensor

from dspark.kernels.checks import expect
from dspark.kernels.residual import reference

__all__ = ["add_norm", "embed_norm"]


def add_norm(
    parts_TKD: Tensor, weights_TK: Tensor | None, residual_TD: Tensor, norm_weight_D: Tensor, eps: float, *,
    is_chained: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add the weighted sum of a token's parts to the residual stream; returns it and its RMS norm, both [T, D].

    Shapes: parts in the residual's dtype or float32, a block's K rows a token (K = 1 for attention); weights float32 or
    None for ones; all contiguous. The sum is taken in float32 in the order of K and rounded once.
    Raises: ValueError for another shape or dtype.
    Source: specs/ling-3.0.md sections 3 and 6.3.
    """
    num_tokens, width = residual_TD.shape
    num_parts = parts_TKD.shape[1] if parts_TKD.dim() == 3 else 1
    dtype = residual_TD.dtype
    wide = torch.promote_types(dtype, torch.float32)
    expect("residual_TD", residual_TD, (num_tokens, width), dtype)
    expect("parts_TKD", parts_TKD, (num_tokens, num_parts, width), dtype, wide)
    expect("norm_weight_D", norm_weight_D, (width,), dtype)
    if weights_TK is not None:
        expect("weights_TK", weights_TK, (num_tokens, num_parts), wide)
    if not residual_TD.is_cuda:
        return reference.add_norm(parts_TKD, weights_TK, residual_TD, norm_weight_D, eps)
    from dspark.kernels.residual import kernel  # Triton, which a CPU may lack

    return kernel.add_norm(parts_TKD, weights_TK, residual_TD, norm_weight_D, eps, is_chained=is_chained)


def embed_norm(
    ids_T: Tensor, embedding_VD: Tensor, norm_weight_D: Tensor, eps: float, *, is_chained: bool = False
) -> tuple[Tensor, Tensor]:
    """Begin the residual stream: the embedding of every id and its RMS norm, both [T, D] in the embedding's dtype.

    Shapes: ids int64 in 0..V-1 (not checked: they lie on the device).
    Raises: ValueError for another shape or dtype.
    """
    num_ids, width = embedding_VD.shape
    expect("ids_T", ids_T, (ids_T.numel(),), torch.int64)
    expect("embedding_VD", embedding_VD, (num_ids, width), embedding_VD.dtype)
    expect("norm_weight_D", norm_weight_D, (width,), embedding_VD.dtype)
    if not embedding_VD.is_cuda:
        return reference.embed_norm(ids_T, embedding_VD, norm_weight_D, eps)
    from dspark.kernels.residual import kernel

    return kernel.embed_norm(ids_T, embedding_VD, norm_weight_D, eps, is_chained=is_chained)
