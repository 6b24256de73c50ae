"""The experts of any number of rows in two launches: up, with SwiGLU in its end, and down, over rows sorted by expert.

A small launch before them cuts every expert's picks into tiles of rows. A program owns such a tile and some columns:
the first product reads its rows through their index, so nothing is gathered into memory; the second writes each row to
its pick's place. Rows and columns past an end repeat the last one, so that no load of the long loop is masked. Gate
and up columns lie side by side in the product's tile, where a thread holds both of a pair.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import launch
from dspark.kernels.moe.reference import sort_by_expert

UP = {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
DOWN = {"BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2}
BLOCK_ROWS = 64
"""Rows of a tile: at a quarter of flash an expert has 128 of 8192 tokens on average, some more, some less."""


class Tiles(NamedTuple):
    """Sorted rows in tiles: order_M the picks; tiles_T3 int32 a tile's expert (-1: none), first row and last row."""

    order_M: Tensor
    tiles_T3: Tensor
    block_rows: int


@triton.jit
def tile_kernel(tiles, ends, X: tl.constexpr, BLOCK_M: tl.constexpr):
    """One tile."""
    t, x = tl.program_id(0), tl.arange(0, triton.next_power_of_2(X))
    end = tl.load(ends + x, mask=x < X, other=0)
    counts = tl.where(x < X, end - tl.load(ends + x - 1, mask=(x > 0) & (x < X), other=0), 0)
    num_tiles = (counts + BLOCK_M - 1) // BLOCK_M
    is_before = tl.cumsum(num_tiles, 0) <= t
    expert = tl.sum((is_before & (x < X)).to(tl.int32))
    first = tl.sum(tl.where(x < expert, counts, 0)) + (t - tl.sum(tl.where(x < expert, num_tiles, 0))) * BLOCK_M
    last = tl.sum(tl.where(x == expert, end, 0)) - 1
    tl.store(tiles + t * 3, tl.where(expert < X, expert, -1))
    tl.store(tiles + t * 3 + 1, first)
    tl.store(tiles + t * 3 + 2, last)


@triton.jit
def _multiply(x_ptr, w_ptr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows times columns, both K long; the pointers are those of the first BLOCK_K."""
    DOT: tl.constexpr = launch.dot_dtype(x_ptr.dtype.element_ty)
    k, sum_ = tl.arange(0, BLOCK_K), tl.zeros((x_ptr.shape[0], w_ptr.shape[1]), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x, w = tl.load(x_ptr + start), tl.load(w_ptr + start)
        else:
            x = tl.load(x_ptr + start, mask=(start + k < K)[None, :], other=0.0)
            w = tl.load(w_ptr + start, mask=(start + k < K)[:, None], other=0.0)
        sum_ = tl.dot(x.to(DOT), w.to(DOT), sum_, input_precision="ieee")
    return sum_


@triton.jit
def product_kernel(
    outputs, inputs, weights, limits, order, tiles, J: tl.constexpr, HALVES: tl.constexpr, WIDTH: tl.constexpr,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of rows and BLOCK_N // HALVES columns of WIDTH. Up has two halves, gate and up, which become SwiGLU: it
    reads every pick's row of J and keeps the sorted order; down reads that and writes to the picks' places.
    """
    COLUMNS: tl.constexpr = BLOCK_N // HALVES
    PARTS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    t, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    expert = tl.load(tiles + t * 3)
    if expert < 0:
        return
    first, last = tl.load(tiles + t * 3 + 1), tl.load(tiles + t * 3 + 2)
    row, n, k = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    pick = tl.load(order + tl.minimum(row, last))
    if HALVES == 2:
        source, target = pick // J, row.to(tl.int64)
    else:
        source, target = tl.minimum(row, last).to(tl.int64), pick
    x_ptr = inputs + source[:, None] * K + k[None, :]
    of_half = n % HALVES * WIDTH + tl.minimum(part * COLUMNS + n // HALVES, WIDTH - 1)
    w_ptr = weights + expert.to(tl.int64) * (HALVES * WIDTH * K) + of_half[None, :] * K + k[:, None]
    sum_ = _multiply(x_ptr, w_ptr, K, BLOCK_K)
    if HALVES == 2:
        gate, up = tl.split(tl.reshape(sum_, (BLOCK_M, COLUMNS, 2)))
        limit = tl.load(limits + expert)
        gate = gate / (1.0 + tl.exp(-gate))
        gate = tl.where(gate > limit, limit, gate)
        sum_ = gate * tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    seen = (row <= last)[:, None] & (column < WIDTH)[None, :]
    tl.store(outputs + target[:, None] * WIDTH + column[None, :], sum_.to(outputs.dtype.element_ty), mask=seen)


def run_each(x_ND: Tensor, ids_NJ: Tensor, gate_up_XCD: Tensor, down_XDI: Tensor, limits_X: Tensor) -> Tensor:
    """See the package. In float32 a sum is one chain of multiply-adds: some times torch's error at wide rows."""
    tiles = tile_rows(*sort_by_expert(ids_NJ, len(limits_X)))
    act_MI = multiply(x_ND, gate_up_XCD, limits_X, tiles, UP)
    return multiply(act_MI, down_XDI, None, tiles, DOWN).view(*ids_NJ.shape, -1)


def tile_rows(order_M: Tensor, ends_X: Tensor, block_rows: int = BLOCK_ROWS) -> Tiles:
    """Cut what ``sort_by_expert`` gives (order_M, ends_X) into tiles of at most ``block_rows`` rows of one expert."""
    num_tiles = triton.cdiv(len(order_M), block_rows) + min(len(ends_X), len(order_M))  # as many, or more
    tiles_T3 = torch.empty(num_tiles, 3, dtype=torch.int32, device=ends_X.device)
    tile_kernel[(num_tiles,)](tiles_T3, ends_X, X=len(ends_X), BLOCK_M=block_rows, num_warps=4)
    return Tiles(order_M, tiles_T3, block_rows)


def multiply(
    inputs: Tensor, weights: Tensor, limits: Tensor | None, tiles: Tiles, choice: dict[str, int]
) -> Tensor:  # fmt: skip
    """With limits SwiGLU of the picks' rows in the sorted order, [M, I]; else the sorted rows through their experts'
    down matrices, in the order of the picks, [M, D].
    """
    halves = 1 if limits is None else 2
    outputs = inputs.new_empty(len(tiles.order_M), weights.shape[1] // halves)
    if inputs.dtype == torch.float32:  # a thread's products are many, so its tiles are small
        choice = choice | {"BLOCK_K": 32, "num_stages": 1}
    width = outputs.shape[1]
    product_kernel[(len(tiles.tiles_T3) * triton.cdiv(width, choice["BLOCK_N"] // halves),)](
        outputs, inputs, weights, limits, tiles.order_M, tiles.tiles_T3, J=len(tiles.order_M) // len(inputs),
        HALVES=halves, WIDTH=width, K=inputs.shape[1], BLOCK_M=tiles.block_rows, **choice,
    )  # fmt: skip
    return outputs
