"""The experts of any number of rows in two launches: up, with SwiGLU in its end, and down, over rows sorted by expert.

A small launch before them cuts every expert's picks into tiles of rows. A program owns such a tile and some columns:
the first product reads its rows through their index, so nothing is gathered into memory; the second writes each row to
its pick's place. Rows and columns past an end repeat the last one, so that no load of the long loop is masked. Gate
and up columns lie side by side in the product's tile, where a thread holds both of a pair.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import launch
from dspark.kernels.moe.reference import sort_by_expert

UP = {"block_n": 128, "block_k": 64, "num_warps": 4, "num_stages": 3}
DOWN = {"block_n": 256, "block_k": 64, "num_warps": 4, "num_stages": 2}
BLOCK_ROWS = 64
"""Rows of a tile: at a quarter of flash an expert has 128 of 8192 tokens on average, some more, some less."""


class Tiles(NamedTuple):
    """Sorted rows in tiles: order_M the picks; tiles_T3 int32 a tile's expert (-1: none), first row and last row."""

    order_M: Tensor
    tiles_T3: Tensor
    block_rows: int


@triton.jit
def tile_kernel(tiles, ends, X: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_M: tl.constexpr):
    """One tile."""
    t, x = tl.program_id(0), tl.arange(0, BLOCK_X)
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
def _multiply(x_ptr, w_ptr, K: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr):
    """Rows times columns, both K long; the pointers are those of the first BLOCK_K."""
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
def up_kernel(
    act, inputs, weights, limits, order, tiles, J: tl.constexpr, INNER: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile of rows and BLOCK_N // 2 columns of both halves."""
    HALF: tl.constexpr = BLOCK_N // 2
    PARTS: tl.constexpr = (INNER + HALF - 1) // HALF
    t, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    expert = tl.load(tiles + t * 3)
    if expert < 0:
        return
    first, last = tl.load(tiles + t * 3 + 1), tl.load(tiles + t * 3 + 2)
    row, n, k = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    token = tl.load(order + tl.minimum(row, last)) // J
    x_ptr = inputs + token[:, None] * D + k[None, :]
    of_half = (n % 2) * INNER + tl.minimum(part * HALF + n // 2, INNER - 1)
    w_ptr = weights + expert.to(tl.int64) * (2 * INNER * D) + of_half[None, :] * D + k[:, None]
    sum_ = _multiply(x_ptr, w_ptr, D, BLOCK_K, DOT)
    gate, up = tl.split(tl.reshape(sum_, (BLOCK_M, HALF, 2)))
    limit = tl.load(limits + expert)
    gate = gate / (1.0 + tl.exp(-gate))
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    column = part * HALF + tl.arange(0, HALF)
    seen = (row <= last)[:, None] & (column < INNER)[None, :]
    tl.store(act + row.to(tl.int64)[:, None] * INNER + column[None, :], (gate * up).to(act.dtype.element_ty), mask=seen)


@triton.jit
def down_kernel(
    outputs, act, weights, order, tiles, D: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile of rows and BLOCK_N columns."""
    PARTS: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    t, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    expert = tl.load(tiles + t * 3)
    if expert < 0:
        return
    first, last = tl.load(tiles + t * 3 + 1), tl.load(tiles + t * 3 + 2)
    row, column, k = first + tl.arange(0, BLOCK_M), part * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    pair = tl.load(order + tl.minimum(row, last))
    x_ptr = act + tl.minimum(row, last).to(tl.int64)[:, None] * INNER + k[None, :]
    w_ptr = weights + expert.to(tl.int64) * (D * INNER) + tl.minimum(column, D - 1)[None, :] * INNER + k[:, None]
    sum_ = _multiply(x_ptr, w_ptr, INNER, BLOCK_K, DOT)
    seen = (row <= last)[:, None] & (column < D)[None, :]
    tl.store(outputs + pair[:, None] * D + column[None, :], sum_.to(outputs.dtype.element_ty), mask=seen)


def run_each(x_ND: Tensor, ids_NJ: Tensor, gate_up_XCD: Tensor, down_XDI: Tensor, limits_X: Tensor) -> Tensor:
    """See the package. In float32 a sum is one chain of multiply-adds: some times torch's error at wide rows."""
    tiles = tile_rows(*sort_by_expert(ids_NJ, len(limits_X)))
    return down(up(x_ND, gate_up_XCD, limits_X, tiles), down_XDI, tiles).view(*ids_NJ.shape, -1)


def tile_rows(order_M: Tensor, ends_X: Tensor, block_rows: int = BLOCK_ROWS) -> Tiles:
    """Cut what ``sort_by_expert`` gives (order_M, ends_X) into tiles of at most ``block_rows`` rows of one expert."""
    num_tiles = triton.cdiv(len(order_M), block_rows) + min(len(ends_X), len(order_M))  # as many, or more
    tiles_T3 = torch.empty(num_tiles, 3, dtype=torch.int32, device=ends_X.device)
    block = triton.next_power_of_2(len(ends_X))
    tile_kernel[(num_tiles,)](tiles_T3, ends_X, X=len(ends_X), BLOCK_X=block, BLOCK_M=block_rows, num_warps=4)
    return Tiles(order_M, tiles_T3, block_rows)


def up(x_ND: Tensor, gate_up_XCD: Tensor, limits_X: Tensor, tiles: Tiles, **changes: Any) -> Tensor:
    """SwiGLU of the picks' rows in the sorted order, [M, I]."""
    (_, doubled, width), num_rows = gate_up_XCD.shape, len(tiles.order_M)
    choice, num_inner = UP | changes, doubled // 2
    act_MI = x_ND.new_empty(num_rows, num_inner)
    up_kernel[(len(tiles.tiles_T3) * triton.cdiv(num_inner, choice["block_n"] // 2),)](
        act_MI, x_ND, gate_up_XCD, limits_X, tiles.order_M, tiles.tiles_T3, J=num_rows // len(x_ND), INNER=num_inner,
        D=width, **_shape(choice, tiles, x_ND.dtype),
    )  # fmt: skip
    return act_MI


def down(act_MI: Tensor, down_XDI: Tensor, tiles: Tiles, **changes: Any) -> Tensor:
    """The sorted rows through their experts' down matrices, in the order of the picks, [M, D]."""
    (_, width, num_inner), choice = down_XDI.shape, DOWN | changes
    outputs_MD = act_MI.new_empty(len(act_MI), width)
    down_kernel[(len(tiles.tiles_T3) * triton.cdiv(width, choice["block_n"]),)](
        outputs_MD, act_MI, down_XDI, tiles.order_M, tiles.tiles_T3, D=width, INNER=num_inner,
        **_shape(choice, tiles, act_MI.dtype),
    )  # fmt: skip
    return outputs_MD


def _shape(choice: dict[str, int], tiles: Tiles, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments that both products share; in float32 a thread's products are many, so its tiles are small."""
    if dtype == torch.float32:
        choice = choice | {"block_k": 32, "num_stages": 1}
    sizes = {"BLOCK_M": tiles.block_rows, "BLOCK_N": choice["block_n"], "BLOCK_K": choice["block_k"]}
    return {**sizes, "DOT": launch.dot_dtype(dtype), **{x: choice[x] for x in ("num_warps", "num_stages")}}
