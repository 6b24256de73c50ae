"""``residual.add_norm`` over ranks in Triton: one program a token row, one hop between GPUs, no flag and no fence.

A call pushes its partial row into its place in every rank's slots, over peer pointers, and polls its own slots until
every number of every rank has arrived: an empty place holds -0.0, and no one sends -0.0 (it is sent as 0.0). A number
is four bytes (two in bfloat16) and arrives whole, so the order in which numbers arrive does not matter.
Three sets of slots take turns. Call n uses set n mod 3 and empties set n-1 mod 3 of its own rank, which it has read in
the call before and which others write next in call n+2, after they have seen this rank's push of call n+1. The turn is
counted on the device, one counter a program, so that a captured graph may be replayed. All rows' programs always run,
also those without a token: they empty and count.
A rank that waits longer than its limit sets the error flag and writes NaN. Source: specs/verifier-kernels.md section 3,
K1; the sentinel protocol is known as Lamport's from TensorRT-LLM's one-shot all-reduce.
"""

import torch
import triton
import triton.language as tl

from dspark.kernels import launch
from dspark.kernels.launch import signal, wait
from dspark.kernels.residual.kernel import finish_row

EMPTY = {torch.float32: -(2**31), torch.bfloat16: -(2**15), torch.float16: -(2**15)}
"""The bits of -0.0 as a signed integer."""


@triton.jit(do_not_specialize=["num_tokens", "rank", "max_polls"])  # one code on all ranks
def exchange_kernel(
    parts,
    weights,
    residual,
    norm_weight,
    new_residual,
    normed,
    peers,
    slots,
    turns,
    errors,
    eps,
    num_tokens,
    rank,
    max_polls,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    EMPTY_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DO_PUSH: tl.constexpr,
    DO_RECEIVE: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """One token's row: push the partial sum, empty the last turn's slots, gather every rank's, add and normalise."""
    sent: tl.constexpr = slots.dtype.element_ty
    bits: tl.constexpr = tl.int32 if sent.primitive_bitwidth == 32 else tl.int16
    SET: tl.constexpr = RANKS * ROWS * WIDTH
    row = tl.program_id(0)
    column_D = tl.arange(0, BLOCK)
    inside_D = column_D < WIDTH
    is_token_D = inside_D & (row < num_tokens)
    scale_D = tl.load(norm_weight + column_D, mask=inside_D, other=0.0)
    wait(IS_CHAINED)
    signal(IS_CHAINED)
    turn = tl.load(turns + row)
    rank_R = tl.arange(0, RANKS_PAD)
    mine = turn * SET + row * WIDTH
    if DO_PUSH:
        total_D = tl.zeros([BLOCK], tl.float32)
        parts_KD, weights_K = (), ()
        for k in tl.static_range(PARTS):
            part_D = tl.load(parts + (row * PARTS + k) * WIDTH + column_D, mask=is_token_D, other=0.0)
            parts_KD = parts_KD + (part_D,)  # noqa: RUF005
            if HAS_WEIGHTS:
                weights_K = weights_K + (tl.load(weights + row * PARTS + k, mask=row < num_tokens, other=0.0),)  # noqa: RUF005
        for k in tl.static_range(PARTS):
            part_D = parts_KD[k].to(tl.float32)
            if HAS_WEIGHTS:
                part_D *= weights_K[k]
            total_D += part_D
        bits_D = total_D.to(sent).to(bits, bitcast=True)
        bits_D = tl.where(bits_D == EMPTY_BITS, 0, bits_D)
        for step in tl.static_range(RANKS):
            to = (rank + 1 + step) % RANKS  # others first, each rank in another order
            base = tl.load(peers + to).to(tl.pointer_type(bits))
            tl.store(base + mine + rank * (ROWS * WIDTH) + column_D, bits_D, mask=is_token_D)
    if DO_RECEIVE:
        place_RD = rank_R[:, None] * (ROWS * WIDTH) + column_D[None, :]
        is_place_RD = (rank_R < RANKS)[:, None] & inside_D[None, :]
        own = slots.to(tl.pointer_type(bits), bitcast=True)
        empty_RD = tl.full([RANKS_PAD, BLOCK], EMPTY_BITS, bits)
        tl.store(own + (turn + 2) % 3 * SET + row * WIDTH + place_RD, empty_RD, mask=is_place_RD)
        residual_D = tl.load(residual + row * WIDTH + column_D, mask=is_token_D, other=0.0)
        tl.debug_barrier()
        is_awaited_RD = is_place_RD & (row < num_tokens)
        bits_RD = tl.load(own + mine + place_RD, mask=is_awaited_RD, other=0, volatile=True)
        num_missing = tl.max(tl.max((bits_RD == EMPTY_BITS).to(tl.int32), 1), 0)
        polls = 0
        while (num_missing > 0) & (polls < max_polls):
            bits_RD = tl.load(own + mine + place_RD, mask=is_awaited_RD, other=0, volatile=True)
            num_missing = tl.max(tl.max((bits_RD == EMPTY_BITS).to(tl.int32), 1), 0)
            polls += 1
        partials_RD = bits_RD.to(sent, bitcast=True).to(tl.float32)
        sum_D = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(RANKS):
            sum_D += tl.sum(tl.where(rank_R[:, None] == source, partials_RD, 0.0), 0)
        sum_D = tl.where(num_missing > 0, float("nan"), sum_D)
        finish_row(residual_D, sum_D, scale_D, new_residual, normed, row * WIDTH + column_D, is_token_D, eps, WIDTH)
        tl.store(turns + row, (turn + 1) % 3)
        tl.store(errors + row, 1, mask=num_missing > 0)


def add_norm(
    parts_TKD: torch.Tensor,
    weights_TK: torch.Tensor | None,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    peers_R: torch.Tensor,
    slots_SRPD: torch.Tensor,
    turns_P: torch.Tensor,
    errors_P: torch.Tensor,
    rank: int,
    *,
    max_polls: int = 1 << 22,
    num_warps: int | None = None,
    phases: tuple[bool, bool] = (True, True),
    is_chained: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dspark.kernels.exchange.add_norm``. ``phases``: push, receive; apart when one process plays all ranks."""
    num_tokens, num_parts, width = parts_TKD.shape
    num_ranks, num_rows = slots_SRPD.shape[1:3]
    block = triton.next_power_of_2(width)
    num_warps = num_warps or int(min(16, max(1, block // 256)))
    new_residual_TD, normed_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
    exchange_kernel[(num_rows,)](
        parts_TKD,
        norm_weight_D if weights_TK is None else weights_TK,
        residual_TD,
        norm_weight_D,
        new_residual_TD,
        normed_TD,
        peers_R,
        slots_SRPD,
        turns_P,
        errors_P,
        eps,
        num_tokens,
        rank,
        max_polls,
        WIDTH=width,
        PARTS=num_parts,
        HAS_WEIGHTS=weights_TK is not None,
        RANKS=num_ranks,
        RANKS_PAD=triton.next_power_of_2(num_ranks),
        ROWS=num_rows,
        EMPTY_BITS=EMPTY[slots_SRPD.dtype],
        BLOCK=block,
        DO_PUSH=phases[0],
        DO_RECEIVE=phases[1],
        num_warps=num_warps,
        maxnreg=min(255, 65536 // (32 * num_warps)),
        **launch.options(is_chained),
    )
    return new_residual_TD, normed_TD
