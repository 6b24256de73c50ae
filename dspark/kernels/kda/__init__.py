"""Kimi Delta Attention: short convolution, decay, and the gated delta rule over one sequence or many."""

import torch
from torch import Tensor

from dspark.kernels.checks import expect, expect_window
from dspark.kernels.kda import reference
from dspark.kernels.kda.reference import (
    chunked,
    gated_rms_norm,
    history_after,
    l2norm,
    log_decay,
    prepare,
    recurrence,
    short_conv,
    state_after,
)

__all__ = ["chunked", "commit", "gated_rms_norm", "history_after", "l2norm", "log_decay", "prepare", "recurrence"]
__all__ += ["short_conv", "state_after", "verify"]


def verify(prepared_TC: Tensor, state_HEF: Tensor, dtype: torch.dtype, *, is_chained: bool = False) -> Tensor:
    """The outputs of T = 1..16 further tokens of one sequence, from what ``prepare`` gives; changes nothing.

    Chained, the state is read before the predecessor has finished: it must not be what writes it (``commit``).

    Shapes: prepared_TC rows [q | k | v | decay | g | beta] of widths HE, HE, HF, HE, HF, H (E = F; g is not read here)
    and state_HEF, both in float32 (float64 on the CPU), contiguous. Returns: o_THF in ``dtype``.
    Raises: ValueError on a shape, dtype or stride that does not fit.
    """
    _check(prepared_TC, state_HEF, ())
    if not prepared_TC.is_cuda:
        return reference.verify(prepared_TC, state_HEF, dtype)
    from dspark.kernels.kda import kernel  # Triton, which a CPU may lack

    return kernel.verify(prepared_TC, state_HEF, dtype, is_chained=is_chained)


def commit(
    projected_LTC: Tensor, prepared_LTC: Tensor, history_LWC: Tensor, state_LHEF: Tensor, count_1: Tensor, *,
    is_chained: bool = False,
) -> None:  # fmt: skip
    """Bring the states and histories of L layers the first ``count_1`` of their T tokens on, in place, in one launch.

    Shapes: as ``prepare`` and ``verify`` take them, stacked over the layers; count_1 int64 on the tensors' device, 0..T
    (0 changes nothing). Chained: as ``verify``. Raises: ValueError as ``verify``.
    """
    _check(prepared_LTC, state_LHEF, state_LHEF.shape[:1])
    num_layers, num_heads, width, _ = state_LHEF.shape
    history_shape = (num_layers, history_LWC.shape[1], 3 * num_heads * width)
    expect("count_1", count_1, (1,), torch.int64)
    expect("projected_LTC", projected_LTC, tuple(prepared_LTC.shape), history_LWC.dtype, num_strided=2)
    expect("history_LWC", history_LWC, history_shape, history_LWC.dtype)
    if not prepared_LTC.is_cuda:
        return reference.commit(projected_LTC, prepared_LTC, history_LWC, state_LHEF, count_1)
    from dspark.kernels.kda import kernel  # Triton, which a CPU may lack

    return kernel.commit(projected_LTC, prepared_LTC, history_LWC, state_LHEF, count_1, is_chained=is_chained)


def _check(prepared: Tensor, state: Tensor, lead: tuple[int, ...]) -> None:
    num_heads, width, num_tokens = state.shape[-3], state.shape[-1], prepared.shape[-2]
    expect_window("prepared", num_tokens)
    expect("state", state, (*lead, num_heads, width, width), torch.float32, torch.float64)
    expect("prepared", prepared, (*lead, num_tokens, num_heads * (5 * width + 1)), state.dtype)
