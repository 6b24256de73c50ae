"""The router of a mixture of experts: which experts every row visits, and for one step the list of visits."""

import torch

from dspark.kernels import MAX_TOKENS
from dspark.kernels.router import reference
from dspark.kernels.router.reference import Dispatch, Law, dense_dispatch, route

__all__ = ["Dispatch", "Law", "dense_dispatch", "dispatch", "route"]


def dispatch(
    x_TD: torch.Tensor,
    gate_XD: torch.Tensor,
    bias_X: torch.Tensor,
    law: Law,
    counters: torch.Tensor,
    *,
    is_chained: bool = False,
) -> Dispatch:
    """``reference.dispatch`` in one launch.

    Shapes: x_TD and gate_XD in the working dtype (the gate may also be float32), bias_X float32; counters int32 [1],
    zero before and after. Raises ValueError for other shapes or dtypes.
    """
    num_groups, num_kept_groups, num_picks, _ = law
    num_tokens, num_experts = x_TD.shape[0], gate_XD.shape[0]
    size = num_experts // num_groups
    _check("tokens", 1 <= num_tokens <= MAX_TOKENS, num_tokens, f"1..{MAX_TOKENS}")
    _check("gate", gate_XD.shape[1:] == x_TD.shape[1:], gate_XD.shape, x_TD.shape)
    _check("bias", bias_X.shape == (num_experts,), bias_X.shape, num_experts)
    _check("groups", size >= 2 and size * num_groups == num_experts, num_groups, f"to divide {num_experts} experts")
    _check("groups", num_groups <= 32, num_groups, "at most 32: the kept ones are the bits of a word")
    _check("picks", num_picks <= num_kept_groups * size, num_picks, f"at most {num_kept_groups * size}")
    if x_TD.device.type == "cpu":
        return reference.dispatch(x_TD, gate_XD, bias_X, law)
    from dspark.kernels.router import kernel  # Triton, which a CPU may lack

    _check("counters", counters.dtype == torch.int32 and counters.numel() > 0, counters, "int32 zero")
    _check("gate's dtype", gate_XD.dtype in (x_TD.dtype, torch.float32), gate_XD.dtype, x_TD.dtype)
    _check("bias's dtype", bias_X.dtype == torch.float32, bias_X.dtype, torch.float32)
    _check("layout", all(x.is_contiguous() for x in (x_TD, gate_XD, bias_X)), "strides", "contiguous tensors")
    return kernel.dispatch(x_TD, gate_XD, bias_X, law, counters, is_chained=is_chained)


def _check(what: str, is_right: bool, found: object, expected: object) -> None:
    if not is_right:
        raise ValueError(f"{what}: found {found}, expected {expected}")
