"""Kimi Delta Attention over whole packed sequences, chunk by chunk: what reading a prompt takes."""

import torch
from torch import Tensor

from dspark.kernels.checks import expect
from dspark.kernels.chunks import Chunks
from dspark.kernels.kda_chunk import reference

__all__ = ["read"]


def read(
    projected_NC: Tensor, history_BWC: Tensor, conv_CJ: Tensor, a_log_H: Tensor, dt_bias_HE: Tensor, norm_F: Tensor,
    state_BHEF: Tensor, lower_bound: float, eps: float, chunks: Chunks,
) -> Tensor:  # fmt: skip
    """The normed and gated outputs of B packed sequences, which go on from their states; brings these on in place.

    Shapes: projected_NC rows [q | k | v | f | g | b] of widths HE, HE, HF, HE, HF, H (E = F), N the sum of the
    lengths in ``chunks``; history_BWC the J - 1 inputs [q | k | v] before each sequence's first row; conv_CJ
    J taps (at most 17) of those channels; state_BHEF float32 (zeros for a new sequence).
    Returns: o_NHF in the projection's dtype. Raises: ValueError on a shape, dtype or stride that does not fit.
    Source: specs/ling-3.0.md section 4.4; Kimi Linear (arXiv 2510.26692).
    """
    batch, (heads, width), num_taps = len(chunks.lengths), dt_bias_HE.shape, conv_CJ.shape[1]
    inner, dtype = heads * width, projected_NC.dtype
    expect("projected_NC", projected_NC, (sum(chunks.lengths), 5 * inner + heads), dtype)
    expect("history_BWC", history_BWC, (batch, num_taps - 1, 3 * inner), dtype)
    expect("conv_CJ", conv_CJ, (3 * inner, num_taps))
    expect("a_log_H", a_log_H, (heads,))
    expect("dt_bias_HE", dt_bias_HE, (heads, width))
    expect("norm_F", norm_F, (width,))
    expect("state_BHEF", state_BHEF, (batch, heads, width, width), torch.promote_types(dtype, torch.float32))
    inputs = (projected_NC, history_BWC, conv_CJ, a_log_H, dt_bias_HE, norm_F, state_BHEF, lower_bound, eps, chunks)
    if not projected_NC.is_cuda:
        return reference.read(*inputs)
    from dspark.kernels.kda_chunk import kernel  # Triton, which a CPU may lack

    return kernel.read(*inputs)
