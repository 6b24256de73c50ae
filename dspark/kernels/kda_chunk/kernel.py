"""The chunked delta rule on the GPU, in two launches.

``prepare_kernel``: a program owns a chunk of one head. Convolution, norms and cumulated decay G go through memory under
a barrier; then, by blocks of 16 keys, the interactions A and the attention P inside the chunk, exp(G_i - G_j) split
around the middle of j's block (the factors stay within exp(+-40)); then (I + A)^-1, by forward substitution in the
blocks on the diagonal and by products below it. What leaves is U, W, q exp(G), (k exp(G_last - G))^T and P, so that

``scan_kernel``, a program a sequence, head and tile of value columns, has from chunk to chunk four products only, with
the state in float32 registers: D = U - W S; O = (q exp(G)) S + P D; S = diag(exp(G_last)) S + (...)^T D.

Operands of the scan are bfloat16 for bfloat16 inputs, as in public engines.
Source: specs/ling-3.0.md section 4.4; the order of work follows fla/ops/kda of flash-linear-attention.
"""

import torch
import triton
import triton.language as tl

from dspark.kernels import launch
from dspark.kernels.kda_chunk.reference import Chunks

EPS = tl.constexpr(1e-6)
BLOCK = tl.constexpr(16)
PREPARE_WARPS, SCAN_WARPS, SCAN_STAGES, SCAN_COLUMNS = 8, 4, 3, 32


@triton.jit
def _mixed(
    projected_ptr, history_ptr, conv_ptr, channel, token, place, count, is_channel, STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Convolution and SiLU of a chunk's tokens [C, E]; the pointers stand at the chunk's and the sequence's first."""
    inside = (token < count) & is_channel
    sum_ = tl.zeros(inside.shape, tl.float32)
    for j in tl.static_range(J):
        back = token + (j - (J - 1))
        x = tl.load(projected_ptr + back * STRIDE + channel, mask=inside & (back + place >= 0), other=0.0)
        sum_ += x.to(tl.float32) * tl.load(conv_ptr + channel * J + j, mask=is_channel, other=0.0).to(tl.float32)
    if place == 0:  # the first tokens of a sequence see its history
        for w in range(J - 1):
            x_ptr = history_ptr + (token + w) * CHANNELS + channel
            x = tl.load(x_ptr, mask=inside & (token + w < J - 1), other=0.0)
            sum_ += x.to(tl.float32) * tl.load(conv_ptr + channel * J + w, mask=is_channel, other=0.0).to(tl.float32)
    return sum_ * tl.sigmoid(sum_)


@triton.jit
def _normed(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]


@triton.jit
def _invert(a_ptr, m_ptr, C: tl.constexpr):
    """(I + A)^-1 of the strictly lower triangular blocks on the diagonal, all of them row by row."""
    block = tl.arange(0, C // BLOCK)[:, None, None] * BLOCK
    row, column = block + tl.arange(0, BLOCK)[None, :, None], block + tl.arange(0, BLOCK)[None, None, :]
    upright = tl.load(a_ptr + column * C + row)
    d = tl.where(row == column, 1.0, 0.0)
    for t in range(1, BLOCK):
        weights = tl.sum(tl.where(column == block + t, upright, 0.0), 2, keep_dims=True)
        d = tl.where(row == block + t, d - tl.sum(weights * d, 1, keep_dims=True), d)
    tl.store(m_ptr + row * C + column, d)


@triton.jit
def prepare_kernel(
    q_ptr, w_ptr, u_ptr, k_ptr, p_ptr, a_ptr, m_ptr, g_ptr, plain_q_ptr, plain_k_ptr, projected_ptr, history_ptr,
    conv_ptr, a_log_ptr, dt_bias_ptr, chunks_ptr, lower_bound, scale, STRIDE: tl.constexpr, H: tl.constexpr,
    E: tl.constexpr, J: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head). WIDTH is E padded; tiles [C, WIDTH] of memory, k's lies transposed."""
    CHANNELS: tl.constexpr = 3 * H * E
    BLOCKS: tl.constexpr = C // BLOCK
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    chunk, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
    count, place = tl.load(chunks_ptr + chunk * 4 + 1), tl.load(chunks_ptr + chunk * 4 + 3)
    projected_ptr += first * STRIDE
    history_ptr += tl.load(chunks_ptr + chunk * 4 + 2).to(tl.int64) * ((J - 1) * CHANNELS)
    tile = chunk.to(tl.int64) * H + head
    q_ptr += tile * (C * WIDTH)
    w_ptr += tile * (C * WIDTH)
    u_ptr += tile * (C * WIDTH)
    k_ptr += tile * (C * WIDTH)
    g_ptr += tile * (C * WIDTH)
    plain_q_ptr += tile * (C * WIDTH)
    plain_k_ptr += tile * (C * WIDTH)
    p_ptr += tile * (C * C)
    a_ptr += tile * (C * C)
    m_ptr += tile * (C * C)
    r, s = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    e = tl.arange(0, WIDTH)[None, :]
    rate = tl.exp(tl.load(a_log_ptr + head))
    dt_bias = tl.load(dt_bias_ptr + head * E + e, mask=e < E, other=0.0)
    total = tl.zeros((1, WIDTH), tl.float32)
    for i in range(BLOCKS):
        token, own = r + i * BLOCK, head * E + e
        at = token * WIDTH + e
        k = _mixed(projected_ptr, history_ptr, conv_ptr, H * E + own, token, place, count, e < E, STRIDE, CHANNELS, J)
        tl.store(plain_k_ptr + at, _normed(k))
        q = _mixed(projected_ptr, history_ptr, conv_ptr, own, token, place, count, e < E, STRIDE, CHANNELS, J)
        tl.store(plain_q_ptr + at, _normed(q) * scale)
        own += 2 * H * E
        v = _mixed(projected_ptr, history_ptr, conv_ptr, own, token, place, count, e < E, STRIDE, CHANNELS, J)
        tl.store(u_ptr + at, v)
        inside = (token < count) & (e < E)
        f = tl.load(projected_ptr + token * STRIDE + H * E + own, mask=inside, other=0.0).to(tl.float32)
        decay = tl.where(inside, lower_bound * tl.sigmoid(rate * (f + dt_bias)), 0.0)
        tl.store(g_ptr + at, tl.cumsum(decay, 0) + total)
        total += tl.sum(decay, 0)[None, :]
    tl.debug_barrier()  # what the threads prepared is seen

    token = tl.arange(0, C)[:, None]
    b_ptr = projected_ptr + token * STRIDE + 5 * H * E + head
    beta = tl.where(token < count, tl.sigmoid(tl.load(b_ptr, mask=token < count, other=0.0).to(tl.float32)), 0.0)
    part = tl.arange(0, PART)[None, :]
    for j in range(BLOCKS):
        a, p = tl.zeros((C, BLOCK), tl.float32), tl.zeros((C, BLOCK), tl.float32)
        for x in range(0, WIDTH, PART):
            at, rows = token * WIDTH + x + part, (r + j * BLOCK) * WIDTH + x + part
            middle = tl.load(g_ptr + (j * BLOCK + BLOCK // 2) * WIDTH + x + part)
            rise = tl.where(token >= j * BLOCK, tl.exp(tl.minimum(tl.load(g_ptr + at) - middle, 80.0)), 0.0)
            fall = tl.trans(tl.load(plain_k_ptr + rows) * tl.exp(middle - tl.load(g_ptr + rows)))
            a = tl.dot(tl.load(plain_k_ptr + at) * rise, fall, a, input_precision=PRECISION)
            p = tl.dot(tl.load(plain_q_ptr + at) * rise, fall, p, input_precision=PRECISION)
        column = s + j * BLOCK
        tl.store(a_ptr + token * C + column, tl.where(column < token, beta * a, 0.0))
        tl.store(p_ptr + token * C + column, tl.where(column <= token, p, 0.0).to(dtype))
    tl.debug_barrier()  # A is whole
    _invert(a_ptr, m_ptr, C)
    tl.debug_barrier()  # the inverse's blocks on the diagonal are seen
    inverse = ()  # of I + A: its blocks (0, 0), (1, 0), (1, 1), (2, 0), ..
    for i in tl.static_range(BLOCKS):
        square = (r + i * BLOCK) * C + s
        below = ()
        for j in tl.static_range(i):
            below += (tl.load(a_ptr + square + j * BLOCK),)
        d = tl.load(m_ptr + square + i * BLOCK)
        for j in tl.static_range(i):
            sum_ = tl.dot(below[j], inverse[j * (j + 1) // 2 + j], input_precision=PRECISION)
            for n in tl.static_range(j + 1, i):
                sum_ += tl.dot(below[n], inverse[n * (n + 1) // 2 + j], input_precision=PRECISION)
            block = -tl.dot(d, sum_, input_precision=PRECISION)
            tl.store(m_ptr + square + j * BLOCK, block)
            inverse += (block,)
        inverse += (d,)
        for j in tl.static_range(i + 1, BLOCKS):
            tl.store(m_ptr + square + j * BLOCK, tl.zeros((BLOCK, BLOCK), tl.float32))
    tl.debug_barrier()  # the inverse is whole

    m = tl.load(m_ptr + token * C + tl.arange(0, C)[None, :])
    for x in range(0, WIDTH, PART):
        at = token * WIDTH + x + part
        g, last = tl.load(g_ptr + at), tl.load(g_ptr + (C - 1) * WIDTH + x + part)
        k = tl.load(plain_k_ptr + at)
        u = tl.dot(m, beta * tl.load(u_ptr + at), input_precision=PRECISION)
        w = tl.dot(m, beta * k * tl.exp(g), input_precision=PRECISION)
        tl.debug_barrier()  # v is read, u takes its place
        tl.store(u_ptr + at, u)
        tl.store(w_ptr + at, w.to(dtype))
        tl.store(q_ptr + at, (tl.load(plain_q_ptr + at) * tl.exp(g)).to(dtype))
        tl.store(k_ptr + (x + part) * C + token, (k * tl.exp(last - g)).to(dtype))


@triton.jit
def scan_kernel(
    o_ptr, q_ptr, w_ptr, u_ptr, k_ptr, p_ptr, g_ptr, state_ptr, chunks_ptr, ends_ptr, H: tl.constexpr,
    E: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of value columns, head, sequence): all chunks of the sequence."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    e, f = tl.arange(0, WIDTH), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    token = tl.arange(0, C)[:, None]
    at = token * WIDTH + e[None, :]
    across = e[:, None] * C + tl.arange(0, C)[None, :]
    state_ptr += (sequence * H + head).to(tl.int64) * (E * E) + e[:, None] * E + f
    is_state = (e[:, None] < E) & (f < E)
    state = tl.load(state_ptr, mask=is_state, other=0.0)
    begin = tl.load(ends_ptr + sequence - 1, mask=sequence > 0, other=0)
    end = tl.load(ends_ptr + sequence)
    first = tl.load(chunks_ptr + begin * 4).to(tl.int64)
    length = tl.load(chunks_ptr + end * 4 - 1) + tl.load(chunks_ptr + end * 4 - 3)  # the last chunk's place and size
    o_ptr += (first * H + head) * E + f
    g_ptr += (C - 1) * WIDTH + e
    total = tl.load(g_ptr + (begin * H + head.to(tl.int64)) * (C * WIDTH))
    for chunk in range(begin, end):
        tile = chunk * H + head.to(tl.int64)
        next_total = tl.load(g_ptr + (tile + tl.where(chunk + 1 < end, H, 0)) * (C * WIDTH))
        w = tl.load(w_ptr + tile * (C * WIDTH) + at).to(DOT)
        q = tl.load(q_ptr + tile * (C * WIDTH) + at).to(DOT)
        k = tl.load(k_ptr + tile * (C * WIDTH) + across).to(DOT)
        p = tl.load(p_ptr + tile * (C * C) + token * C + tl.arange(0, C)[None, :]).to(DOT)
        u = tl.load(u_ptr + tile * (C * WIDTH) + token * WIDTH + f)
        held = state.to(DOT)
        delta = (u - tl.dot(w, held, input_precision=PRECISION)).to(DOT)
        o = tl.dot(p, delta, tl.dot(q, held, input_precision=PRECISION), input_precision=PRECISION)
        state = tl.dot(k, delta, state * tl.exp(total)[:, None], input_precision=PRECISION)
        row = (chunk - begin) * C + token
        tl.store(o_ptr + row * (H * E), o.to(o_ptr.dtype.element_ty), mask=(row < length) & (f < E))
        total = next_total
    tl.store(state_ptr, state, mask=is_state)


def read(
    projected_NC: torch.Tensor, history_BWC: torch.Tensor, conv_CJ: torch.Tensor, a_log_H: torch.Tensor,
    dt_bias_HE: torch.Tensor, state_BHEF: torch.Tensor, lower_bound: float, chunks: Chunks,
) -> torch.Tensor:  # fmt: skip
    """See the package. Products of float32 are exact: Triton 3.6 leaves its shared memory in "tf32x3"."""
    batch, heads, width, _ = state_BHEF.shape
    padded, size, num_chunks = max(16, triton.next_power_of_2(width)), chunks.chunk_tokens, len(chunks.chunks_M4)
    stored, precision, columns, num_stages = torch.bfloat16, "tf32", SCAN_COLUMNS, SCAN_STAGES
    if projected_NC.dtype == torch.float32:  # tiles twice as large: no room to load ahead
        stored, precision, columns, num_stages = torch.float32, "ieee", 16, 1
    columns = min(columns, padded)
    q, w, k = projected_NC.new_empty(3, num_chunks, heads, size, padded, dtype=stored)
    p = projected_NC.new_empty(num_chunks, heads, size, size, dtype=stored)
    u, g, plain_q, plain_k = (torch.empty_like(q, dtype=torch.float32) for _ in range(4))
    a, m = (torch.empty_like(p, dtype=torch.float32) for _ in range(2))
    prepare_kernel[(num_chunks, heads)](
        q, w, u, k, p, a, m, g, plain_q, plain_k, projected_NC, history_BWC, conv_CJ, a_log_H, dt_bias_HE,
        chunks.chunks_M4, lower_bound, width**-0.5, STRIDE=projected_NC.shape[1], H=heads, E=width,
        J=conv_CJ.shape[1], WIDTH=padded, PART=min(64, padded), C=size, PRECISION=precision,
        num_warps=PREPARE_WARPS, num_stages=1, maxnreg=1024 // PREPARE_WARPS,  # two programs a multiprocessor
    )  # fmt: skip
    o_NHF = projected_NC.new_empty(len(projected_NC), heads, width)
    scan_kernel[(padded // columns, heads, batch)](
        o_NHF, q, w, u, k, p, g, state_BHEF, chunks.chunks_M4, chunks.ends_B, H=heads, E=width, WIDTH=padded, C=size,
        COLUMNS=columns, DOT=launch.dot_dtype(stored), PRECISION=precision, num_warps=SCAN_WARPS,
        num_stages=num_stages,
    )  # fmt: skip
    return o_NHF
