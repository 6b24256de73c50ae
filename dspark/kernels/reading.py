"""Reading memory and doing nothing else: the bandwidth that other kernels are compared with. Runs on a GPU only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.dispatch import check

TILINGS = tuple((block, programs) for block in (4096, 8192, 16384) for programs in (264, 528, 1056))
"""Integers of a block, and programs (2, 4, 8 a multiprocessor of an H200), to take the fastest of."""


@triton.jit
def _read_sums(x_ptr, sums_ptr, num_blocks, BLOCK: tl.constexpr):
    """A program strides over blocks and keeps one register vector of sums, so nothing is elided."""
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros([BLOCK], tl.int32)
    for _ in range(program, num_blocks, tl.num_programs(0)):
        total += tl.load(x_ptr + offsets)
        offsets += stride
    tl.store(sums_ptr + program, tl.sum(total))


def read_sums(x_N: Tensor, block: int, num_programs: int) -> Tensor:
    """Read every integer once; program p sums blocks p, p + P, p + 2P ... with int32 wrap-around.

    Shapes: x_N int32, contiguous, N a multiple of ``block``. Returns int32 [P].
    Raises: ValueError for another dtype or length.
    """
    check({"N": len(x_N) // block * block}, torch.int32, x_N=x_N)
    sums_P = torch.empty(num_programs, dtype=torch.int32, device=x_N.device)
    _read_sums[(num_programs,)](x_N, sums_P, len(x_N) // block, BLOCK=block, num_warps=8)
    return sums_P
