"""The absorbed form in Triton: three launches around the latent cache.

absorb: a program owns one head and a tile of latent columns (its key weights are read before the wait), or one token:
its norm, rotations and cache row. attend: a program owns one split and one tile of (token, head) rows. The cache block
is the large side of both products (scores [rows of the block, tile], context [latent, tile]), so that a tile of 16 or
32 rows still fills the tensor cores' 64 and the whole latent fits in registers: 512 x 32 float32 is 64 KB a program.
finish: a program owns one (token, head) and a tile of its values: it merges the splits and multiplies.
Tile sizes depend on the shapes of the model, never on T or the length, and no code is specialised on those: a token's
bits depend on neither.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dspark.kernels import MAX_TOKENS, launch
from dspark.kernels.launch import signal, wait

BLOCK_ROWS = 64
"""Cached rows a block: also the unit that splits share out, so it is part of a result's bits."""


@dataclass(frozen=True)
class AttendTiles:
    """Tiles of ``attend``.

    rows: (token, head) pairs a program. Four tokens at 8 heads: at T = 9 the cache is read three times from L2 and once
    from memory. 64 rows spill. stages: blocks in flight, 72 KB each. float32 blocks are twice as large, and their
    products run without tensor cores.
    """

    rows: int
    num_warps: int
    num_stages: int


def attend_tiles(dtype: torch.dtype) -> AttendTiles:
    """The default tiles for a dtype; the number of tokens has no say, so that it does not change a token's bits."""
    return AttendTiles(16, 8, 1) if dtype == torch.float32 else AttendTiles(32, 8, 2)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def absorb_kernel(
    projected,
    norm_weight,
    keys,
    angles,
    rows,
    length,
    q,
    eps,
    num_tokens,
    num_rows,
    PROJECTED_STRIDE: tl.constexpr,
    KEYS_STRIDE: tl.constexpr,
    ROWS_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT: tl.constexpr,
    NOPE_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    DOT: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """A token's cache row and rotated queries, or a head's queries through its key weights."""
    dtype: tl.constexpr = q.dtype.element_ty
    if tl.program_id(0) < num_tokens:  # one token's cache row and rotated queries
        token = tl.program_id(0)
        place_C = tl.arange(0, LATENT_PAD)
        pair_E = tl.arange(0, PAIRS_PAD)
        head_H = tl.arange(0, HEADS_PAD)[:, None]
        weight_C = tl.load(norm_weight + place_C, mask=place_C < LATENT, other=0.0).to(tl.float32)
        wait(IS_CHAINED)
        signal(IS_CHAINED)
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
        TILES: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
        program = tl.program_id(0) - num_tokens
        head = program // TILES
        column_C = program % TILES * COLUMNS + tl.arange(0, COLUMNS)
        place_E = tl.arange(0, NOPE_PAD)
        token_T = tl.arange(0, TOKENS)
        is_key_EC = (place_E < NOPE)[:, None] & (column_C < LATENT)[None, :]
        keys_EC = keys + head * KEYS_STRIDE + place_E[:, None] * LATENT + column_C[None, :]
        keys_EC = tl.load(keys_EC, mask=is_key_EC, other=0.0)
        wait(IS_CHAINED)
        signal(IS_CHAINED)
        is_token_T = token_T < num_tokens
        q_TE = projected + token_T[:, None] * PROJECTED_STRIDE + head * (NOPE + ROPE) + place_E[None, :]
        q_TE = tl.load(q_TE, mask=is_token_T[:, None] & (place_E < NOPE)[None, :], other=0.0)
        absorbed_TC = tl.dot(q_TE.to(DOT), keys_EC.to(DOT), input_precision="ieee")
        place_TC = (token_T[:, None] * HEADS + head) * (LATENT + ROPE) + column_C[None, :]
        tl.store(q + place_TC, absorbed_TC.to(dtype), mask=is_token_T[:, None] & (column_C < LATENT)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_splits"])
def attend_kernel(
    q,
    rows,
    length,
    context,
    lse,
    scale_log2,
    num_tokens,
    num_rows,
    num_splits,
    ROWS_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """A split's softmax and weighted sum for a tile of (token, head) rows."""
    split, tile = tl.program_id(0), tl.program_id(1)
    wait(IS_CHAINED)
    signal(IS_CHAINED)
    WIDTH: tl.constexpr = VALUE + ROPE
    count = num_tokens * HEADS
    row_N = tile * TILE + tl.arange(0, TILE)
    column_C = tl.arange(0, VALUE_PAD)
    place_E = tl.arange(0, ROPE_PAD)
    committed = tl.load(length).to(tl.int32)
    end_N = committed + row_N // HEADS
    last = tl.minimum(tile * TILE + TILE, count) - 1
    limit = tl.minimum(committed + last // HEADS + 1, num_rows)
    q_NC = tl.load(
        q + row_N[:, None] * WIDTH + column_C[None, :],
        mask=(row_N < count)[:, None] & (column_C < VALUE)[None, :],
        other=0.0,
    ).to(DOT)
    q_NE = tl.load(
        q + row_N[:, None] * WIDTH + VALUE + place_E[None, :],
        mask=(row_N < count)[:, None] & (place_E < ROPE)[None, :],
        other=0.0,
    ).to(DOT)
    max_N = tl.full([TILE], float("-inf"), tl.float32)
    sum_N = tl.zeros([TILE], tl.float32)
    context_CN = tl.zeros([VALUE_PAD, TILE], tl.float32)
    for block in range(split, tl.cdiv(limit, BLOCK), num_splits):
        row_J = block * BLOCK + tl.arange(0, BLOCK)
        source_J = rows + row_J.to(tl.int64) * ROWS_STRIDE
        latent_JC = tl.load(
            source_J[:, None] + column_C[None, :],
            mask=(row_J < limit)[:, None] & (column_C < VALUE)[None, :],
            other=0.0,
        ).to(DOT)
        rope_JE = tl.load(
            source_J[:, None] + VALUE + place_E[None, :],
            mask=(row_J < limit)[:, None] & (place_E < ROPE)[None, :],
            other=0.0,
        ).to(DOT)
        scores_JN = tl.dot(latent_JC, tl.trans(q_NC), input_precision="ieee")
        scores_JN = tl.dot(rope_JE, tl.trans(q_NE), scores_JN, input_precision="ieee")
        scores_JN = tl.where(row_J[:, None] <= end_N[None, :], scores_JN * scale_log2, float("-inf"))
        new_max_N = tl.maximum(max_N, tl.max(scores_JN, 0))
        base_N = tl.where(new_max_N == float("-inf"), 0.0, new_max_N)
        fade_N = tl.exp2(max_N - base_N)
        p_JN = tl.exp2(scores_JN - base_N[None, :])
        sum_N = sum_N * fade_N + tl.sum(p_JN, 0)
        context_CN = tl.dot(tl.trans(latent_JC), p_JN.to(DOT), context_CN * fade_N[None, :], input_precision="ieee")
        max_N = new_max_N
    place_N = split * count + row_N
    sum_N = tl.where(sum_N > 0, sum_N, 1.0)  # of a row that sees nothing here: its maximum says so
    tl.store(lse + place_N, (max_N + tl.log2(sum_N)) * 0.6931471805599453, mask=row_N < count)
    if split * BLOCK < limit:
        context_CN /= sum_N[None, :]
        tl.store(
            context + place_N[None, :] * VALUE + column_C[:, None],
            context_CN,
            mask=(row_N < count)[None, :] & (column_C < VALUE)[:, None],
        )


@triton.jit(do_not_specialize=["count"])
def finish_kernel(
    context,
    lse,
    values,
    gate,
    o,
    GATE_STRIDE: tl.constexpr,
    VALUES_STRIDE: tl.constexpr,
    count,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """One (token, head): merge the splits, a tile of its values, the gate."""
    row, tile = tl.program_id(0), tl.program_id(1)
    head, token = row % HEADS, row // HEADS
    dtype: tl.constexpr = o.dtype.element_ty
    column_F = tile * COLUMNS + tl.arange(0, COLUMNS)
    place_C = tl.arange(0, LATENT_PAD)
    values_FC = tl.load(
        values + head * VALUES_STRIDE + column_F[:, None] * LATENT + place_C[None, :],
        mask=(column_F < WIDTH)[:, None] & (place_C < LATENT)[None, :],
        other=0.0,
    )
    wait(IS_CHAINED)
    signal(IS_CHAINED)
    opening = tl.load(gate + token * GATE_STRIDE + head).to(tl.float32)
    lse_S, parts_SC = (), ()  # all loads before the first number is needed
    for split in tl.static_range(SPLITS):
        lse_S = lse_S + (tl.load(lse + split * count + row),)  # noqa: RUF005
    for split in tl.static_range(AHEAD):
        part_C = tl.load(context + (split * count + row) * LATENT + place_C, mask=place_C < LATENT, other=0.0)
        parts_SC = parts_SC + (part_C,)  # noqa: RUF005
    top = lse_S[0]
    for split in tl.static_range(1, SPLITS):
        top = tl.maximum(top, lse_S[split])
    total = 0.0
    context_C = tl.zeros([LATENT_PAD], tl.float32)
    for split in tl.static_range(SPLITS):
        if split < AHEAD:
            part_C = parts_SC[split]
        else:
            part_C = tl.load(context + (split * count + row) * LATENT + place_C, mask=place_C < LATENT, other=0.0)
        weight = tl.exp(lse_S[split] - top)
        total += weight
        context_C += weight * tl.where(weight > 0, part_C, 0.0)  # what an empty split holds is undefined
    context_C = (context_C / total).to(dtype).to(tl.float32)
    o_F = tl.sum(values_FC.to(tl.float32) * context_C[None, :], 1).to(dtype).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-opening))).to(dtype).to(tl.float32)
    tl.store(o + row * WIDTH + column_F, (o_F * opened).to(dtype), mask=column_F < WIDTH)


def absorb(
    projected_TC: torch.Tensor,
    norm_weight_C: torch.Tensor,
    eps: float,
    keys_HEC: torch.Tensor,
    angles_JE2: torch.Tensor,
    rows_JC: torch.Tensor,
    length_1: torch.Tensor,
    *,
    columns: int = 32,
    num_warps: int = 4,
    is_chained: bool = False,
) -> torch.Tensor:
    """See ``dspark.kernels.mla.absorb``. 32 columns a program give 128 programs at 8 heads of a 512-wide latent."""
    num_heads, nope, latent = keys_HEC.shape
    num_tokens, (num_rows, width) = len(projected_TC), rows_JC.shape
    q_THC = projected_TC.new_empty(num_tokens, num_heads, width)
    columns = min(columns, max(16, triton.next_power_of_2(latent)))
    absorb_kernel[(num_tokens + num_heads * triton.cdiv(latent, columns),)](
        projected_TC,
        norm_weight_C,
        keys_HEC,
        angles_JE2,
        rows_JC,
        length_1,
        q_THC,
        eps,
        num_tokens,
        num_rows,
        projected_TC.stride(0),
        keys_HEC.stride(0),
        rows_JC.stride(0),
        HEADS=num_heads,
        NOPE=nope,
        ROPE=width - latent,
        LATENT=latent,
        NOPE_PAD=max(16, triton.next_power_of_2(nope)),
        HEADS_PAD=triton.next_power_of_2(num_heads),
        PAIRS_PAD=triton.next_power_of_2((width - latent) // 2),
        LATENT_PAD=triton.next_power_of_2(latent),
        COLUMNS=columns,
        TOKENS=MAX_TOKENS,
        DOT=launch.dot_dtype(projected_TC.dtype),
        num_warps=num_warps,
        **launch.options(is_chained),
    )
    return q_THC


def attend(
    q_THC: torch.Tensor,
    rows_JC: torch.Tensor,
    length_1: torch.Tensor,
    value_width: int,
    scale: float,
    num_splits: int,
    *,
    tiles: AttendTiles | None = None,
    block_rows: int = BLOCK_ROWS,
    is_chained: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dspark.kernels.mla.attend``."""
    num_tokens, num_heads, width = q_THC.shape
    tiles = tiles or attend_tiles(q_THC.dtype)
    context_STHC = q_THC.new_empty(num_splits, num_tokens, num_heads, value_width, dtype=torch.float32)
    lse_STH = q_THC.new_empty(num_splits, num_tokens, num_heads, dtype=torch.float32)
    attend_kernel[(num_splits, triton.cdiv(num_tokens * num_heads, tiles.rows))](
        q_THC,
        rows_JC,
        length_1,
        context_STHC,
        lse_STH,
        scale * 1.4426950408889634,
        num_tokens,
        len(rows_JC),
        num_splits,
        rows_JC.stride(0),
        HEADS=num_heads,
        VALUE=value_width,
        ROPE=width - value_width,
        VALUE_PAD=max(16, triton.next_power_of_2(value_width)),
        ROPE_PAD=max(16, triton.next_power_of_2(width - value_width)),
        TILE=tiles.rows,
        BLOCK=block_rows,
        DOT=launch.dot_dtype(q_THC.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch.options(is_chained),
    )
    return context_STHC, lse_STH


def finish(
    context_STHC: torch.Tensor,
    lse_STH: torch.Tensor,
    values_HFC: torch.Tensor,
    gate_TH: torch.Tensor,
    *,
    columns: int = 64,
    ahead: int = 48,
    num_warps: int = 8,
    is_chained: bool = False,
) -> torch.Tensor:
    """See ``dspark.kernels.mla.finish``. 64 values a program give 144 programs at 9 tokens, 8 heads of 128 values."""
    num_splits, num_tokens, num_heads, latent = context_STHC.shape
    width = values_HFC.shape[1]
    o_THF = gate_TH.new_empty(num_tokens, num_heads, width)
    columns = min(columns, triton.next_power_of_2(width))
    finish_kernel[(num_tokens * num_heads, triton.cdiv(width, columns))](
        context_STHC,
        lse_STH,
        values_HFC,
        gate_TH,
        o_THF,
        gate_TH.stride(0),
        values_HFC.stride(0),
        num_tokens * num_heads,
        HEADS=num_heads,
        WIDTH=width,
        LATENT=latent,
        SPLITS=num_splits,
        LATENT_PAD=triton.next_power_of_2(latent),
        AHEAD=min(num_splits, ahead),
        COLUMNS=columns,
        num_warps=num_warps,
        maxnreg=min(255, 65536 // (32 * num_warps)),
        **launch.options(is_chained),
    )
    return o_THF
