"""Causal attention of packed sequences in Triton, in one launch: online softmax, the gate in its end.

A program owns the rows of one chunk and one head, and walks the keys of the chunk's sequence up to its last row. A key
is a part of its own and a rotated part that all heads share; so is a query. The two products are summed where they are
made, and nothing is put side by side in memory. Keys that every row sees need no mask; rows and keys past an end repeat
the last one. Chunks start from the last: of one sequence the longest walks first.
Source: FlashAttention-2 (arXiv 2307.08691).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import launch
from dspark.kernels.chunks import Chunks

SHAPE = {"KEYS": 64, "num_warps": 8, "num_stages": 3}
"""In 16 bits, for chunks of ``PACKED_ROWS``: a warp owns 16 rows, keys are on their way two blocks ahead."""
LOG2_E = 1.4426950408889634


@triton.jit
def _load(pointers, place, WIDTH: tl.constexpr):
    """For a product; zeros past the width, where there is such a place."""
    x = tl.load(pointers) if place.numel == WIDTH else tl.load(pointers, mask=place < WIDTH, other=0.0)
    return x.to(launch.dot_dtype(x.dtype))


@triton.jit
def _walk(
    sum_MF, most_M, total_M, q_ME, turned_MR, keys, turned_keys, values, place_M, begin, first, last, scale,
    HEADS: tl.constexpr, TURNED_K_STRIDE: tl.constexpr, E: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
    KEYS: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Keys ``first`` to before ``last`` of the sequence that begins at row ``begin``."""
    e, r = tl.arange(0, q_ME.shape[1])[:, None], tl.arange(0, turned_MR.shape[1])[:, None]
    f = tl.arange(0, sum_MF.shape[1])[None, :]
    for start in tl.range(first, last, KEYS):
        j = start + tl.arange(0, KEYS)
        row_J = (begin + (tl.minimum(j, last - 1) if IS_MASKED else j)).to(tl.int64)
        k_EJ = _load(keys + row_J[None, :] * (HEADS * E) + e, e, E)
        scores_MJ = tl.dot(q_ME, k_EJ, input_precision="ieee")
        turned_RJ = _load(turned_keys + row_J[None, :] * TURNED_K_STRIDE + r, r, R)
        scores_MJ = tl.dot(turned_MR, turned_RJ, scores_MJ, input_precision="ieee") * scale
        if IS_MASKED:
            scores_MJ = tl.where(j[None, :] <= place_M[:, None], scores_MJ, float("-inf"))
        now_M = tl.maximum(most_M, tl.max(scores_MJ, 1))
        shrink_M = tl.exp2(most_M - now_M)
        p_MJ = tl.exp2(scores_MJ - now_M[:, None])
        total_M = total_M * shrink_M + tl.sum(p_MJ, 1)
        v_JF = _load(values + row_J[:, None] * (HEADS * F) + f, f, F)
        sum_MF = tl.dot(p_MJ.to(v_JF.dtype), v_JF, sum_MF * shrink_M[:, None], input_precision="ieee")
        most_M = now_M
    return sum_MF, most_M, total_M


@triton.jit(do_not_specialize=["past"])
def packed_kernel(
    outputs, queries, turned_queries, keys, turned_keys, values, gates, chunks, past, scale,
    Q_STRIDE: tl.constexpr, Q_HEAD: tl.constexpr, TURNED_STRIDE: tl.constexpr, TURNED_K_STRIDE: tl.constexpr,
    GATE_STRIDE: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A chunk's rows and a head; ``past`` keys of the only sequence lie before its rows."""
    chunk, head = chunks + (tl.num_programs(0) - 1 - tl.program_id(0)) * 4, tl.program_id(1)
    first, count, place = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 3)
    m, f = tl.arange(0, ROWS), tl.arange(0, launch.padded(F))[None, :]
    e, r = tl.arange(0, launch.padded(E))[None, :], tl.arange(0, launch.padded(R))[None, :]
    row_M = (first + tl.minimum(m, count - 1)).to(tl.int64)[:, None]
    q_ME = _load(queries + row_M * Q_STRIDE + head * Q_HEAD + e, e, E)
    turned_MR = _load(turned_queries + row_M * TURNED_STRIDE + head * R + r, r, R)
    keys, values, place_M = keys + head * E, values + head * F, past + place + m
    sum_MF, total_M = tl.zeros((ROWS, f.numel), tl.float32), tl.zeros((ROWS,), tl.float32)
    most_M = tl.full((ROWS,), float("-inf"), tl.float32)
    begin, seen_by_all = first - place, (past + place + 1) // KEYS * KEYS
    sum_MF, most_M, total_M = _walk(
        sum_MF, most_M, total_M, q_ME, turned_MR, keys, turned_keys, values, place_M, begin, 0, seen_by_all, scale,
        HEADS, TURNED_K_STRIDE, E, R, F, KEYS, False,
    )  # fmt: skip
    sum_MF, most_M, total_M = _walk(
        sum_MF, most_M, total_M, q_ME, turned_MR, keys, turned_keys, values, place_M, begin, seen_by_all,
        past + place + count, scale, HEADS, TURNED_K_STRIDE, E, R, F, KEYS, True,
    )  # fmt: skip
    dtype: tl.constexpr = outputs.dtype.element_ty
    gate_M = tl.load(gates + row_M * GATE_STRIDE + head).to(tl.float32)
    gate_M = (1.0 / (1.0 + tl.exp(-gate_M))).to(dtype).to(tl.float32)
    o_MF = (sum_MF / total_M[:, None]).to(dtype).to(tl.float32) * gate_M
    seen = (m < count)[:, None] & (f < F)
    tl.store(outputs + row_M * (HEADS * F) + head * F + f, o_MF.to(dtype), mask=seen)


def attend_packed(
    q_NHE: Tensor, turned_NHR: Tensor, k_JHE: Tensor, turned_JR: Tensor, v_JHF: Tensor, gate_NH: Tensor, chunks: Chunks,
    scale: float,
) -> Tensor:  # fmt: skip
    """See ``dspark.kernels.mla.attend_packed``."""
    (num_rows, heads, width), value_width = q_NHE.shape, v_JHF.shape[2]
    o_NHF = q_NHE.new_empty(num_rows, heads, value_width)
    shape = SHAPE if q_NHE.dtype != torch.float32 else SHAPE | {"KEYS": 16, "num_stages": 1}
    packed_kernel[(len(chunks.chunks_M4), heads)](
        o_NHF, q_NHE, turned_NHR, k_JHE, turned_JR, v_JHF, gate_NH, chunks.chunks_M4, len(k_JHE) - num_rows,
        scale * LOG2_E, Q_STRIDE=q_NHE.stride(0), Q_HEAD=q_NHE.stride(1), TURNED_STRIDE=turned_NHR.stride(0),
        TURNED_K_STRIDE=turned_JR.stride(0), GATE_STRIDE=gate_NH.stride(0), HEADS=heads, E=width,
        R=turned_JR.shape[1], F=value_width, ROWS=chunks.chunk_tokens, **shape,
    )  # fmt: skip
    return o_NHF
