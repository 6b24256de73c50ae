"""Kimi Delta Attention, defined. C channels, E width of a key, F width of a value; statistics in float32 or higher.

Per head and token, with the state S [E, F]::

    S <- diag(exp(log_decay)) S
    u  = beta (v - S^T k)            # reads the decayed state
    S <- S + k u^T
    o  = S^T q / sqrt(E)             # reads the updated state

Sources: Kimi Linear (arXiv 2510.26692); fla/ops/kda of flash-linear-attention; specs/ling-3.0.md section 4.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_TOKENS = 16
"""With a log decay above -5, sixteen tokens decay by at most exp(-80), which float32 still holds."""


class DeltaRule(NamedTuple):
    """What the delta rule gives over T tokens: outputs, the update u of every token, and the state after the last."""

    o_BTHF: Tensor
    deltas_BTHF: Tensor
    state_BHEF: Tensor


def short_conv(window_BWC: Tensor, weight_CJ: Tensor) -> Tensor:
    """Depthwise causal convolution of J taps, then SiLU; the last tap meets the current token.

    Shapes: window_BWC the J-1 inputs before the first token followed by the T inputs (W = J-1+T); returns
    [B, T, C] in float32 or higher.
    """
    num_taps = weight_CJ.shape[1]
    wide = torch.promote_types(window_BWC.dtype, torch.float32)
    window_BWC, weight_CJ = window_BWC.to(wide), weight_CJ.to(wide)
    num_tokens = window_BWC.shape[1] - num_taps + 1
    y_BTC = window_BWC[:, :num_tokens] * weight_CJ[:, 0]
    for tap in range(1, num_taps):
        y_BTC = torch.addcmul(y_BTC, window_BWC[:, tap : tap + num_tokens], weight_CJ[:, tap])
    return functional.silu(y_BTC)


def history_after(window_BWC: Tensor, counts_B: Tensor, num_history: int) -> Tensor:
    """The ``num_history`` inputs that precede the next token once the first counts_B[b] tokens of a window are taken.

    Shapes: window_BWC as in ``short_conv`` (leading dimensions of any number go with counts_B); counts in 0..T.
    """
    rows_BW = counts_B.unsqueeze(-1) + torch.arange(num_history, device=counts_B.device)
    return window_BWC.take_along_dim(rows_BW.unsqueeze(-1), -2)


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension, in float32 or higher."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def log_decay(f_BTHE: Tensor, a_log_H: Tensor, dt_bias_HE: Tensor, lower_bound: float) -> Tensor:
    """``lower_bound * sigmoid(exp(A_log) (f + dt_bias))``: the log of what a key channel keeps, in (lower_bound, 0)."""
    return lower_bound * torch.sigmoid(a_log_H.exp().unsqueeze(-1) * (f_BTHE + dt_bias_HE))


def gated_rms_norm(o: Tensor, weight_F: Tensor, gate: Tensor, eps: float) -> Tensor:
    """``o / sqrt(mean(o^2) + eps) * weight * sigmoid(gate)`` over the last dimension, in o's dtype."""
    return functional.rms_norm(o, weight_F.shape, weight_F.to(o.dtype), eps) * torch.sigmoid(gate.to(o.dtype))


def recurrence(
    q_BTHE: Tensor, k_BTHE: Tensor, v_BTHF: Tensor, log_decay_BTHE: Tensor, beta_BTH: Tensor, state_BHEF: Tensor
) -> DeltaRule:
    """The delta rule token by token: the definition that every other form must equal."""
    outputs, deltas = [], []
    for t in range(q_BTHE.shape[1]):
        k_BHE = k_BTHE[:, t]
        state_BHEF = state_BHEF * log_decay_BTHE[:, t].exp().unsqueeze(-1)
        read_BHF = torch.einsum("bhef,bhe->bhf", state_BHEF, k_BHE)
        delta_BHF = beta_BTH[:, t].unsqueeze(-1) * (v_BTHF[:, t] - read_BHF)
        state_BHEF = state_BHEF + torch.einsum("bhe,bhf->bhef", k_BHE, delta_BHF)
        outputs.append(torch.einsum("bhef,bhe->bhf", state_BHEF, q_BTHE[:, t]) * q_BTHE.shape[-1] ** -0.5)
        deltas.append(delta_BHF)
    return DeltaRule(torch.stack(outputs, 1), torch.stack(deltas, 1), state_BHEF)


def chunked(
    q_BTHE: Tensor, k_BTHE: Tensor, v_BTHF: Tensor, log_decay_BTHE: Tensor, beta_BTH: Tensor, state_BHEF: Tensor
) -> DeltaRule:
    """The delta rule in chunks of 16 tokens: matrix products inside a chunk, a loop only from chunk to chunk.

    A token with beta 0 and log decay 0 leaves the state as it is, so right-padded rows end in their own last state.
    exp(G_i - G_j) is split around the middle of the chunk: each factor stays within exp(+-40).

    Shapes: all inputs in one dtype, float32 or float64. Source: specs/ling-3.0.md section 4.4.
    """
    num_tokens = q_BTHE.shape[1]
    size = min(CHUNK_TOKENS, num_tokens)
    inputs = (q_BTHE * q_BTHE.shape[-1] ** -0.5, k_BTHE, v_BTHF, log_decay_BTHE, beta_BTH[..., None])
    q, k, v, decay, beta = (_split(x, size) for x in inputs)  # [B, H, chunks, size, width]
    total = decay.cumsum(3)
    centred = total - total[:, :, :, size // 2, None]
    rise, fall, kept = centred.exp(), (-centred).exp(), total.exp()
    k_out = (k * fall).transpose(-1, -2)
    interactions = beta * (k * rise @ k_out).tril(-1)
    attention = (q * rise @ k_out).tril()
    known = beta * torch.cat((v, k * kept), -1)
    solved = torch.linalg.solve_triangular(interactions, known, upper=False, unitriangular=True)
    wanted, seen = solved.split((v.shape[-1], k.shape[-1]), -1)
    tail = (k * (total[:, :, :, -1:] - total).exp()).transpose(-1, -2)
    kept_whole = kept[:, :, :, -1].unsqueeze(-1)
    states, deltas = [], []
    # unbind rather than index: its gradient is one stack, not a zero-filled tensor a chunk
    for parts in zip(*(x.unbind(2) for x in (wanted, seen, tail, kept_whole)), strict=True):
        wanted_BHTF, seen_BHTE, tail_BHET, kept_BHE1 = parts
        states.append(state_BHEF)
        deltas.append(wanted_BHTF - seen_BHTE @ state_BHEF)
        state_BHEF = kept_BHE1 * state_BHEF + tail_BHET @ deltas[-1]
    delta = torch.stack(deltas, 2)
    o = q * kept @ torch.stack(states, 2) + attention @ delta
    return DeltaRule(_join(o, num_tokens), _join(delta, num_tokens), state_BHEF)


def state_after(
    counts_B: Tensor, k_BTHE: Tensor, log_decay_BTHE: Tensor, deltas_BTHF: Tensor, state_BHEF: Tensor
) -> Tensor:
    """The state after the first counts_B[b] of T staged tokens, from the state before them and their updates::

        S_n = exp(G_n) S_0 + sum over i <= n of (exp(G_n - G_i) k_i) u_i^T

    Shapes: counts_B int64 in 0..T; the rest as ``chunked`` takes and gives them.
    """
    taken_BT11 = (torch.arange(k_BTHE.shape[1], device=counts_B.device) < counts_B[:, None])[:, :, None, None]
    total_BTHE = (log_decay_BTHE * taken_BT11).cumsum(1)
    last_BHE = total_BTHE[:, -1]
    faded_BTHE = k_BTHE * (last_BHE[:, None] - total_BTHE).exp()
    added_BHEF = faded_BTHE.permute(0, 2, 3, 1) @ (deltas_BTHF * taken_BT11).transpose(1, 2)
    return added_BHEF + last_BHE.exp().unsqueeze(-1) * state_BHEF


def _split(x_BTHE: Tensor, size: int) -> Tensor:
    padding = -x_BTHE.shape[1] % size
    x_BHTE = functional.pad(x_BTHE, (0, 0, 0, 0, 0, padding)).transpose(1, 2)
    return torch.unflatten(x_BHTE, 2, (-1, size))


def _join(x: Tensor, num_tokens: int) -> Tensor:
    return x.flatten(2, 3).transpose(1, 2)[:, :num_tokens]


def prepare(
    projected_TC: Tensor, history_WC: Tensor, conv_CJ: Tensor, a_log_H: Tensor, dt_bias_HE: Tensor, lower_bound: float
) -> Tensor:
    """What of a layer's in-projection is elementwise or along tokens, in float32 or higher.

    Shapes: projected_TC rows [q | k | v | f | g | b] of widths HE, HE, HF, HE, HF, H (E = F); history_WC the J - 1
    inputs q | k | v before them. Returns: prepared_TC with convolution and SiLU of q | k | v, of f the share that a
    key channel keeps (exp of the log decay), of g | b the sigmoid.
    """
    (num_heads, width), mixed = dt_bias_HE.shape, conv_CJ.shape[0]
    wide_TC = projected_TC.to(torch.promote_types(projected_TC.dtype, torch.float32))
    inputs_TC, f_TC, gates_TC = wide_TC.split((mixed, num_heads * width, num_heads * (width + 1)), -1)
    mixed_BTC = short_conv(torch.cat((history_WC.to(wide_TC.dtype), inputs_TC))[None], conv_CJ)
    decay_THE = log_decay(f_TC.unflatten(-1, (num_heads, width)), a_log_H, dt_bias_HE, lower_bound).exp()
    return torch.cat((mixed_BTC[0], decay_THE.flatten(1), gates_TC.sigmoid()), -1)


def verify(prepared_TC: Tensor, state_HEF: Tensor, dtype: torch.dtype) -> Tensor:
    """The outputs [T, H, F] in ``dtype`` of T further prepared tokens of one sequence; changes nothing."""
    return _replay(prepared_TC, state_HEF).o_BTHF[0].to(dtype)


def commit(
    projected_LTC: Tensor, prepared_LTC: Tensor, history_LWC: Tensor, state_LHEF: Tensor, count_1: Tensor
) -> None:
    """Bring the states and histories of L layers the first ``count_1`` (0..T, int64) of their T tokens on, in place."""
    count = int(count_1)
    if count:
        for prepared_TC, state_HEF in zip(prepared_LTC, state_LHEF, strict=True):
            state_HEF.copy_(_replay(prepared_TC[:count], state_HEF).state_BHEF[0])
        inputs_LTC = projected_LTC[:, :count, : history_LWC.shape[2]]
        history_LWC.copy_(torch.cat((history_LWC, inputs_LTC), 1)[:, count:])


def _replay(prepared_TC: Tensor, state_HEF: Tensor) -> DeltaRule:
    num_heads, width, _ = state_HEF.shape
    *rows_THE, beta_TH = prepared_TC.split((*(5 * [num_heads * width]), num_heads), -1)
    q, k, v, decay, _ = (x.unflatten(-1, (num_heads, width))[None] for x in rows_THE)
    return recurrence(l2norm(q), l2norm(k), v, decay.log(), beta_TH[None], state_HEF[None])
