"""The router of one step (T = 1..16 tokens) in one launch: logits, choice and pair list; and any number of choices.

A program owns a list of a group's experts and all tokens, the width cut into one slice a warp. Its weight rows are in
registers before ``wait``, then all tokens are loaded at once. It leaves its biased scores sorted for every token, so
that the last program to arrive compares only the heads of lists. That one chooses, a token a warp, a list a lane: what
counts is how few instructions 16 warps on one SM issue and that no maximum, sum or change of layout needs a barrier.
Where rows are many, each is chosen for in the registers of one warp.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import MAX_TOKENS, launch
from dspark.kernels.router.reference import Dispatch, Law

BLOCK_X, NUM_WARPS = 8, 16
"""Lists of 8 experts (4 is possible): 64 programs for flash, and 32 lists in the kept groups, one for every lane."""
PADDED = tl.constexpr(MAX_TOKENS)
LEAST = tl.constexpr(-0x80000000)


@triton.jit
def _dispatch_kernel(
    x, gate, bias, scratch, counters, weights, pairs, scaling, T: tl.constexpr, X: tl.constexpr, D: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, PICKS: tl.constexpr, BLOCK_X: tl.constexpr, LENGTH: tl.constexpr,
    LANES: tl.constexpr, SLICES: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    # More exact than the working dtype needs where only the gate is float32.
    DOT: tl.constexpr = launch.dot_dtype(gate.dtype.element_ty)
    SLICE: tl.constexpr = 32 if gate.dtype.element_ty == tl.float32 else 128
    SIZE: tl.constexpr = X // GROUPS
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    first, end = program // LENGTH * SIZE + program % LENGTH * BLOCK_X, program // LENGTH * SIZE + SIZE
    token, lane = tl.arange(0, PADDED), tl.arange(0, 32)[None, :]
    ROW_BYTES: tl.constexpr = D * gate.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = triton.next_power_of_2((BLOCK_X * ROW_BYTES + 127) // 128)
    launch.prefetch_lines(gate + first * D, 0, tl.minimum(BLOCK_X, end - first) * ROW_BYTES, LINES, IS_CHAINED)
    gate_tiles = _rows(gate, first + tl.arange(0, BLOCK_X), end, D, SLICES, SLICE)
    member = lane % BLOCK_X + token[:, None] * 0
    own_bias = _load(bias + first + member, first + member < end)
    launch.follow(IS_CHAINED)
    x_tiles = _rows(x, token, 0, D, SLICES, SLICE)
    if num_programs > 0:  # outside a branch the second tile's load would wait for the first one's arrival
        x_tiles = _rows(x, token, T, D, SLICES, SLICE)
    # Behind the pairs lie the experts and their number. Every program clears its share.
    SLOTS: tl.constexpr = min(X, T * PICKS) + 1
    SHARE: tl.constexpr = triton.next_power_of_2((SLOTS * (PADDED + 1)) // (GROUPS * LENGTH) + 1)
    place = program * SHARE + tl.arange(0, SHARE)
    tl.store(pairs + place, -1, mask=place < SLOTS * (PADDED + 1))
    acc = tl.zeros((SLICES, PADDED, BLOCK_X), tl.float32)
    for chunk in tl.static_range(len(x_tiles)):
        gate_tile = tl.permute(gate_tiles[chunk].to(DOT), (0, 2, 1))
        acc = tl.dot(x_tiles[chunk].to(DOT), gate_tile, acc, input_precision="ieee")

    # A token a warp from here: COPIES times its experts. Splitting brings slices together in one exchange.
    COPIES: tl.constexpr = 32 // BLOCK_X
    acc = tl.permute(tl.reshape(acc, (SLICES // COPIES, COPIES, PADDED, BLOCK_X)), (2, 1, 3, 0))
    for bit in tl.static_range((SLICES // COPIES).bit_length() - 1):
        even, odd = tl.split(tl.reshape(acc, (PADDED, 32, (SLICES // COPIES) >> (bit + 1), 2)))
        acc = even + odd
    score = tl.sigmoid(_sum_copies(tl.reshape(acc, (PADDED, 32)), 32, BLOCK_X))
    key = tl.maximum(_ordered((score + own_bias).to(tl.int32, bitcast=True)), LEAST + 1)
    key, rank = tl.where(first + member < end, key, LEAST), tl.zeros((PADDED, 32), tl.int32)
    for j in tl.static_range(0, BLOCK_X, COPIES):
        far = j + lane // BLOCK_X
        other = _of_lane(key, (member + far) % BLOCK_X)
        is_before = (other > key) | ((other == key) & (member + far >= BLOCK_X))
        rank += (is_before & (far < BLOCK_X)).to(tl.int32)
    rank = _sum_copies(rank, 32, BLOCK_X)

    # A list: its keys but the least, falling, and four bits a key that say whose it is: 32 bytes. The least lies apart.
    LISTS: tl.constexpr = triton.next_power_of_2(GROUPS) * LENGTH
    own, rest = token[:, None] * LISTS + program, scratch + PADDED * LISTS * BLOCK_X
    words, scores = rest + PADDED * LISTS, rest + PADDED * (LISTS + LANES)
    is_first, is_own = lane < BLOCK_X, (lane < BLOCK_X) & (first + member < end)
    order = tl.sum(tl.where(is_first, member << rank * 4, 0), 1)[:, None]
    place = tl.where(rank < BLOCK_X - 1, own * BLOCK_X + rank, PADDED * LISTS * BLOCK_X + own)
    _store(scratch + place, key, is_first)
    _store(scratch + own * BLOCK_X + BLOCK_X - 1 + lane, order, lane == 0)
    _store(scores + token[:, None] * X + first + member, score.to(tl.int32, bitcast=True), is_own)
    tl.debug_barrier()
    if tl.atomic_add(counters, 1, sem="acq_rel") == num_programs - 1:
        tl.store(counters, 0)
        kept, lists = _keep(scratch, GROUPS, KEPT, BLOCK_X, LENGTH, LANES)
        expert, bitmap = _pick(scratch, rest, kept, lists, X // GROUPS, KEPT, PICKS, BLOCK_X, LENGTH, LANES)
        _list(expert, bitmap, words, scores, weights, pairs, scaling, SLOTS, T, X, PICKS, LANES)


@triton.jit
def _rows(base, row, end, D, SLICES, SLICE):
    """Whole rows below end in tiles [slices, rows, columns], the last ones of 16, 32, .. columns a slice."""
    FULL: tl.constexpr = D // (SLICES * SLICE)
    REST: tl.constexpr = (D - FULL * SLICES * SLICE + SLICES * 16 - 1) // (SLICES * 16)
    tiles = ()
    for chunk in tl.static_range(FULL):
        tiles += (_tile(base, row, row < end, chunk * SLICES * SLICE, D, SLICES, SLICE),)
    for bit in tl.static_range((SLICE // 16).bit_length()):
        if (REST >> bit) & 1:
            first = FULL * SLICES * SLICE + (REST & ((1 << bit) - 1)) * SLICES * 16
            tiles += (_tile(base, row, row < end, first, D, SLICES, 16 << bit),)
    return tiles


@triton.jit
def _tile(base, row, is_row, first, D, SLICES: tl.constexpr, SLICE: tl.constexpr):
    """Columns first + [slices, slice] of some rows: [slices, rows, slice]."""
    k = (first + tl.arange(0, SLICES)[:, None] * SLICE + tl.arange(0, SLICE)[None, :])[:, None, :]
    return tl.load(base + row[None, :, None] * D + k, mask=is_row[None, :, None] & (k < D), other=0.0)


@triton.jit
def _ordered(bits):
    """The bits of a float32 as an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _of_lane(tile, lane):
    """What that lane holds, of the same row."""
    return tl.gather(tile, tl.broadcast_to(lane, tile.shape), 1)


@triton.jit
def _sum_copies(tile, LANES: tl.constexpr, SIZE: tl.constexpr):
    """For every lane the sum over those that are the same modulo SIZE."""
    for bit in tl.static_range((LANES // SIZE).bit_length() - 1):
        tile += _of_lane(tile, tl.arange(0, LANES)[None, :] ^ (SIZE << bit))
    return tile


@triton.jit
def _flat(tile):
    """In one dimension: Triton 3.6 gives a pointer tile of unknown contiguity another layout than its neighbours."""
    return tl.reshape(tile, (tile.shape[0] * tile.shape[1],))


@triton.jit
def _load(place, mask):
    return tl.reshape(tl.load(_flat(place), mask=_flat(mask), other=0), place.shape)


@triton.jit
def _store(place, value, mask):
    mask = _flat(mask | tl.zeros(place.shape, tl.int1))
    tl.store(_flat(place), _flat(tl.broadcast_to(value, place.shape)), mask=mask)


@triton.jit
def _four(place):
    """The four words from every place of a tile on."""
    words = tl.load(tl.multiple_of(_flat(place)[:, None] + tl.arange(0, 4)[None, :], (16, 16)))
    even, odd = tl.split(tl.reshape(words, (place.shape[0], place.shape[1], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _bits_set(x):
    """How many, of an int32."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _first_largest(key, index):
    """The smallest index of those with the largest key, for every row: [rows, 1]."""
    is_best = key == tl.max(key, 1)[:, None]
    return tl.min(tl.where(is_best, index, 0x7FFFFFFF), 1)[:, None]


@triton.jit
def _two_largest(first, second, other_first, other_second):
    """Of two pairs."""
    between = tl.minimum(first, other_first)
    return tl.maximum(first, other_first), tl.maximum(between, tl.maximum(second, other_second))


@triton.jit
def _keep(scratch, GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK_X, LENGTH: tl.constexpr, LANES: tl.constexpr):
    """The kept groups, the best first, lanes // KEPT of every row each; and the number of the row's first list."""
    QUAD: tl.constexpr = LANES // triton.next_power_of_2(GROUPS)  # lanes of a group, and then of a kept one
    KEPT_QUAD: tl.constexpr = LANES // triton.next_power_of_2(KEPT)
    lane, zero = tl.arange(0, LANES)[None, :], tl.zeros((PADDED, LANES), tl.int32)
    lists = tl.arange(0, PADDED)[:, None] * (LANES // QUAD * LENGTH) + zero
    group, first, second = lane // QUAD + zero, zero + LEAST, zero + LEAST
    for j in tl.static_range(0, LENGTH, QUAD):
        one, two, _, _ = _four(scratch + (lists + group * LENGTH + j + lane % QUAD % LENGTH) * BLOCK_X)
        is_list = lane % QUAD < LENGTH
        first, second = _two_largest(first, second, tl.where(is_list, one, LEAST), tl.where(is_list, two, LEAST))
    for bit in tl.static_range(QUAD.bit_length() - 1):
        other = lane ^ (1 << bit)
        first, second = _two_largest(first, second, _of_lane(first, other), _of_lane(second, other))
    value = _ordered(first).to(tl.float32, bitcast=True) + _ordered(second).to(tl.float32, bitcast=True)
    value = tl.maximum(_ordered(value.to(tl.int32, bitcast=True)), LEAST + 1)
    value, kept = tl.where(group < GROUPS, value, LEAST), zero
    for k in tl.static_range(KEPT):
        best = _first_largest(value, group)
        value, kept = tl.where(group == best, LEAST, value), tl.where(lane // KEPT_QUAD == k, best, kept)
    return kept, lists


@triton.jit
def _pick(scratch, rest, kept, lists, SIZE, KEPT, PICKS: tl.constexpr, BLOCK_X, LENGTH: tl.constexpr, LANES):
    """Pick k in the lanes that are k modulo the next power of two of PICKS; and the picks of a row as a bitmap."""
    KEPT_QUAD: tl.constexpr = LANES // triton.next_power_of_2(KEPT)
    lane = tl.arange(0, LANES)[None, :]
    is_list = (lane // KEPT_QUAD < KEPT) & (lane % KEPT_QUAD < LENGTH)
    lists += kept * LENGTH + lane % KEPT_QUAD % LENGTH
    keys, last = (), _load(rest + lists, lists >= 0)
    for j in tl.static_range(0, BLOCK_X, 4):
        keys += _four(scratch + lists * BLOCK_X + j)
    order, expert, bitmap = keys[BLOCK_X - 1], kept * 0, kept * 0
    for k in tl.static_range(PICKS):
        # The largest head, of equal ones that of the smaller expert. Its list moves on.
        index = kept * SIZE + lane % KEPT_QUAD % LENGTH * BLOCK_X + (order & 15)
        best = _first_largest(tl.where(is_list, keys[0], LEAST), index)
        expert = tl.where(lane % triton.next_power_of_2(PICKS) == k, best, expert)
        bitmap |= tl.where(lane == best >> 5, 1 << (best & 31), 0)
        is_best = index == best
        order, head = tl.where(is_best, order >> 4, order), tl.where(is_best, keys[1], keys[0])
        if k >= BLOCK_X - 2:  # not earlier, for it would be waited for
            head, last = tl.maximum(head, last), tl.where(head == LEAST, LEAST, last)
        moved = (head,)
        for j in tl.static_range(1, BLOCK_X - 1):
            moved += (tl.where(is_best, keys[j + 1] if j < BLOCK_X - 2 else LEAST, keys[j]),)
        keys = moved
    return expert, bitmap


@triton.jit
def _list(expert, bitmap, words, scores, weights, pairs, scaling, SLOTS, T, X, PICKS: tl.constexpr, LANES):
    """Weights and pairs. A pick's column counts the earlier tokens at its expert, its row the smaller experts."""
    BLOCK_P: tl.constexpr = triton.next_power_of_2(PICKS)
    token, lane = tl.arange(0, PADDED)[:, None], tl.arange(0, LANES)[None, :]
    tl.store(words + token * LANES + lane, bitmap)
    pair, own, bit = token * (PICKS + 1) + lane, expert >> 5, expert & 31
    score = _load(scores + token * X + expert, (token < T) & (lane < PICKS)).to(tl.float32, bitcast=True)
    tl.debug_barrier()
    union, column = bitmap, expert * 0
    for t in tl.static_range(T):
        union |= tl.load(words + t * LANES + lane + column * 0)
    for t in tl.static_range(0, T - 1, LANES // BLOCK_P):
        earlier = t + lane // BLOCK_P + token * 0
        column += (_load(words + earlier * LANES + own, earlier < token) >> bit) & 1
    column, count = _sum_copies(column, LANES, BLOCK_P), _bits_set(union)
    before = tl.cumsum(count, 1)
    num_routed = tl.max(before, 1)[:, None]
    row = _of_lane(before - count, own) + _bits_set(_of_lane(union, own) & ((1 << bit) - 1))
    is_shared, is_pair = lane == PICKS, (token < T) & (lane <= PICKS)
    row, column = tl.where(is_shared, num_routed, row), tl.where(is_shared, token, column)
    _store(pairs + row * PADDED + column, pair, is_pair)
    _store(pairs + SLOTS * PADDED + row, tl.where(is_shared, X, expert), is_pair & (column == 0))
    _store(pairs + SLOTS * (PADDED + 1) + pair, num_routed + 1, pair == 0)
    score = tl.where(is_shared, 1.0, score * (scaling / (tl.sum(score, 1) + 1e-20))[:, None])
    _store(weights + pair, score, is_pair)


def dispatch(
    x_TD: Tensor, gate_XD: Tensor, bias_X: Tensor, law: Law, counters: Tensor, *, is_chained: bool = False
) -> Dispatch:
    """See the package."""
    (num_tokens, width), num_experts = x_TD.shape, gate_XD.shape[0]
    num_groups, num_kept_groups, num_picks, scaling = law
    power = triton.next_power_of_2
    num_lists = power(triton.cdiv(num_experts // num_groups, BLOCK_X))  # of a group
    lanes = power(max(32, num_groups, num_picks + 1, triton.cdiv(num_experts, 32), power(num_kept_groups) * num_lists))
    num_words = power(num_groups) * num_lists * (BLOCK_X + 1) + lanes + num_experts
    scratch = torch.empty(MAX_TOKENS * num_words, dtype=torch.int32, device=x_TD.device)
    num_slots = min(num_experts, num_tokens * num_picks) + 1
    weights_TJ = torch.empty(num_tokens, num_picks + 1, device=x_TD.device)
    integers = torch.empty(num_slots * (MAX_TOKENS + 1) + 1, dtype=torch.int32, device=x_TD.device)
    pairs, experts_P, num_active_1 = integers.split([num_slots * MAX_TOKENS, num_slots, 1])
    _dispatch_kernel[(num_groups * num_lists,)](
        x_TD, gate_XD, bias_X, scratch, counters, weights_TJ, integers, scaling, T=num_tokens, X=num_experts, D=width,
        GROUPS=num_groups, KEPT=num_kept_groups, PICKS=num_picks, BLOCK_X=BLOCK_X, LENGTH=num_lists, LANES=lanes,
        SLICES=NUM_WARPS, num_warps=NUM_WARPS, maxnreg=2048 // NUM_WARPS,  # fewer, and the assembler delays loads
        **launch.options(is_chained),
    )  # fmt: skip
    return Dispatch(weights_TJ, experts_P, pairs.view(num_slots, MAX_TOKENS), num_active_1)


@triton.jit
def choose_kernel(
    ids, weights, logits, bias, scaling, X: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, PICKS: tl.constexpr
):  # fmt: skip
    """One row; tiles are [groups, members]. The smaller index wins: places are minima over the best."""
    SIZE: tl.constexpr = X // GROUPS
    row = tl.program_id(0).to(tl.int64)
    g, s = tl.arange(0, triton.next_power_of_2(GROUPS)), tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
    expert = g[:, None] * SIZE + s
    inside = (g[:, None] < GROUPS) & (s < SIZE)
    score = tl.sigmoid(tl.load(logits + row * X + expert, mask=inside, other=0.0))
    biased = tl.where(inside, score + tl.load(bias + expert, mask=inside, other=0.0), -float("inf"))
    best = tl.max(biased, 1)
    place = tl.min(tl.where(biased == best[:, None], s, SIZE), 1)
    value = best + tl.max(tl.where(s == place[:, None], -float("inf"), biased), 1)
    other, own = value[None, :], value[:, None]
    is_before = (other > own) | ((other == own) & (g[None, :] < g[:, None]))
    biased = tl.where(tl.sum(is_before.to(tl.int32), 1)[:, None] < KEPT, biased, -float("inf"))
    total, picked = 0.0, ()
    for k in tl.static_range(PICKS):
        place = tl.min(tl.where(biased == tl.max(biased), expert, X))
        is_pick = inside & (expert == place)
        biased = tl.where(is_pick, -float("inf"), biased)
        picked += (tl.sum(tl.where(is_pick, score, 0.0)),)
        total += picked[k]
        tl.store(ids + row * (PICKS + 1) + k, place)
    for k in tl.static_range(PICKS):
        tl.store(weights + row * (PICKS + 1) + k, picked[k] * (scaling / (total + 1e-20)))
    tl.store(ids + row * (PICKS + 1) + PICKS, X)
    tl.store(weights + row * (PICKS + 1) + PICKS, 1.0)


def choose(logits_NX: Tensor, bias_X: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """See the package."""
    num_rows, num_experts = logits_NX.shape
    num_groups, num_kept_groups, num_picks, scaling = law
    ids_NJ = torch.empty(num_rows, num_picks + 1, dtype=torch.int32, device=logits_NX.device)
    weights_NJ = torch.empty(num_rows, num_picks + 1, device=logits_NX.device)
    choose_kernel[(num_rows,)](
        ids_NJ, weights_NJ, logits_NX, bias_X, scaling, X=num_experts, GROUPS=num_groups, KEPT=num_kept_groups,
        PICKS=num_picks, num_warps=1,
    )  # fmt: skip
    return ids_NJ, weights_NJ
