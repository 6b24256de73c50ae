"""The absorbed form in Triton: three launches around the latent cache.

absorb: a program owns one head and a tile of latent columns (its key weights are read before the wait), or one token:
its norm, rotations and cache row. It also asks the committed rows into L2 for attend.
attend: a program owns one split and up to 64 (token, head) rows. It reads its first blocks into registers before the
wait, but for the rows that absorb writes, and works them off as one: 128 cached rows are the large side of both
products (scores [cached rows, tile], context [latent, tile]), so that no warp repeats another's scores, and the whole
latent fits in registers: 512 x 64 float32 is 128 KB. Where a split has more than two blocks, tiles are smaller and a
loop follows, one block after the other.
finish: a program owns one (token, head): it merges the splits, all of them on their way at once, and multiplies.
Tile sizes depend on the shapes of the model and its cache, never on T or the length, and no code is specialised on
those: a token's bits depend on neither.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import MAX_TOKENS, launch
from dspark.kernels.mla.reference import BLOCK_ROWS

COLUMNS, AHEAD = tl.constexpr(32), tl.constexpr(64)
"""Of ``absorb``: 128 programs at 8 heads of a 512-wide latent, of which each asks for that many rows for ``attend``."""
TOKENS, BLOCK = tl.constexpr(MAX_TOKENS), tl.constexpr(BLOCK_ROWS)

FINISH_WARPS = 8
"""Two programs of ``finish`` a multiprocessor: 144 of them, at 16 heads, run at once."""


def attend_tiles(dtype: torch.dtype, num_steps: int) -> tuple[int, int, int]:
    """For splits of ``num_steps`` blocks: (token, head) rows of a program at most, blocks it holds, stages of its loop.

    The number of tokens has no say: a token keeps its bits. Two held blocks and 64 rows fill a multiprocessor: 8 warps
    of 254 registers, 216 KB; with a loop they spill. float32 blocks are twice as large, and their products run without
    tensor cores.
    """
    if dtype == torch.float32:
        return 16, 1, 1
    return (64, 2, 1) if num_steps <= 2 else (32, 2, 2)


@triton.jit
def prefetch_block(rows, block, end, STRIDE: tl.constexpr, SIZE: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Ask a block's rows before ``end`` into L2."""
    dtype: tl.constexpr = rows.dtype.element_ty
    BYTES: tl.constexpr = STRIDE * dtype.primitive_bitwidth // 8
    LINES: tl.constexpr = launch.num_lines(SIZE * STRIDE, dtype)
    first = tl.cast(block, tl.int64) * SIZE
    launch.prefetch_lines(rows, first * BYTES // 128, tl.minimum(first + SIZE, end) * BYTES, LINES, IS_CHAINED)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def absorb_kernel(
    projected, norm_weight, keys, angles, rows, length, q, eps, num_tokens, num_rows,
    PROJECTED_STRIDE: tl.constexpr, KEYS_STRIDE: tl.constexpr, ROWS_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """A token's cache row and rotated queries, or a head's queries through its key weights."""
    dtype: tl.constexpr = q.dtype.element_ty
    if tl.program_id(0) < num_tokens:  # one token's cache row and rotated queries
        token = tl.program_id(0)
        place_C = tl.arange(0, triton.next_power_of_2(LATENT))
        pair_E = tl.arange(0, triton.next_power_of_2(ROPE // 2))
        head_H = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
        weight_C = tl.load(norm_weight + place_C, mask=place_C < LATENT, other=0.0).to(tl.float32)
        launch.follow(IS_CHAINED)
        source = projected + token * PROJECTED_STRIDE
        key = source + HEADS * (NOPE + ROPE)
        latent_C = tl.load(key + place_C, mask=place_C < LATENT, other=0.0).to(tl.float32)
        is_pair_E = pair_E < ROPE // 2
        key_E = key + LATENT + 2 * pair_E
        even_E = tl.load(key_E, mask=is_pair_E, other=0.0).to(tl.float32)
        odd_E = tl.load(key_E + 1, mask=is_pair_E, other=0.0).to(tl.float32)
        is_pair_HE = (head_H < HEADS) & is_pair_E[None, :]
        query_HE = source + head_H * (NOPE + ROPE) + NOPE + 2 * pair_E[None, :]
        even_HE = tl.load(query_HE, mask=is_pair_HE, other=0.0).to(tl.float32)
        odd_HE = tl.load(query_HE + 1, mask=is_pair_HE, other=0.0).to(tl.float32)
        position = tl.load(length) + token
        is_held = position < num_rows
        cos_E = tl.load(angles + position * ROPE + 2 * pair_E, mask=is_pair_E & is_held, other=0.0)
        sin_E = tl.load(angles + position * ROPE + 2 * pair_E + 1, mask=is_pair_E & is_held, other=0.0)
        cos_HE, sin_HE = cos_E[None, :], sin_E[None, :]
        rotated_HE = q + (token * HEADS + head_H) * (LATENT + ROPE) + LATENT + 2 * pair_E[None, :]
        tl.store(rotated_HE, (even_HE * cos_HE - odd_HE * sin_HE).to(dtype), mask=is_pair_HE)
        tl.store(rotated_HE + 1, (even_HE * sin_HE + odd_HE * cos_HE).to(dtype), mask=is_pair_HE)
        row = rows + position * ROWS_STRIDE
        rotated_E = row + LATENT + 2 * pair_E
        tl.store(rotated_E, (even_E * cos_E - odd_E * sin_E).to(dtype), mask=is_pair_E & is_held)
        tl.store(rotated_E + 1, (even_E * sin_E + odd_E * cos_E).to(dtype), mask=is_pair_E & is_held)
        inverse = tl.rsqrt(tl.sum(latent_C * latent_C, 0) / LATENT + eps)
        tl.store(row + place_C, (latent_C * inverse * weight_C).to(dtype), mask=(place_C < LATENT) & is_held)
    else:  # one head's queries through a tile of its key weights
        DOT: tl.constexpr = launch.dot_dtype(dtype)
        TILES: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
        program = tl.program_id(0) - num_tokens
        head = program // TILES
        column_C = program % TILES * COLUMNS + tl.arange(0, COLUMNS)
        place_E = tl.arange(0, launch.padded(NOPE))
        token_T = tl.arange(0, TOKENS)
        is_key_EC = (place_E < NOPE)[:, None] & (column_C < LATENT)[None, :]
        keys_EC = keys + head * KEYS_STRIDE + place_E[:, None] * LATENT + column_C[None, :]
        keys_EC = tl.load(keys_EC, mask=is_key_EC, other=0.0)
        launch.follow(IS_CHAINED)
        prefetch_block(rows, program, tl.minimum(tl.load(length), num_rows), ROWS_STRIDE, AHEAD, IS_CHAINED)
        is_token_T = token_T < num_tokens
        q_TE = projected + token_T[:, None] * PROJECTED_STRIDE + head * (NOPE + ROPE) + place_E[None, :]
        q_TE = tl.load(q_TE, mask=is_token_T[:, None] & (place_E < NOPE)[None, :], other=0.0)
        absorbed_TC = tl.dot(q_TE.to(DOT), keys_EC.to(DOT), input_precision="ieee")
        place_TC = (token_T[:, None] * HEADS + head) * (LATENT + ROPE) + column_C[None, :]
        tl.store(q + place_TC, absorbed_TC.to(dtype), mask=is_token_T[:, None] & (column_C < LATENT)[None, :])


@triton.jit
def pinned(x, IS_CHAINED: tl.constexpr):
    """x; nothing that follows happens earlier: 16-bit numbers stay two in a register, and a load is not waited for."""
    if IS_CHAINED and x.dtype.primitive_bitwidth == 16:  # not in the interpreter
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def rows_of(
    rows, row_J, is_read_J, latent_JC, rope_JE, STRIDE: tl.constexpr, VALUE: tl.constexpr, ROPE: tl.constexpr
):  # fmt: skip
    """Cached rows where they are read, and latent_JC and rope_JE elsewhere."""
    column_C, place_E = tl.arange(0, launch.padded(VALUE))[None, :], tl.arange(0, launch.padded(ROPE))[None, :]
    at_J = rows + row_J.to(tl.int64)[:, None] * STRIDE
    is_read_J = is_read_J[:, None]
    latent_JC = tl.load(at_J + column_C, mask=is_read_J & (column_C < VALUE), other=latent_JC, cache_modifier=".cg")
    rope_JE = tl.load(at_J + VALUE + place_E, mask=is_read_J & (place_E < ROPE), other=rope_JE, cache_modifier=".cg")
    return latent_JC, rope_JE


@triton.jit
def fold(latent_JC, rope_JE, row_J, q_NC, q_NE, end_N, scale_log2, max_N, sum_N, context_CN):
    """Cached rows J join the softmax of query rows N, of which each sees the rows up to its end."""
    DOT: tl.constexpr = launch.dot_dtype(q_NC.dtype)
    scores_JN = tl.dot(latent_JC.to(DOT), tl.trans(q_NC.to(DOT)), input_precision="ieee")
    scores_JN = tl.dot(rope_JE.to(DOT), tl.trans(q_NE.to(DOT)), scores_JN, input_precision="ieee")
    scores_JN = tl.where(row_J[:, None] <= end_N[None, :], scores_JN * scale_log2, float("-inf"))
    new_max_N = tl.maximum(max_N, tl.max(scores_JN, 0))
    base_N = tl.where(new_max_N == float("-inf"), 0.0, new_max_N)
    fade_N = tl.exp2(max_N - base_N)
    p_JN = tl.exp2(scores_JN - base_N[None, :])
    sum_N = sum_N * fade_N + tl.sum(p_JN, 0)
    context_CN = tl.dot(tl.trans(latent_JC.to(DOT)), p_JN.to(DOT), context_CN * fade_N[None, :], input_precision="ieee")
    return new_max_N, sum_N, context_CN


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_splits", "share"])
def attend_kernel(
    q, rows, length, context, lse, scale_log2, num_tokens, num_rows, num_splits, share,
    ROWS_STRIDE: tl.constexpr, HEADS: tl.constexpr, VALUE: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
    HELD: tl.constexpr, IS_LONG: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """A split's softmax and weighted sum for ``share`` (token, head) rows."""
    VALUE_PAD: tl.constexpr = launch.padded(VALUE)
    split, count = tl.program_id(0), num_tokens * HEADS
    committed = tl.load(length).to(tl.int32)
    place_J = tl.arange(0, HELD * BLOCK)
    held_J = (split + place_J // BLOCK * num_splits) * BLOCK + place_J % BLOCK
    written = tl.minimum(committed, num_rows)
    latent_JC, rope_JE = rows_of(rows, held_J, held_J < written, 0.0, 0.0, ROWS_STRIDE, VALUE, ROPE)
    if IS_LONG:
        prefetch_block(rows, split + HELD * num_splits, written, ROWS_STRIDE, BLOCK, IS_CHAINED)
    launch.follow(IS_CHAINED)
    first = tl.program_id(1) * share
    end = tl.minimum(first + share, count)
    limit = tl.minimum(committed + (end - 1) // HEADS + 1, num_rows)
    row_N = first + tl.arange(0, TILE)
    column_C, place_E = tl.arange(0, VALUE_PAD)[None, :], tl.arange(0, launch.padded(ROPE))[None, :]
    at_N, is_row_N = q + row_N[:, None] * (VALUE + ROPE), (row_N < end)[:, None]
    q_NC = tl.load(at_N + column_C, mask=is_row_N & (column_C < VALUE), other=0.0)
    q_NE = tl.load(at_N + VALUE + place_E, mask=is_row_N & (place_E < ROPE), other=0.0)
    sum_N, context_CN = tl.zeros([TILE], tl.float32), tl.zeros([VALUE_PAD, TILE], tl.float32)
    max_N = sum_N - float("inf")
    end_N = tl.minimum(committed + row_N // HEADS, num_rows - 1)
    fresh_J = held_J + (tl.load(length).to(tl.int32) - committed)  # held_J, but its addresses held no registers so far
    is_fresh_J = (held_J >= committed) & (held_J < limit)
    latent_JC, rope_JE = rows_of(rows, fresh_J, is_fresh_J, latent_JC, rope_JE, ROWS_STRIDE, VALUE, ROPE)
    q_NC, q_NE = pinned(q_NC, IS_CHAINED), pinned(q_NE, IS_CHAINED)  # arrive while the rows go to shared memory
    max_N, sum_N, context_CN = fold(
        latent_JC, rope_JE, held_J, q_NC, q_NE, end_N, scale_log2, max_N, sum_N, context_CN
    )  # fmt: skip
    if IS_LONG:
        for block in range(split + HELD * num_splits, tl.cdiv(limit, BLOCK), num_splits):
            prefetch_block(rows, block + num_splits, written, ROWS_STRIDE, BLOCK, IS_CHAINED)
            row_J = block * BLOCK + tl.arange(0, BLOCK)
            more_JC, more_JE = rows_of(rows, row_J, row_J < limit, 0.0, 0.0, ROWS_STRIDE, VALUE, ROPE)
            max_N, sum_N, context_CN = fold(
                more_JC, more_JE, row_J, q_NC, q_NE, end_N, scale_log2, max_N, sum_N, context_CN
            )  # fmt: skip
    is_any = split * BLOCK < limit
    sum_N = tl.where(sum_N > 0, sum_N, 1.0)  # of a row that sees nothing here: its maximum says so
    place_N = split * count + row_N
    tl.store(lse + place_N, (max_N + tl.log2(sum_N)) * 0.6931471805599453, mask=row_N < end)
    if is_any:  # else the context is undefined
        value_C = tl.arange(0, VALUE_PAD)[:, None]
        mean_CN = (context_CN / sum_N[None, :]).to(context.dtype.element_ty)
        tl.store(context + place_N[None, :] * VALUE + value_C, mean_CN, mask=(row_N < end)[None, :] & (value_C < VALUE))


@triton.jit(do_not_specialize=["count"])
def finish_kernel(
    context, lse, values, gate, o, GATE_STRIDE: tl.constexpr, VALUES_STRIDE: tl.constexpr, count,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, LATENT: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """One (token, head): merge the splits, GROUP at a time, then a tile of its values, and the gate."""
    GROUP: tl.constexpr = min(16, triton.next_power_of_2(SPLITS))
    LATENT_PAD: tl.constexpr = triton.next_power_of_2(LATENT)
    row, tile = tl.program_id(0), tl.program_id(1)
    head, token = row % HEADS, row // HEADS
    dtype: tl.constexpr = o.dtype.element_ty
    column_F = tile * COLUMNS + tl.arange(0, COLUMNS)
    place_C = tl.arange(0, LATENT_PAD)
    at_FC = values + head * VALUES_STRIDE + column_F[:, None] * LATENT + place_C[None, :]
    values_FC = tl.load(at_FC, mask=(column_F < WIDTH)[:, None] & (place_C < LATENT)[None, :], other=0.0)
    launch.follow(IS_CHAINED)
    opening = tl.load(gate + token * GATE_STRIDE + head).to(tl.float32)
    lse_G, parts_GC = (), ()  # all loads before the first number is needed
    for first in tl.static_range(0, SPLITS, GROUP):
        split_G = first + tl.arange(0, GROUP)
        is_part_GC = (split_G < SPLITS)[:, None] & (place_C < LATENT)[None, :]
        at_GC = context + (split_G.to(tl.int64) * count + row)[:, None] * LATENT + place_C[None, :]
        lse_G += (tl.load(lse + split_G * count + row, mask=split_G < SPLITS, other=float("-inf")),)
        parts_GC += (tl.load(at_GC, mask=is_part_GC, other=0.0),)
    top_G = lse_G[0]
    for group in tl.static_range(1, len(lse_G)):
        top_G = tl.maximum(top_G, lse_G[group])
    top = tl.max(top_G, 0)
    total_G = tl.zeros([GROUP], tl.float32)
    context_GC = tl.zeros([GROUP, LATENT_PAD], tl.float32)
    for group in tl.static_range(len(lse_G)):
        weight_G = tl.exp(lse_G[group] - top)
        total_G += weight_G
        weight_GC = weight_G[:, None]  # what an empty split holds is undefined
        context_GC += weight_GC * tl.where(weight_GC > 0, pinned(parts_GC[group], IS_CHAINED).to(tl.float32), 0.0)
    context_C = (tl.sum(context_GC, 0) / tl.sum(total_G, 0)).to(dtype).to(tl.float32)
    o_F = tl.sum(pinned(values_FC, IS_CHAINED).to(tl.float32) * context_C[None, :], 1).to(dtype).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-opening))).to(dtype).to(tl.float32)
    tl.store(o + row * WIDTH + column_F, (o_F * opened).to(dtype), mask=column_F < WIDTH)


def absorb(
    projected_TC: Tensor, norm_weight_C: Tensor, eps: float, keys_HEC: Tensor, angles_JE2: Tensor, rows_JC: Tensor,
    length_1: Tensor, *, is_chained: bool = False,
) -> Tensor:  # fmt: skip
    """See the package."""
    num_heads, nope, latent = keys_HEC.shape
    num_tokens, (num_rows, width) = len(projected_TC), rows_JC.shape
    q_THC = projected_TC.new_empty(num_tokens, num_heads, width)
    columns = min(COLUMNS.value, launch.padded(latent))
    absorb_kernel[(num_tokens + num_heads * triton.cdiv(latent, columns),)](
        projected_TC, norm_weight_C, keys_HEC, angles_JE2, rows_JC, length_1, q_THC, eps, num_tokens, num_rows,
        projected_TC.stride(0), keys_HEC.stride(0), rows_JC.stride(0), HEADS=num_heads, NOPE=nope, ROPE=width - latent,
        LATENT=latent, COLUMNS=columns, num_warps=4, **launch.options(is_chained),
    )  # fmt: skip
    return q_THC


def attend(
    q_THC: Tensor, rows_JC: Tensor, length_1: Tensor, value_width: int, scale: float, num_splits: int, *,
    is_chained: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See the package."""
    num_tokens, num_heads, width = q_THC.shape
    num_steps = triton.cdiv(triton.cdiv(len(rows_JC), BLOCK_ROWS), num_splits)
    tile, held, num_stages = attend_tiles(q_THC.dtype, num_steps)
    context_STHC = q_THC.new_empty(num_splits, num_tokens, num_heads, value_width)
    lse_STH = q_THC.new_empty(num_splits, num_tokens, num_heads, dtype=torch.float32)
    num_tiles = triton.cdiv(num_tokens * num_heads, tile)
    attend_kernel[(num_splits, num_tiles)](
        q_THC, rows_JC, length_1, context_STHC, lse_STH, scale * 1.4426950408889634, num_tokens, len(rows_JC),
        num_splits, triton.cdiv(num_tokens * num_heads, num_tiles), ROWS_STRIDE=rows_JC.stride(0), HEADS=num_heads,
        VALUE=value_width, ROPE=width - value_width, TILE=tile, HELD=held, IS_LONG=num_steps > held, num_warps=8,
        num_stages=num_stages, **launch.options(is_chained),
    )  # fmt: skip
    return context_STHC, lse_STH


def finish(
    context_STHC: Tensor, lse_STH: Tensor, values_HFC: Tensor, gate_TH: Tensor, *, is_chained: bool = False
) -> Tensor:
    """See the package. 128 values a program: 72 at 9 tokens of 8 heads, each row merged once."""
    num_splits, num_tokens, num_heads, latent = context_STHC.shape
    width = values_HFC.shape[1]
    o_THF = gate_TH.new_empty(num_tokens, num_heads, width)
    columns = min(128, triton.next_power_of_2(width))
    finish_kernel[(num_tokens * num_heads, triton.cdiv(width, columns))](
        context_STHC, lse_STH, values_HFC, gate_TH, o_THF, gate_TH.stride(0), values_HFC.stride(0),
        num_tokens * num_heads, HEADS=num_heads, WIDTH=width, LATENT=latent, SPLITS=num_splits, COLUMNS=columns,
        num_warps=FINISH_WARPS, **launch.options(is_chained),
    )  # fmt: skip
    return o_THF
