"""The residual stream between two blocks: add what a block said, and normalise for the next."""

import torch
from torch import Tensor

from dspark.kernels.dispatch import check, form_for
from dspark.kernels.residual import reference


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
    dtype, wide = residual_TD.dtype, torch.promote_types(residual_TD.dtype, torch.float32)
    sizes = check({}, dtype, residual_TD=residual_TD, norm_weight_D=norm_weight_D)
    sizes = check(sizes, dtype, wide, parts_TKD=parts_TKD)
    check(sizes, wide, weights_TK=weights_TK)
    run = form_for(residual_TD, reference.add_norm, is_chained=is_chained)
    return run(parts_TKD, weights_TK, residual_TD, norm_weight_D, eps)


def embed_norm(
    ids_T: Tensor, embedding_VD: Tensor, norm_weight_D: Tensor, eps: float, *, is_chained: bool = False
) -> tuple[Tensor, Tensor]:
    """Begin the residual stream: the embedding of every id and its RMS norm, both [T, D] in the embedding's dtype.

    Shapes: ids int64 in 0..V-1 (not checked: they lie on the device).
    Raises: ValueError for another shape or dtype.
    """
    check({}, torch.int64, ids_T=ids_T)
    check({}, embedding_VD.dtype, embedding_VD=embedding_VD, norm_weight_D=norm_weight_D)
    return form_for(embedding_VD, reference.embed_norm, is_chained=is_chained)(ids_T, embedding_VD, norm_weight_D, eps)
