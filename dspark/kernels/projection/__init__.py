"""Products of a step's 1..16 tokens with one weight, plain, behind the gated norm of linear attention or before it."""

import torch
from torch import Tensor

from dspark.kernels.dispatch import check, check_counters, form_for
from dspark.kernels.projection import reference


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
    run = form_for(x_TD, reference.project, counters=counters, is_chained=is_chained)
    return run(x_TD, weight_CD, out_dtype=out_dtype)


def project_gated(
    o_THF: Tensor, norm_weight_F: Tensor, gate_THF: Tensor, weight_CD: Tensor, eps: float, counters: Tensor, *,
    is_chained: bool = False,
) -> Tensor:  # fmt: skip
    """``project`` [T, C] of o after RMS norm over each head (weight of any float dtype) and the sigmoid of the gate.

    On a GPU the normed and gated value is rounded once, where the reference rounds each of its three steps.

    Shapes: D = H * F; gate_THF may be a strided view, contiguous in F; the rest as in ``project``.
    Raises ValueError on a wrong shape or dtype.
    """
    sizes = check({}, weight_CD.dtype, num_strided=2, o_THF=o_THF, gate_THF=gate_THF)
    check(sizes, norm_weight_F=norm_weight_F)
    _check(o_THF.flatten(1), weight_CD, counters)
    run = form_for(o_THF, reference.project_gated, counters=counters, is_chained=is_chained)
    return run(o_THF, norm_weight_F, gate_THF, weight_CD, eps)


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
    (num_heads, width), dtype = dt_bias_HE.shape, x_TD.dtype
    wide = torch.promote_types(dtype, torch.float32)
    check({}, wide, dt_bias_HE=dt_bias_HE, a_log_H=a_log_H)
    mixed = {"C": 3 * num_heads * width, "W": conv_CJ.shape[1] - 1}
    check(mixed, dtype, history_WC=history_WC, conv_CJ=conv_CJ)
    sizes = {"T": len(x_TD), "C": num_heads * (5 * width + 1)}
    check(sizes, dtype, num_strided=1, weight_CD=weight_CD)
    check(sizes, dtype, projected_TC=out[0])
    check(sizes, wide, prepared_TC=out[1])
    run = form_for(x_TD, reference.project_prepared, counters=counters, is_chained=is_chained)
    run(x_TD, weight_CD, history_WC, conv_CJ, a_log_H, dt_bias_HE, lower_bound, out=out)


def _check(x_TD: Tensor, weight_CD: Tensor, counters: Tensor) -> None:
    dtype, wide = x_TD.dtype, torch.promote_types(x_TD.dtype, torch.float32)
    sizes = check({}, dtype, num_strided=1, is_window=True, x_TD=x_TD)
    sizes = check(sizes, dtype, wide, num_strided=1, weight_CD=weight_CD)
    check_counters(counters, -(-sizes["C"] // 16))
