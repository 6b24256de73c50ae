"""Kimi Delta Attention: short convolution, decay, and the gated delta rule over one sequence or many."""

import torch
from torch import Tensor

from dspark.kernels.dispatch import check, form_for
from dspark.kernels.kda import reference


def verify(prepared_TC: Tensor, state_HEF: Tensor, dtype: torch.dtype, *, is_chained: bool = False) -> Tensor:
    """The outputs of T = 1..16 further tokens of one sequence, from what ``prepare`` gives; changes nothing.

    Chained, the state is read before the predecessor has finished: it must not be what writes it (``commit``).

    Shapes: prepared_TC rows [q | k | v | decay | g | beta] of widths HE, HE, HF, HE, HF, H (E = F; g is not read here)
    and state_HEF, both in float32 (float64 on the CPU), contiguous. Returns: o_THF in ``dtype``.
    Raises: ValueError on a shape, dtype or stride that does not fit.
    """
    num_heads, _, width = state_HEF.shape
    sizes = {"E": width, "C": num_heads * (5 * width + 1)}
    check(sizes, torch.float32, torch.float64, is_window=True, state_HEF=state_HEF, prepared_TC=prepared_TC)
    return form_for(prepared_TC, reference.verify, is_chained=is_chained)(prepared_TC, state_HEF, dtype)


def commit(
    projected_LTC: Tensor, prepared_LTC: Tensor, history_LWC: Tensor, state_LHEF: Tensor, count_1: Tensor, *,
    is_chained: bool = False,
) -> None:  # fmt: skip
    """Bring the states and histories of L layers the first ``count_1`` of their T tokens on, in place, in one launch.

    Shapes: as ``prepare`` and ``verify`` take them, stacked over the layers; count_1 int64 on the tensors' device, 0..T
    (0 changes nothing). Chained: as ``verify``. Raises: ValueError as ``verify``.
    """
    num_layers, num_heads, _, width = state_LHEF.shape
    sizes = {"L": num_layers, "E": width, "C": num_heads * (5 * width + 1)}
    kinds = (torch.float32, torch.float64)
    sizes = check(sizes, *kinds, is_window=True, state_LHEF=state_LHEF, prepared_LTC=prepared_LTC)
    check(sizes, history_LWC.dtype, num_strided=2, projected_LTC=projected_LTC)
    check({"L": num_layers, "C": 3 * num_heads * width}, history_LWC=history_LWC)
    check({}, torch.int64, count_1=count_1)
    run = form_for(prepared_LTC, reference.commit, is_chained=is_chained)
    run(projected_LTC, prepared_LTC, history_LWC, state_LHEF, count_1)
