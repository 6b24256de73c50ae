"""Read-only streaming: a program strides over blocks and keeps one register vector of sums, so nothing is elided."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read_sums(x_ptr, sums_ptr, num_blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros([BLOCK], tl.int32)
    for _ in range(program, num_blocks, tl.num_programs(0)):
        total += tl.load(x_ptr + offsets)
        offsets += stride
    tl.store(sums_ptr + program, tl.sum(total))


def read_sums(x_N: Tensor, block: int, num_programs: int, num_warps: int = 8) -> Tensor:
    """See the public function."""
    sums_P = torch.empty(num_programs, dtype=torch.int32, device=x_N.device)
    _read_sums[(num_programs,)](x_N, sums_P, len(x_N) // block, BLOCK=block, num_warps=num_warps)
    return sums_P
