"""Kimi Delta Attention over whole packed sequences, chunk by chunk: what reading a prompt takes."""

import torch
from torch import Tensor

from dspark.kernels.chunks import Chunks
from dspark.kernels.dispatch import check, form_for
from dspark.kernels.kda_chunk import reference


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
    (heads, width), dtype = dt_bias_HE.shape, projected_NC.dtype
    check({"N": sum(chunks.lengths), "C": heads * (5 * width + 1)}, dtype, projected_NC=projected_NC)
    sizes = {"B": len(chunks.lengths), "C": 3 * heads * width, "F": width, "W": conv_CJ.shape[1] - 1}
    sizes = check(sizes, dt_bias_HE=dt_bias_HE, a_log_H=a_log_H, conv_CJ=conv_CJ, norm_F=norm_F)
    check(sizes, dtype, history_BWC=history_BWC)
    check(sizes, torch.promote_types(dtype, torch.float32), state_BHEF=state_BHEF)
    inputs = (projected_NC, history_BWC, conv_CJ, a_log_H, dt_bias_HE, norm_F, state_BHEF, lower_bound, eps, chunks)
    return form_for(projected_NC, reference.read)(*inputs)
