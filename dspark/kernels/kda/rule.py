"""The delta rule of one token on the GPU. Device functions only.

Columns of a head's [E, E] state lie in a program as E / 32 pieces of rows, a tile [warps, LANES, COLUMNS] each; a
vector over the rows as E / 32 pieces [warps, LANES, 1]. Every multiply-add is written out, so that with the compiler's
own fusion off the bits are the same in every kernel.
"""

import triton
import triton.language as tl

LANES = tl.constexpr(32)
EPS = tl.constexpr(1e-6)


@triton.jit
def places(tile, E: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's lanes and columns [WARPS * LANES, 1 and COLUMNS], and which columns there are.

    Memory is read and written by tiles of two dimensions: of three, Triton 3.6 would not put LANES over the lanes.
    """
    place = tl.arange(0, WARPS * LANES)[:, None]
    columns = (tile * WARPS + place // LANES) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return place % LANES, columns, columns < E


@triton.jit
def load_state(ptr, lanes, columns, mask, E: tl.constexpr, PIECES: tl.constexpr):
    """The pieces of some columns of a head's state."""
    state = ()
    for i in tl.static_range(PIECES):
        row = lanes + i * LANES
        tile = tl.load(ptr + row * E + columns, mask=(row < E) & mask, other=0.0)
        state += (tl.reshape(tile, (tile.shape[0] // LANES, LANES, tile.shape[1])),)
    return state


@triton.jit
def load_rows(ptr, lanes, E: tl.constexpr, PIECES: tl.constexpr):
    """A vector over a head's rows."""
    row = ()
    for i in tl.static_range(PIECES):
        at = lanes + i * LANES
        row += (tl.reshape(tl.load(ptr + at, mask=at < E, other=0.0), (lanes.shape[0] // LANES, LANES, 1)),)
    return row


@triton.jit
def load_token(ptr, head, lanes, columns, mask, H: tl.constexpr, E: tl.constexpr, PIECES: tl.constexpr):
    """k not yet normed, decay, v [WARPS * LANES, COLUMNS] and beta, of the token whose prepared row begins at ptr."""
    at = ptr + head * E
    v = tl.load(at + 2 * H * E + columns, mask=mask, other=0.0)
    k, kept = load_rows(at + H * E, lanes, E, PIECES), load_rows(at + 3 * H * E, lanes, E, PIECES)
    return k, kept, v, tl.load(ptr + 5 * H * E + head)


@triton.jit
def product(x, y, PIECES: tl.constexpr):
    """The sum over the rows of x y: [warps, 1, 1] of two vectors, [warps, 1, COLUMNS] of columns and a vector."""
    sum_ = x[0] * y[0]
    for i in tl.static_range(1, PIECES):
        sum_ = tl.fma(x[i], y[i], sum_)
    return tl.sum(sum_, 1)[:, None, :]


@triton.jit
def fade(state, kept, PIECES: tl.constexpr):
    """The state times the share that each row keeps."""
    faded = ()
    for i in tl.static_range(PIECES):
        faded += (state[i] * kept[i],)
    return faded


@triton.jit
def advance(faded, read, k, square, v, beta, PIECES: tl.constexpr):
    """The state after a token, and what its k adds to the faded state; ``read`` faded^T k, ``square`` k^T k.

    k is not normed: its length is a factor of read and of the update, so that no sum waits for another one.
    """
    factor = tl.rsqrt(square + EPS)
    delta = (beta * factor) * (tl.reshape(v, faded[0].shape) - factor * read)
    after = ()
    for i in tl.static_range(PIECES):
        after += (tl.fma(k[i], delta, faded[i]),)
    return after, delta
