"""Kimi Delta Attention over packed sequences, defined."""

import torch
from torch import Tensor

from dspark.kernels.chunks import Chunks
from dspark.kernels.kda import reference as kda


def read(
    projected_NC: Tensor, history_BWC: Tensor, conv_CJ: Tensor, a_log_H: Tensor, dt_bias_HE: Tensor, norm_F: Tensor,
    state_BHEF: Tensor, lower_bound: float, eps: float, chunks: Chunks,
) -> Tensor:  # fmt: skip
    """``kda.chunked`` and ``kda.gated_rms_norm`` over one sequence after the other, in the state's dtype."""
    heads, width = dt_bias_HE.shape
    outputs = []
    sizes = (len(conv_CJ), heads * width, heads * width, heads)
    sequences = zip(projected_NC.split(chunks.lengths), history_BWC, state_BHEF, strict=True)
    for projected_TC, history_WC, state_HEF in sequences:
        inputs_TC, f_TC, g_TC, b_TH = projected_TC.to(state_HEF.dtype).split(sizes, 1)
        window_BWC = torch.cat((history_WC.to(state_HEF.dtype), inputs_TC))[None]
        q, k, v = kda.short_conv(window_BWC, conv_CJ).unflatten(-1, (3, heads, width)).unbind(2)
        decay_THE = kda.log_decay(f_TC.unflatten(1, (heads, width)), a_log_H, dt_bias_HE, lower_bound)
        rule = kda.chunked(kda.l2norm(q), kda.l2norm(k), v, decay_THE[None], b_TH[None].sigmoid(), state_HEF[None])
        state_HEF.copy_(rule.state_BHEF[0])
        gate_THF = g_TC.unflatten(1, (heads, width))
        outputs.append(kda.gated_rms_norm(rule.o_BTHF[0], norm_F, gate_THF, eps))
    return torch.cat(outputs).to(projected_NC.dtype)
