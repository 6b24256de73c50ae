"""Projections of a step's tokens, defined. C rows and D columns of a weight, H heads of F values (D = H * F)."""

import torch
from torch import Tensor

from dspark.kernels.kda import reference as kda


def project(x_TD: Tensor, weight_CD: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """``x W^T`` summed in float32 or higher and rounded once, to ``out_dtype`` or x's dtype."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return (x_TD.to(wide) @ weight_CD.to(wide).T).to(out_dtype or x_TD.dtype)


def project_gated(o_THF: Tensor, norm_weight_F: Tensor, gate_THF: Tensor, weight_CD: Tensor, eps: float) -> Tensor:
    """``project`` of ``kda.gated_rms_norm`` over each head.

    Source: specs/ling-3.0.md section 4.1, steps 7 and 8.
    """
    return project(kda.gated_rms_norm(o_THF, norm_weight_F, gate_THF, eps).flatten(1), weight_CD)


def project_prepared(
    x_TD: Tensor, weight_CD: Tensor, history_WC: Tensor, conv_CJ: Tensor, a_log_H: Tensor, dt_bias_HE: Tensor,
    lower_bound: float, out: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """``project`` into out[0], and ``kda.prepare`` of the rounded result into out[1]."""
    out[0].copy_(project(x_TD, weight_CD))
    out[1].copy_(kda.prepare(out[0], history_WC, conv_CJ, a_log_H, dt_bias_HE, lower_bound))
