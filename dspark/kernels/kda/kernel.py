"""Kimi Delta Attention over one step's tokens on the GPU: ``verify`` and ``commit`` of reference.py.

A warp owns 4 columns of a head's state (or a multiple) with all their rows: lane l holds the rows l, l + 32, ..., so
that a key is one number a lane and 32 rows, four columns are one 16-byte load, and a sum over the rows is a chain of
multiply-adds and one butterfly within the warp. No vector ever changes its layout.
What all columns of a head share (k, decay, q: convolution, norm, gate) is prepared once a program, a token a warp, and
passed through global memory under one barrier.
The rule of a token is ``rule.advance`` for both kernels, every multiply-add is written out and the compiler's own
fusion is off: the bits depend neither on the kernel nor on T nor on the tiling.
"""

import torch
import triton
import triton.language as tl

from dspark.kernels import launch
from dspark.kernels.kda.rule import (
    COLUMNS,
    LANES,
    advance,
    load_rows,
    load_state,
    places,
    store_state,
    upright,
    write_output,
)
from dspark.kernels.kda.staging import load_staged, stage

VERIFY_WARPS, VERIFY_GROUPS = 4, 1
"""Warps a program and groups of four columns a warp: 8 heads of 128 give 64 programs for 132 SMs, a warp to each of an
SM's four schedulers."""
COMMIT_WARPS, COMMIT_GROUPS = 4, 4
"""One program a head, since it overwrites the history that all columns read. At 153 registers three fit on an SM: 35
layers of 8 heads are one wave."""


@triton.jit
def verify_kernel(
    o_ptr,
    staged_ptr,
    projected_ptr,
    history_ptr,
    conv_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    lower_bound,
    scale,
    num_tokens,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    J: tl.constexpr,
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """Program (tile of columns, head): all tokens of those columns. The state is read before the wait.

    The warps of a program share out the tokens to prepare and meet at one barrier.
    """
    PIECES: tl.constexpr = (E + LANES - 1) // LANES
    TILE: tl.constexpr = WARPS * GROUPS * COLUMNS
    head = tl.program_id(1)
    rows, row_masks, columns, column_masks = places(tl.program_id(0), E, WARPS, GROUPS, PIECES)
    state = load_state(state_ptr + head * E * E, columns, column_masks, E, WARPS, PIECES, GROUPS)
    staged_ptr += (tl.program_id(0) * H + head) * num_tokens * (4 * E)
    launch.wait(IS_CHAINED)
    launch.signal(IS_CHAINED)
    for step in range((num_tokens + WARPS - 1) // WARPS):
        stage(
            staged_ptr,
            projected_ptr,
            history_ptr,
            conv_ptr,
            a_log_ptr + head,
            dt_bias_ptr + head * E,
            lower_bound,
            scale,
            num_tokens,
            head,
            step,
            tl.program_id(0) * TILE,
            STRIDE,
            H,
            E,
            J,
            WARPS,
            (TILE + LANES - 1) // LANES,
            True,
        )
    tl.debug_barrier()  # what the warps staged is seen
    b_ptr = projected_ptr + 5 * H * E + head
    k, kept, v, b = load_staged(staged_ptr, b_ptr, rows, row_masks, columns, column_masks, E, PIECES, GROUPS)
    q = load_rows(staged_ptr + 3 * E, rows, 1, row_masks, PIECES)
    for t in range(num_tokens):
        after = tl.minimum(t + 1, num_tokens - 1)  # the next token, asked for before this one is worked on
        token_ptr = staged_ptr + after * (4 * E)
        next_k, next_kept, next_v, next_b = load_staged(
            token_ptr, b_ptr + after * STRIDE, rows, row_masks, columns, column_masks, E, PIECES, GROUPS
        )
        next_q = load_rows(token_ptr + 3 * E, rows, 1, row_masks, PIECES)
        state = advance(state, upright(kept, PIECES), upright(k, PIECES), v, tl.sigmoid(b), PIECES, GROUPS)
        out_ptr = o_ptr + (t * H + head) * E
        write_output(out_ptr, state, upright(q, PIECES), columns, column_masks, WARPS, GROUPS, PIECES)
        q, k, kept, v, b = next_q, next_k, next_kept, next_v, next_b


@triton.jit
def _replay(
    staged_ptr,
    b_ptr,
    state_ptr,
    count,
    tile,
    STRIDE: tl.constexpr,
    E: tl.constexpr,
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Bring a tile of columns of one head's state ``count`` >= 1 staged tokens on."""
    PIECES: tl.constexpr = (E + LANES - 1) // LANES
    rows, row_masks, columns, column_masks = places(tile, E, WARPS, GROUPS, PIECES)
    state = load_state(state_ptr, columns, column_masks, E, WARPS, PIECES, GROUPS)
    k, kept, v, b = load_staged(staged_ptr, b_ptr, rows, row_masks, columns, column_masks, E, PIECES, GROUPS)
    for t in range(count):
        after = tl.minimum(t + 1, count - 1)  # the next token, asked for before this one is worked on
        next_k, next_kept, next_v, next_b = load_staged(
            staged_ptr + after * (3 * E),
            b_ptr + after * STRIDE,
            rows,
            row_masks,
            columns,
            column_masks,
            E,
            PIECES,
            GROUPS,
        )
        state = advance(state, upright(kept, PIECES), upright(k, PIECES), v, tl.sigmoid(b), PIECES, GROUPS)
        k, kept, v, b = next_k, next_kept, next_v, next_b
    store_state(state_ptr, state, columns, column_masks, E, WARPS, PIECES, GROUPS)


@triton.jit
def commit_kernel(
    staged_ptr,
    projected_ptr,
    history_ptr,
    conv_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    count_ptr,
    lower_bound,
    LAYER_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    J: tl.constexpr,
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    HISTORY_ROWS: tl.constexpr,
    HISTORY_CHANNELS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """Program (head, layer): what all columns share of the first tokens, the history, then the state in tiles."""
    C: tl.constexpr = 3 * H * E
    head, layer = tl.program_id(0), tl.program_id(1)
    projected_ptr += layer.to(tl.int64) * LAYER_STRIDE
    history_ptr += layer.to(tl.int64) * ((J - 1) * C)
    conv_ptr += layer.to(tl.int64) * (C * J)
    a_log_ptr += layer * H + head
    dt_bias_ptr += (layer * H + head) * E
    state_ptr += (layer * H + head).to(tl.int64) * (E * E)
    staged_ptr += (layer * H + head) * (T * 3 * E)
    launch.wait(IS_CHAINED)
    launch.signal(IS_CHAINED)
    count = tl.load(count_ptr).to(tl.int32)
    if count > 0:
        # the history becomes the rows count, count + 1, ... of the history followed by the inputs
        w = tl.arange(0, HISTORY_ROWS)[:, None]
        place = tl.arange(0, HISTORY_CHANNELS)[None, :]
        channel = (place // E * H + head) * E + place % E
        is_written = (w < J - 1) & (place < 3 * E)
        is_old = count + w < J - 1
        old = tl.load(history_ptr + (count + w) * C + channel, mask=is_written & is_old, other=0.0)
        new_ptr = projected_ptr + (count + w - (J - 1)) * STRIDE + channel
        new = tl.load(new_ptr, mask=is_written & (count + w >= J - 1), other=0.0)
        for step in range((count + WARPS - 1) // WARPS):
            stage(
                staged_ptr,
                projected_ptr,
                history_ptr,
                conv_ptr,
                a_log_ptr,
                dt_bias_ptr,
                lower_bound,
                1.0,
                count,
                head,
                step,
                0,
                STRIDE,
                H,
                E,
                J,
                WARPS,
                (E + LANES - 1) // LANES,
                False,
            )
        tl.debug_barrier()  # every warp has read the history, and what it staged is seen
        tl.store(history_ptr + w * C + channel, tl.where(is_old, old, new.to(old.dtype)), mask=is_written)
        for tile in range(TILES):
            _replay(staged_ptr, projected_ptr + 5 * H * E + head, state_ptr, count, tile, STRIDE, E, WARPS, GROUPS)


def verify(
    projected_TC: torch.Tensor,
    history_WC: torch.Tensor,
    conv_CJ: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_HE: torch.Tensor,
    state_HEF: torch.Tensor,
    lower_bound: float,
    *,
    is_chained: bool = False,
    num_warps: int | None = None,
    groups: int = VERIFY_GROUPS,
) -> torch.Tensor:
    """``reference.verify``; a program owns num_warps * groups * 4 columns of a head."""
    num_tokens, (num_heads, width, _) = len(projected_TC), state_HEF.shape
    warps = num_warps or min(VERIFY_WARPS, triton.next_power_of_2(triton.cdiv(width, 4 * groups)))
    tiles = triton.cdiv(width, 4 * groups * warps)
    o_THF = projected_TC.new_empty(num_tokens, num_heads, width)
    staged = state_HEF.new_empty(tiles, num_heads, num_tokens, 4, width)
    verify_kernel[(tiles, num_heads)](
        o_THF,
        staged,
        projected_TC,
        history_WC,
        conv_CJ,
        a_log_H,
        dt_bias_HE,
        state_HEF,
        lower_bound,
        width**-0.5,
        num_tokens,
        STRIDE=projected_TC.stride(0),
        H=num_heads,
        E=width,
        J=conv_CJ.shape[1],
        WARPS=warps,
        GROUPS=groups,
        num_warps=warps,
        enable_fp_fusion=False,
        **launch.options(is_chained),
    )
    return o_THF


def commit(
    projected_LTC: torch.Tensor,
    history_LWC: torch.Tensor,
    conv_LCJ: torch.Tensor,
    a_log_LH: torch.Tensor,
    dt_bias_LHE: torch.Tensor,
    state_LHEF: torch.Tensor,
    lower_bound: float,
    count_1: torch.Tensor,
    *,
    is_chained: bool = False,
    num_warps: int | None = None,
    groups: int = COMMIT_GROUPS,
) -> None:
    """``reference.commit``; a program owns a head and goes through it by num_warps * groups * 4 columns."""
    num_layers, num_heads, width, _ = state_LHEF.shape
    num_taps = conv_LCJ.shape[2]
    warps = num_warps or min(COMMIT_WARPS, triton.next_power_of_2(triton.cdiv(width, 4 * groups)))
    num_tokens = projected_LTC.shape[1]
    staged = state_LHEF.new_empty(num_layers, num_heads, num_tokens, 3, width)
    commit_kernel[(num_heads, num_layers)](
        staged,
        projected_LTC,
        history_LWC,
        conv_LCJ,
        a_log_LH,
        dt_bias_LHE,
        state_LHEF,
        count_1,
        lower_bound,
        LAYER_STRIDE=projected_LTC.stride(0),
        STRIDE=projected_LTC.stride(1),
        H=num_heads,
        E=width,
        J=num_taps,
        WARPS=warps,
        GROUPS=groups,
        TILES=triton.cdiv(width, 4 * groups * warps),
        T=num_tokens,
        HISTORY_ROWS=triton.next_power_of_2(num_taps - 1),
        HISTORY_CHANNELS=triton.next_power_of_2(3 * width),
        num_warps=warps,
        enable_fp_fusion=False,
        **launch.options(is_chained),
    )
