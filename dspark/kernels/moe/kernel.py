"""The experts of one step (T = 1..16 tokens) in two launches, up with SwiGLU and down.

The experts' weights are the large side of the product and the tokens the narrow one (8 or 16 columns, of which absent
ones read nothing). A program owns a unit, an expert and a row tile with all K: nothing is summed across programs, and
a token's result depends neither on T nor on its column. Two forms, one arithmetic:
    plain   software-pipelined over K; many small programs hide each other's ends.
    whole   all K loaded at once and, in a chain, before ``wait``: short K only.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import MAX_TOKENS, launch
from dspark.kernels.router import Dispatch

UP = {"form": "plain", "block_rows": 16, "min_rows": 8, "block_k": 128, "num_stages": 5, "num_warps": 2}
"""At a quarter of flash 828 units of 164 KB, 6.3 a multiprocessor; 32 KB of weights in flight a program."""

DOWN = {"form": "whole", "block_rows": 64, "min_rows": 64, "block_k": 64, "num_stages": 1, "num_warps": 4}
"""At a quarter of flash 2760 units of 24 KB; a row is only 384 bytes, so all of it is one program's."""

DOWN_HALF = DOWN | {"form": "plain", "block_rows": 128, "min_rows": 32, "block_k": 128, "num_stages": 3, "num_warps": 8}
"""At half of flash (384)."""

UP_ONE = UP | {"block_k": 256, "num_stages": 4}
DOWN_ONE = DOWN | {"block_k": 128, "num_warps": 2}
"""Of one token at half of flash, where few experts keep no memory busy; down loads all its weights before ``wait``."""

DOWN_WIDE = DOWN | {"form": "plain", "block_rows": 32, "min_rows": 16, "block_k": 128, "num_stages": 5}
"""The dense MLP (6144 / 4), and experts that are not sharded (768)."""

PADDED = tl.constexpr(MAX_TOKENS)
MIN_UNITS = 4 * 132
"""With fewer the row tile is halved, down to min_rows. A sum is one chain over K in every size and instruction."""


@triton.jit
def _weight_tile(
    weights, expert, tile, start, HALVES: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows tile*BLOCK_R.. of every half of an expert's matrix, columns start..: [HALVES * BLOCK_R, BLOCK_K]."""
    index = tl.arange(0, HALVES * BLOCK_R)
    row, k = tile * BLOCK_R + index % BLOCK_R, start + tl.arange(0, BLOCK_K)
    base = weights + expert.to(tl.int64) * (HALVES * R * K)
    pointers = base + (index // BLOCK_R * R + row)[:, None] * K + k[None, :]
    if R % BLOCK_R == 0 and K % BLOCK_K == 0:
        return tl.load(pointers, eviction_policy="evict_first")
    else:
        seen = (row < R)[:, None] & (k < K)[None, :]
        return tl.load(pointers, mask=seen, other=0.0, eviction_policy="evict_first")


@triton.jit
def _input_tile(inputs, pair, start, PAIRS_A_ROW: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns start.. of the input rows of an expert's pairs, zero where there is none: [N, BLOCK_K]."""
    k = start + tl.arange(0, BLOCK_K)
    pointers = inputs + (pair // PAIRS_A_ROW)[:, None] * K + k[None, :]
    seen = (pair >= 0)[:, None]
    if K % BLOCK_K != 0:
        seen = seen & (k < K)[None, :]
    return tl.load(pointers, mask=seen, other=0.0)


@triton.jit
def _round(x, DTYPE: tl.constexpr, DOT: tl.constexpr):
    """x as DTYPE would hold it, in float32. The interpreter, whose DOT is float32, cuts bfloat16 off: round by hand."""
    if DTYPE.is_bf16() and DOT.is_fp32():
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["last_expert"])
def _unit_kernel(
    inputs, weights, limits, experts, pairs, outputs, last_expert, PAIRS_A_ROW: tl.constexpr, HALVES: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, IS_WHOLE: tl.constexpr, LINES: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """One unit.

    In a chain ``plain`` asks, before it knows what the router chose, for the last expert, which is always visited.
    """
    DOT: tl.constexpr = launch.dot_dtype(inputs.dtype.element_ty)
    TILES: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    slot, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    if not IS_WHOLE:
        MATRIX: tl.constexpr = HALVES * R * K
        BYTES: tl.constexpr = MATRIX * inputs.dtype.element_ty.primitive_bitwidth // 8
        last = weights + last_expert.to(tl.int64) * MATRIX
        launch.prefetch_lines(last, tl.program_id(0) * LINES, BYTES, LINES, IS_CHAINED)
        launch.follow(IS_CHAINED)
    expert = tl.load(experts + slot, cache_modifier=".cg")
    if expert < 0:
        return
    pair = tl.load(pairs + slot * PADDED + tl.arange(0, N), cache_modifier=".cg")
    acc = tl.zeros((HALVES * BLOCK_R, N), tl.float32)
    if IS_WHOLE:
        tiles = ()
        for chunk in tl.static_range(CHUNKS):
            tiles += (_weight_tile(weights, expert, tile, chunk * BLOCK_K, HALVES, R, K, BLOCK_R, BLOCK_K),)
        launch.follow(IS_CHAINED)
        x_tiles = ()
        for chunk in tl.static_range(CHUNKS):
            x_tiles += (_input_tile(inputs, pair, chunk * BLOCK_K, PAIRS_A_ROW, K, BLOCK_K).to(DOT),)
        for chunk in tl.static_range(CHUNKS):
            acc = tl.dot(tiles[chunk].to(DOT), tl.trans(x_tiles[chunk]), acc, input_precision="ieee")
    else:
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            w_tile = _weight_tile(weights, expert, tile, start, HALVES, R, K, BLOCK_R, BLOCK_K)
            x_tile = _input_tile(inputs, pair, start, PAIRS_A_ROW, K, BLOCK_K).to(DOT)
            acc = tl.dot(w_tile.to(DOT), tl.trans(x_tile), acc, input_precision="ieee")
    # Round a unit's sums and write them to its pairs' rows; two halves are gate and up and become SwiGLU first.
    DTYPE: tl.constexpr = outputs.dtype.element_ty
    row = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = _round(acc, DTYPE, DOT)
    if HALVES == 2:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_R, N)), (1, 2, 0)))
        limit = tl.load(limits + expert)
        gate = _round(gate / (1.0 + tl.exp(-gate)), DTYPE, DOT)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        acc = _round(gate * up, DTYPE, DOT)
    pointers = outputs + pair[None, :] * R + row[:, None]
    tl.store(pointers, acc.to(DTYPE), mask=(pair >= 0)[None, :] & (row < R)[:, None])


def up(
    x_TD: Tensor, gate_up_XCD: Tensor, dispatch: Dispatch, limits_X: Tensor, *, is_chained: bool = False, **changes: Any
) -> Tensor:
    """See the package. ``changes`` to UP."""
    choice = (UP_ONE if len(x_TD) == 1 and gate_up_XCD.shape[1] > 512 else UP) | changes
    return _multiply(x_TD, gate_up_XCD, limits_X, dispatch, choice, is_chained)


def down(act_MI: Tensor, down_XDI: Tensor, dispatch: Dispatch, *, is_chained: bool = False, **changes: Any) -> Tensor:
    """See the package. ``changes`` to DOWN."""
    width, half = down_XDI.shape[2], DOWN_ONE if len(dispatch.weights_TJ) == 1 else DOWN_HALF
    choice = (DOWN if width <= 256 else half if width <= 512 else DOWN_WIDE) | changes
    return _multiply(act_MI, down_XDI, None, dispatch, choice, is_chained).view(*dispatch.weights_TJ.shape, -1)


def _multiply(
    inputs: Tensor, weights: Tensor, limits: Tensor | None, dispatch: Dispatch, choice: dict[str, Any], is_chained: bool
) -> Tensor:
    """Every pair's row, in the form of ``choice``: with limits up, of its token's input, else down, of its own."""
    (num_tokens, num_slots), num_visits = dispatch.weights_TJ.shape, len(dispatch.pairs_PN)
    halves, pairs_a_row = (1, 1) if limits is None else (2, num_slots)
    num_rows, width = weights.shape[1] // halves, weights.shape[2]
    outputs = inputs.new_empty(num_tokens * num_slots, num_rows)
    block_rows = choice["block_rows"]
    while block_rows > choice["min_rows"] and num_visits * triton.cdiv(num_rows, block_rows) < MIN_UNITS:
        block_rows //= 2
    _unit_kernel[(num_visits * triton.cdiv(num_rows, block_rows),)](
        inputs, weights, limits, dispatch.experts_P, dispatch.pairs_PN, outputs, len(weights) - 1,
        PAIRS_A_ROW=pairs_a_row, HALVES=halves, R=num_rows, K=width, N=8 if num_tokens <= 8 else MAX_TOKENS,
        BLOCK_R=block_rows, BLOCK_K=choice["block_k"], STAGES=choice["num_stages"],
        IS_WHOLE=choice["form"] == "whole", LINES=32 * choice["num_warps"], num_warps=choice["num_warps"],
        **launch.options(is_chained),
    )  # fmt: skip
    return outputs
