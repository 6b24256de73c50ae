"""Products of a step's 1..16 tokens with one weight, plain or behind the gated norm of linear attention."""

import torch

from dspark.kernels import MAX_TOKENS
from dspark.kernels.projection import reference

__all__ = ["num_counters", "project", "project_gated"]


def num_counters(num_rows: int) -> int:
    """How many zeroed int32 numbers ``counters`` needs at least for a weight of ``num_rows`` rows.

    One for each tile, of 16 rows at least. A call leaves them zero, so calls that follow one another on a device share
    one tensor made for the largest weight.
    """
    return -(-num_rows // 16)


def project(
    x_TD: torch.Tensor,
    weight_CD: torch.Tensor,
    counters: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    is_chained: bool = False,
) -> torch.Tensor:
    """``x W^T`` [T, C], summed in float32, in ``out_dtype`` (x's dtype or float32; default x's).

    Shapes: T in 1..16; both tensors in one dtype, contiguous in the last dimension; counters as ``num_counters`` says
    (unused on the CPU). ``is_chained``: see kernels/launch.py. A row's result does not depend on T.
    Raises ValueError on a wrong shape or dtype.
    """
    _check(x_TD, weight_CD, counters)
    if out_dtype not in {None, x_TD.dtype, torch.float32}:
        raise ValueError(f"projection: found out_dtype {out_dtype}, expected {x_TD.dtype} or float32")
    if not x_TD.is_cuda:
        return reference.project(x_TD, weight_CD, out_dtype)
    from dspark.kernels.projection import kernel

    return kernel.project(x_TD, weight_CD, counters, out_dtype=out_dtype, is_chained=is_chained)


def project_gated(
    o_THF: torch.Tensor,
    norm_weight_F: torch.Tensor,
    gate_THF: torch.Tensor,
    weight_CD: torch.Tensor,
    eps: float,
    counters: torch.Tensor,
    *,
    is_chained: bool = False,
) -> torch.Tensor:
    """``project`` [T, C] of o after RMS norm over each head (weight of any float dtype) and the sigmoid of the gate.

    On a GPU the normed and gated value is rounded once, where the reference rounds each of its three steps.

    Shapes: D = H * F; gate_THF may be a strided view, contiguous in F; the rest as in ``project``.
    Raises ValueError on a wrong shape or dtype.
    """
    if o_THF.dim() != 3 or gate_THF.shape != o_THF.shape or gate_THF.dtype != o_THF.dtype:
        found = f"o {o_THF.dtype} {tuple(o_THF.shape)}, gate {gate_THF.dtype} {tuple(gate_THF.shape)}"
        raise ValueError(f"projection: found {found}, expected one dtype and shape [T, H, F]")
    if (
        norm_weight_F.shape != o_THF.shape[2:]
        or not norm_weight_F.is_contiguous()
        or {o_THF.stride(2), gate_THF.stride(2)} != {1}
    ):
        found = f"{tuple(norm_weight_F.shape)}, strides of o {o_THF.stride()}, of the gate {gate_THF.stride()}"
        raise ValueError(f"projection: found norm weight {found}, expected {tuple(o_THF.shape[2:])}, contiguous in F")
    _check(o_THF.flatten(1), weight_CD, counters)
    if not o_THF.is_cuda:
        return reference.project_gated(o_THF, norm_weight_F, gate_THF, weight_CD, eps)
    from dspark.kernels.projection import kernel

    return kernel.project_gated(o_THF, norm_weight_F, gate_THF, weight_CD, eps, counters, is_chained=is_chained)


def _check(x_TD: torch.Tensor, weight_CD: torch.Tensor, counters: torch.Tensor) -> None:
    found = f"x {x_TD.dtype} {tuple(x_TD.shape)}, weight {weight_CD.dtype} {tuple(weight_CD.shape)}"
    if x_TD.dim() != 2 or weight_CD.dim() != 2 or x_TD.shape[1] != weight_CD.shape[1] or x_TD.dtype != weight_CD.dtype:
        raise ValueError(f"projection: found {found}, expected [T, D] and [C, D] in one dtype")
    if not 1 <= x_TD.shape[0] <= MAX_TOKENS:
        raise ValueError(f"projection: found {x_TD.shape[0]} tokens, expected 1 to {MAX_TOKENS}")
    if x_TD.stride(1) != 1 or weight_CD.stride(1) != 1:
        raise ValueError(f"projection: found strides {x_TD.stride()}, {weight_CD.stride()}, expected a last one of 1")
    if counters.dtype != torch.int32 or counters.numel() < num_counters(weight_CD.shape[0]):
        expected = f"int32, {num_counters(weight_CD.shape[0])} or more"
        raise ValueError(f"projection: found {counters.numel()} counters {counters.dtype}, expected {expected}")
