"""The residual stream in Triton: one program a token's row, every load in flight at once, one barrier (the norm's sum).

A row of 2560 numbers is 320 threads of eight; the tile is the next power of two, and 16 warps give each thread one
16-byte load a part. The norm's weight is read before the wait. ``maxnreg`` gives the assembler all registers: left to
itself it takes 40 and issues nine parts' loads in four rounds, each as long as the whole sum (seen in the SASS). Of
more rows than a window's, many small programs a multiprocessor do more than one with all loads in flight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import MAX_TOKENS, launch


def warps_for(width: int) -> int:
    """Eight elements a thread, at most 16 warps: the chain is latency-bound, so every load shall be one instruction."""
    return int(min(16, max(1, triton.next_power_of_2(width) // (8 * 32))))


def registers_for(num_warps: int) -> int:
    """All registers that a thread can have when one program has the multiprocessor to itself."""
    return min(255, 65536 // (32 * num_warps))


@triton.jit
def sum_parts(parts, weights, row, is_token, column_D, inside_D, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """The sum of a row's parts in float32, weighted unless ``weights`` is None; all loads come before it."""
    parts_KD, weights_K = (), ()
    for k in tl.static_range(PARTS):
        parts_KD += (tl.load(parts + (row * PARTS + k) * WIDTH + column_D, mask=inside_D, other=0.0),)
        if weights is not None:
            weights_K += (tl.load(weights + row * PARTS + k, mask=is_token, other=0.0),)
    total_D = tl.zeros(column_D.shape, tl.float32)
    for k in tl.static_range(PARTS):
        part_D = parts_KD[k].to(tl.float32)
        if weights is not None:
            part_D *= weights_K[k]
        total_D += part_D
    return total_D


@triton.jit
def finish_row(residual_D, total_D, scale_D, new_residual, normed, place_D, inside_D, eps, WIDTH: tl.constexpr):
    """From the float32 sum on: round, add, round, normalise, write. Lanes outside the row hold zeros."""
    dtype: tl.constexpr = new_residual.dtype.element_ty
    sum_D = residual_D.to(tl.float32) + total_D.to(dtype).to(tl.float32)
    rounded_D = sum_D.to(dtype)
    tl.store(new_residual + place_D, rounded_D, mask=inside_D)
    x_D = rounded_D.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x_D * x_D, 0) / WIDTH + eps)
    tl.store(normed + place_D, (x_D * inverse * scale_D.to(tl.float32)).to(dtype), mask=inside_D)


@triton.jit
def add_norm_kernel(
    parts, weights, residual, ids, norm_weight, new_residual, normed, eps, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """One token's row: the weighted sum of its parts, the residual (with ids: of that id), the norm."""
    row = tl.program_id(0)
    column_D = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside_D = column_D < WIDTH
    scale_D = tl.load(norm_weight + column_D, mask=inside_D, other=0.0)
    # Of a sum at once: the successor's weights are asked for while this waits for nine rows.
    launch.follow(IS_CHAINED, IS_EARLY=ids is None)
    source = row if ids is None else tl.load(ids + row)
    residual_D = tl.load(residual + (source * WIDTH + column_D), mask=inside_D, other=0.0)
    total_D = sum_parts(parts, weights, row, True, column_D, inside_D, WIDTH, PARTS)
    finish_row(residual_D, total_D, scale_D, new_residual, normed, row * WIDTH + column_D, inside_D, eps, WIDTH)


def add_norm(
    parts_TKD: Tensor, weights_TK: Tensor | None, residual_TD: Tensor, norm_weight_D: Tensor, eps: float, *,
    is_chained: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See ``dspark.kernels.residual.add_norm``."""
    num_tokens, num_parts, width = parts_TKD.shape
    is_window = num_tokens <= MAX_TOKENS
    num_warps = warps_for(width) if is_window else min(4, warps_for(width))
    new_residual_TD, normed_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
    add_norm_kernel[(num_tokens,)](
        parts_TKD, weights_TK, residual_TD, None, norm_weight_D, new_residual_TD, normed_TD, eps, WIDTH=width,
        PARTS=num_parts, num_warps=num_warps, **launch.options(is_chained),
        **({"maxnreg": registers_for(num_warps)} if is_window else {}),
    )  # fmt: skip
    return new_residual_TD, normed_TD


def embed_norm(
    ids_T: Tensor, embedding_VD: Tensor, norm_weight_D: Tensor, eps: float, *, is_chained: bool = False
) -> tuple[Tensor, Tensor]:
    """See ``dspark.kernels.residual.embed_norm``."""
    width = embedding_VD.shape[1]
    num_warps = warps_for(width)
    residual_TD = embedding_VD.new_empty(len(ids_T), width)
    normed_TD = torch.empty_like(residual_TD)
    add_norm_kernel[(len(ids_T),)](
        None, None, embedding_VD, ids_T, norm_weight_D, residual_TD, normed_TD, eps, WIDTH=width, PARTS=0,
        num_warps=num_warps, maxnreg=registers_for(num_warps), **launch.options(is_chained),
    )  # fmt: skip
    return residual_TD, normed_TD
