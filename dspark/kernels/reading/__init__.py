"""Reading memory and doing nothing else: the bandwidth that other kernels are compared with."""

import torch
from torch import Tensor

from dspark.kernels.checks import check
from dspark.kernels.forms import form_for
from dspark.kernels.reading import reference

TILINGS = tuple((block, programs) for block in (4096, 8192, 16384) for programs in (264, 528, 1056))
"""Integers of a block, and programs (2, 4, 8 a multiprocessor of an H200), to take the fastest of."""


def read_sums(x_N: Tensor, block: int, num_programs: int) -> Tensor:
    """Read every integer once; program p sums blocks p, p + P, p + 2P ... with int32 wrap-around.

    Shapes: x_N int32, contiguous, N a multiple of ``block``. Returns int32 [P].
    Raises: ValueError for another dtype or length.
    """
    check({"N": len(x_N) // block * block}, torch.int32, x_N=x_N)
    return form_for(x_N, reference.read_sums)(x_N, block, num_programs)
