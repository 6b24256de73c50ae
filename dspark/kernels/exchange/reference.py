"""The residual stream over ranks, defined: every rank's partial sum, added in the order of the ranks."""

from torch import Tensor

from dspark.kernels.residual import reference


def sum_norm(partials_RTD: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual + round(sum of the ranks' partial sums)`` and its RMS norm; partials in what travels between ranks.

    Every rank adds in the order 0, 1, ... in float32 or higher, so all ranks hold the same bits.
    """
    return reference.add_norm(partials_RTD.transpose(0, 1), None, residual_TD, norm_weight_D, eps)
