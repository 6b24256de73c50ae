"""The experts by torch's grouped matrix product: no loop and no host sync."""

import torch
from torch.nn import functional

from dspark.kernels.moe.reference import combine, sort_by_expert, swiglu


def run_experts(
    x_ND: torch.Tensor,
    ids_NK: torch.Tensor,
    weights_NK: torch.Tensor,
    gate_up_XID: torch.Tensor,
    down_XDI: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """As ``reference.run_experts``; bfloat16, float16 or float32."""
    order_M, ends_X = sort_by_expert(ids_NK, down_XDI.shape[0])
    rows_MD = x_ND.index_select(0, order_M // ids_NK.shape[1])
    gate_up_MI = functional.grouped_mm(rows_MD, gate_up_XID.transpose(1, 2), offs=ends_X)
    gate_MI, up_MI = gate_up_MI.chunk(2, -1)
    outputs_MD = functional.grouped_mm(swiglu(gate_MI, up_MI, limit), down_XDI.transpose(1, 2), offs=ends_X)
    return combine(outputs_MD, order_M, weights_NK)
