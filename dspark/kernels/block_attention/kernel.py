"""A draft block's attention in Triton: three launches around a cache of keys and values.

write: a program owns one head of one row; one warp. attend: a program owns one split of one key-value head for a tile
of (slot, query head) rows, and reads every byte of its blocks once. The cache block is the large side of both products
(scores [rows of the block, tile], context [E, tile]), so that 16 rows still fill the tensor cores' 64. The first blocks
of a split are asked into L2 before the wait, as the length then stands: a hint, whatever it reads. merge: a program
owns some values of one (slot, head); all its loads are in flight at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import launch
from dspark.kernels.block_attention.reference import BLOCK_ROWS

AHEAD = tl.constexpr(2)
"""Blocks of keys and values that ``attend`` asks into L2 before the wait."""


@triton.jit(do_not_specialize=["num_rows"])
def write_kernel(
    qkv, q_norm, k_norm, angles, start, keys, values, q, eps, num_rows, QKV_STRIDE: tl.constexpr,
    KEYS_STRIDE: tl.constexpr, VALUES_STRIDE: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row, head): of QUERIES query heads, then HEADS key and HEADS value heads."""
    token, head = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = qkv.dtype.element_ty
    PAIRS: tl.constexpr = WIDTH // 2
    pair = tl.arange(0, triton.next_power_of_2(PAIRS))
    mask = pair < PAIRS
    norm = q_norm if head < QUERIES else k_norm
    front_scale = tl.load(norm + pair, mask=mask, other=0.0).to(tl.float32)
    back_scale = tl.load(norm + PAIRS + pair, mask=mask, other=0.0).to(tl.float32)
    launch.follow(IS_CHAINED)
    source = qkv + token.to(tl.int64) * QKV_STRIDE + head * WIDTH + pair
    front = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    back = tl.load(source + PAIRS, mask=mask, other=0.0).to(tl.float32)
    position = tl.load(start) + token
    if head < QUERIES:
        to = q + (token * QUERIES + head).to(tl.int64) * WIDTH
    elif head < QUERIES + HEADS:
        to = keys + (head - QUERIES).to(tl.int64) * KEYS_STRIDE + position * WIDTH
    else:
        to = values + (head - QUERIES - HEADS).to(tl.int64) * VALUES_STRIDE + position * WIDTH
    if head < QUERIES + HEADS:
        angle = angles + tl.minimum(position, num_rows - 1) * WIDTH + 2 * pair
        cos = tl.load(angle, mask=mask, other=0.0)
        sin = tl.load(angle + 1, mask=mask, other=0.0)
        inverse = tl.rsqrt(tl.sum(front * front + back * back, 0) / WIDTH + eps)
        x = (front * inverse * front_scale).to(dtype).to(tl.float32)
        y = (back * inverse * back_scale).to(dtype).to(tl.float32)
        front, back = x * cos - y * sin, x * sin + y * cos
    is_held = mask & ((head < QUERIES) | (position < num_rows))
    tl.store(to + pair, front.to(dtype), mask=is_held)
    tl.store(to + PAIRS + pair, back.to(dtype), mask=is_held)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_splits"])
def attend_kernel(
    q, keys, values, length, context, lse, scale_log2, num_tokens, num_rows, num_splits, KEYS_STRIDE: tl.constexpr,
    VALUES_STRIDE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (split, key-value head, tile). HEADS counts query heads."""
    dtype: tl.constexpr = keys.dtype.element_ty
    DOT: tl.constexpr = launch.dot_dtype(dtype)
    WIDTH_PAD: tl.constexpr = launch.padded(WIDTH)
    LINES: tl.constexpr = launch.num_lines(BLOCK * WIDTH, dtype)
    ROW_BYTES: tl.constexpr = WIDTH * dtype.primitive_bitwidth // 8
    split, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keys += head.to(tl.int64) * KEYS_STRIDE
    values += head.to(tl.int64) * VALUES_STRIDE
    hint = tl.load(length, cache_modifier=".cg")  # not into L1: what the predecessor writes must be seen later
    num_bytes = tl.minimum(hint, num_rows) * ROW_BYTES
    for step in tl.static_range(AHEAD):
        line = (split + step * num_splits) * (BLOCK * ROW_BYTES // 128)
        launch.prefetch_lines(keys, line, num_bytes, LINES, IS_CHAINED)
        launch.prefetch_lines(values, line, num_bytes, LINES, IS_CHAINED)
    launch.follow(IS_CHAINED)
    count = num_tokens * GROUP
    row_N = tile * TILE + tl.arange(0, TILE)
    place_N = row_N // GROUP * HEADS + head * GROUP + row_N % GROUP
    column_E = tl.arange(0, WIDTH_PAD)
    is_column_E = column_E < WIDTH
    limit = tl.minimum(tl.load(length) + num_tokens, num_rows).to(tl.int32)
    is_query_NE = (row_N < count)[:, None] & is_column_E[None, :]
    q_NE = tl.load(q + place_N[:, None] * WIDTH + column_E[None, :], mask=is_query_NE, other=0.0).to(DOT)
    max_N = tl.full([TILE], float("-inf"), tl.float32)
    sum_JN = tl.zeros([BLOCK, TILE], tl.float32)
    context_EN = tl.zeros([WIDTH_PAD, TILE], tl.float32)
    for block in range(split, tl.cdiv(limit, BLOCK), num_splits):
        row_J = block * BLOCK + tl.arange(0, BLOCK)
        is_row_J = row_J < limit
        at_JE = row_J.to(tl.int64)[:, None] * WIDTH + column_E[None, :]
        is_row_JE = is_row_J[:, None] & is_column_E[None, :]
        key_JE = tl.load(keys + at_JE, mask=is_row_JE, other=0.0).to(DOT)
        value_JE = tl.load(values + at_JE, mask=is_row_JE, other=0.0).to(DOT)
        scores_JN = tl.dot(key_JE, tl.trans(q_NE), input_precision="ieee")
        scores_JN = tl.where(is_row_J[:, None], scores_JN * scale_log2, float("-inf"))
        new_max_N = tl.maximum(max_N, tl.max(scores_JN, 0))  # finite: every block of the loop has a row
        fade_N = tl.exp2(max_N - new_max_N)
        p_JN = tl.exp2(scores_JN - new_max_N[None, :])
        sum_JN = sum_JN * fade_N[None, :] + p_JN
        context_EN = tl.dot(tl.trans(value_JE), p_JN.to(DOT), context_EN * fade_N[None, :], input_precision="ieee")
        max_N = new_max_N
    to_N = split * num_tokens * HEADS + place_N
    if split * BLOCK < limit:
        sum_N = tl.sum(sum_JN, 0)
        tl.store(lse + to_N, (max_N + tl.log2(sum_N)) * 0.6931471805599453, mask=row_N < count)
        to_EN = to_N[None, :] * WIDTH + column_E[:, None]
        tl.store(context + to_EN, context_EN / sum_N[None, :], mask=(row_N < count)[None, :] & is_column_E[:, None])
    else:
        tl.store(lse + to_N, max_N, mask=row_N < count)


@triton.jit
def merge_kernel(
    context, lse, o, SPLITS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, IS_CHAINED: tl.constexpr
):  # fmt: skip
    """Program ((slot, head), tile): COLUMNS values of it."""
    row, count = tl.program_id(0), tl.num_programs(0)
    split_S = tl.arange(0, triton.next_power_of_2(SPLITS))
    column_E = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place_S = split_S * count + row
    is_value_SE = (split_S < SPLITS)[:, None] & (column_E < WIDTH)[None, :]
    launch.follow(IS_CHAINED)
    lse_S = tl.load(lse + place_S, mask=split_S < SPLITS, other=float("-inf"))
    context_SE = tl.load(context + place_S[:, None] * WIDTH + column_E[None, :], mask=is_value_SE, other=0.0)
    weight_S = tl.exp(lse_S - tl.max(lse_S, 0))
    context_SE = tl.where(weight_S[:, None] > 0, context_SE, 0.0)  # what an empty split holds is undefined
    o_E = tl.sum(weight_S[:, None] * context_SE, 0) / tl.sum(weight_S, 0)
    tl.store(o + row * WIDTH + column_E, o_E.to(o.dtype.element_ty), mask=column_E < WIDTH)


def write(
    qkv_TC: Tensor, q_norm_E: Tensor, k_norm_E: Tensor, eps: float, angles_JE2: Tensor, start_1: Tensor,
    keys_HJE: Tensor, values_HJE: Tensor, num_query_heads: int, *, is_chained: bool = False,
) -> Tensor:  # fmt: skip
    """See ``dspark.kernels.block_attention.write``."""
    num_heads, num_rows, width = keys_HJE.shape
    q_THE = qkv_TC.new_empty(len(qkv_TC), num_query_heads, width)
    write_kernel[(len(qkv_TC), num_query_heads + 2 * num_heads)](
        qkv_TC, q_norm_E, k_norm_E, angles_JE2, start_1, keys_HJE, values_HJE, q_THE, eps, num_rows,
        qkv_TC.stride(0), keys_HJE.stride(0), values_HJE.stride(0), QUERIES=num_query_heads, HEADS=num_heads,
        WIDTH=width, num_warps=1, **launch.options(is_chained),
    )  # fmt: skip
    return q_THE


def attend(
    q_THE: Tensor, keys_HJE: Tensor, values_HJE: Tensor, length_1: Tensor, scale: float, num_splits: int, *,
    is_chained: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See ``dspark.kernels.block_attention.attend``.

    Two programs with three stages of 32 KB fit on a multiprocessor; float32 is for tests and small models.
    """
    (num_tokens, heads, width), (kv_heads, num_rows, _) = q_THE.shape, keys_HJE.shape
    group = heads // kv_heads
    rows = min(64, launch.padded(num_tokens * group))
    context_STHE = q_THE.new_empty(num_splits, num_tokens, heads, width, dtype=torch.float32)
    lse_STH = q_THE.new_empty(num_splits, num_tokens, heads, dtype=torch.float32)
    attend_kernel[(num_splits, kv_heads, triton.cdiv(num_tokens * group, rows))](
        q_THE, keys_HJE, values_HJE, length_1, context_STHE, lse_STH, scale * 1.4426950408889634, num_tokens, num_rows,
        num_splits, keys_HJE.stride(0), values_HJE.stride(0), HEADS=heads, GROUP=group, WIDTH=width,
        TILE=rows, BLOCK=BLOCK_ROWS, num_warps=4, num_stages=3 if q_THE.element_size() == 2 else 1,
        **launch.options(is_chained),
    )  # fmt: skip
    return context_STHE, lse_STH


def merge(context_STHE: Tensor, lse_STH: Tensor, dtype: torch.dtype, *, is_chained: bool = False) -> Tensor:
    """See ``dspark.kernels.block_attention.merge``. 32 values a program are 256 programs at 8 slots of 8 heads."""
    num_splits, num_tokens, num_heads, width = context_STHE.shape
    o_TC = context_STHE.new_empty(num_tokens, num_heads * width, dtype=dtype)
    columns = min(32, triton.next_power_of_2(width))
    merge_kernel[(num_tokens * num_heads, triton.cdiv(width, columns))](
        context_STHE, lse_STH, o_TC, SPLITS=num_splits, WIDTH=width, COLUMNS=columns, num_warps=4,
        **launch.options(is_chained),
    )  # fmt: skip
    return o_TC
