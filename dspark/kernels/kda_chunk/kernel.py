"""The chunked delta rule on the GPU, in four launches.

``mix_kernel``, a program a chunk, head and kind: convolution, SiLU and norm of q, k and v, and the cumulated decay G.
``prepare_kernel``, a program a chunk and head: the interactions A and the attention P inside the chunk by blocks of 16
keys, exp(G_i - G_j) split around the middle of j's block (the factors stay within exp(+-40)); then (I + A)^-1 by
doubling, in registers: the inverses D of two blocks on the diagonal and what lies below the first, L, make the inverse
of twice the size, D - D L D. What leaves is U, W, q exp(G), (k exp(G_last - G))^T and P, so that

``scan_kernel``, a program a sequence, head and tile of value columns, has from chunk to chunk two products only, with
the state in float32 registers: D = U - W S; S = diag(exp(G_last)) S + (...)^T D. ``output_kernel``, a program a chunk
and head, multiplies what the scan kept, O = (q exp(G)) S + P D, and ends with the norm and the gate.

Operands of the last two are bfloat16 for bfloat16 inputs, as in public engines.
Source: specs/ling-3.0.md section 4.4; the order of work follows fla/ops/kda of flash-linear-attention.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import launch
from dspark.kernels.kda_chunk.reference import Chunks

EPS = tl.constexpr(1e-6)
BLOCK = tl.constexpr(16)
Q, K, V, G = (tl.constexpr(plane) for plane in range(4))
MIX_WARPS, PREPARE_WARPS, PREPARE_PART = 8, 4, 32
SCAN_WARPS, SCAN_STAGES, SCAN_COLUMNS = 4, 4, 16


@triton.jit
def mix_kernel(
    mixed_ptr, projected_ptr, history_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, chunks_ptr, lower_bound, scale,
    STRIDE: tl.constexpr, H: tl.constexpr, E: tl.constexpr, J: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head, kind). WIDTH is E padded; a tile [C, WIDTH] of the kind's plane of memory."""
    CHANNELS: tl.constexpr = 3 * H * E
    chunk, head, kind = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
    count, place = tl.load(chunks_ptr + chunk * 4 + 1), tl.load(chunks_ptr + chunk * 4 + 3)
    token, e = tl.arange(0, C)[:, None], tl.arange(0, WIDTH)[None, :]
    channel = (kind * H + head) * E + e
    is_channel = e < E
    inside = (token < count) & is_channel
    x_ptr = projected_ptr + first * STRIDE + token * STRIDE + channel
    if kind == G:
        f = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
        dt_bias = tl.load(dt_bias_ptr + head * E + e, mask=is_channel, other=0.0)
        decay = lower_bound * tl.sigmoid(tl.exp(tl.load(a_log_ptr + head)) * (f + dt_bias))
        y = tl.cumsum(tl.where(inside, decay, 0.0), 0)
    else:
        y = tl.zeros((C, WIDTH), tl.float32)
        for j in tl.static_range(J):
            back = j - (J - 1)
            x = tl.load(x_ptr + back * STRIDE, mask=inside & (token + back + place >= 0), other=0.0)
            y += x.to(tl.float32) * tl.load(conv_ptr + channel * J + j, mask=is_channel, other=0.0).to(tl.float32)
        if place == 0:  # the first tokens of a sequence see its history
            history_ptr += tl.load(chunks_ptr + chunk * 4 + 2).to(tl.int64) * ((J - 1) * CHANNELS)
            for w in range(J - 1):
                h_ptr = history_ptr + (token + w) * CHANNELS + channel
                x = tl.load(h_ptr, mask=inside & (token + w < J - 1), other=0.0)
                y += x.to(tl.float32) * tl.load(conv_ptr + channel * J + w, mask=is_channel, other=0.0).to(tl.float32)
        y *= tl.sigmoid(y)
        if kind != V:
            y *= (tl.rsqrt(tl.sum(y * y, 1) + EPS) * tl.where(kind == Q, scale, 1.0))[:, None]
    tile = (kind * tl.num_programs(0) + chunk).to(tl.int64) * H + head
    tl.store(mixed_ptr + tile * (C * WIDTH) + token * WIDTH + e, y)


@triton.jit
def _side_by_side(blocks):
    """One, two or four blocks [C, BLOCK] as one tile."""
    C: tl.constexpr = blocks[0].shape[0]
    if len(blocks) == 1:
        return blocks[0]
    elif len(blocks) == 2:
        return tl.reshape(tl.permute(tl.join(blocks[0], blocks[1]), (0, 2, 1)), (C, 2 * BLOCK))
    else:
        pairs = tl.join(tl.join(blocks[0], blocks[2]), tl.join(blocks[1], blocks[3]))  # block 2 i + j is [.., i, j]
        return tl.reshape(tl.permute(pairs, (0, 2, 3, 1)), (C, 4 * BLOCK))


@triton.jit
def prepare_kernel(
    q_ptr, w_ptr, k_ptr, p_ptr, mixed_ptr, projected_ptr, chunks_ptr, STRIDE: tl.constexpr, H: tl.constexpr,
    E: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head). Tiles [C, WIDTH] of memory, k's lies transposed; U takes the place of v."""
    BLOCKS: tl.constexpr = C // BLOCK
    LEVELS: tl.constexpr = C.bit_length() - 1
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    chunk, head = tl.program_id(0), tl.program_id(1)
    tile = chunk.to(tl.int64) * H + head
    plane = tl.num_programs(0).to(tl.int64) * (H * C * WIDTH)
    plain_q_ptr = mixed_ptr + tile * (C * WIDTH)
    plain_k_ptr, u_ptr, g_ptr = plain_q_ptr + plane, plain_q_ptr + 2 * plane, plain_q_ptr + 3 * plane
    token, part = tl.arange(0, C)[:, None], tl.arange(0, PART)[None, :]
    r = tl.arange(0, BLOCK)[:, None]
    a_blocks, p_blocks = (), ()
    for _ in tl.static_range(BLOCKS):
        a_blocks += (tl.zeros((C, BLOCK), tl.float32),)
        p_blocks += (tl.zeros((C, BLOCK), tl.float32),)
    for x in range(0, WIDTH, PART):
        at = token * WIDTH + x + part
        q, k, g = tl.load(plain_q_ptr + at), tl.load(plain_k_ptr + at), tl.load(g_ptr + at)
        a_sums, p_sums = (), ()
        for j in tl.static_range(BLOCKS):
            rows = (r + j * BLOCK) * WIDTH + x + part
            middle = tl.load(g_ptr + (j * BLOCK + BLOCK // 2) * WIDTH + x + part)
            rise = tl.where(token >= j * BLOCK, tl.exp(tl.minimum(g - middle, 80.0)), 0.0)
            fall = tl.trans(tl.load(plain_k_ptr + rows) * tl.exp(middle - tl.load(g_ptr + rows)))
            a_sums += (tl.dot(k * rise, fall, a_blocks[j], input_precision=PRECISION),)
            p_sums += (tl.dot(q * rise, fall, p_blocks[j], input_precision=PRECISION),)
        a_blocks, p_blocks = a_sums, p_sums
    column = tl.arange(0, C)[None, :]
    p = tl.where(column <= token, _side_by_side(p_blocks), 0.0)
    tl.store(p_ptr + tile * (C * C) + token * C + column, p.to(dtype))

    first, count = tl.load(chunks_ptr + chunk * 4).to(tl.int64), tl.load(chunks_ptr + chunk * 4 + 1)
    b_ptr = projected_ptr + first * STRIDE + token * STRIDE + 5 * H * E + head
    beta = tl.where(token < count, tl.sigmoid(tl.load(b_ptr, mask=token < count, other=0.0).to(tl.float32)), 0.0)
    a = tl.where(column < token, beta * _side_by_side(a_blocks), 0.0)
    m = tl.where(column == token, 1.0, 0.0) - tl.where(token ^ column == 1, a, 0.0)
    for doubling in tl.static_range(1, LEVELS):
        between = tl.where((token ^ column) >> doubling == 1, a, 0.0)
        m -= tl.dot(tl.dot(m, between, input_precision=PRECISION), m, input_precision=PRECISION)
    for x in range(0, WIDTH, PART):
        at = token * WIDTH + x + part
        g, last = tl.load(g_ptr + at), tl.load(g_ptr + (C - 1) * WIDTH + x + part)
        k = tl.load(plain_k_ptr + at)
        u = tl.dot(m, beta * tl.load(u_ptr + at), input_precision=PRECISION)
        w = tl.dot(m, beta * k * tl.exp(g), input_precision=PRECISION)
        tl.debug_barrier()  # v is read, u takes its place
        tl.store(u_ptr + at, u)
        tl.store(w_ptr + tile * (C * WIDTH) + at, w.to(dtype))
        tl.store(q_ptr + tile * (C * WIDTH) + at, (tl.load(plain_q_ptr + at) * tl.exp(g)).to(dtype))
        tl.store(k_ptr + tile * (C * WIDTH) + (x + part) * C + token, (k * tl.exp(last - g)).to(dtype))


@triton.jit
def scan_kernel(
    delta_ptr, held_ptr, w_ptr, u_ptr, k_ptr, g_ptr, state_ptr, ends_ptr, H: tl.constexpr, E: tl.constexpr,
    WIDTH: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of value columns, head, sequence): all chunks of the sequence, the state before each and its D."""
    DOT: tl.constexpr = launch.dot_dtype(w_ptr.dtype.element_ty)
    head, sequence = tl.program_id(1), tl.program_id(2)
    e, f = tl.arange(0, WIDTH), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    token = tl.arange(0, C)[:, None]
    at, across = token * WIDTH + e[None, :], e[:, None] * C + tl.arange(0, C)[None, :]
    state_ptr += (sequence * H + head).to(tl.int64) * (E * E) + e[:, None] * E + f
    is_state = (e[:, None] < E) & (f < E)
    state = tl.load(state_ptr, mask=is_state, other=0.0)
    begin = tl.load(ends_ptr + sequence - 1, mask=sequence > 0, other=0)
    end = tl.load(ends_ptr + sequence)
    g_ptr += (C - 1) * WIDTH + e
    total = tl.load(g_ptr + (begin * H + head.to(tl.int64)) * (C * WIDTH))
    for chunk in range(begin, end):
        tile = chunk * H + head.to(tl.int64)
        next_total = tl.load(g_ptr + (tile + tl.where(chunk + 1 < end, H, 0)) * (C * WIDTH))
        w = tl.load(w_ptr + tile * (C * WIDTH) + at).to(DOT)
        k = tl.load(k_ptr + tile * (C * WIDTH) + across).to(DOT)
        u = tl.load(u_ptr + tile * (C * WIDTH) + token * WIDTH + f)
        held = state.to(DOT)
        tl.store(held_ptr + tile * (WIDTH * WIDTH) + e[:, None] * WIDTH + f, held.to(held_ptr.dtype.element_ty))
        delta = (u - tl.dot(w, held, input_precision=PRECISION)).to(DOT)
        tl.store(delta_ptr + tile * (C * WIDTH) + token * WIDTH + f, delta.to(delta_ptr.dtype.element_ty))
        state = tl.dot(k, delta, state * tl.exp(total)[:, None], input_precision=PRECISION)
        total = next_total
    tl.store(state_ptr, state, mask=is_state)


@triton.jit
def output_kernel(
    o_ptr, q_ptr, held_ptr, p_ptr, delta_ptr, projected_ptr, norm_ptr, chunks_ptr, eps, STRIDE: tl.constexpr,
    H: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head): O, its norm and its gate."""
    DOT: tl.constexpr = launch.dot_dtype(q_ptr.dtype.element_ty)
    chunk, head = tl.program_id(0), tl.program_id(1)
    tile = chunk.to(tl.int64) * H + head
    e, f = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    token, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    q = tl.load(q_ptr + tile * (C * WIDTH) + token * WIDTH + f).to(DOT)
    held = tl.load(held_ptr + tile * (WIDTH * WIDTH) + e * WIDTH + f).to(DOT)
    p = tl.load(p_ptr + tile * (C * C) + token * C + column).to(DOT)
    delta = tl.load(delta_ptr + tile * (C * WIDTH) + token * WIDTH + f).to(DOT)
    o = tl.dot(p, delta, tl.dot(q, held, input_precision=PRECISION), input_precision=PRECISION)
    row, count = tl.load(chunks_ptr + chunk * 4).to(tl.int64) + token, tl.load(chunks_ptr + chunk * 4 + 1)
    inside, at = (token < count) & (f < E), head * E + f
    gate = tl.load(projected_ptr + row * STRIDE + 4 * H * E + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + f, mask=f < E, other=0.0).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, 1) / E + eps)[:, None] * weight * tl.sigmoid(gate)
    tl.store(o_ptr + row * (H * E) + at, o.to(o_ptr.dtype.element_ty), mask=inside)


def read(
    projected_NC: Tensor, history_BWC: Tensor, conv_CJ: Tensor, a_log_H: Tensor, dt_bias_HE: Tensor, norm_F: Tensor,
    state_BHEF: Tensor, lower_bound: float, eps: float, chunks: Chunks,
) -> Tensor:  # fmt: skip
    """See the package. float32, whose products are exact (Triton 3.6 leaves its shared memory in "tf32x3"), spills: it
    is there for tests and small models."""
    batch, heads, width, _ = state_BHEF.shape
    padded, size, num_chunks = launch.padded(width), chunks.chunk_tokens, len(chunks.chunks_M4)
    stored, precision, warps, num_stages = torch.bfloat16, "tf32", (PREPARE_WARPS, SCAN_WARPS, 4), SCAN_STAGES
    if projected_NC.dtype == torch.float32:  # tiles twice as large: no room to load ahead
        stored, precision, warps, num_stages = torch.float32, "ieee", (16, 8, 8), 1
    columns = min(SCAN_COLUMNS, padded)
    q, w, k, delta = projected_NC.new_empty(4, num_chunks, heads, size, padded, dtype=stored)
    p = projected_NC.new_empty(num_chunks, heads, size, size, dtype=stored)
    held = projected_NC.new_empty(num_chunks, heads, padded, padded, dtype=stored)
    mixed = projected_NC.new_empty(4, num_chunks, heads, size, padded, dtype=torch.float32)
    o_NHF = projected_NC.new_empty(len(projected_NC), heads, width)
    shape = {"H": heads, "E": width, "WIDTH": padded, "C": size}
    stride, exactness = {"STRIDE": projected_NC.shape[1]}, {"PRECISION": precision}
    mix_kernel[(num_chunks, heads, 4)](
        mixed, projected_NC, history_BWC, conv_CJ, a_log_H, dt_bias_HE, chunks.chunks_M4, lower_bound, width**-0.5,
        **shape, **stride, J=conv_CJ.shape[1], num_warps=MIX_WARPS,
    )  # fmt: skip
    prepare_kernel[(num_chunks, heads)](
        q, w, k, p, mixed, projected_NC, chunks.chunks_M4, **shape, **stride, **exactness,
        PART=min(PREPARE_PART, padded), num_warps=warps[0], num_stages=1,
    )  # fmt: skip
    scan_kernel[(padded // columns, heads, batch)](
        delta, held, w, mixed[V.value], k, mixed[G.value], state_BHEF, chunks.ends_B, **shape, **exactness,
        COLUMNS=columns, num_warps=warps[1], num_stages=num_stages,
    )  # fmt: skip
    output_kernel[(num_chunks, heads)](
        o_NHF, q, held, p, delta, projected_NC, norm_F, chunks.chunks_M4, eps, **shape, **stride, **exactness,
        num_warps=warps[2], num_stages=1,
    )  # fmt: skip
    return o_NHF
