"""The router of a mixture of experts: which experts every row visits, and for one step the list of visits."""

import torch
from torch import Tensor

from dspark.kernels import MAX_TOKENS
from dspark.kernels.dispatch import check, check_counters, form_for
from dspark.kernels.router import reference
from dspark.kernels.router.reference import Dispatch, Law, dense_dispatch, list_pairs, route

__all__ = ["Dispatch", "Law", "choose", "dense_dispatch", "dispatch", "list_pairs", "route"]


def choose(logits_NX: Tensor, bias_X: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """``reference.choose`` for any number of rows, from logits in float32 (or float64)."""
    return form_for(logits_NX, reference.choose)(logits_NX, bias_X, law)


def dispatch(
    x_TD: Tensor, gate_XD: Tensor, bias_X: Tensor, law: Law, counters: Tensor, *, is_chained: bool = False
) -> Dispatch:
    """``reference.dispatch`` in one launch.

    Shapes: x_TD and gate_XD in the working dtype (the gate may also be float32), bias_X float32; counters int32 [1],
    zero before and after. Raises ValueError for other shapes or dtypes.
    """
    num_groups, num_kept_groups, num_picks, _ = law
    num_tokens, num_experts = len(x_TD), len(gate_XD)
    size = num_experts // num_groups
    is_even = size >= 2 and size * num_groups == num_experts and num_groups <= 32  # the kept ones: bits of a word
    if not 1 <= num_tokens <= MAX_TOKENS or not is_even or num_picks > num_kept_groups * size:
        found = f"{num_tokens} tokens, {num_experts} experts and {law}"
        raise ValueError(f"expected 1..16 tokens, at most 32 equal groups and fewer picks than members, found {found}")
    sizes = check({}, x_TD.dtype, x_TD=x_TD)
    sizes = check(sizes, x_TD.dtype, torch.float32, gate_XD=gate_XD)
    check(sizes, torch.float32, bias_X=bias_X)
    check_counters(counters)
    return form_for(x_TD, reference.dispatch, counters=counters, is_chained=is_chained)(x_TD, gate_XD, bias_X, law)
