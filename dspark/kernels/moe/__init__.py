"""Mixture of experts: the experts that a router chose for every row.

``up`` and ``down`` serve one step of 1..16 tokens in a launch each; ``run_experts`` any number of rows.
"""

import torch

from dspark.kernels.moe import grouped, reference
from dspark.kernels.moe.reference import swiglu
from dspark.kernels.router import Dispatch

__all__ = ["down", "run_experts", "swiglu", "up"]


def run_experts(
    x_ND: torch.Tensor,
    ids_NK: torch.Tensor,
    weights_NK: torch.Tensor,
    gate_up_XID: torch.Tensor,
    down_XDI: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """``reference.run_experts``, by grouped matrix products where the device has them (CUDA, up to float32).

    Under autocast the products run in its dtype; rows are summed in float32 or higher and returned so.
    """
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    is_grouped = device == "cuda" and dtype != torch.float64
    run = grouped.run_experts if is_grouped else reference.run_experts
    return run(x_ND.to(dtype), ids_NK, weights_NK, gate_up_XID.to(dtype), down_XDI.to(dtype), limit)


def up(
    x_TD: torch.Tensor,
    gate_up_XCD: torch.Tensor,
    dispatch: Dispatch,
    limits_X: torch.Tensor,
    *,
    is_chained: bool = False,
) -> torch.Tensor:
    """``reference.up``: act_MI, the clamped SwiGLU of every pair row. limits_X float32 [X+1], the rest one dtype.

    Raises ValueError for other shapes or dtypes.
    """
    num_tokens, num_rows = dispatch.weights_TJ.shape[0], gate_up_XCD.shape[0]
    _check("x", x_TD.shape == (num_tokens, gate_up_XCD.shape[2]), x_TD.shape, (num_tokens, gate_up_XCD.shape[2]))
    _check("gate and up rows", gate_up_XCD.shape[1] % 2 == 0, gate_up_XCD.shape, "as many gate as up rows")
    _check("limits", limits_X.shape == (num_rows,), limits_X.shape, num_rows)
    if x_TD.device.type == "cpu":
        return reference.up(x_TD, gate_up_XCD, dispatch, limits_X)
    from dspark.kernels.moe import kernel

    _check("dtype", x_TD.dtype == gate_up_XCD.dtype, gate_up_XCD.dtype, x_TD.dtype)
    _check("limits' dtype", limits_X.dtype == torch.float32, limits_X.dtype, torch.float32)
    _check("layout", x_TD.is_contiguous() and gate_up_XCD.is_contiguous(), "strides", "contiguous tensors")
    return kernel.up(x_TD, gate_up_XCD, dispatch, limits_X, is_chained=is_chained)


def down(act_MI: torch.Tensor, down_XDI: torch.Tensor, dispatch: Dispatch, *, is_chained: bool = False) -> torch.Tensor:
    """``reference.down``: out_TJD, every pair row through its expert's down matrix, unweighted, all of one dtype.

    In a chain it reads the dispatch and its weights before ``wait``: the dispatch must be older than the predecessor
    (which is ``up``). Raises ValueError for other shapes or dtypes.
    """
    expected = (dispatch.weights_TJ.numel(), down_XDI.shape[2])
    _check("activation", act_MI.shape == expected, act_MI.shape, expected)
    if act_MI.device.type == "cpu":
        return reference.down(act_MI, down_XDI, dispatch)
    from dspark.kernels.moe import kernel

    _check("dtype", act_MI.dtype == down_XDI.dtype, down_XDI.dtype, act_MI.dtype)
    _check("layout", act_MI.is_contiguous() and down_XDI.is_contiguous(), "strides", "contiguous tensors")
    return kernel.down(act_MI, down_XDI, dispatch, is_chained=is_chained)


def _check(what: str, is_right: bool, found: object, expected: object) -> None:
    if not is_right:
        raise ValueError(f"{what}: found {found}, expected {expected}")
