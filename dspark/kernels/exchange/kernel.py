"""Sums and gathers over ranks in Triton: one program a token row, one hop between GPUs, no flag and no fence.

A call pushes its row into its place in every rank's slots, over peer pointers, and polls its own slots until every
number of every rank has arrived: an empty place holds -0.0, and no one sends -0.0 (it is sent as 0.0). A number is four
bytes (two in bfloat16) and arrives whole, so the order in which numbers arrive does not matter.
Three sets of slots take turns. Call n uses set n mod 3 and empties set n-1 mod 3 of its own rank, which it has read in
the call before and which others write next in call n+2, after they have seen this rank's push of call n+1. The turn is
counted on the device, one counter a program, so that a captured graph may be replayed. All rows' programs always run,
also those without a token: they empty and count. Sums and gathers are calls of one series and share its turns.
A rank that waits longer than its limit names the lowest rank that it misses, and waits no more: its turn is negative
from then on, its sums are NaN and its gathers zero (they may hold token ids, which must stay valid).
Source: specs/verifier-kernels.md section 3, K1; the sentinel protocol is known as Lamport's from TensorRT-LLM's
one-shot all-reduce.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import launch
from dspark.kernels.exchange import Exchange
from dspark.kernels.residual.kernel import finish_row, registers_for, sum_parts, warps_for

POLLS_PER_LOOK = tl.constexpr(1 if launch.IS_INTERPRETED else 256)
"""Polls between two looks at the clock, which is slower to read than a slot."""


@triton.constexpr_function
def empty_bits(bits: tl.dtype) -> int:
    """The bits of -0.0 as a signed integer of that type."""
    return -(1 << (bits.primitive_bitwidth - 1))


@triton.jit
def nanoseconds(polls):
    """What all threads agree that the time is; in the interpreter, which knows no clock, a microsecond a poll."""
    if not launch.IS_INTERPRETED:
        thread_N = tl.arange(0, tl.extra.cuda.num_threads())  # one each: no thread may leave a loop before another
        now_N = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [thread_N], dtype=tl.int64, is_pure=False, pack=1
        )
        return tl.max(now_N, 0)
    else:
        return polls.to(tl.int64) * 1000


@triton.jit
def push_row(bits_C, peers, offset, column_C, is_sent_C, rank, RANKS: tl.constexpr):
    """Write a row into this rank's place at every rank: others first, each rank in another order."""
    bits_C = tl.where(bits_C == empty_bits(bits_C.dtype), 0, bits_C)
    for step in tl.static_range(RANKS):
        base = tl.load(peers + (rank + 1 + step) % RANKS).to(tl.pointer_type(bits_C.dtype))
        base = tl.multiple_of(base, 16)
        tl.store(base + offset + column_C, bits_C, mask=is_sent_C)


@triton.jit
def any_empty(bits_RC):
    """Whether a place is empty, in one reduction."""
    is_empty_N = tl.reshape(bits_RC == empty_bits(bits_RC.dtype), [bits_RC.numel], can_reorder=True)
    return tl.max(is_empty_N.to(tl.int32), 0) > 0


@triton.jit
def receive_row(
    own, turns, errors, row, turn, column_C, is_awaited_C, limit_microseconds, WIDTH: tl.constexpr, RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Empty the last turn's row, await every rank's numbers of this one, count. Also says whether a rank was lost."""
    SIZE: tl.constexpr = ROWS * WIDTH
    bits: tl.constexpr = own.dtype.element_ty
    EMPTY: tl.constexpr = empty_bits(bits)
    rank_R = tl.arange(0, triton.next_power_of_2(RANKS))
    column_D = tl.arange(0, triton.next_power_of_2(WIDTH))
    is_live = turn >= 0
    safe = tl.maximum(turn, 0)
    old = own + (safe + 2) % 3 * (RANKS * SIZE) + row * WIDTH
    empty_RD = tl.full([rank_R.numel, column_D.numel], EMPTY, bits)
    is_row_RD = (rank_R < RANKS)[:, None] & (column_D < WIDTH)[None, :]
    tl.store(old + rank_R[:, None] * SIZE + column_D[None, :], empty_RD, mask=is_row_RD)
    tl.debug_barrier()
    place_RC = own + safe * (RANKS * SIZE) + row * WIDTH + rank_R[:, None] * SIZE + column_C[None, :]
    is_awaited_RC = (rank_R < RANKS)[:, None] & is_awaited_C[None, :] & is_live
    bits_RC = tl.load(place_RC, mask=is_awaited_RC, other=0, volatile=True)
    is_missing = any_empty(bits_RC)
    polls, began, is_in_time = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64), turn == turn
    while is_missing & is_in_time:
        bits_RC = tl.load(place_RC, mask=is_awaited_RC, other=0, volatile=True)
        is_missing = any_empty(bits_RC)
        polls += 1
        if polls % POLLS_PER_LOOK == 0:
            now = nanoseconds(polls)
            began = tl.where(polls == POLLS_PER_LOOK, now, began)
            is_in_time = now - began < limit_microseconds.to(tl.int64) * 1000
    if is_missing:
        missing_RC = tl.where(bits_RC == EMPTY, rank_R[:, None], RANKS)
        tl.store(errors + row, tl.min(tl.min(missing_RC, 1), 0) + 1)
    is_lost = is_missing | (turn < 0)
    tl.store(turns + row, tl.where(is_lost, -1, (safe + 1) % 3))
    return bits_RC, is_lost


@triton.jit(do_not_specialize=["num_tokens", "rank", "limit_microseconds"])  # one code on all ranks
def exchange_kernel(
    parts, weights, residual, norm_weight, new_residual, normed, peers, slots, turns, errors, eps, num_tokens, rank,
    limit_microseconds, PARTS: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    DO_PUSH: tl.constexpr, DO_RECEIVE: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """One token's row: push the partial sum, empty the last turn's slots, gather every rank's, add and normalise."""
    sent: tl.constexpr = slots.dtype.element_ty
    bits: tl.constexpr = tl.int32 if sent.primitive_bitwidth == 32 else tl.int16
    row = tl.program_id(0)
    column_D = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside_D = column_D < WIDTH
    is_token_D = inside_D & (row < num_tokens)
    scale_D = tl.load(norm_weight + column_D, mask=inside_D, other=0.0)
    launch.follow(IS_CHAINED)
    turn = tl.load(turns + row)
    if DO_PUSH:
        total_D = sum_parts(parts, weights, row, row < num_tokens, column_D, is_token_D, WIDTH, PARTS)
        bits_D = total_D.to(sent).to(bits, bitcast=True)
        place = ((turn * RANKS + rank) * ROWS + row) * WIDTH
        push_row(bits_D, peers, place, column_D, is_token_D & (turn >= 0), rank, RANKS)
    if DO_RECEIVE:
        residual_D = tl.load(residual + row * WIDTH + column_D, mask=is_token_D, other=0.0)
        own = slots.to(tl.pointer_type(bits), bitcast=True)
        bits_RD, is_lost = receive_row(
            own, turns, errors, row, turn, column_D, is_token_D, limit_microseconds, WIDTH, RANKS, ROWS
        )  # fmt: skip
        partials_RD = bits_RD.to(sent, bitcast=True).to(tl.float32)
        sum_D = tl.zeros(column_D.shape, tl.float32)
        for source in tl.static_range(RANKS):
            sum_D += tl.sum(tl.where(tl.arange(0, partials_RD.shape[0])[:, None] == source, partials_RD, 0.0), 0)
        sum_D = tl.where(is_lost, float("nan"), sum_D)
        finish_row(residual_D, sum_D, scale_D, new_residual, normed, row * WIDTH + column_D, is_token_D, eps, WIDTH)


@triton.jit(do_not_specialize=["num_tokens", "rank", "limit_microseconds"])
def gather_kernel(
    values, gathered, peers, slots, turns, errors, num_tokens, rank, limit_microseconds, COLUMNS: tl.constexpr,
    COLUMNS_PAD: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, DO_PUSH: tl.constexpr,
    DO_RECEIVE: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """One row of four-byte numbers: push it, and store every rank's."""
    row = tl.program_id(0)
    column_C = tl.arange(0, COLUMNS_PAD)
    is_sent_C = (column_C < COLUMNS) & (row < num_tokens)
    launch.follow(IS_CHAINED)
    turn = tl.load(turns + row)
    if DO_PUSH:
        bits_C = tl.load(values + row * COLUMNS + column_C, mask=is_sent_C, other=0)
        place = ((turn * RANKS + rank) * ROWS + row) * WIDTH
        push_row(bits_C, peers, place, column_C, is_sent_C & (turn >= 0), rank, RANKS)
    if DO_RECEIVE:
        own = slots.to(tl.pointer_type(tl.int32), bitcast=True)
        bits_RC, is_lost = receive_row(
            own, turns, errors, row, turn, column_C, is_sent_C, limit_microseconds, WIDTH, RANKS, ROWS
        )  # fmt: skip
        rank_R = tl.arange(0, bits_RC.shape[0])[:, None]
        place_RC = gathered + (rank_R * num_tokens + row) * COLUMNS + column_C[None, :]
        bits_RC = tl.where(is_lost, 0, bits_RC)
        tl.store(place_RC, bits_RC, mask=(rank_R < RANKS) & is_sent_C[None, :])


def add_norm(
    parts_TKD: Tensor, weights_TK: Tensor | None, residual_TD: Tensor, norm_weight_D: Tensor, eps: float,
    exchange: Exchange, *, phases: tuple[bool, bool] = (True, True), is_chained: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See ``dspark.kernels.exchange.add_norm``. ``phases``: push, receive; apart when one process plays all ranks."""
    num_tokens, num_parts, width = parts_TKD.shape
    num_warps = warps_for(width)
    new_residual_TD, normed_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
    exchange_kernel[(len(exchange.turns_P),)](
        parts_TKD, weights_TK, residual_TD, norm_weight_D, new_residual_TD, normed_TD, eps=eps, num_tokens=num_tokens,
        PARTS=num_parts, num_warps=num_warps, maxnreg=registers_for(num_warps), **_shared(exchange, phases, is_chained),
    )  # fmt: skip
    return new_residual_TD, normed_TD


def gather(
    values_TC: Tensor, exchange: Exchange, *, phases: tuple[bool, bool] = (True, True), is_chained: bool = False
) -> Tensor:
    """See ``dspark.kernels.exchange.gather``; values of int32. ``phases`` as in ``add_norm``."""
    num_tokens, num_columns = values_TC.shape
    _, num_ranks, num_rows, width = exchange.slots_SRPD.shape
    num_warps = warps_for(width)
    columns_pad = max(triton.next_power_of_2(num_columns), 32 * num_warps)  # two threads must not poll one number
    gathered_RTC = values_TC.new_empty(num_ranks, num_tokens, num_columns)
    gather_kernel[(num_rows,)](
        values_TC, gathered_RTC, num_tokens=num_tokens, COLUMNS=num_columns, COLUMNS_PAD=columns_pad,
        num_warps=num_warps, **_shared(exchange, phases, is_chained),
    )  # fmt: skip
    return gathered_RTC


def _shared(exchange: Exchange, phases: tuple[bool, bool], is_chained: bool) -> dict[str, Any]:
    _, num_ranks, num_rows, width = exchange.slots_SRPD.shape
    return {
        "peers": exchange.peers_R, "slots": exchange.slots_SRPD, "turns": exchange.turns_P,
        "errors": exchange.errors_P, "rank": exchange.rank, "limit_microseconds": int(exchange.limit_seconds * 1e6),
        "WIDTH": width, "RANKS": num_ranks, "ROWS": num_rows, "DO_PUSH": phases[0], "DO_RECEIVE": phases[1],
        **launch.options(is_chained),
    }  # fmt: skip
