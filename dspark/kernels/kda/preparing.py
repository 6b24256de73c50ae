"""``reference.prepare`` on a tile [channels, 16 tokens] of the in-projection. Device functions only.

Nothing here makes a tile of its own, so that Gluon kernels, whose tiles have layouts, can call it too.
"""

import triton
import triton.language as tl


@triton.jit
def load_parameters(history, conv, a_log, dt_bias, rows, w, H: tl.constexpr, E: tl.constexpr, J: tl.constexpr):
    """What ``prepare`` needs beside the projection, of channels ``rows`` [any, 1]; read ahead of it. w: 0..15 [1, 16].

    The J taps, the history [any, 16] (J - 1 columns of it), decay rate and bias.
    """
    is_mixed = rows < 3 * H * E
    taps = ()
    for j in tl.static_range(J):
        taps += (tl.load(conv + rows * J + j, mask=is_mixed, other=0.0).to(tl.float32),)
    old = tl.load(history + w * (3 * H * E) + rows, mask=is_mixed & (w < J - 1), other=0.0).to(tl.float32)
    place = rows - 3 * H * E
    is_decay = (place >= 0) & (place < H * E)
    rate = tl.exp(tl.load(a_log + place // E, mask=is_decay, other=0.0))
    return taps, old, rate, tl.load(dt_bias + place, mask=is_decay, other=0.0)


@triton.jit
def prepare(y, taps, old, rate, bias, lower_bound, rows, w, H: tl.constexpr, E: tl.constexpr, J: tl.constexpr):
    """float32 [rows, 16] from the rounded projection y, in float32."""
    place, sum_ = tl.broadcast_to(w, y.shape), y  # of which the first tap makes a product
    for j in tl.static_range(J):  # input j of a token is row token + j of the history followed by y
        row = place + j
        before, after = tl.gather(old, tl.minimum(row, 15), 1), tl.gather(y, tl.maximum(row - (J - 1), 0), 1)
        x, tap = tl.where(row < J - 1, before, after), tl.broadcast_to(taps[j], y.shape)
        sum_ = x * tap if j == 0 else tl.fma(x, tap, sum_)
    kept = tl.exp(lower_bound * tl.sigmoid(rate * (y + bias)))
    is_decay = (rows >= 3 * H * E) & (rows < 4 * H * E)
    gated = tl.sigmoid(tl.where(rows < 3 * H * E, sum_, y))
    return tl.where(is_decay, kept, tl.where(rows < 3 * H * E, sum_ * gated, gated))
