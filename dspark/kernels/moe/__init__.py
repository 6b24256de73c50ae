"""Mixture of experts: the experts that a router chose for every row.

``up`` and ``down`` serve one step of 1..16 tokens in a launch each; the other functions any number of rows.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dspark.kernels.dispatch import check, form_for
from dspark.kernels.moe import reference
from dspark.kernels.moe.reference import sort_by_expert, swiglu
from dspark.kernels.router import Dispatch

__all__ = ["down", "multiply", "run_each", "run_experts", "sort_by_expert", "swiglu", "up"]


def run_experts(
    x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor, gate_up_XID: Tensor, down_XDI: Tensor, limit: float | None
) -> Tensor:
    """``sum over k of weight_k * expert_k(x)``; has gradients.

    Shapes: gate_up_XID holds an expert's gate rows, then its up rows ([X, 2I, D]); down_XDI [X, D, I].
    Under autocast the products run in its dtype. Returns [N, D] in the dtype of weights_NK (float32 or float64).
    """
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    order_M, ends_X = sort_by_expert(ids_NK, len(down_XDI))
    rows_MD = x_ND.to(dtype)[order_M // ids_NK.shape[1]]
    gate_MI, up_MI = multiply(rows_MD, gate_up_XID.to(dtype), ends_X).chunk(2, 1)
    outputs_MD = multiply(swiglu(gate_MI, up_MI, limit), down_XDI.to(dtype), ends_X)
    # Outputs go back into the order of the picks; each row is summed by weight.
    place_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
    outputs_NKD = outputs_MD.index_select(0, place_M).view(*weights_NK.shape, -1).to(weights_NK.dtype)
    return (outputs_NKD * weights_NK.unsqueeze(-1)).sum(1)


def multiply(rows_MD: Tensor, weight_XCD: Tensor, ends_X: Tensor) -> Tensor:
    """Rows sorted by expert times their experts' matrices, [M, C]; expert x's rows end at ends_X[x] (int32)."""
    is_aligned = all(size * weight_XCD.itemsize % 16 == 0 for size in weight_XCD.shape[1:])
    if rows_MD.is_cuda and is_aligned and rows_MD.dtype != torch.float64:  # the grouped product takes no others
        return functional.grouped_mm(rows_MD, weight_XCD.transpose(1, 2), offs=ends_X)
    parts = zip(rows_MD.tensor_split(ends_X.tolist()[:-1]), weight_XCD, strict=True)
    return torch.cat([functional.linear(part_MD, weight_CD) for part_MD, weight_CD in parts if len(part_MD)])


def run_each(x_ND: Tensor, ids_NJ: Tensor, gate_up_XCD: Tensor, down_XDI: Tensor, limits_X: Tensor) -> Tensor:
    """``reference.run_each``: outputs_NJD, what every expert of a row says, unweighted; no gradient.

    Shapes: as in ``up`` and ``down``, x and both matrices of one dtype; N * J below 2**31. Raises ValueError otherwise.
    """
    inner = gate_up_XCD.shape[1] // 2
    sizes = {"N": len(ids_NJ), "C": 2 * inner, "I": inner}
    sizes = check(sizes, x_ND.dtype, gate_up_XCD=gate_up_XCD, x_ND=x_ND, down_XDI=down_XDI)
    check(sizes, limits_X=limits_X)
    if ids_NJ.numel() >= 1 << 31:
        raise ValueError(f"ids_NJ: expected fewer than 2**31, found {ids_NJ.numel()}")
    return form_for(x_ND, reference.run_each, "grouped")(x_ND, ids_NJ, gate_up_XCD, down_XDI, limits_X)


def up(x_TD: Tensor, gate_up_XCD: Tensor, dispatch: Dispatch, limits_X: Tensor, *, is_chained: bool = False) -> Tensor:
    """``reference.up``: act_MI, the clamped SwiGLU of every pair row. limits_X float32 [X+1], the rest one dtype.

    Raises ValueError for other shapes or dtypes.
    """
    sizes = {"T": len(dispatch.weights_TJ), "C": gate_up_XCD.shape[1] // 2 * 2}
    sizes = check(sizes, x_TD.dtype, gate_up_XCD=gate_up_XCD, x_TD=x_TD)
    check(sizes, torch.float32, limits_X=limits_X)
    return form_for(x_TD, reference.up, is_chained=is_chained)(x_TD, gate_up_XCD, dispatch, limits_X)


def down(act_MI: Tensor, down_XDI: Tensor, dispatch: Dispatch, *, is_chained: bool = False) -> Tensor:
    """``reference.down``: out_TJD, every pair row through its expert's down matrix, unweighted, all of one dtype.

    In a chain it reads the dispatch and its weights before ``wait``: the dispatch must be older than the predecessor
    (which is ``up``). Raises ValueError for other shapes or dtypes.
    """
    check({"M": dispatch.weights_TJ.numel()}, down_XDI.dtype, down_XDI=down_XDI, act_MI=act_MI)
    return form_for(act_MI, reference.down, is_chained=is_chained)(act_MI, down_XDI, dispatch)
