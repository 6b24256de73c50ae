"""Kimi Delta Attention over packed sequences, defined; and how sequences are cut into chunks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dspark.kernels import kda

CHUNK_TOKENS = 64
"""Tokens that a program of the kernel takes together; a sequence's last chunk may hold fewer."""


class Chunks(NamedTuple):
    """How packed sequences lie, and their chunks in order; a chunk never spans two sequences.

    Shapes, int32 on the device: chunks_M4 a chunk's first row, its number of tokens, its sequence, and the place of its
    first token in that; ends_B how many chunks end with each sequence.
    """

    lengths: tuple[int, ...]
    chunk_tokens: int
    chunks_M4: torch.Tensor
    ends_B: torch.Tensor


def lay_out(lengths: Sequence[int], device: torch.device, chunk_tokens: int = CHUNK_TOKENS) -> Chunks:
    """Cut sequences of these lengths into chunks. Raises: ValueError when one is empty."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"sequences: found lengths {list(lengths)}, expected at least one token each")
    rows, ends, first = [], [], 0
    for sequence, length in enumerate(lengths):
        for place in range(0, length, chunk_tokens):
            rows.append((first + place, min(chunk_tokens, length - place), sequence, place))
        first += length
        ends.append(len(rows))
    tables = [torch.tensor(x, dtype=torch.int32) for x in (rows, ends)]
    if device.type == "cuda":  # from pinned memory a copy waits for nothing
        tables = [table.pin_memory().to(device, non_blocking=True) for table in tables]
    return Chunks(tuple(lengths), chunk_tokens, *tables)


def read(
    projected_NC: torch.Tensor,
    history_BWC: torch.Tensor,
    conv_CJ: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_HE: torch.Tensor,
    norm_F: torch.Tensor,
    state_BHEF: torch.Tensor,
    lower_bound: float,
    eps: float,
    chunks: Chunks,
) -> torch.Tensor:
    """``kda.chunked`` and ``kda.gated_rms_norm`` over one sequence after the other, in the state's dtype."""
    heads, width = dt_bias_HE.shape
    outputs = []
    for projected_TC, history_WC, state_HEF in zip(
        projected_NC.split(chunks.lengths), history_BWC, state_BHEF, strict=True
    ):
        sizes = (len(conv_CJ), heads * width, heads * width, heads)
        inputs_TC, f_TC, g_TC, b_TH = projected_TC.to(state_HEF.dtype).split(sizes, 1)
        window_BWC = torch.cat((history_WC.to(state_HEF.dtype), inputs_TC))[None]
        q, k, v = kda.short_conv(window_BWC, conv_CJ).unflatten(-1, (3, heads, width)).unbind(2)
        decay_THE = kda.log_decay(f_TC.unflatten(1, (heads, width)), a_log_H, dt_bias_HE, lower_bound)
        rule = kda.chunked(kda.l2norm(q), kda.l2norm(k), v, decay_THE[None], b_TH[None].sigmoid(), state_HEF[None])
        state_HEF.copy_(rule.state_BHEF[0])
        gate_THF = g_TC.unflatten(1, (heads, width))
        outputs.append(kda.gated_rms_norm(rule.o_BTHF[0], norm_F, gate_THF, eps))
    return torch.cat(outputs).to(projected_NC.dtype)
