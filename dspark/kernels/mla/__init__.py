"""Latent attention: the plain form for whole sequences and the absorbed form over a latent cache.

``absorb``, ``attend`` and ``finish`` are the absorbed form of T = 1..16 tokens of one sequence, in three launches. Its
length lies on the device: nothing here waits for it, and nothing depends on it but what is read. ``attend_packed`` is
the plain form of whole packed sequences.
"""

import torch
from torch import Tensor

from dspark.kernels.chunks import Chunks
from dspark.kernels.dispatch import check, form_for
from dspark.kernels.mla import reference
from dspark.kernels.mla.reference import BLOCK_ROWS, PACKED_ROWS, absorbed_attention, causal_attention

__all__ = ["BLOCK_ROWS", "PACKED_ROWS", "absorb", "absorbed_attention", "attend", "attend_packed", "causal_attention"]
__all__ += ["finish"]


def attend_packed(
    q_NHE: Tensor, turned_NHR: Tensor, k_JHE: Tensor, turned_JR: Tensor, v_JHF: Tensor, gate_NH: Tensor, chunks: Chunks,
    scale: float,
) -> Tensor:  # fmt: skip
    """Causal attention of B packed sequences, each head gated: a score is ``(q k + turned_q turned_k) scale``.

    Shapes: N rows of all sequences, cut into ``chunks`` (of ``PACKED_ROWS``, for a GPU); J = N keys, or for a single
    sequence more: the first J - N lie before its rows. E the part of a key that is a head's own, R the rotated part
    that all heads share. gate_NH before the sigmoid. q, turned, turned_JR and gate may be strided views of rows.
    Returns: o_NHF in the queries' dtype. Raises: ValueError for another shape, dtype or stride.
    """
    num_rows, num_keys = len(q_NHE), len(k_JHE)
    if sum(chunks.lengths) != num_rows or num_keys < num_rows or (num_keys > num_rows and len(chunks.lengths) > 1):
        found = f"{num_rows} rows, {num_keys} keys and sequences of {list(chunks.lengths)}"
        raise ValueError(f"expected as many rows and keys as the sequences have (one: more keys, too), found {found}")
    sizes = check({}, q_NHE.dtype, num_strided=2, q_NHE=q_NHE)
    sizes = check(sizes, q_NHE.dtype, k_JHE=k_JHE, v_JHF=v_JHF)
    check(sizes, q_NHE.dtype, num_strided=1, turned_NHR=turned_NHR, turned_JR=turned_JR, gate_NH=gate_NH)
    run = form_for(q_NHE, reference.attend_packed, "packed")
    return run(q_NHE, turned_NHR, k_JHE, turned_JR, v_JHF, gate_NH, chunks, scale)


def absorb(
    projected_TC: Tensor, norm_weight_C: Tensor, eps: float, keys_HEC: Tensor, angles_JE2: Tensor, rows_JC: Tensor,
    length_1: Tensor, *, is_chained: bool = False,
) -> Tensor:  # fmt: skip
    """Absorbed queries of T tokens; writes the tokens' cache rows at ``length .. length+T-1`` of rows_JC in place.

    Shapes: projected_TC rows ``q (heads of nope | rope) | kv_a (latent | rope) | ...``, what follows is not read;
    norm_weight_C of the latent; keys_HEC [H, nope, latent], may be a view into kv_b_proj; angles_JE2 cosine and sine of
    every position [J, rope / 2, 2] in float32 (float64 for float64); rows_JC ``normalised latent | rotated key``;
    length_1 int64, the committed rows. Rows past the capacity J are dropped. Returns q_THC [T, H, latent + rope],
    rotated and unscaled, in projected's dtype. T <= 16.
    Raises: ValueError for another shape or dtype.
    Source: specs/ling-3.0.md section 5.
    """
    dtype, (num_heads, nope, latent), (num_rows, width) = projected_TC.dtype, keys_HEC.shape, rows_JC.shape
    least = num_heads * (nope + width - latent) + width  # queries, then a row
    check({"C": max(least, projected_TC.shape[-1])}, dtype, num_strided=1, is_window=True, projected_TC=projected_TC)
    check({"C": latent}, dtype, norm_weight_C=norm_weight_C)
    check({}, dtype, num_strided=1, keys_HEC=keys_HEC)
    check({}, dtype, num_strided=1, rows_JC=rows_JC)
    sizes = {"J": num_rows, "E": (width - latent) // 2}
    check(sizes, torch.promote_types(dtype, torch.float32), angles_JE2=angles_JE2)
    check({}, torch.int64, length_1=length_1)
    run = form_for(projected_TC, reference.absorb, is_chained=is_chained)
    return run(projected_TC, norm_weight_C, eps, keys_HEC, angles_JE2, rows_JC, length_1)


def attend(
    q_THC: Tensor, rows_JC: Tensor, length_1: Tensor, value_width: int, scale: float, num_splits: int, *,
    is_chained: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of absorbed queries on the cached rows, in splits: token t sees the rows ``0 .. length+t``.

    The cache is cut into blocks of rows and split s reads the blocks s, s + num_splits, ...: a row's split depends on
    nothing but its position, so a token's result does not depend on the tokens beside it, and the work is even at every
    length. Splits of one split's own softmax; ``finish`` merges them.

    Shapes: q_THC and rows_JC as ``absorb`` gives them; rows before ``length+T`` finite. Returns context_STHC
    [num_splits, T, H, value_width] in q's dtype, undefined where a split sees no row, and lse_STH, float32, the natural
    logarithm of the split's sum of exponents, -inf there. In a chain the predecessor may write rows ``length ..
    length+T-1`` but not the length nor the rows before it, which are read early.
    Raises: ValueError for another shape or dtype.
    """
    width = check({}, q_THC.dtype, is_window=True, q_THC=q_THC)["C"]
    check({"C": width}, q_THC.dtype, num_strided=1, rows_JC=rows_JC)
    check({}, torch.int64, length_1=length_1)
    if not 0 < value_width <= width or num_splits < 1:
        found = f"value_width {value_width} and {num_splits} splits"
        raise ValueError(f"expected a value_width in 1..{width} and at least one split, found {found}")
    run = form_for(q_THC, reference.attend, is_chained=is_chained)
    return run(q_THC, rows_JC, length_1, value_width, scale, num_splits)


def finish(
    context_STHC: Tensor, lse_STH: Tensor, values_HFC: Tensor, gate_TH: Tensor, *, is_chained: bool = False
) -> Tensor:
    """Merge the splits, expand the latent to values, and gate every head: the input of the output projection.

    Shapes: context and lse as ``attend`` gives them (every token sees a row in some split); values_HFC
    [H, value, latent], may be a view into kv_b_proj; gate_TH the gate before the sigmoid, may be a strided view of the
    in-projection's output. Returns o_THF in the gate's dtype. Merged context, value and gate are each rounded to it.
    Raises: ValueError for another shape or dtype.
    """
    dtype = gate_TH.dtype
    sizes = check({}, dtype, context_STHC=context_STHC)
    check(sizes, torch.promote_types(dtype, torch.float32), lse_STH=lse_STH)
    check(sizes, dtype, num_strided=1, values_HFC=values_HFC, gate_TH=gate_TH)
    return form_for(gate_TH, reference.finish, is_chained=is_chained)(context_STHC, lse_STH, values_HFC, gate_TH)
