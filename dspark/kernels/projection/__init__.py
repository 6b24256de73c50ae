"""Products of a step's 1..16 tokens with one weight, plain, behind the gated norm of linear attention or before it."""

import torch
from torch import Tensor

from dspark.kernels.checks import expect, expect_window
from dspark.kernels.projection import reference

__all__ = ["project", "project_gated", "project_prepared"]


def project(
    x_TD: Tensor, weight_CD: Tensor, counters: Tensor, *, out_dtype: torch.dtype | None = None, is_chained: bool = False
) -> Tensor:
    """``x W^T`` [T, C], summed in float32, in ``out_dtype`` (x's dtype or float32; default x's).

    Shapes: T in 1..16; both tensors in one dtype (the weight may also be float32), contiguous in the last dimension;
    counters int32, one for 16 rows of the weight or more, zero before and after: calls that follow one another share
    them. ``is_chained``: see kernels/launch.py. A row's result does not depend on T.
    Raises ValueError on a wrong shape or dtype.
    """
    _check(x_TD, weight_CD, counters)
    if out_dtype not in {None, x_TD.dtype, torch.float32}:
        raise ValueError(f"out_dtype: expected {x_TD.dtype} or float32, found {out_dtype}")
    if not x_TD.is_cuda:
        return reference.project(x_TD, weight_CD, out_dtype)
    from dspark.kernels.projection import kernel

    return kernel.project(x_TD, weight_CD, counters, out_dtype=out_dtype, is_chained=is_chained)


def project_gated(
    o_THF: Tensor, norm_weight_F: Tensor, gate_THF: Tensor, weight_CD: Tensor, eps: float, counters: Tensor, *,
    is_chained: bool = False,
) -> Tensor:  # fmt: skip
    """``project`` [T, C] of o after RMS norm over each head (weight of any float dtype) and the sigmoid of the gate.

    On a GPU the normed and gated value is rounded once, where the reference rounds each of its three steps.

    Shapes: D = H * F; gate_THF may be a strided view, contiguous in F; the rest as in ``project``.
    Raises ValueError on a wrong shape or dtype.
    """
    num_tokens, heads, width = o_THF.shape
    expect("o_THF", o_THF, (num_tokens, heads, width), weight_CD.dtype, num_strided=2)
    expect("gate_THF", gate_THF, (num_tokens, heads, width), weight_CD.dtype, num_strided=2)
    expect("norm_weight_F", norm_weight_F, (width,), norm_weight_F.dtype)
    _check(o_THF.flatten(1), weight_CD, counters)
    if not o_THF.is_cuda:
        return reference.project_gated(o_THF, norm_weight_F, gate_THF, weight_CD, eps)
    from dspark.kernels.projection import kernel

    return kernel.project_gated(o_THF, norm_weight_F, gate_THF, weight_CD, eps, counters, is_chained=is_chained)


def project_prepared(
    x_TD: Tensor, weight_CD: Tensor, history_WC: Tensor, conv_CJ: Tensor, a_log_H: Tensor, dt_bias_HE: Tensor,
    lower_bound: float, counters: Tensor, out: tuple[Tensor, Tensor], *, is_chained: bool = False,
) -> None:  # fmt: skip
    """The in-projection of linear attention: ``project`` into out[0], and what ``kda.prepare`` makes of it into out[1].

    Chained, the history is read before the predecessor has finished: it must not be what writes it (``kda.commit``).

    Shapes: as in ``kda.prepare`` and ``project``; a_log, dt_bias and out[1] in float32 (float64 on the CPU), all but x
    and the weight contiguous. Raises ValueError on a wrong shape or dtype.
    """
    _check(x_TD, weight_CD, counters)
    (num_heads, width), num_taps = dt_bias_HE.shape, conv_CJ.shape[1]
    inner, wide = num_heads * width, torch.promote_types(x_TD.dtype, torch.float32)
    shape = (len(x_TD), 5 * inner + num_heads)
    expect("weight_CD", weight_CD, (shape[1], x_TD.shape[1]), x_TD.dtype, num_strided=1)
    expect("history_WC", history_WC, (num_taps - 1, 3 * inner), x_TD.dtype)
    expect("conv_CJ", conv_CJ, (3 * inner, num_taps), x_TD.dtype)
    expect("a_log_H", a_log_H, (num_heads,), wide)
    expect("dt_bias_HE", dt_bias_HE, (num_heads, width), wide)
    expect("out[0]", out[0], shape, x_TD.dtype)
    expect("out[1]", out[1], shape, wide)
    if not x_TD.is_cuda:
        return reference.project_prepared(x_TD, weight_CD, history_WC, conv_CJ, a_log_H, dt_bias_HE, lower_bound, out)
    from dspark.kernels.projection import kernel

    kernel.project_prepared(
        x_TD, weight_CD, history_WC, conv_CJ, a_log_H, dt_bias_HE, lower_bound, counters, out, is_chained=is_chained
    )


def _check(x_TD: Tensor, weight_CD: Tensor, counters: Tensor) -> None:
    (num_rows, num_columns), wide = weight_CD.shape, torch.promote_types(x_TD.dtype, torch.float32)
    expect_window("x_TD", len(x_TD))
    expect("x_TD", x_TD, (len(x_TD), num_columns), num_strided=1)
    expect("weight_CD", weight_CD, (num_rows, num_columns), x_TD.dtype, wide, num_strided=1)
    expect("counters", counters, (max(-(-num_rows // 16), counters.numel()),), torch.int32)
