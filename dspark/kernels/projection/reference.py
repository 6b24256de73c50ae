"""Projections of a step's tokens, defined. C rows and D columns of a weight, H heads of F values (D = H * F)."""

import torch

from dspark.kernels import kda


def project(x_TD: torch.Tensor, weight_CD: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x W^T`` summed in float32 or higher and rounded once, to ``out_dtype`` or x's dtype."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return (x_TD.to(wide) @ weight_CD.to(wide).T).to(out_dtype or x_TD.dtype)


def project_gated(
    o_THF: torch.Tensor, norm_weight_F: torch.Tensor, gate_THF: torch.Tensor, weight_CD: torch.Tensor, eps: float
) -> torch.Tensor:
    """``project`` of ``kda.gated_rms_norm`` over each head.

    Source: specs/ling-3.0.md section 4.1, steps 7 and 8.
    """
    return project(kda.gated_rms_norm(o_THF, norm_weight_F, gate_THF, eps).flatten(1), weight_CD)


def project_prepared(
    x_TD: torch.Tensor,
    weight_CD: torch.Tensor,
    history_WC: torch.Tensor,
    conv_CJ: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_HE: torch.Tensor,
    lower_bound: float,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """``project`` into out[0], and ``kda.prepare`` of the rounded result into out[1]."""
    out[0].copy_(project(x_TD, weight_CD))
    out[1].copy_(kda.prepare(out[0], history_WC, conv_CJ, a_log_H, dt_bias_HE, lower_bound))
