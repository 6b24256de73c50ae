"""Kimi Delta Attention over one step's tokens on the GPU: ``verify`` and ``commit`` of reference.py.

A warp owns up to 4 columns of a head's state with all their rows: lane l holds the rows l, l + 32, ..., so that a key
is one number a lane and 32 rows, four columns are one 16-byte load, and a sum over the rows is a chain of multiply-adds
and one butterfly within the warp. No vector ever changes its layout and no warp waits for another.
The rule of a token is ``rule.advance`` for both kernels, every multiply-add is written out and the compiler's own
fusion is off: the bits depend neither on the kernel nor on T nor on the tiling.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import launch
from dspark.kernels.kda import rule

VERIFY_WARPS, VERIFY_COLUMNS = 4, 2
"""Warps a program (twice as many from 16 heads on) and columns a warp (1, 2 or 4): 8 or 16 heads of 128 give 128
programs for 132 SMs, one or two warps to each of an SM's four schedulers."""
VERIFY_REGISTERS = 128
"""With so many allowed, the assembler lays the sums over the rows side by side; left alone, it saves registers instead
and takes one after the other: by its own latencies twice the time for a token."""
COMMIT_WARPS, COMMIT_COLUMNS = 4, 4
"""Whole sectors of the state to every program, and many of them on an SM."""


@triton.jit
def verify_kernel(
    o_ptr, prepared_ptr, state_ptr, scale, num_tokens, H: tl.constexpr, E: tl.constexpr, WARPS: tl.constexpr,
    COLUMNS: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, head): all tokens of those columns. The state is read before the wait.

    The output of a token, S^T q with S = faded + k delta^T, is taken as faded^T q + (k q) delta: all sums over the rows
    are side by side, and only that of faded^T k is waited for by the next token.
    """
    PIECES: tl.constexpr = (E + rule.LANES - 1) // rule.LANES
    C: tl.constexpr = 5 * H * E + H
    head = tl.program_id(1)
    lanes, columns, mask = rule.places(tl.program_id(0), E, WARPS, COLUMNS)
    state = rule.load_state(state_ptr + head * E * E, lanes, columns, mask, E, PIECES)
    launch.follow(IS_CHAINED)
    q = rule.load_rows(prepared_ptr + head * E, lanes, E, PIECES)
    k, kept, v, beta = rule.load_token(prepared_ptr, head, lanes, columns, mask, H, E, PIECES)
    for t in range(num_tokens):
        next_q, next_k, next_kept, next_v, next_beta = q, k, kept, v, beta
        if t + 1 < num_tokens:  # asked for before this token is worked on
            next_ptr = prepared_ptr + (t + 1) * C
            next_q = rule.load_rows(next_ptr + head * E, lanes, E, PIECES)
            next_k, next_kept, next_v, next_beta = rule.load_token(next_ptr, head, lanes, columns, mask, H, E, PIECES)
        faded = rule.fade(state, kept, PIECES)
        kk, qq, qk = rule.product(k, k, PIECES), rule.product(q, q, PIECES), rule.product(q, k, PIECES)
        read, seen = rule.product(faded, k, PIECES), rule.product(faded, q, PIECES)
        state, delta = rule.advance(faded, read, k, kk, v, beta, PIECES)
        o = tl.fma(delta, qk, seen) * (tl.rsqrt(qq + rule.EPS) * scale)
        out_ptr = o_ptr + (t * H + head) * E + columns
        tl.store(out_ptr, tl.reshape(o, columns.shape).to(o_ptr.dtype.element_ty), mask=mask & (lanes == 0))
        q, k, kept, v, beta = next_q, next_k, next_kept, next_v, next_beta


@triton.jit
def commit_kernel(
    projected_ptr, prepared_ptr, history_ptr, state_ptr, count_ptr, LAYER_STRIDE: tl.constexpr, STRIDE: tl.constexpr,
    T: tl.constexpr, H: tl.constexpr, E: tl.constexpr, J: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, head, layer): their state, and the history of their q, k and v channels."""
    PIECES: tl.constexpr = (E + rule.LANES - 1) // rule.LANES
    TILE: tl.constexpr = WARPS * COLUMNS
    C: tl.constexpr = 5 * H * E + H
    tile, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    prepared_ptr += layer * (T * C)
    state_ptr += (layer * H + head) * (E * E)
    lanes, columns, mask = rule.places(tile, E, WARPS, COLUMNS)
    state = rule.load_state(state_ptr, lanes, columns, mask, E, PIECES)
    launch.follow(IS_CHAINED)
    count = tl.load(count_ptr).to(tl.int32)
    if count > 0:
        # the history becomes the rows count, count + 1, ... of the history followed by the inputs
        place = tl.arange(0, 4 * TILE)  # q, k, v and nothing
        column = tile * TILE + place % TILE
        channel = (place // TILE * H + head) * E + column
        is_input = (place < 3 * TILE) & (column < E)
        old_ptr = history_ptr + layer * ((J - 1) * 3 * H * E) + channel
        new_ptr = projected_ptr + layer * LAYER_STRIDE + channel
        inputs = ()
        for w in tl.static_range(J - 1):
            row = count + w
            old = tl.load(old_ptr + row * (3 * H * E), mask=is_input & (row < J - 1), other=0.0)
            new = tl.load(new_ptr + (row - (J - 1)) * STRIDE, mask=is_input & (row >= J - 1), other=0.0)
            inputs += (tl.where(row < J - 1, old, new),)
        for w in tl.static_range(J - 1):  # a thread has read all rows of its channels
            tl.store(old_ptr + w * (3 * H * E), inputs[w], mask=is_input)
        k, kept, v, beta = rule.load_token(prepared_ptr, head, lanes, columns, mask, H, E, PIECES)
        for t in range(count):
            next_k, next_kept, next_v, next_beta = k, kept, v, beta
            if t + 1 < count:
                at = prepared_ptr + (t + 1) * C
                next_k, next_kept, next_v, next_beta = rule.load_token(at, head, lanes, columns, mask, H, E, PIECES)
            square = rule.product(k, k, PIECES)
            faded = rule.fade(state, kept, PIECES)
            state, _ = rule.advance(faded, rule.product(faded, k, PIECES), k, square, v, beta, PIECES)
            k, kept, v, beta = next_k, next_kept, next_v, next_beta
        for i in tl.static_range(PIECES):
            row = lanes + i * rule.LANES
            tl.store(state_ptr + row * E + columns, tl.reshape(state[i], columns.shape), mask=(row < E) & mask)


def _warps(most: int, width: int, columns: int) -> int:
    return min(most, triton.next_power_of_2(triton.cdiv(width, columns)))


def verify(
    prepared_TC: Tensor, state_HEF: Tensor, dtype: torch.dtype, *, is_chained: bool = False,
    num_warps: int | None = None, columns: int = VERIFY_COLUMNS,
) -> Tensor:  # fmt: skip
    """``reference.verify``; a program owns num_warps * columns columns of a head."""
    num_tokens, (num_heads, width, _) = len(prepared_TC), state_HEF.shape
    warps = num_warps or _warps(VERIFY_WARPS if num_heads < 16 else 2 * VERIFY_WARPS, width, columns)
    o_THF = prepared_TC.new_empty(num_tokens, num_heads, width, dtype=dtype)
    verify_kernel[(triton.cdiv(width, columns * warps), num_heads)](
        o_THF, prepared_TC, state_HEF, width**-0.5, num_tokens, H=num_heads, E=width, WARPS=warps, COLUMNS=columns,
        num_warps=warps, maxnreg=VERIFY_REGISTERS, enable_fp_fusion=False, **launch.options(is_chained),
    )  # fmt: skip
    return o_THF


def commit(
    projected_LTC: Tensor, prepared_LTC: Tensor, history_LWC: Tensor, state_LHEF: Tensor, count_1: Tensor, *,
    is_chained: bool = False, num_warps: int | None = None, columns: int = COMMIT_COLUMNS,
) -> None:  # fmt: skip
    """``reference.commit``; a program owns num_warps * columns columns of a head."""
    num_layers, num_heads, width, _ = state_LHEF.shape
    warps = num_warps or _warps(COMMIT_WARPS, width, columns)
    commit_kernel[(triton.cdiv(width, columns * warps), num_heads, num_layers)](
        projected_LTC, prepared_LTC, history_LWC, state_LHEF, count_1,
        LAYER_STRIDE=projected_LTC.stride(0), STRIDE=projected_LTC.stride(1), T=projected_LTC.shape[1],
        H=num_heads, E=width, J=history_LWC.shape[1] + 1, WARPS=warps, COLUMNS=columns,
        num_warps=warps, enable_fp_fusion=False, **launch.options(is_chained),
    )  # fmt: skip
