"""The residual stream between two blocks, defined. T tokens, K parts a token, D model width, V vocabulary."""

import torch
from torch import Tensor
from torch.nn import functional


def add_norm(
    parts_TKD: Tensor, weights_TK: Tensor | None, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``residual + round(sum over k of weight_k * part_k)`` and its RMS norm.

    The parts are summed in float32 or higher in the order of k; the sum, the new residual and the norm are each rounded
    once to the residual's dtype.
    """
    total_TD = partial_sum(parts_TKD, weights_TK)
    residual_TD = residual_TD + total_TD.to(residual_TD.dtype)
    return residual_TD, functional.rms_norm(residual_TD, norm_weight_D.shape, norm_weight_D, eps)


def partial_sum(parts_TKD: Tensor, weights_TK: Tensor | None) -> Tensor:
    """The weighted sum of the parts in float32 or higher: what ranks exchange, and sum in the order of the ranks."""
    wide, total_TD = torch.promote_types(parts_TKD.dtype, torch.float32), None
    for place, part_TD in enumerate(parts_TKD.unbind(1)):  # one after the other: all at once take twice their memory
        part_TD = part_TD.to(wide)
        if weights_TK is not None:
            part_TD = part_TD * weights_TK[:, place, None]
        total_TD = part_TD if total_TD is None else total_TD + part_TD
    assert total_TD is not None
    return total_TD


def embed_norm(ids_T: Tensor, embedding_VD: Tensor, norm_weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The embedding's rows and their RMS norm."""
    residual_TD = embedding_VD[ids_T]
    return residual_TD, functional.rms_norm(residual_TD, norm_weight_D.shape, norm_weight_D, eps)
