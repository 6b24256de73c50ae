"""Skinny projections in Triton: weight rows are the large side of the matrix product, 16 tokens the small one.

A program owns ROWS weight rows and one of SPLITS shares of their columns, and reads every byte of them once. What it
can do before its predecessor has finished, it does: the first HELD columns go to registers, the rest of its share is
asked into L2. After the wait a software pipeline of num_stages steps of COLUMNS columns runs over the rest. SLICES
column slices of a step go to different warps (a batched product), so that no warp waits on a long chain of
accumulations; they are added at the end. Shares of the columns meet in a workspace: the last to arrive adds them in
order. Tokens are padded to 16 for every T, so a token's result does not depend on T. A program ends with its rows of
all tokens in registers: what linear attention does along tokens, or to a number, is done there (kda/preparing.py).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import launch
from dspark.kernels.kda.preparing import load_parameters, prepare
from dspark.kernels.projection import ring


class Tile(NamedTuple):
    """How a projection is cut; every field can be swept.

    rows of a program; columns of a pipeline step; slices of a step that warps share (1, or a batched product, which
    holds to the classic tensor-core instruction; with 1 and 64 rows or more the warp-group one is used); splits of the
    columns over programs; held columns that are loaded before the wait (a power of two; 0 for none). Weights leave the
    caches first.
    """

    rows: int
    columns: int
    slices: int
    splits: int
    held: int
    num_warps: int
    num_stages: int


def tile_for(num_rows: int, num_columns: int, element_size: int, head_width: int = 0) -> Tile:
    """The tile of a weight [num_rows, num_columns]; ``head_width``: of the (padded) heads that are normed, if any.

    The byte time is near when all programs run at once with equal work and some 4.5 MB are in flight in all (a latency
    of a microsecond): then it does not matter that the programs do not divide by 132 multiprocessors.
    """
    if element_size > 2:  # full-precision products do not use tensor cores: small tiles, for tests and small models
        return Tile(16, max(32, head_width), 1, 1, 0, 4, 2)
    if head_width:  # many rows and few columns a program: each norms its columns anew
        fits = triton.cdiv(num_rows, 128) * triton.cdiv(num_columns, 256) <= 132  # one program a multiprocessor
        held = max(256 if fits else 512, head_width)
        return Tile(128, held, 1, triton.cdiv(num_columns, held), held, 8 if held <= 256 else 16, 2)
    held = max(128, triton.next_power_of_2(num_columns))
    if held <= 1024:  # no pipeline: all weights of a program are on the chip before the wait
        return Tile(16, held, 4, 1, held, 4, 2)
    # small programs start and end smoothly: 32 KB in flight in each where there are hundreds, two or three a
    # multiprocessor; 24 KB where there are fewer programs, whose rows are on their way to L2 before the wait
    rows, columns, slices, stages = (16, 256, 2, 5) if num_rows > 132 * 32 else (16, 256, 4, 4)
    splits = 1
    while num_rows * splits < 132 * rows and num_columns > 2 * splits * columns:
        splits *= 2
    return Tile(rows, columns, slices, splits, 0, slices, stages)


@triton.jit
def _columns(padded, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    """Where a padded column lies: heads of WIDTH columns are padded to PADDED_WIDTH."""
    return padded if WIDTH == PADDED_WIDTH else padded // PADDED_WIDTH * WIDTH + padded % PADDED_WIDTH


@triton.jit
def weight_tile(
    weight, stride, rows, first, D: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, SLICES: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Weights [rows, COLUMNS] from padded column ``first`` on, or [SLICES, rows, COLUMNS / SLICES]."""
    if SLICES == 1:
        padded = first + tl.arange(0, COLUMNS)[None, :]
        at = weight + rows[:, None] * stride + _columns(padded, WIDTH, PADDED_WIDTH)
    else:
        WIDE: tl.constexpr = COLUMNS // SLICES
        padded = first + tl.arange(0, SLICES)[:, None, None] * WIDE + tl.arange(0, WIDE)[None, None, :]
        at = weight + rows[None, :, None] * stride + _columns(padded, WIDTH, PADDED_WIDTH)
    if IS_WHOLE:
        return tl.load(at, eviction_policy="evict_first")
    else:
        is_column = (padded < D // WIDTH * PADDED_WIDTH) & (padded % PADDED_WIDTH < WIDTH)
        return tl.load(at, mask=is_column, other=0.0, eviction_policy="evict_first")


@triton.jit
def token_tile(
    x, stride, first, num_tokens, D: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr, IS_WHOLE: tl.constexpr
):
    """Activations as the small side [COLUMNS, 16], or [SLICES, COLUMNS / SLICES, 16]; zero past T and D."""
    if SLICES == 1:
        tokens = tl.arange(0, 16)[None, :]
        columns = first + tl.arange(0, COLUMNS)[:, None]
    else:
        WIDE: tl.constexpr = COLUMNS // SLICES
        tokens = tl.arange(0, 16)[None, None, :]
        columns = first + tl.arange(0, SLICES)[:, None, None] * WIDE + tl.arange(0, WIDE)[None, :, None]
    mask = tokens < num_tokens if IS_WHOLE else (tokens < num_tokens) & (columns < D)
    return tl.load(x + tokens * stride + columns, mask=mask, other=0.0)


@triton.jit
def _input_tile(
    o, stride, gated, first, num_tokens, D: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, SLICES: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """``token_tile``; with a gate of gated and normed heads: statistics and product in float32, rounded once."""
    gate, norm_weight, stride_head, gate_stride, gate_stride_head, eps = gated
    if gate is None:
        return token_tile(o, stride, first, num_tokens, D, COLUMNS, SLICES, IS_WHOLE)
    else:
        tokens = tl.arange(0, 16)[:, None, None]
        heads = first // PADDED_WIDTH + tl.arange(0, COLUMNS // PADDED_WIDTH)[None, :, None]
        places = tl.arange(0, PADDED_WIDTH)[None, None, :]
        mask = (tokens < num_tokens) & (heads < D // WIDTH) & (places < WIDTH)
        x = tl.load(o + tokens * stride + heads * stride_head + places, mask=mask, other=0.0).to(tl.float32)
        at = gate + tokens * gate_stride + heads * gate_stride_head + places
        logits = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(norm_weight + places, mask=places < WIDTH, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 2) / WIDTH + eps)
        x = x * inverse[:, :, None] * scale / (1.0 + tl.exp(-logits))
        x = x.to(o.dtype.element_ty)
        if SLICES == 1:
            return tl.trans(tl.reshape(x, (16, COLUMNS)))
        else:
            return tl.permute(tl.reshape(x, (16, SLICES, COLUMNS // SLICES)), (1, 2, 0))


@triton.jit
def prefetch_tile(weight, stride, rows, first, D: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Ask NUM_CHUNKS pieces of CHUNK elements (a multiple of 16 bytes) of every row into L2."""
    columns = tl.minimum(first + tl.arange(0, NUM_CHUNKS) * CHUNK, D - CHUNK)
    at = weight + rows[:, None] * stride + columns[None, :]
    size = tl.full(at.shape, CHUNK * weight.dtype.element_ty.primitive_bitwidth // 8, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at, size], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _finish(
    sums, y, prepared, at, mask, parameters, lower_bound, rows, H: tl.constexpr, E: tl.constexpr, J: tl.constexpr
):
    """Write whole sums [rows, 16]: rounded, and with J taps also what becomes of the rounded ones."""
    rounded = sums.to(y.dtype.element_ty)
    tl.store(y + at, rounded, mask=mask)
    if J > 0:
        taps, old, rate, bias = parameters
        token = tl.arange(0, 16)[None, :]
        values = prepare(rounded.to(tl.float32), taps, old, rate, bias, lower_bound, rows, token, H, E, J)
        tl.store(prepared + at, values, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])  # one program text for every T
def project_kernel(
    x, weight, y, partial, counters, num_tokens, x_stride, weight_stride, C: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr,
    SPLITS: tl.constexpr, HELD: tl.constexpr, STEPS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    IS_WHOLE: tl.constexpr, IS_CHAINED: tl.constexpr, num_stages: tl.constexpr, gate=None, norm_weight=None, eps=0.0,
    x_stride_head=0, gate_stride=0, gate_stride_head=0, prepared=None, history=None, conv=None, a_log=None,
    dt_bias=None, lower_bound=0.0, H: tl.constexpr = 0, E: tl.constexpr = 0, J: tl.constexpr = 0,
):  # fmt: skip
    """Program (tile, share). C rows and D columns of the weight; a share has HELD + STEPS * COLUMNS padded columns.

    IS_WHOLE: no column needs a mask. Without a gate WIDTH is D. J 0: nothing is prepared.
    """
    DOT: tl.constexpr = launch.dot_dtype(weight.dtype.element_ty)
    gated = (gate, norm_weight, x_stride_head, gate_stride, gate_stride_head, eps)
    tile, share = tl.program_id(0), tl.program_id(1)
    rows = tl.minimum(tile * ROWS + tl.arange(0, ROWS), C - 1).to(tl.int64)  # past the end the last, not written
    first = share * (HELD + STEPS * COLUMNS)
    if HELD > 0:
        held = weight_tile(weight, weight_stride, rows, first, D, WIDTH, PADDED_WIDTH, HELD, SLICES, IS_WHOLE)
    if NUM_CHUNKS > 0:
        prefetch_tile(weight, weight_stride, rows, first + HELD, D, NUM_CHUNKS, CHUNK)
    own_rows = tile * ROWS + tl.arange(0, ROWS)[:, None]
    token = tl.arange(0, 16)[None, :]
    parameters = load_parameters(history, conv, a_log, dt_bias, own_rows, token, H, E, J) if J > 0 else ()
    launch.follow(IS_CHAINED)
    sums = tl.zeros((ROWS, 16), tl.float32) if SLICES == 1 else tl.zeros((SLICES, ROWS, 16), tl.float32)
    if STEPS > 0:
        for step in tl.range(0, STEPS, num_stages=num_stages):
            at = first + HELD + step * COLUMNS
            w = weight_tile(weight, weight_stride, rows, at, D, WIDTH, PADDED_WIDTH, COLUMNS, SLICES, IS_WHOLE)
            tokens = _input_tile(
                x, x_stride, gated, at, num_tokens, D, WIDTH, PADDED_WIDTH, COLUMNS, SLICES, IS_WHOLE
            )  # fmt: skip
            sums = tl.dot(w.to(DOT), tokens.to(DOT), sums, input_precision="ieee")
    if HELD > 0:
        tokens = _input_tile(x, x_stride, gated, first, num_tokens, D, WIDTH, PADDED_WIDTH, HELD, SLICES, IS_WHOLE)
        sums = tl.dot(held.to(DOT), tokens.to(DOT), sums, input_precision="ieee")
    if SLICES > 1:
        sums = tl.sum(sums, 0)
    tokens = tl.arange(0, 16)[None, :]
    mask = (own_rows < C) & (tokens < num_tokens)
    at = tokens * C + own_rows
    if SPLITS == 1:
        _finish(sums, y, prepared, at, mask, parameters, lower_bound, own_rows, H, E, J)
    else:
        tl.store(partial + share * num_tokens * C + at, sums, mask=mask)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((ROWS, 16), tl.float32)
            for other in range(SPLITS):
                total += tl.load(partial + other * num_tokens * C + at, mask=mask, other=0.0, cache_modifier=".cg")
            _finish(total, y, prepared, at, mask, parameters, lower_bound, own_rows, H, E, J)
            tl.store(counters + tile, 0)


def shares(tile: Tile, num_columns: int) -> tuple[int, int]:
    """Pipeline steps of a share of the (padded) columns, and how many shares it takes."""
    share = triton.cdiv(num_columns, tile.splits)
    steps = triton.cdiv(max(share - tile.held, 0), tile.columns)
    return steps, triton.cdiv(num_columns, tile.held + steps * tile.columns)


def chunks(weight_CD: Tensor, rows: int, num_warps: int, num_columns: int) -> tuple[int, int]:
    """How ``num_columns`` columns of each of a program's rows are asked into L2: pieces, elements of one; or zeros.

    As many pieces as give every thread one, but of 256 bytes or more. The instruction wants multiples of 16 bytes.
    Nothing is asked of float32, whose products take longer than its bytes.
    """
    unit = 16 // weight_CD.element_size()
    is_aligned = weight_CD.data_ptr() % 16 == 0 and weight_CD.stride(0) % unit == 0 and weight_CD.shape[1] % unit == 0
    if launch.IS_INTERPRETED or unit < 8 or not is_aligned or num_columns < 16 * unit:
        return 0, 0
    count = max(1, min(32 * num_warps // rows, num_columns // (16 * unit)))
    count = 1 << (count.bit_length() - 1)
    return count, triton.cdiv(num_columns, count * unit) * unit


def project(
    x_TD: Tensor, weight_CD: Tensor, counters: Tensor, *, out_dtype: torch.dtype | None = None,
    is_chained: bool = False, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """``reference.project``; ``tile`` overrides the table."""
    y_TC = x_TD.new_empty(len(x_TD), len(weight_CD), dtype=out_dtype)
    return _launch(x_TD, weight_CD, y_TC, counters, {}, is_chained, tile)


def project_gated(
    o_THF: Tensor, norm_weight_F: Tensor, gate_THF: Tensor, weight_CD: Tensor, eps: float, counters: Tensor, *,
    is_chained: bool = False, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """``reference.project_gated``; ``tile`` overrides the table, its columns and held are multiples of the padded F."""
    width = o_THF.shape[2]
    gated = {
        "gate": gate_THF, "norm_weight": norm_weight_F, "eps": eps, "WIDTH": width,
        "PADDED_WIDTH": triton.next_power_of_2(width), "x_stride_head": o_THF.stride(1),
        "gate_stride": gate_THF.stride(0), "gate_stride_head": gate_THF.stride(1),
    }  # fmt: skip
    y_TC = o_THF.new_empty(len(o_THF), len(weight_CD))
    return _launch(o_THF, weight_CD, y_TC, counters, gated, is_chained, tile)


def project_prepared(
    x_TD: Tensor, weight_CD: Tensor, history_WC: Tensor, conv_CJ: Tensor, a_log_H: Tensor, dt_bias_HE: Tensor,
    lower_bound: float, counters: Tensor, out: tuple[Tensor, Tensor], *, is_chained: bool = False,
    tile: Tile | None = None,
) -> None:  # fmt: skip
    """``reference.project_prepared``; ``tile`` overrides the table, and the ring where that fits."""
    if tile is None and not launch.IS_INTERPRETED and ring.fits(x_TD, weight_CD):
        inputs = (x_TD, weight_CD, history_WC, conv_CJ, a_log_H, dt_bias_HE, lower_bound, out)
        return ring.project_prepared(*inputs, is_chained=is_chained)
    (num_heads, width), num_taps = dt_bias_HE.shape, conv_CJ.shape[1]
    prepared = {
        "prepared": out[1], "history": history_WC, "conv": conv_CJ, "a_log": a_log_H, "dt_bias": dt_bias_HE,
        "lower_bound": lower_bound, "H": num_heads, "E": width, "J": num_taps,
    }  # fmt: skip
    _launch(x_TD, weight_CD, out[0], counters, prepared, is_chained, tile)


def _launch(
    x: Tensor, weight_CD: Tensor, y_TC: Tensor, counters: Tensor, extras: dict[str, Any], is_chained: bool,
    tile: Tile | None,
) -> Tensor:  # fmt: skip
    """``extras``: the kernel's arguments of a gated or a prepared product."""
    num_tokens, (num_rows, num_columns) = x.shape[0], weight_CD.shape
    extras = {"WIDTH": num_columns, "PADDED_WIDTH": num_columns} | extras
    width, padded_width = extras["WIDTH"], extras["PADDED_WIDTH"]
    padded_columns = num_columns // width * padded_width
    gated_width = padded_width if "gate" in extras else 0
    tile = tile or tile_for(num_rows, padded_columns, weight_CD.element_size(), gated_width)
    steps, splits = shares(tile, padded_columns)
    if gated_width:
        assert steps == 0 or tile.columns % gated_width == 0
        assert tile.held % gated_width == 0
    rest = min(steps * tile.columns, max(num_columns - tile.held, 0))
    num_chunks, chunk = chunks(weight_CD, tile.rows, tile.num_warps, rest)
    partial = y_TC if splits == 1 else x.new_empty(splits, num_tokens, num_rows, dtype=torch.float32)
    is_whole = splits * (tile.held + steps * tile.columns) == num_columns and width == padded_width
    project_kernel[(triton.cdiv(num_rows, tile.rows), splits)](
        x, weight_CD, y_TC, partial=partial, counters=counters, num_tokens=num_tokens, x_stride=x.stride(0),
        weight_stride=weight_CD.stride(0), C=num_rows, D=num_columns, **extras,
        ROWS=tile.rows, COLUMNS=tile.columns, SLICES=tile.slices, SPLITS=splits, HELD=tile.held, STEPS=steps,
        NUM_CHUNKS=num_chunks, CHUNK=chunk, IS_WHOLE=is_whole, num_stages=tile.num_stages, num_warps=tile.num_warps,
        **launch.options(is_chained),
    )  # fmt: skip
    return y_TC
