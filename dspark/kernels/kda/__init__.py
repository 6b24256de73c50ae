"""Kimi Delta Attention: short convolution, decay, and the gated delta rule over one sequence or many."""

import torch

from dspark.kernels import MAX_TOKENS
from dspark.kernels.kda import reference
from dspark.kernels.kda.reference import (
    CHUNK_TOKENS,
    DeltaRule,
    chunked,
    gated_rms_norm,
    history_after,
    l2norm,
    log_decay,
    recurrence,
    short_conv,
    state_after,
)

__all__ = [
    "CHUNK_TOKENS",
    "DeltaRule",
    "chunked",
    "commit",
    "gated_rms_norm",
    "history_after",
    "l2norm",
    "log_decay",
    "recurrence",
    "short_conv",
    "state_after",
    "verify",
]


def verify(
    projected_TC: torch.Tensor,
    history_WC: torch.Tensor,
    conv_CJ: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_HE: torch.Tensor,
    state_HEF: torch.Tensor,
    lower_bound: float,
    *,
    is_chained: bool = False,
) -> torch.Tensor:
    """The outputs of T = 1..16 further tokens of one sequence, from the in-projection's rows; changes nothing.

    Chained, the state is read before the predecessor has finished: it must not be what writes it
    (``commit``). One that writes the projection stands between them anyway.

    Shapes: projected_TC rows [q | k | v | f | g | b] of widths HE, HE, HF, HE, HF, H (E = F; g is not read here);
    history_WC the J - 1 inputs [q | k | v] before them; conv_CJ J taps of those channels; state_HEF float32.
    Returns: o_THF in the projection's dtype. Raises: ValueError on a shape, dtype or stride that does not fit.
    """
    _check(projected_TC, history_WC, conv_CJ, a_log_H, dt_bias_HE, state_HEF, ())
    if not projected_TC.is_cuda:
        return reference.verify(projected_TC, history_WC, conv_CJ, a_log_H, dt_bias_HE, state_HEF, lower_bound)
    from dspark.kernels.kda import kernel  # Triton, which a CPU may lack

    return kernel.verify(
        projected_TC, history_WC, conv_CJ, a_log_H, dt_bias_HE, state_HEF, lower_bound, is_chained=is_chained
    )


def commit(
    projected_LTC: torch.Tensor,
    history_LWC: torch.Tensor,
    conv_LCJ: torch.Tensor,
    a_log_LH: torch.Tensor,
    dt_bias_LHE: torch.Tensor,
    state_LHEF: torch.Tensor,
    lower_bound: float,
    count_1: torch.Tensor,
    *,
    is_chained: bool = False,
) -> None:
    """Bring the states and histories of L layers the first ``count_1`` of their T tokens on, in place, in one launch.

    Shapes: as ``verify`` takes them, stacked over the layers; count_1 int64 on the tensors' device, 0..T (0 changes
    nothing). Raises: ValueError as ``verify``.
    """
    _check(projected_LTC, history_LWC, conv_LCJ, a_log_LH, dt_bias_LHE, state_LHEF, state_LHEF.shape[:1])
    if count_1.shape != (1,) or count_1.dtype != torch.int64:
        raise ValueError(f"count_1: found {count_1.dtype} {tuple(count_1.shape)}, expected torch.int64 (1,)")
    if not projected_LTC.is_cuda:
        return reference.commit(
            projected_LTC, history_LWC, conv_LCJ, a_log_LH, dt_bias_LHE, state_LHEF, lower_bound, count_1
        )
    from dspark.kernels.kda import kernel  # Triton, which a CPU may lack

    return kernel.commit(
        projected_LTC,
        history_LWC,
        conv_LCJ,
        a_log_LH,
        dt_bias_LHE,
        state_LHEF,
        lower_bound,
        count_1,
        is_chained=is_chained,
    )


def _check(
    projected: torch.Tensor,
    history: torch.Tensor,
    conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    lead: tuple[int, ...],
) -> None:
    num_heads, width = state.shape[-3], state.shape[-1]
    num_tokens, num_taps, inner = projected.shape[-2], conv.shape[-1], num_heads * width
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"projected: found {num_tokens} tokens, expected 1 to {MAX_TOKENS}")
    shapes = {
        "projected": (projected, (num_tokens, 5 * inner + num_heads)),
        "history": (history, (num_taps - 1, 3 * inner)),
        "conv": (conv, (3 * inner, num_taps)),
        "a_log": (a_log, (num_heads,)),
        "dt_bias": (dt_bias, (num_heads, width)),
        "state": (state, (num_heads, width, width)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != (*lead, *shape):
            raise ValueError(f"{name}: found shape {tuple(tensor.shape)}, expected {(*lead, *shape)}")
        if name != "projected" and not tensor.is_contiguous():
            raise ValueError(f"{name}: found strides {tensor.stride()}, expected a contiguous tensor")
    if projected.stride(-1) != 1:
        raise ValueError(f"projected: found stride {projected.stride(-1)} between channels, expected 1")
    wide = torch.promote_types(projected.dtype, torch.float32)
    if history.dtype != projected.dtype or state.dtype != wide:
        found = f"{history.dtype} and {state.dtype}"
        raise ValueError(f"history and state: found {found}, expected {projected.dtype} and {wide}")
