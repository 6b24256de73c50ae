"""The in-projection of linear attention out of shared memory, one program a multiprocessor; in Gluon.

Behind the sum and norm before it a kernel of many small programs has little to do but wait for weights. Here every
multiprocessor asks for its share of the rows, and before the tokens are there, for as much of it as it holds. A row's
columns are cut into slices, one a warp; a warp copies what it reads, straight in the order of the tensor-core
instruction (8 numbers a thread, tokens as well), and slices are added in shared memory at the end.

Without work a multiprocessor would draw several programs of the kernel behind (``kda.verify``: one for each), so those
without rows start too; and the register limit leaves it room.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspark.kernels import launch
from dspark.kernels.kda.preparing import load_parameters, prepare

MULTIPROCESSORS, WARPS, REGISTERS = 132, 8, 128
WIDE = gl.constexpr(64)
"""Columns of a slice: two instructions' 8 numbers a thread."""
RING_BYTES, EARLY_BYTES = 200 * 1024, 120 * 1024
"""Shared memory for weights, and how much of it is asked for before the wait; more would hold up the norm before it."""


@gluon.constexpr_function
def _powers(end, first=1):
    return [1 << bit for bit in range(first.bit_length() - 1, end.bit_length() - 1)]


@gluon.constexpr_function
def _piece(pieces, i):
    return pieces[i]


@gluon.constexpr_function
def _ring_layout(slices, rows):
    """[slices, rows, 64] of 2 bytes: rows of 128 bytes, whose halves change places in every second row."""
    bases = [[0, 0, k] for k in _powers(64)] + [[0, 1, 32]] + [[0, row, 0] for row in _powers(rows, 2)]
    return gl.SharedLinearLayout(bases + [[piece, 0, 0] for piece in _powers(slices)])


@gluon.constexpr_function
def _sums_layout(slices, rows):
    """[slices, 16, rows] in float32: neither those who write it nor those who read it meet in a bank."""
    bases = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 0, 2], [0, 0, 4], [0, 0, 1], [0, 8, 0]]
    bases += [[0, 0, row] for row in _powers(rows, 8)]
    return gl.SharedLinearLayout(bases + [[piece, 0, 0] for piece in _powers(slices)])


@gluon.constexpr_function
def _slices_layout(slices, rows):
    """[slices, 16, rows]: a sum's slices in a thread, a row's tokens in a warp."""
    warps = ([[0, 0, 1]] + [[0, 0, row] for row in _powers(rows, 8)] + [[0, 0, 0]] * 2)[:3]
    registers = [[piece, 0, 0] for piece in _powers(slices)] + [[0, 8, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 0, 2], [0, 0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [slices, 16, rows])


@gluon.constexpr_function
def _channels_layout(rows):
    """[rows, 16]: the same of one slice."""
    warps = ([[1, 0]] + [[row, 0] for row in _powers(rows, 8)] + [[0, 0]] * 2)[:3]
    return gl.DistributedLinearLayout([[0, 8]], [[0, 1], [0, 2], [0, 4], [2, 0], [4, 0]], warps, [], [rows, 16])


@gluon.jit
def _places(first, ROWS: gl.constexpr):
    """Rows [ROWS, 1] and tokens [1, 16] of an output tile."""
    layout: gl.constexpr = _channels_layout(ROWS)
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    return row, gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _allocate_ring(STAGES: gl.constexpr, SLICES: gl.constexpr, ROWS: gl.constexpr):
    return gl.allocate_shared_memory(gl.bfloat16, [STAGES, SLICES, ROWS, WIDE], _ring_layout(SLICES, ROWS))


@gluon.jit
def _share(sums):
    layout: gl.constexpr = _sums_layout(sums.shape[0], sums.shape[2])
    return gl.allocate_shared_memory(gl.float32, sums.shape, layout, sums)


@gluon.jit
def _ask(rings, stage, weight, firsts, at, C, D: gl.constexpr, PIECES: gl.constexpr, SLICES: gl.constexpr):
    """Have one step's columns, from ``at`` on, of a program's rows copied."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [SLICES, 1, 1], [2, 1, 0])
    piece = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    k = gl.arange(0, WIDE, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    for i in gl.static_range(len(PIECES)):
        row = gl.arange(0, _piece(PIECES, i), gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
        place = weight + firsts[i] * D + (at + (row * D + piece * WIDE + k))
        ampere.async_copy.async_copy_global_to_shared(
            rings[i].index(stage), place, firsts[i] + row < C, cache_modifier=".cg", eviction_policy="evict_first"
        )  # fmt: skip
    ampere.async_copy.commit_group()


@gluon.jit
def _load_parameters(firsts, history, conv, a_log, dt_bias, PIECES: gl.constexpr, H, E, J):
    parameters = ()
    for i in gl.static_range(len(PIECES)):
        row, token = _places(firsts[i], _piece(PIECES, i))
        parameters += (load_parameters(history, conv, a_log, dt_bias, row, token, H, E, J),)
    return parameters


@gluon.jit(do_not_specialize=["num_tokens"])  # one program text for every T
def ring_kernel(
    x, weight, y, prepared, history, conv, a_log, dt_bias, num_tokens, lower_bound, x_stride, C: gl.constexpr,
    D: gl.constexpr, H: gl.constexpr, E: gl.constexpr, J: gl.constexpr, PIECES: gl.constexpr, ROWS: gl.constexpr,
    SLICES: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, IS_TIGHT: gl.constexpr, IS_CHAINED: gl.constexpr,
):  # fmt: skip
    """Program p owns the ROWS rows from p ROWS on of C, in PIECES of 8, 16 or 32; D is whole steps of SLICES * WIDE.

    STAGES steps fit, of which EARLY are asked for before the wait. IS_TIGHT: registers are so few that parameters are
    loaded at the end and tokens a step ahead, not two.
    """
    COLUMNS: gl.constexpr = SLICES * WIDE
    STEPS: gl.constexpr = D // COLUMNS
    AHEAD: gl.constexpr = 1 if IS_TIGHT else 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, 1, 1], [1, 16, 8])
    x_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    first = gl.program_id(0) * ROWS
    rings, firsts, sums, parameters = (), (), (), ()
    for i in gl.static_range(len(PIECES)):
        rings += (_allocate_ring(STAGES, SLICES, _piece(PIECES, i)),)
        sums += (gl.zeros((SLICES, 16, _piece(PIECES, i)), gl.float32, mma),)
        firsts += (first,)
        first += _piece(PIECES, i)
    for step in gl.static_range(EARLY):
        _ask(rings, step, weight, firsts, step * COLUMNS, C, D, PIECES, SLICES)
    if not IS_TIGHT:
        parameters = _load_parameters(firsts, history, conv, a_log, dt_bias, PIECES, H, E, J)
    if IS_CHAINED:
        gdc_launch_dependents()  # before the wait: what comes behind takes its place early, and evenly
        gdc_wait()
    piece = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, x_layout)))[:, None, None]
    token = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, x_layout)))[None, :, None]
    k = gl.arange(0, WIDE, gl.SliceLayout(0, gl.SliceLayout(1, x_layout)))[None, None, :]
    place, tokens = x + token * x_stride + (piece * WIDE + k), ()
    for step in gl.static_range(min(AHEAD, STEPS)):
        tokens += (gl.load(place + step * COLUMNS, mask=token < num_tokens, other=0.0),)
    for step in gl.static_range(EARLY, STAGES):
        _ask(rings, step, weight, firsts, step * COLUMNS, C, D, PIECES, SLICES)
    for step in gl.static_range(STEPS):
        ampere.async_copy.wait_group(min(STAGES, STEPS - step) - 1)
        later = ()
        for i in gl.static_range(len(PIECES)):
            w = rings[i].index(step % STAGES).permute((0, 2, 1)).load(gl.DotOperandLayout(1, mma, 8))
            later += (ampere.mma_v2(tokens[step], w, sums[i]),)
        sums = later
        if IS_TIGHT and step == STEPS - 1:
            parameters = _load_parameters(firsts, history, conv, a_log, dt_bias, PIECES, H, E, J)
        if step + AHEAD < STEPS:
            tokens += (gl.load(place + (step + AHEAD) * COLUMNS, mask=token < num_tokens, other=0.0),)
        if step + STAGES < STEPS:
            _ask(rings, step % STAGES, weight, firsts, (step + STAGES) * COLUMNS, C, D, PIECES, SLICES)
    shared = ()
    for i in gl.static_range(len(PIECES)):
        shared += (_share(sums[i]),)
    for i in gl.static_range(len(PIECES)):  # add the slices, round, write, and write what becomes of the rounded values
        taps, old, rate, bias = parameters[i]
        row, w = _places(firsts[i], _piece(PIECES, i))
        total = gl.permute(gl.sum(shared[i].load(_slices_layout(SLICES, _piece(PIECES, i))), 0), (1, 0))
        total = gl.convert_layout(total, _channels_layout(_piece(PIECES, i)), assert_trivial=True)
        rounded, at, mask = total.to(y.dtype.element_ty), w * C + row, (row < C) & (w < num_tokens)
        gl.store(y + at, rounded, mask=mask)
        values = prepare(rounded.to(gl.float32), taps, old, rate, bias, lower_bound, row, w, H, E, J)
        gl.store(prepared + at, values, mask=mask)


def shape(num_rows: int, num_columns: int) -> dict[str, Any]:
    """How so many rows are cut: the kernel's constants."""
    rows = triton.cdiv(triton.cdiv(num_rows, MULTIPROCESSORS), 8) * 8
    pieces = (32,) * (rows // 32) + tuple(piece for piece in (16, 8) if rows & piece)
    step_bytes, num_steps = rows * WARPS * WIDE.value * 2, num_columns // (WARPS * WIDE.value)
    stages = min(num_steps, RING_BYTES // step_bytes)
    early = min(stages, max(1, EARLY_BYTES // step_bytes))
    return {"PIECES": pieces, "ROWS": rows, "STAGES": stages, "EARLY": early, "IS_TIGHT": rows > 48}


def fits(x_TD: Tensor, weight_CD: Tensor) -> bool:
    """Whether this way is there for a weight, and the better one: two bytes a number, 33 to 80 rows a program."""
    rows = triton.cdiv(len(weight_CD), MULTIPROCESSORS)
    is_whole = weight_CD.shape[1] % (WARPS * WIDE.value) == 0 and weight_CD.is_contiguous() and x_TD.stride(0) % 8 == 0
    is_aligned = x_TD.data_ptr() % 16 == 0 and weight_CD.data_ptr() % 16 == 0
    is_sized = 32 < rows <= 80 and weight_CD.dtype == torch.bfloat16
    return is_whole and is_aligned and is_sized


def project_prepared(
    x_TD: Tensor, weight_CD: Tensor, history_WC: Tensor, conv_CJ: Tensor, a_log_H: Tensor, dt_bias_HE: Tensor,
    lower_bound: float, out: tuple[Tensor, Tensor], *, is_chained: bool = False,
) -> None:  # fmt: skip
    """``reference.project_prepared``, of what ``fits``."""
    (num_rows, num_columns), (num_heads, width) = weight_CD.shape, dt_bias_HE.shape
    ring_kernel[(MULTIPROCESSORS,)](
        x_TD, weight_CD, *out, history_WC, conv_CJ, a_log_H, dt_bias_HE, len(x_TD), lower_bound, x_TD.stride(0),
        C=num_rows, D=num_columns, H=num_heads, E=width, J=conv_CJ.shape[1], **shape(num_rows, num_columns),
        SLICES=WARPS, num_warps=WARPS, maxnreg=REGISTERS, **launch.options(is_chained),
    )  # fmt: skip
