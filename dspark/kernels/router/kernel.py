"""The router of one step (T = 1..16 tokens) in one launch: logits, choice and pair list.

A program owns a few experts and all tokens, the width cut into one slice a warp. Its weight rows are in registers
before ``wait``, and then all tokens are loaded at once. The last program to arrive chooses, a token a warp: its scores
lie in the lanes of one warp, so that neither a maximum nor a sum needs a barrier.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from dspark.kernels import MAX_TOKENS, launch
from dspark.kernels.router.reference import Dispatch, Law

CHOICE: dict[str, Any] = {"block_x": 4, "num_warps": 16}
"""128 programs of 4 experts for flash. 16 warps: with a warp for every token the choice stays inside warps."""


@triton.jit
def _dispatch_kernel(
    x,
    gate,
    bias,
    scores,
    words,
    counters,
    weights,
    experts,
    pairs,
    num_active,
    num_slots,
    scaling,
    T: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    PICKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_X: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    DOT: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    expert = program * BLOCK_X + tl.arange(0, BLOCK_X)
    token = tl.arange(0, PADDED)
    FULL: tl.constexpr = D // (SLICES * SLICE)
    REST: tl.constexpr = (D - FULL * SLICES * SLICE + SLICES * 16 - 1) // (SLICES * 16)  # in pieces of 16, 32, ..
    BITS: tl.constexpr = (SLICE // 16).bit_length()
    GATE_BYTES: tl.constexpr = gate.dtype.element_ty.primitive_bitwidth // 8
    SLICE_BYTES: tl.constexpr = BLOCK_X * D * GATE_BYTES
    LINES: tl.constexpr = triton.next_power_of_2((SLICE_BYTES + 127) // 128)
    own = tl.minimum(SLICE_BYTES, (X - program * BLOCK_X) * D * GATE_BYTES)
    launch.prefetch_lines(gate + program * BLOCK_X * D, 0, own, LINES, IS_CHAINED)
    gate_tiles = ()
    for chunk in tl.static_range(FULL):
        gate_tiles += (_tile(gate, expert, expert < X, chunk * SLICES * SLICE, D, SLICES, SLICE),)
    for bit in tl.static_range(BITS):
        if (REST >> bit) & 1:
            first = FULL * SLICES * SLICE + (REST & ((1 << bit) - 1)) * SLICES * 16
            gate_tiles += (_tile(gate, expert, expert < X, first, D, SLICES, 16 << bit),)
    own_bias = tl.load(bias + expert, mask=expert < X, other=0.0)
    launch.wait(IS_CHAINED)
    launch.signal(IS_CHAINED)
    acc = tl.zeros((SLICES, PADDED, BLOCK_X), tl.float32)
    x_tiles = ()
    for chunk in tl.static_range(FULL):
        x_tiles += (_tile(x, token, token < T, chunk * SLICES * SLICE, D, SLICES, SLICE),)
    for bit in tl.static_range(BITS):
        if (REST >> bit) & 1:
            first = FULL * SLICES * SLICE + (REST & ((1 << bit) - 1)) * SLICES * 16
            x_tiles += (_tile(x, token, token < T, first, D, SLICES, 16 << bit),)
    _clear(experts, pairs, num_slots, PADDED)
    for chunk in tl.static_range(len(x_tiles)):
        acc = _add_product(acc, x_tiles[chunk], gate_tiles[chunk], DOT)
    score = tl.sigmoid(tl.sum(acc, 0))
    seen = (expert < X)[None, :] & (token < T)[:, None]
    place = scores + token[:, None] * X + expert[None, :]
    tl.store(place, score, mask=seen)
    tl.store(place + PADDED * X, score + own_bias[None, :], mask=seen)
    tl.debug_barrier()
    if tl.atomic_add(counters, 1, sem="acq_rel") == num_programs - 1:
        tl.store(counters, 0)
        _choose(scores, words, weights, experts, pairs, num_active, scaling, T, X, GROUPS, KEPT, PICKS, PADDED)


@triton.jit
def _tile(base, row, is_row, first, D: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr):
    """Columns first + [slices, slice] of some rows: [slices, rows, slice]."""
    k = (first + tl.arange(0, SLICES)[:, None] * SLICE + tl.arange(0, SLICE)[None, :])[:, None, :]
    return tl.load(base + row[None, :, None] * D + k, mask=is_row[None, :, None] & (k < D), other=0.0)


@triton.jit
def _add_product(acc, x_tile, gate_tile, DOT: tl.constexpr):
    """acc + x gate^T, a slice of K each."""
    return tl.dot(x_tile.to(DOT), tl.permute(gate_tile.to(DOT), (0, 2, 1)), acc, input_precision="ieee")


@triton.jit
def _clear(experts, pairs, num_slots, PADDED: tl.constexpr):
    """Every program its share of the lists."""
    slot = tl.program_id(0)
    while slot < num_slots:
        tl.store(pairs + slot * PADDED + tl.arange(0, PADDED), tl.full((PADDED,), -1, tl.int32))
        tl.store(experts + slot, -1)
        slot += tl.num_programs(0)


@triton.jit
def _ordered(bits):
    """The bits of a float32 as an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(biased, seen, group, member, X: tl.constexpr, SIZE: tl.constexpr):
    """The biased score of one expert a lane as an ordered integer: [tokens, lanes]."""
    token = tl.arange(0, seen.shape[0])[:, None]
    seen = seen & (member < SIZE)
    value = tl.load(biased + token * X + group * SIZE + member, mask=seen, other=0.0)
    key = tl.maximum(_ordered(value.to(tl.int32, bitcast=True)), -0x7FFFFFFF)
    return tl.where(seen, key, -0x80000000)


@triton.jit
def _bits_set(x):
    """How many, of an int32."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _choose(
    scores,
    words,
    weights,
    experts,
    pairs,
    num_active,
    scaling,
    T: tl.constexpr,
    X: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    PICKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """``reference.route`` and the pair list, by one program. Tiles are [tokens, lanes]: a token is one warp's."""
    LEAST: tl.constexpr = -0x80000000
    SIZE: tl.constexpr = X // GROUPS
    BLOCK_S: tl.constexpr = triton.next_power_of_2(SIZE)
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUPS)
    BLOCK_KEPT: tl.constexpr = triton.next_power_of_2(KEPT)
    LANES: tl.constexpr = max(32, BLOCK_G, triton.next_power_of_2(PICKS + 1))
    QUAD: tl.constexpr = LANES // BLOCK_G
    RUN: tl.constexpr = (BLOCK_S + QUAD - 1) // QUAD  # experts a lane
    token, lane = tl.arange(0, PADDED)[:, None], tl.arange(0, LANES)[None, :]
    is_token = token < T

    # A group counts by its two largest.
    group = lane // QUAD + token * 0
    is_group = is_token & (group < GROUPS)
    keys, largest = (), tl.full((PADDED, LANES), LEAST, tl.int32)
    for j in tl.static_range(RUN):
        keys += (_key(scores + PADDED * X, is_group, group, j * QUAD + lane % QUAD, X, SIZE),)
    for j in tl.static_range(RUN):
        largest = tl.maximum(largest, keys[j])
    below, many = tl.full((PADDED, LANES), LEAST, tl.int32), tl.zeros((PADDED, LANES), tl.int32)
    for j in tl.static_range(RUN):
        many += (keys[j] == largest).to(tl.int32)
        below = tl.maximum(below, tl.where(keys[j] == largest, LEAST, keys[j]))
    second = tl.where(many > 1, largest, below)  # of a lane
    largest = tl.reshape(largest, (PADDED, BLOCK_G, QUAD))
    second = tl.reshape(second, (PADDED, BLOCK_G, QUAD))
    best = tl.max(largest, 2)[:, :, None]
    is_best = largest == best
    below = tl.max(tl.where(is_best, second, largest), 2)[:, :, None]
    below = tl.where(tl.sum(is_best.to(tl.int32), 2)[:, :, None] > 1, best, below)
    value = _ordered(best).to(tl.float32, bitcast=True) + _ordered(below).to(tl.float32, bitcast=True)
    value = tl.reshape(tl.broadcast_to(value, (PADDED, BLOCK_G, QUAD)), (PADDED, LANES))
    value = tl.where(is_group, tl.maximum(_ordered(value.to(tl.int32, bitcast=True)), LEAST + 1), LEAST)

    # Its rank is the number of groups before it. Bit g of kept: whether group g is.
    rank = tl.zeros((PADDED, LANES), tl.int32)
    for g in tl.static_range(GROUPS):
        other = tl.sum(tl.where(lane == g * QUAD, value, 0), 1)[:, None]
        rank += ((other > value) | ((other == value) & (g < group))).to(tl.int32)
    is_kept = (rank < KEPT) & (lane % QUAD == 0) & (group < GROUPS)
    kept = tl.sum(tl.where(is_kept, 1 << group, 0), 1)[:, None]
    KEPT_QUAD: tl.constexpr = LANES // BLOCK_KEPT
    KEPT_RUN: tl.constexpr = (BLOCK_S + KEPT_QUAD - 1) // KEPT_QUAD
    group = tl.zeros((PADDED, LANES), tl.int32)
    before = tl.zeros((PADDED, 1), tl.int32)
    for g in tl.static_range(GROUPS):
        bit = (kept >> g) & 1
        group = tl.where((bit == 1) & (before == lane // KEPT_QUAD), g, group)
        before += bit

    # Only the kept groups are read again; picks by repeated maximum, the smaller index first.
    seen = is_token & (lane // KEPT_QUAD < KEPT)
    keys, first = (), lane % KEPT_QUAD
    for j in tl.static_range(KEPT_RUN):
        keys += (_key(scores + PADDED * X, seen, group, j * KEPT_QUAD + first, X, SIZE),)
    first += group * SIZE
    WORDS: tl.constexpr = max(LANES, triton.next_power_of_2((X + 31) // 32))
    word = tl.arange(0, WORDS)[None, :]
    picked, bitmap, picks = tl.zeros((PADDED, LANES), tl.int32), tl.zeros((PADDED, WORDS), tl.int32), ()
    for k in tl.static_range(PICKS):
        largest = keys[0]
        for j in tl.static_range(1, KEPT_RUN):
            largest = tl.maximum(largest, keys[j])
        best = tl.max(largest, 1)[:, None]
        place = tl.full((PADDED, LANES), X - 1, tl.int32)
        for j in tl.static_range(KEPT_RUN):
            place = tl.minimum(place, tl.where(keys[j] == best, first + j * KEPT_QUAD, X - 1))
        place = tl.min(place, 1)[:, None]
        rest = ()
        for j in tl.static_range(KEPT_RUN):
            rest += (tl.where(first + j * KEPT_QUAD == place, LEAST, keys[j]),)
        keys = rest
        picked = tl.where(lane == k, place, picked)
        bitmap |= tl.where(word == place >> 5, 1 << (place & 31), 0)
        picks += (place,)
    tl.store(words + token * WORDS + word, bitmap, mask=is_token)

    is_pick = is_token & (lane < PICKS)
    score = tl.load(scores + token * X + picked, mask=is_pick, other=0.0)
    score = score * (scaling / (tl.sum(score, 1) + 1e-20))[:, None]
    score = tl.where(lane < PICKS, score, 1.0)
    tl.store(weights + token * (PICKS + 1) + lane, score, mask=is_token & (lane <= PICKS))

    # A pick's column is the number of earlier tokens at its expert, its row the number of smaller experts.
    tl.debug_barrier()
    union, column = tl.zeros((PADDED, WORDS), tl.int32), tl.zeros((PADDED, LANES), tl.int32)
    for t in tl.static_range(T):
        union |= tl.load(words + t * WORDS + word + token * 0)
        theirs = tl.load(words + t * WORDS + (picked >> 5), mask=is_pick, other=0)
        column += tl.where(t < token, (theirs >> (picked & 31)) & 1, 0)
    count = _bits_set(union)
    row = tl.zeros((PADDED, LANES), tl.int32)
    for k in tl.static_range(PICKS):
        own = picks[k] >> 5
        inside = _bits_set(union & ((1 << (picks[k] & 31)) - 1))
        here = tl.where(word < own, count, tl.where(word == own, inside, 0))
        row = tl.where(lane == k, tl.sum(here, 1)[:, None], row)
    pair = token * (PICKS + 1) + lane
    tl.store(pairs + row * PADDED + column, pair, mask=is_pick)
    tl.store(experts + row, picked, mask=is_pick & (column == 0))
    num_routed = tl.sum(count, 1)[:, None] + lane * 0  # the same in every token's warp
    tl.store(pairs + num_routed * PADDED + token, pair + PICKS, mask=is_token & (lane == 0))
    is_first = (token == 0) & (lane == 0)
    tl.store(experts + num_routed, pair * 0 + X, mask=is_first)
    tl.store(num_active + pair, num_routed + 1, mask=is_first)


def dispatch(
    x_TD: torch.Tensor,
    gate_XD: torch.Tensor,
    bias_X: torch.Tensor,
    law: Law,
    counters: torch.Tensor,
    *,
    is_chained: bool = False,
    **changes: Any,
) -> Dispatch:
    """See the package. ``changes`` to CHOICE."""
    (num_tokens, width), num_experts = x_TD.shape, gate_XD.shape[0]
    num_groups, num_kept_groups, num_picks, scaling = law
    choice = CHOICE | changes
    num_slots = min(num_experts, num_tokens * num_picks) + 1
    weights_TJ = torch.empty(num_tokens, num_picks + 1, device=x_TD.device)
    integers = torch.empty(num_slots * (MAX_TOKENS + 1) + 1, dtype=torch.int32, device=x_TD.device)
    pairs, experts_P, num_active_1 = integers.split([num_slots * MAX_TOKENS, num_slots, 1])
    scores_CNX = torch.empty(2, MAX_TOKENS, num_experts, device=x_TD.device)  # plain, biased
    num_words = max(32, triton.next_power_of_2(max(num_groups, num_picks + 1, triton.cdiv(num_experts, 32))))
    words_NW = torch.empty(MAX_TOKENS, num_words, dtype=torch.int32, device=x_TD.device)
    # More exact than the working dtype needs where only one side is float32.
    wide = torch.promote_types(x_TD.dtype, gate_XD.dtype)
    _dispatch_kernel[(triton.cdiv(num_experts, choice["block_x"]),)](
        x_TD,
        gate_XD,
        bias_X,
        scores_CNX,
        words_NW,
        counters,
        weights_TJ,
        experts_P,
        pairs,
        num_active_1,
        num_slots,
        scaling,
        T=num_tokens,
        X=num_experts,
        D=width,
        GROUPS=num_groups,
        KEPT=num_kept_groups,
        PICKS=num_picks,
        PADDED=MAX_TOKENS,
        BLOCK_X=choice["block_x"],
        SLICES=choice["num_warps"],
        SLICE=32 if wide == torch.float32 else 128,
        DOT=launch.dot_dtype(wide),
        num_warps=choice["num_warps"],
        **launch.options(is_chained),
    )
    return Dispatch(weights_TJ, experts_P, pairs.view(num_slots, MAX_TOKENS), num_active_1)
