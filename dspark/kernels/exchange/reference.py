"""The residual stream over ranks, defined: every rank's partial sum, added in the order of the ranks."""

import torch
from torch.nn import functional


def sum_norm(
    partials_RTD: torch.Tensor, residual_TD: torch.Tensor, norm_weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + round(sum of the ranks' partial sums)`` and its RMS norm; partials in what travels between ranks.

    Every rank adds in the order 0, 1, ... in float32 or higher, so all ranks hold the same bits.
    """
    wide_RTD = partials_RTD.to(torch.promote_types(partials_RTD.dtype, torch.float32))
    total_TD = wide_RTD[0]
    for partial_TD in wide_RTD[1:]:
        total_TD = total_TD + partial_TD
    residual_TD = residual_TD + total_TD.to(residual_TD.dtype)
    return residual_TD, functional.rms_norm(residual_TD, norm_weight_D.shape, norm_weight_D, eps)
