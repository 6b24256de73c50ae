"""Attention of a draft's block in three launches: ``write`` the block's rows, ``attend`` in splits, ``merge`` them.

The context's keys and values and, behind them, those of the block lie in one cache of fixed memory, row j for position
j. Its length lies on the device: nothing here waits for it on a GPU.
"""

import torch
from torch import Tensor

from dspark.kernels.block_attention import reference
from dspark.kernels.dispatch import check, form_for


def write(
    qkv_TC: Tensor, q_norm_E: Tensor, k_norm_E: Tensor, eps: float, angles_JE2: Tensor, start_1: Tensor,
    keys_HJE: Tensor, values_HJE: Tensor, num_query_heads: int, *, is_chained: bool = False,
) -> Tensor:  # fmt: skip
    """Queries, normed and rotated; writes T rows of keys (likewise) and values at ``start .. start+T-1`` in place.

    Shapes: qkv_TC rows ``queries | keys | values`` (num_query_heads, H, H heads of E; none of the first for context
    rows), any T, may be strided in T; angles_JE2 cosine and sine of every position [J, E / 2, 2] in float32 (float64
    for float64), of the pairs (i, i + E / 2); start_1 int64; keys and values may be strided in H; one dtype. Rows past
    the capacity J are dropped. Returns q_THE [T, num_query_heads, E], unscaled.
    Raises: ValueError for another shape or dtype.
    """
    dtype = qkv_TC.dtype
    sizes = check({}, dtype, num_strided=1, keys_HJE=keys_HJE, values_HJE=values_HJE)
    num_heads, width = num_query_heads + 2 * sizes["H"], sizes["E"]
    check({"C": num_heads * width}, dtype, num_strided=1, qkv_TC=qkv_TC)
    check(sizes, dtype, q_norm_E=q_norm_E, k_norm_E=k_norm_E)
    check(sizes | {"E": width // 2}, torch.promote_types(dtype, torch.float32), angles_JE2=angles_JE2)
    check({}, torch.int64, start_1=start_1)
    run = form_for(qkv_TC, reference.write, is_chained=is_chained)
    return run(qkv_TC, q_norm_E, k_norm_E, eps, angles_JE2, start_1, keys_HJE, values_HJE, num_query_heads)


def attend(
    q_THE: Tensor, keys_HJE: Tensor, values_HJE: Tensor, length_1: Tensor, scale: float, num_splits: int, *,
    is_chained: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Every slot of a block reads the rows ``0 .. length+T-1``: the context and, in both directions, the block.

    Split s has the blocks of 64 rows s, s + num_splits, ..., so the work is even at every length. Query head h reads
    key-value head h // group. Rows behind ``length+T`` may hold anything.

    Shapes: q_THE as ``write`` gives it, T of 1..16; length_1 int64, the rows before the block. Returns context_STHE
    float32 [num_splits, T, H, E], undefined where a split has no row, and lse_STH float32, the natural logarithm of a
    split's sum of exponents, -inf there.
    Raises: ValueError for another shape or dtype.
    """
    num_heads, dtype = q_THE.shape[1], q_THE.dtype
    if num_splits < 1 or num_heads % len(keys_HJE):
        found = f"{num_splits} splits, {num_heads} query heads"
        raise ValueError(f"q_THE: expected a split, a multiple of {len(keys_HJE)} query heads, found {found}")
    width = check({}, dtype, is_window=True, q_THE=q_THE)["E"]
    check({"E": width}, dtype, num_strided=1, keys_HJE=keys_HJE, values_HJE=values_HJE)
    check({}, torch.int64, length_1=length_1)
    run = form_for(q_THE, reference.attend, is_chained=is_chained)
    return run(q_THE, keys_HJE, values_HJE, length_1, scale, num_splits)


def merge(context_STHE: Tensor, lse_STH: Tensor, dtype: torch.dtype, *, is_chained: bool = False) -> Tensor:
    """The splits of ``attend`` as one: o_TC in ``dtype``, what the output projection reads.

    Raises: ValueError for another shape or dtype.
    """
    check({}, torch.promote_types(dtype, torch.float32), context_STHE=context_STHE, lse_STH=lse_STH)
    return form_for(lse_STH, reference.merge, is_chained=is_chained)(context_STHE, lse_STH, dtype)
