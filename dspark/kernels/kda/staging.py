"""What all columns of a head share of a token (k, decay, v, q), prepared once and passed through memory."""

import triton
import triton.language as tl

from dspark.kernels.kda.rule import LANES, decay, load_rows, load_taps, mixed, normed


@triton.jit
def load_window(projected_ptr, history_ptr, t, channel, mask, STRIDE: tl.constexpr, C: tl.constexpr, J: tl.constexpr):
    """The J inputs of tokens t at channels [1, any]: rows t and on of the history and the projection."""
    window = ()
    for j in tl.static_range(J):
        row = (t + j)[:, None]
        old = tl.load(history_ptr + row * C + channel, mask=mask & (row < J - 1), other=0.0)
        new = tl.load(projected_ptr + (row - (J - 1)) * STRIDE + channel, mask=mask & (row >= J - 1), other=0.0)
        window += ((tl.where(row < J - 1, old, new.to(old.dtype)).to(tl.float32),),)
    return window


@triton.jit
def stage(
    staged_ptr,
    projected_ptr,
    history_ptr,
    conv_ptr,
    a_log_ptr,
    dt_bias_ptr,
    lower_bound,
    scale,
    count,
    head,
    step,
    first,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    J: tl.constexpr,
    WARPS: tl.constexpr,
    V_PIECES: tl.constexpr,
    HAS_Q: tl.constexpr,
):
    """Write k, decay, v (and q) of WARPS tokens, a token a warp, to staged_ptr [token, 3 or 4, E].

    Of v, the columns ``first`` and on.
    """
    PIECES: tl.constexpr = (E + LANES - 1) // LANES
    C: tl.constexpr = 3 * H * E
    t = step * WARPS + tl.arange(0, WARPS)
    lanes = tl.arange(0, LANES)[None, :]
    to_ptr = staged_ptr + t[:, None] * ((4 if HAS_Q else 3) * E)
    rate = tl.exp(tl.load(a_log_ptr).to(tl.float32))
    q, k = (), ()
    for i in tl.static_range(PIECES):
        place = lanes + i * LANES
        mask = (t < count)[:, None] & (place < E)
        if HAS_Q:
            at = head * E + place
            window = load_window(projected_ptr, history_ptr, t, at, mask, STRIDE, C, J)
            q = q + mixed(window, load_taps(conv_ptr, (at,), (place < E,), 1, J), 1, J)
        at = (H + head) * E + place
        window = load_window(projected_ptr, history_ptr, t, at, mask, STRIDE, C, J)
        k = k + mixed(window, load_taps(conv_ptr, (at,), (place < E,), 1, J), 1, J)
        f_at = t[:, None] * STRIDE + (3 * H + head) * E + place
        f = tl.load(projected_ptr + f_at, mask=mask, other=0.0).to(tl.float32)
        dt_bias = tl.load(dt_bias_ptr + place, mask=place < E, other=0.0)
        tl.store(to_ptr + E + place, decay((f,), (dt_bias,), rate, lower_bound, 1)[0], mask=mask)
    for i in tl.static_range(V_PIECES):
        place = first + lanes + i * LANES
        mask = (t < count)[:, None] & (place < E)
        at = (2 * H + head) * E + place
        window = load_window(projected_ptr, history_ptr, t, at, mask, STRIDE, C, J)
        v = mixed(window, load_taps(conv_ptr, (at,), (place < E,), 1, J), 1, J)
        tl.store(to_ptr + 2 * E + place, v[0], mask=mask)
    k = normed(k, 1.0, PIECES)
    if HAS_Q:
        q = normed(q, scale, PIECES)
    for i in tl.static_range(PIECES):
        place = lanes + i * LANES
        mask = (t < count)[:, None] & (place < E)
        tl.store(to_ptr + place, k[i], mask=mask)
        if HAS_Q:
            tl.store(to_ptr + 3 * E + place, q[i], mask=mask)


@triton.jit
def load_staged(
    token_ptr,
    b_ptr,
    rows,
    row_masks,
    columns,
    column_masks,
    E: tl.constexpr,
    PIECES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """k and decay [LANES] a piece, v [WARPS, LANES, COLUMNS] a group, and b of a staged token."""
    k, kept = load_rows(token_ptr, rows, 1, row_masks, PIECES), load_rows(token_ptr + E, rows, 1, row_masks, PIECES)
    return k, kept, load_rows(token_ptr + 2 * E, columns, 1, column_masks, GROUPS), tl.load(b_ptr).to(tl.float32)
