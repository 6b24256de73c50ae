"""How far a draft's law is from its teacher's, row by row, and the gradient by the draft's logits, defined.

P rows of a piece, M teacher rows, of which several rows may share one.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Figures(NamedTuple):
    """What a loss needs of the two laws of every row; float32 or better. Shapes: all [P], or on a grid of slots.

    The log-probabilities are the label's; divergence is KL(teacher || draft); acceptance, one minus the total
    variation, is sum_v min(p, q); agrees is 1 where the teacher's most likely token, the first of equals, is a most
    likely one of the draft, else 0.
    """

    draft_logprobs: Tensor
    teacher_logprobs: Tensor
    divergence: Tensor
    acceptance: Tensor
    agrees: Tensor


class Slopes(NamedTuple):
    """Derivatives of a loss by a row's draft_logprob, divergence and acceptance."""

    logprobs_P: Tensor
    divergence_P: Tensor
    acceptance_P: Tensor


class Weights(NamedTuple):
    """What a loss weighs: terms of a slot j by exp(-j / decay_positions), and whether and how it knows the expected
    acceptance length, by the ratios of the text itself or by the acceptances.
    """

    cross_entropy: float
    forward_kl: float
    total_variation: float
    decay_positions: float
    has_length: bool
    is_ratio: bool


class Scales(NamedTuple):
    """What sums of slot weights are divided by, and what one more accepted draft takes off the loss; scalars."""

    weight: Tensor
    length: Tensor


Laws = tuple[Tensor, Tensor, Tensor]
"""What ``gradient`` needs of a piece: q_PV the draft's law, p_PV the teacher's, and the labels, label_P1."""


def compare(draft_PV: Tensor, teacher_MV: Tensor, teacher_rows_P: Tensor, labels_P: Tensor) -> tuple[Figures, Laws]:
    """Compare rows at temperature 1. Returns the figures, and what ``gradient`` keeps of the two laws.
    Shapes: logits of any float dtype; teacher_rows_P and labels_P integers.
    """
    label_P1 = labels_P.long()[:, None]
    wide = torch.promote_types(draft_PV.dtype, torch.float32)
    draft_logprobs_PV = draft_PV.log_softmax(-1, dtype=wide)
    teacher_logprobs_PV = teacher_MV.log_softmax(-1, dtype=wide)[teacher_rows_P]
    label_q_P, label_p_P = (x_PV.gather(1, label_P1)[:, 0] for x_PV in (draft_logprobs_PV, teacher_logprobs_PV))
    top_P = teacher_MV.argmax(1)[teacher_rows_P]
    agrees_P = (draft_PV.gather(1, top_P[:, None])[:, 0] == draft_PV.amax(1)).to(wide)
    p_PV = teacher_logprobs_PV.exp()
    divergence_P = teacher_logprobs_PV.sub_(draft_logprobs_PV).mul_(p_PV).sum(1)
    q_PV = draft_logprobs_PV.exp_()
    acceptance_P = torch.minimum(p_PV, q_PV).sum(1)
    return Figures(label_q_P, label_p_P, divergence_P, acceptance_P, agrees_P), (q_PV, p_PV, label_P1)


def gradient(kept: Laws, slopes: Slopes) -> Tensor:
    """The loss's gradient with respect to the draft's logits, [P, V]: with q = draft, p = teacher,

        d log q(label) = onehot - q        d KL = q - p        d acceptance = q (c - sum(q c)) / 2, c = sign(p - q)

    What was kept is used up.
    """
    q_PV, p_PV, label_P1 = kept
    logprob_P1, divergence_P1, acceptance_P1 = (slope_P[:, None] for slope_P in slopes)
    gradient_PV: Tensor = (p_PV - q_PV).sign_().mul_(acceptance_P1 / 2)
    inner_P1 = torch.linalg.vecdot(gradient_PV, q_PV)[:, None]
    gradient_PV.add_(divergence_P1 - logprob_P1 - inner_P1).mul_(q_PV)
    gradient_PV.addcmul_(p_PV, divergence_P1, value=-1)
    return gradient_PV.scatter_add_(1, label_P1, logprob_P1)


def slopes(
    figures: Figures, rows_A1: Tensor, first_row: int, num_slots: int, scales: Scales, weights: Weights
) -> Slopes:
    """Slopes of A blocks' valid slots, P rows in order: block a has rows rows_A1[a] to rows_A1[a + 1], counted from
    ``first_row``, a prefix of its num_slots slots. The slots of a block are coupled by the acceptance length alone.
    """
    slots_K = torch.arange(num_slots, device=rows_A1.device)
    valid_AK = slots_K < rows_A1.diff()[:, None]
    decay_K = torch.exp(-slots_K.double() / weights.decay_positions)
    weights_P = (valid_AK * decay_K)[valid_AK].to(scales.weight.dtype) / scales.weight
    by_logprob_P = -weights.cross_entropy * weights_P
    by_acceptance_P = -2 * weights.total_variation * weights_P
    if weights.has_length:
        gap_P = figures.draft_logprobs - figures.teacher_logprobs
        go_on_P = gap_P.clamp(max=0).exp() if weights.is_ratio else figures.acceptance
        zeros_AK = gap_P.new_zeros(valid_AK.shape)
        grids = (zeros_AK.masked_scatter(valid_AK, x_P) for x_P in (figures.acceptance, go_on_P))
        by_step_P, by_go_on_P = (x_AK[valid_AK] * scales.length for x_AK in length_slopes(*grids))
        by_acceptance_P = by_acceptance_P - by_step_P - (0 if weights.is_ratio else by_go_on_P)
        if weights.is_ratio:
            by_logprob_P = by_logprob_P - by_go_on_P * go_on_P * (gap_P <= 0)
    return Slopes(by_logprob_P, weights.forward_kl * weights_P, by_acceptance_P)


def length_slopes(step_AK: Tensor, go_on_AK: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives of E = sum_k (prod_{i<k} go_on_i) step_k by every step and every go_on, where both are 0 for a slot
    that is not valid.

    By step k: prod_{i<k} go_on_i. By go_on j: that of j, times t_j = step_{j+1} + go_on_{j+1} t_{j+1}.
    Source: specs/dspark.md 5.1, the form without divisions.
    """
    reach_AK = torch.cat((torch.ones_like(go_on_AK[:, :1]), go_on_AK[:, :-1]), 1).cumprod(1)
    tail_A, tails = torch.zeros_like(step_AK[:, 0]), []
    for slot in range(step_AK.shape[1] - 1, -1, -1):
        tails.append(tail_A)
        tail_A = step_AK[:, slot] + go_on_AK[:, slot] * tail_A
    return reach_AK, reach_AK * torch.stack(tails[::-1], 1)
