"""A training block's attention in Triton: one launch forward, two backward.

Whatever a row reads, context or slots, is one interval of one tensor of keys: ``starts .. anchors`` of the context and
``a * K .. (a + 1) * K`` of the slots. So the same step serves both, and tiles need not begin where blocks do.

forward: a program owns a tile of rows of one query head and walks its keys with an online softmax: first the rows' own
slots, after which every row has a largest score; then, without a mask, the keys that all its rows read; then the rest.
backward, queries: the same program and the same walk; it owns dQ, and on the way stores what the other launch needs of
a row, the sum of o * dO. backward, keys: a program owns a tile of keys of one key-value head, context tiles before slot
tiles, finds by bisection the rows that read each key, an interval too, and walks them for every query head of the
group; it owns dK and dV.
Nothing is added in memory, so the gradients are the same bits every time. Scores are recomputed from the logarithm of
a row's sum of exponents, in base 2. Source: FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import launch

FORWARD = {"ROWS": 64, "SIZE": 64, "num_warps": 4, "num_stages": 3}
QUERIES = {"ROWS": 128, "SIZE": 64, "num_warps": 8, "num_stages": 3}
KEYS = {"ROWS": 64, "SIZE": 64, "num_warps": 4, "num_stages": 2}
"""Tiles of rows and keys for 16 bits and heads of up to 128."""
AT_ONCE = 8
"""Heads that walk together: few share L2, many even out the last programs."""
WIDE = {"ROWS": 64, "SIZE": 64, "num_warps": 8, "num_stages": 2}
FLOAT32 = {"ROWS": 16, "SIZE": 16, "num_warps": 4, "num_stages": 1}
"""What wider heads and float32, which is for tests and small models, change."""
LOG2_E = 1.4426950408889634


@triton.jit
def _place(num_tiles, HEADS: tl.constexpr, AT_ONCE: tl.constexpr):
    """This program's tile and head: AT_ONCE heads share a tile before the next one comes."""
    program = tl.program_id(0)
    share = num_tiles * AT_ONCE
    return program % share // AT_ONCE, program // share * AT_ONCE + program % AT_ONCE


@triton.jit
def _end_of_whole(all_first, all_last, SIZE: tl.constexpr):
    """Where the whole tiles of what is read by all end; the beginning where there is none."""
    return all_first + tl.maximum(all_last - all_first, 0) // SIZE * SIZE


@triton.jit
def _partial(i, first, whole_first, whole_last, last, SIZE: tl.constexpr):
    """Tile i of what lies before and behind the whole tiles: where it begins and where its side ends."""
    before = tl.cdiv(whole_first - first, SIZE)
    at = tl.where(i < before, first + i * SIZE, whole_last + (i - before) * SIZE)
    return at, tl.where(i < before, whole_first, last)


@triton.jit
def _rows(
    base, first, last, STRIDE: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, IS_PARTIAL: tl.constexpr
):  # fmt: skip
    """Rows ``first .. first+SIZE-1`` of a head; of a partial tile those from ``last`` on repeat the last."""
    DOT: tl.constexpr = launch.dot_dtype(base.dtype.element_ty)
    n, e = tl.arange(0, SIZE), tl.arange(0, launch.padded(E))
    if IS_PARTIAL:
        n = tl.minimum(n, last - 1 - first)
    pointers = base + tl.cast(first, tl.int64) * STRIDE + (n[:, None] * STRIDE + e[None, :])
    return (tl.load(pointers) if e.numel == E else tl.load(pointers, mask=(e < E)[None, :], other=0.0)).to(DOT)


@triton.jit
def _store(base, tile, first, last, STRIDE: tl.constexpr, E: tl.constexpr):
    n, e = tl.arange(0, tile.shape[0]), tl.arange(0, tile.shape[1])
    pointers = base + tl.cast(first, tl.int64) * STRIDE + (n[:, None] * STRIDE + e[None, :])
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(first + n < last)[:, None] & (e < E)[None, :])


@triton.jit
def _masked(scores_NT, low_N, high_N, first, last):
    """Scores of the tile that begins at ``first``: -inf where row n does not read, from low_N to before high_N."""
    t = first + tl.arange(0, scores_NT.shape[1])
    is_read_NT = (low_N[:, None] <= t[None, :]) & (t[None, :] < tl.minimum(high_N, last)[:, None])
    return tl.where(is_read_NT, scores_NT, float("-inf"))


@triton.jit
def _attend(
    carried, rows, keys, low_M, high_M, first, last, scale, STRIDE: tl.constexpr, E: tl.constexpr,
    SIZE: tl.constexpr, IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """One tile of keys in the online softmax. A row's largest score must be finite before a masked tile or in it."""
    sum_ME, most_M, total_M = carried
    q_ME = rows[0]
    k_JE = _rows(keys[0], first, last, STRIDE, E, SIZE, IS_PARTIAL)
    scores_MJ = tl.dot(q_ME, tl.trans(k_JE), input_precision="ieee")
    if IS_PARTIAL:
        scores_MJ = _masked(scores_MJ, low_M, high_M, first, last)
    now_M = tl.maximum(most_M, tl.max(scores_MJ, 1) * scale)
    shrink_M = tl.exp2(most_M - now_M)
    p_MJ = tl.exp2(scores_MJ * scale - now_M[:, None])
    total_M = total_M * shrink_M + tl.sum(p_MJ, 1)
    v_JE = _rows(keys[1], first, last, STRIDE, E, SIZE, IS_PARTIAL)
    sum_ME = tl.dot(p_MJ.to(v_JE.dtype), v_JE, sum_ME * shrink_M[:, None], input_precision="ieee")
    return sum_ME, now_M, total_M


@triton.jit
def _differentiate_q(
    dq_ME, rows, keys, low_M, high_M, first, last, scale, STRIDE: tl.constexpr, E: tl.constexpr,
    SIZE: tl.constexpr, IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """One tile of keys in dQ, without the factor of the scores."""
    q_ME, do_ME, lse_M, delta_M = rows
    k_JE = _rows(keys[0], first, last, STRIDE, E, SIZE, IS_PARTIAL)
    v_JE = _rows(keys[1], first, last, STRIDE, E, SIZE, IS_PARTIAL)
    logs_MJ = tl.dot(q_ME, tl.trans(k_JE), input_precision="ieee") * scale - lse_M[:, None]
    if IS_PARTIAL:
        logs_MJ = _masked(logs_MJ, low_M, high_M, first, last)
    p_MJ = tl.exp2(logs_MJ)
    ds_MJ = p_MJ * (tl.dot(do_ME, tl.trans(v_JE), input_precision="ieee") - delta_M[:, None])
    return tl.dot(ds_MJ.to(k_JE.dtype), k_JE, dq_ME, input_precision="ieee")


@triton.jit
def _differentiate_kv(
    carried, keys, rows, head, num_rows, low_J, high_J, first, last, scale, HEADS: tl.constexpr, E: tl.constexpr,
    SIZE: tl.constexpr, IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """One tile of a head's rows in dK, without the factor of the scores, and dV. Keys are the large side of every
    product.
    """
    dk_JE, dv_JE = carried
    k_JE, v_JE = keys
    q, do, lse, delta = rows
    q_ME = _rows(q + head * E, first, last, HEADS * E, E, SIZE, IS_PARTIAL)
    do_ME = _rows(do + head * E, first, last, HEADS * E, E, SIZE, IS_PARTIAL)
    m = first + tl.arange(0, SIZE)
    row_M = head * num_rows + (tl.minimum(m, last - 1) if IS_PARTIAL else m)
    logs_JM = tl.dot(k_JE, tl.trans(q_ME), input_precision="ieee") * scale - tl.load(lse + row_M)[None, :]
    if IS_PARTIAL:
        logs_JM = _masked(logs_JM, low_J, high_J, first, last)
    p_JM = tl.exp2(logs_JM)
    ds_JM = p_JM * (tl.dot(v_JE, tl.trans(do_ME), input_precision="ieee") - tl.load(delta + row_M)[None, :])
    dv_JE = tl.dot(p_JM.to(do_ME.dtype), do_ME, dv_JE, input_precision="ieee")
    return tl.dot(ds_JM.to(q_ME.dtype), q_ME, dk_JE, input_precision="ieee"), dv_JE


@triton.jit
def _tile_of_rows(num_rows, HEADS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """This program's head, and where its rows begin and end: the last tile first, which has the longest walk."""
    num_tiles = tl.cdiv(num_rows, ROWS)
    tile, head = _place(num_tiles, HEADS, AT_ONCE)
    first = (num_tiles - 1 - tile) * ROWS
    return head, first, tl.minimum(first + ROWS, num_rows)


@triton.jit
def _intervals(starts, anchors, first, last, K: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Of a tile of rows: each lane's slots and interval of context; the walk, its whole tiles, and the slots read."""
    block_M = (first + tl.minimum(tl.arange(0, ROWS), last - 1 - first)) // K
    start_M, anchor_M = tl.load(starts + block_M).to(tl.int32), tl.load(anchors + block_M).to(tl.int32)
    front, back = first // K, (last - 1) // K
    context_first, context_last = tl.load(starts + front).to(tl.int32), tl.load(anchors + back).to(tl.int32)
    whole_first = tl.load(starts + back).to(tl.int32)
    whole_last = _end_of_whole(whole_first, tl.load(anchors + front).to(tl.int32), SIZE)
    return block_M * K, start_M, anchor_M, context_first, whole_first, whole_last, context_last, front * K, back * K + K


@triton.jit
def _walk(
    STEP: tl.constexpr, carried, rows, intervals, own, context, scale, STRIDE: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What STEP carries, after all tiles of keys that a tile of rows reads."""
    slot_M, start_M, anchor_M, context_first, whole_first, whole_last, context_last, own_first, own_last = intervals
    for j in tl.range(own_first, own_last, SIZE):
        carried = STEP(carried, rows, own, slot_M, slot_M + K, j, own_last, scale, STRIDE, E, SIZE, True)
    for j in tl.range(whole_first, whole_last, SIZE):
        carried = STEP(carried, rows, context, start_M, anchor_M, j, whole_last, scale, STRIDE, E, SIZE, False)
    num_partial = tl.cdiv(whole_first - context_first, SIZE) + tl.cdiv(context_last - whole_last, SIZE)
    for i in tl.range(0, num_partial):
        j, end = _partial(i, context_first, whole_first, whole_last, context_last, SIZE)
        carried = STEP(carried, rows, context, start_M, anchor_M, j, end, scale, STRIDE, E, SIZE, True)
    return carried


@triton.jit(do_not_specialize=["num_rows"])
def forward_kernel(
    o, lse, q, context_k, context_v, k, v, starts, anchors, num_rows, scale, HEADS: tl.constexpr, GROUP: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (tile of ROWS rows, query head)."""
    STRIDE: tl.constexpr = HEADS // GROUP * E
    head, first, last = _tile_of_rows(num_rows, HEADS, ROWS, AT_ONCE)
    at = head // GROUP * E
    intervals = _intervals(starts, anchors, first, last, K, ROWS, SIZE)
    q_ME = _rows(q + head * E, first, last, HEADS * E, E, ROWS, True)
    sum_ME, total_M = tl.zeros(q_ME.shape, tl.float32), tl.zeros((ROWS,), tl.float32)
    most_M = tl.full((ROWS,), -1e30, tl.float32)  # finite: a row's own slots may come behind a tile without them
    sum_ME, most_M, total_M = _walk(
        _attend, (sum_ME, most_M, total_M), (q_ME,), intervals, (k + at, v + at), (context_k + at, context_v + at),
        scale, STRIDE, E, K, SIZE,
    )  # fmt: skip
    _store(o + head * E, sum_ME / total_M[:, None], first, last, HEADS * E, E)
    m = first + tl.arange(0, ROWS)
    tl.store(lse + head * num_rows + m, most_M + tl.log2(total_M), mask=m < last)


@triton.jit(do_not_specialize=["num_rows"])
def queries_kernel(
    dq, delta, o, do, lse, q, context_k, context_v, k, v, starts, anchors, num_rows, scale, out_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (tile of ROWS rows, query head), as forward."""
    STRIDE: tl.constexpr = HEADS // GROUP * E
    head, first, last = _tile_of_rows(num_rows, HEADS, ROWS, AT_ONCE)
    at, at_row = head // GROUP * E, head * num_rows
    intervals = _intervals(starts, anchors, first, last, K, ROWS, SIZE)
    m = first + tl.arange(0, ROWS)
    do_ME = _rows(do + head * E, first, last, HEADS * E, E, ROWS, True)
    o_ME = _rows(o + head * E, first, last, HEADS * E, E, ROWS, True)
    delta_M = tl.sum(o_ME.to(tl.float32) * do_ME.to(tl.float32), 1)
    tl.store(delta + at_row + m, delta_M, mask=m < last)
    lse_M = tl.load(lse + at_row + tl.minimum(m, last - 1))
    q_ME = _rows(q + head * E, first, last, HEADS * E, E, ROWS, True)
    dq_ME = _walk(
        _differentiate_q, tl.zeros(q_ME.shape, tl.float32), (q_ME, do_ME, lse_M, delta_M), intervals, (k + at, v + at),
        (context_k + at, context_v + at), scale, STRIDE, E, K, SIZE,
    )  # fmt: skip
    _store(dq + head * E, dq_ME * out_scale, first, last, HEADS * E, E)


@triton.jit
def _at_most(values, num_values, j):
    """How many of the numbers, which never fall, are at most each of j: by bisection."""
    count_J, step = j * 0, 1
    while step * 2 <= num_values:
        step *= 2
    while step > 0:
        there_J = count_J + step
        is_there_J = there_J <= num_values
        value_J = tl.load(values + tl.where(is_there_J, there_J, 1) - 1)
        count_J = tl.where(is_there_J & (value_J <= j), there_J, count_J)
        step //= 2
    return count_J


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def keys_kernel(
    dcontext_k, dcontext_v, dk, dv, q, do, lse, delta, context_k, context_v, k, v, starts, anchors, num_tokens,
    num_rows, scale, out_scale, HEADS: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (tile of SIZE keys, key-value head): first the context's, of which early ones have the most readers."""
    STRIDE: tl.constexpr = HEADS // GROUP * E
    num_context = tl.cdiv(num_tokens, SIZE)
    tile, kv_head = _place(num_context + tl.cdiv(num_rows, SIZE), HEADS // GROUP, AT_ONCE)
    if tile < num_context:
        keys, values, to_k, to_v = context_k, context_v, dcontext_k, dcontext_v
        first = tile * SIZE
        last = tl.minimum(first + SIZE, num_tokens)
        j = tl.minimum(first + tl.arange(0, SIZE), last - 1)
        low_J = _at_most(anchors, num_rows // K, j) * K
        high_J = _at_most(starts, num_rows // K, j) * K
    else:
        keys, values, to_k, to_v = k, v, dk, dv
        first = (tile - num_context) * SIZE
        last = tl.minimum(first + SIZE, num_rows)
        low_J = tl.minimum(first + tl.arange(0, SIZE), last - 1) // K * K
        high_J = low_J + K
    some_first, some_last, whole_first = tl.min(low_J, 0), tl.max(high_J, 0), tl.max(low_J, 0)
    whole_last = _end_of_whole(whole_first, tl.min(high_J, 0), ROWS)
    num_partial = tl.cdiv(whole_first - some_first, ROWS) + tl.cdiv(some_last - whole_last, ROWS)
    k_JE = _rows(keys + kv_head * E, first, last, STRIDE, E, SIZE, True)
    v_JE = _rows(values + kv_head * E, first, last, STRIDE, E, SIZE, True)
    own, rows = (k_JE, v_JE), (q, do, lse, delta)
    carried = tl.zeros(k_JE.shape, tl.float32), tl.zeros(v_JE.shape, tl.float32)
    num_whole = (whole_last - whole_first) // ROWS
    divide_whole, divide_partial = tl.maximum(num_whole, 1), tl.maximum(num_partial, 1)  # a prologue may divide by them
    for i in tl.range(0, num_whole * GROUP):
        head, m = kv_head * GROUP + i // divide_whole, whole_first + i % divide_whole * ROWS
        carried = _differentiate_kv(
            carried, own, rows, head, num_rows, low_J, high_J, m, whole_last, scale, HEADS, E, ROWS, False
        )  # fmt: skip
    for i in tl.range(0, num_partial * GROUP):
        head = kv_head * GROUP + i // divide_partial
        m, end = _partial(i % divide_partial, some_first, whole_first, whole_last, some_last, ROWS)
        carried = _differentiate_kv(
            carried, own, rows, head, num_rows, low_J, high_J, m, end, scale, HEADS, E, ROWS, True
        )  # fmt: skip
    dk_JE, dv_JE = carried
    _store(to_k + kv_head * E, dk_JE * out_scale, first, last, STRIDE, E)
    _store(to_v + kv_head * E, dv_JE, first, last, STRIDE, E)


def _launch(table: dict[str, int], q_NHE: Tensor, k_NGE: Tensor, num_blocks: int, heads: int) -> dict[str, Any]:
    """The constants of a launch whose programs each own one of ``heads``."""
    num_rows, num_heads, width = q_NHE.shape
    change = FLOAT32 if q_NHE.dtype == torch.float32 else WIDE if width > 128 else {}
    sizes = {"HEADS": num_heads, "GROUP": num_heads // k_NGE.shape[1], "E": width, "K": num_rows // num_blocks}
    return {**table, **change, **sizes, "AT_ONCE": math.gcd(heads, AT_ONCE)}


@torch.library.custom_op("dspark::anchor_attention", mutates_args=())
def attend(
    q_NHE: Tensor, context_k_TGE: Tensor, context_v_TGE: Tensor, k_NGE: Tensor, v_NGE: Tensor, starts_A: Tensor,
    anchors_A: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o_NHE and lse_HN float32, the base-2 logarithm of every row's sum of exponents. Copies what is not contiguous."""
    floats = [x.contiguous() for x in (q_NHE, context_k_TGE, context_v_TGE, k_NGE, v_NGE)]
    num_rows, num_heads, width = q_NHE.shape
    o_NHE, lse_HN = torch.empty_like(floats[0]), q_NHE.new_empty(num_heads, num_rows, dtype=torch.float32)
    options = _launch(FORWARD, q_NHE, k_NGE, len(starts_A), num_heads)
    forward_kernel[(triton.cdiv(num_rows, options["ROWS"]) * num_heads,)](
        o_NHE, lse_HN, *floats, starts_A, anchors_A, num_rows, width**-0.5 * LOG2_E, **options
    )
    return o_NHE, lse_HN


@attend.register_fake
def _(q_NHE, context_k_TGE, context_v_TGE, k_NGE, v_NGE, starts_A, anchors_A):
    num_rows, num_heads, _ = q_NHE.shape
    return q_NHE.new_empty(q_NHE.shape), q_NHE.new_empty(num_heads, num_rows, dtype=torch.float32)


@torch.library.custom_op("dspark::anchor_attention_backward", mutates_args=())
def differentiate(
    do_NHE: Tensor, o_NHE: Tensor, lse_HN: Tensor, q_NHE: Tensor, context_k_TGE: Tensor, context_v_TGE: Tensor,
    k_NGE: Tensor, v_NGE: Tensor, starts_A: Tensor, anchors_A: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the five float tensors: of the queries, the context's keys and values, the slots'."""
    do_NHE, floats = do_NHE.contiguous(), [x.contiguous() for x in (q_NHE, context_k_TGE, context_v_TGE, k_NGE, v_NGE)]
    (num_rows, num_heads, width), (num_tokens, num_kv_heads, _) = q_NHE.shape, context_k_TGE.shape
    dq_NHE, *dkv = (torch.empty_like(x) for x in floats)
    delta_HN, scale = torch.empty_like(lse_HN), width**-0.5
    options = _launch(QUERIES, q_NHE, k_NGE, len(starts_A), num_heads)
    queries_kernel[(triton.cdiv(num_rows, options["ROWS"]) * num_heads,)](
        dq_NHE, delta_HN, o_NHE, do_NHE, lse_HN, *floats, starts_A, anchors_A, num_rows, scale * LOG2_E, scale,
        **options,
    )  # fmt: skip
    options = _launch(KEYS, q_NHE, k_NGE, len(starts_A), num_kv_heads)
    num_tiles = triton.cdiv(num_tokens, options["SIZE"]) + triton.cdiv(num_rows, options["SIZE"])
    keys_kernel[(num_tiles * num_kv_heads,)](
        *dkv, floats[0], do_NHE, lse_HN, delta_HN, *floats[1:], starts_A, anchors_A, num_tokens, num_rows,
        scale * LOG2_E, scale, **options,
    )  # fmt: skip
    return dq_NHE, dkv[0], dkv[1], dkv[2], dkv[3]


@differentiate.register_fake
def _(do_NHE, o_NHE, lse_HN, q_NHE, context_k_TGE, context_v_TGE, k_NGE, v_NGE, starts_A, anchors_A):
    return tuple(x.new_empty(x.shape) for x in (q_NHE, context_k_TGE, context_v_TGE, k_NGE, v_NGE))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output, *inputs)
    ctx.set_materialize_grads(False)  # no zeros for the logarithms, which nobody sees


def _backward(ctx, do_NHE, _):
    return (*differentiate(do_NHE, *ctx.saved_tensors), None, None)


attend.register_autograd(_backward, setup_context=_save)


def anchor_attention(*inputs: Tensor) -> Tensor:
    """See ``dspark.kernels.anchor_attention``; at least one block."""
    return attend(*inputs)[0]
