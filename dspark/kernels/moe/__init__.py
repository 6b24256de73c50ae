"""Mixture of experts: choosing experts for every row and running them."""

import torch

from dspark.kernels.moe import grouped, reference
from dspark.kernels.moe.reference import route, swiglu

__all__ = ["route", "run_experts", "swiglu"]


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
