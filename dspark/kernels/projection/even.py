"""KDA's in-projection with the same work for every multiprocessor: one program each, with all of its weight rows.

A program of kernel.py reads the tokens again for every 16 weight rows, half as many bytes as the weights themselves;
here they are read once a multiprocessor. The tokens are the product's 16-row side and the weight rows the other one, in
two pieces: 40 rows, 5128 over 132 programs, are no power of two.
"""

import torch
import triton
import triton.language as tl

from dspark.kernels import launch
from dspark.kernels.kda.preparing import load_parameters, prepare
from dspark.kernels.projection.kernel import chunks, prefetch_tile, weight_tile

MULTIPROCESSORS = 132
COLUMNS, NUM_STAGES = 256, 5
"""Four steps in flight: at 40 rows 112 KB."""


@triton.jit(do_not_specialize=["num_tokens"])  # one program text for every T
def even_kernel(
    x, weight, y, prepared, history, conv, a_log, dt_bias, num_tokens, lower_bound, x_stride, weight_stride,
    C: tl.constexpr, D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, J: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr, MAIN_CHUNKS: tl.constexpr,
    MAIN_CHUNK: tl.constexpr, REST_CHUNKS: tl.constexpr, REST_CHUNK: tl.constexpr, DOT: tl.constexpr,
    IS_CHAINED: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    """Program p owns the rows p (MAIN + REST) and on of C, in pieces of MAIN and REST (0: none); COLUMNS divides D."""
    WIDE: tl.constexpr = COLUMNS // SLICES
    first = tl.program_id(0) * (MAIN + REST)
    main = first + tl.arange(0, MAIN)
    main_rows = tl.minimum(main, C - 1).to(tl.int64)
    if MAIN_CHUNKS > 0:
        prefetch_tile(weight, weight_stride, main_rows, 0, D, MAIN_CHUNKS, MAIN_CHUNK)
    main_parameters = load_parameters(history, conv, a_log, dt_bias, main[:, None], H, E, J)
    main_sums = tl.zeros((SLICES, 16, MAIN), tl.float32)
    if REST > 0:
        rest = first + MAIN + tl.arange(0, REST)
        rest_rows = tl.minimum(rest, C - 1).to(tl.int64)
        if REST_CHUNKS > 0:
            prefetch_tile(weight, weight_stride, rest_rows, 0, D, REST_CHUNKS, REST_CHUNK)
        rest_parameters = load_parameters(history, conv, a_log, dt_bias, rest[:, None], H, E, J)
        rest_sums = tl.zeros((SLICES, 16, REST), tl.float32)
    launch.wait(IS_CHAINED)
    launch.signal(IS_CHAINED)
    token = tl.arange(0, 16)
    place = tl.arange(0, SLICES)[:, None, None] * WIDE + tl.arange(0, WIDE)[None, None, :]
    for at in tl.range(0, D, COLUMNS, num_stages=num_stages):
        is_token = (token < num_tokens)[None, :, None] & (place >= 0)
        tokens = tl.load(x + token[None, :, None] * x_stride + (at + place), mask=is_token, other=0.0).to(DOT)
        tile = weight_tile(weight, weight_stride, main_rows, at, D, D, D, COLUMNS, SLICES, True, "evict_first")
        main_sums = tl.dot(tokens, tl.permute(tile.to(DOT), (0, 2, 1)), main_sums, input_precision="ieee")
        if REST > 0:
            tile = weight_tile(weight, weight_stride, rest_rows, at, D, D, D, COLUMNS, SLICES, True, "evict_first")
            rest_sums = tl.dot(tokens, tl.permute(tile.to(DOT), (0, 2, 1)), rest_sums, input_precision="ieee")
    _finish(main_sums, y, prepared, main, num_tokens, main_parameters, lower_bound, C, H, E, J)
    if REST > 0:
        _finish(rest_sums, y, prepared, rest, num_tokens, rest_parameters, lower_bound, C, H, E, J)


@triton.jit
def _finish(
    sums, y, prepared, row, num_tokens, parameters, lower_bound, C: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
    J: tl.constexpr,
):  # fmt: skip
    """Add the slices, round, write, and write what becomes of the rounded values."""
    taps, old, rate, bias = parameters
    token = tl.arange(0, 16)[None, :]
    rounded = tl.trans(tl.sum(sums, 0)).to(y.dtype.element_ty)
    at, mask = token * C + row[:, None], (row < C)[:, None] & (token < num_tokens)
    tl.store(y + at, rounded, mask=mask)
    values = prepare(rounded.to(tl.float32), taps, old, rate, bias, lower_bound, row[:, None], H, E, J)
    tl.store(prepared + at, values, mask=mask)


def pieces(num_rows: int) -> tuple[int, int]:
    """A program's rows as two powers of two, at least 16 and (0 or at least) 8."""
    rows = max(16, triton.cdiv(num_rows, MULTIPROCESSORS))
    main = 1 << (rows.bit_length() - 1)
    return main, max(8, triton.next_power_of_2(rows - main)) if rows > main else 0


def slices(num_rows: int) -> int:
    """Slices of a step's columns, one a warp: more of them where the sums of many rows would not fit in registers."""
    return 4 if sum(pieces(num_rows)) <= 48 else 8


def fits(weight_CD: torch.Tensor) -> bool:
    """Whether this way is the better one: many rows, whole steps of columns, two bytes a number."""
    num_rows, num_columns = weight_CD.shape
    is_sized = num_rows > 32 * MULTIPROCESSORS and sum(pieces(num_rows)) <= 96 and num_columns % COLUMNS == 0
    return is_sized and weight_CD.element_size() == 2


def project_prepared(
    x_TD: torch.Tensor, weight_CD: torch.Tensor, history_WC: torch.Tensor, conv_CJ: torch.Tensor,
    a_log_H: torch.Tensor, dt_bias_HE: torch.Tensor, lower_bound: float, out: tuple[torch.Tensor, torch.Tensor],
    *, is_chained: bool = False, columns: int = COLUMNS,
) -> None:  # fmt: skip
    """``reference.project_prepared``, where ``columns`` divide the weight's."""
    (num_rows, num_columns), (num_heads, width) = weight_CD.shape, dt_bias_HE.shape
    main, rest = pieces(num_rows)
    num_slices = slices(num_rows)
    main_chunks, main_chunk = chunks(weight_CD, main, num_slices, num_columns)
    rest_chunks, rest_chunk = chunks(weight_CD, rest, num_slices, num_columns) if rest else (0, 0)
    even_kernel[(triton.cdiv(num_rows, main + rest),)](
        x_TD, weight_CD, *out, history_WC, conv_CJ, a_log_H, dt_bias_HE, len(x_TD), lower_bound, x_TD.stride(0),
        weight_CD.stride(0), C=num_rows, D=num_columns, H=num_heads, E=width, J=conv_CJ.shape[1], MAIN=main, REST=rest,
        COLUMNS=columns, SLICES=num_slices, MAIN_CHUNKS=main_chunks, MAIN_CHUNK=main_chunk, REST_CHUNKS=rest_chunks,
        REST_CHUNK=rest_chunk, DOT=launch.dot_dtype(x_TD.dtype), num_stages=NUM_STAGES, num_warps=num_slices,
        **launch.options(is_chained),
    )  # fmt: skip
