"""The delta rule of one token on the GPU, and what it needs: convolution, norm, decay. Device functions only.

A head's [E, E] state lies in a program as E / 32 pieces of rows by some groups of columns, a tile [warps, LANES,
COLUMNS] each; a vector over the rows as E / 32 pieces [LANES]. Every multiply-add is written out, so that with the
compiler's own fusion off the bits are the same in every kernel.
"""

import triton
import triton.language as tl

LANES = tl.constexpr(32)
COLUMNS = tl.constexpr(4)
EPS = tl.constexpr(1e-6)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def load_rows(ptr, channels, stride, masks, COUNT: tl.constexpr):
    """A row of a tensor, or a tap: one float32 vector for each of COUNT pieces of ``channels``."""
    row = ()
    for i in tl.static_range(COUNT):
        row += (tl.load(ptr + channels[i] * stride, mask=masks[i], other=0.0).to(tl.float32),)
    return row


@triton.jit
def load_taps(conv_ptr, channels, masks, COUNT: tl.constexpr, J: tl.constexpr):
    """The J taps of a convolution, each as ``load_rows``."""
    taps = ()
    for j in tl.static_range(J):
        taps += (load_rows(conv_ptr + j, channels, J, masks, COUNT),)
    return taps


@triton.jit
def mixed(window, taps, COUNT: tl.constexpr, J: tl.constexpr):
    """Convolution and SiLU of a token from its J inputs."""
    y = ()
    for i in tl.static_range(COUNT):
        sum_ = window[0][i] * taps[0][i]
        for j in tl.static_range(1, J):
            sum_ = tl.fma(window[j][i], taps[j][i], sum_)
        y += (_silu(sum_),)
    return y


@triton.jit
def normed(x, scale, COUNT: tl.constexpr):
    """L2 norm over the rows of a head, which are the pieces' last dimension, times ``scale``."""
    square = x[0] * x[0]
    for i in tl.static_range(1, COUNT):
        square = tl.fma(x[i], x[i], square)
    factor = tl.rsqrt(tl.sum(square, -1, keep_dims=True) + EPS) * scale
    y = ()
    for i in tl.static_range(COUNT):
        y += (x[i] * factor,)
    return y


@triton.jit
def decay(f, dt_bias, rate, lower_bound, COUNT: tl.constexpr):
    """exp(lower_bound * sigmoid(rate (f + dt_bias))), the share that a row keeps."""
    y = ()
    for i in tl.static_range(COUNT):
        y += (tl.exp(lower_bound * tl.sigmoid(rate * (f[i] + dt_bias[i]))),)
    return y


@triton.jit
def upright(x, COUNT: tl.constexpr):
    """Vectors [LANES] as [1, LANES, 1], to meet a tile of the state."""
    y = ()
    for i in tl.static_range(COUNT):
        y += (x[i][None, :, None],)
    return y


@triton.jit
def _summed(state, x, g, PIECES: tl.constexpr):
    """S^T x over the rows for the four columns of group ``g`` of every warp: [warps, 1, COLUMNS]."""
    sum_ = state[g * PIECES] * x[0]
    for i in tl.static_range(1, PIECES):
        sum_ = tl.fma(state[g * PIECES + i], x[i], sum_)
    return tl.sum(sum_, 1)[:, None, :]


@triton.jit
def advance(state, kept, k, v, beta, PIECES: tl.constexpr, GROUPS: tl.constexpr):
    """The delta rule for one token: the state after it."""
    faded = ()
    for g in tl.static_range(GROUPS):
        for i in tl.static_range(PIECES):
            faded += (state[g * PIECES + i] * kept[i],)
    after = ()
    for g in tl.static_range(GROUPS):
        delta = beta * (tl.reshape(v[g], faded[g * PIECES].shape) - _summed(faded, k, g, PIECES))
        for i in tl.static_range(PIECES):
            after += (tl.fma(k[i], delta, faded[g * PIECES + i]),)
    return after


@triton.jit
def places(tile, E: tl.constexpr, WARPS: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr):
    """Rows [LANES] a piece, columns [WARPS * LANES, COLUMNS] a group (the same in all lanes), with their masks.

    Memory is read and written by tiles of two dimensions: of three, Triton 3.6 would not put LANES over the lanes.
    """
    lanes, warps = tl.arange(0, LANES), tl.arange(0, WARPS * LANES)[:, None] // LANES
    rows, row_masks, columns, column_masks = (), (), (), ()
    for i in tl.static_range(PIECES):
        rows += (lanes + i * LANES,)
        row_masks += (lanes + i * LANES < E,)
    for g in tl.static_range(GROUPS):
        column = ((tile * WARPS + warps) * GROUPS + g) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        columns += (column,)
        column_masks += (column < E,)
    return rows, row_masks, columns, column_masks


@triton.jit
def load_state(
    ptr, columns, column_masks, E: tl.constexpr, WARPS: tl.constexpr, PIECES: tl.constexpr, GROUPS: tl.constexpr
):
    """The tiles of a head's state: group by group of columns, the pieces of rows."""
    lane = tl.arange(0, WARPS * LANES)[:, None] % LANES
    state = ()
    for g in tl.static_range(GROUPS):
        for i in tl.static_range(PIECES):
            row = lane + i * LANES
            tile = tl.load(ptr + row * E + columns[g], mask=(row < E) & column_masks[g], other=0.0)
            state += (tl.reshape(tile, (WARPS, LANES, COLUMNS)),)
    return state


@triton.jit
def store_state(
    ptr, state, columns, column_masks, E: tl.constexpr, WARPS: tl.constexpr, PIECES: tl.constexpr, GROUPS: tl.constexpr
):
    """Write what ``load_state`` read."""
    lane = tl.arange(0, WARPS * LANES)[:, None] % LANES
    for g in tl.static_range(GROUPS):
        for i in tl.static_range(PIECES):
            row = lane + i * LANES
            tile = tl.reshape(state[g * PIECES + i], (WARPS * LANES, COLUMNS))
            tl.store(ptr + row * E + columns[g], tile, mask=(row < E) & column_masks[g])


@triton.jit
def write_output(
    o_ptr, state, q, columns, column_masks, WARPS: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr
):
    """Write S^T q of one token; all lanes hold it, the first one writes."""
    for g in tl.static_range(GROUPS):
        o = _summed(state, q, g, PIECES) + tl.zeros((WARPS, LANES, COLUMNS), tl.float32)
        o = tl.reshape(o, (WARPS * LANES, COLUMNS)).to(o_ptr.dtype.element_ty)
        mask = column_masks[g] & (tl.arange(0, WARPS * LANES)[:, None] % LANES == 0)
        tl.store(o_ptr + columns[g], o, mask=mask)
