"""How good a draft's blocks are: the loss terms, the expected acceptance length, and their denominators."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dspark.config import ObjectiveSection
from dspark.draft.anchors import BlockTargets, gather_positions, slot_positions
from dspark.draft.model import DraftOutput

Metrics = dict[str, tuple[Tensor, Tensor]]
EPSILON = 1e-6
"""Added to the pooled sum of slot weights, as DeepSpec does; a window without a valid slot gives zero, not NaN."""


class Agreement(NamedTuple):
    """What the terms need of the two distributions of every slot; all [B, A, K], float32 or better.

    The log-probabilities are the label's; divergence_BAK is KL(teacher || draft); acceptance_BAK, one minus the total
    variation, is sum_v min(p, q). Gradients flow through all but the teacher's.
    """

    draft_logprobs_BAK: Tensor
    teacher_logprobs_BAK: Tensor
    divergence_BAK: Tensor
    acceptance_BAK: Tensor


def compare(draft_logits_BAKV: Tensor, teacher_logits_BAKV: Tensor, label_ids_BAK: Tensor) -> Agreement:
    """Compare draft and teacher slot by slot at temperature 1. Nothing else here touches the vocabulary.
    Shapes: both logits float32 or float64; label_ids_BAK int64. The teacher gets no gradient.
    """
    inputs = (draft_logits_BAKV, teacher_logits_BAKV.detach(), label_ids_BAK[..., None])
    return Agreement(*_Comparison.apply(*inputs))  # type: ignore[no-untyped-call]


class _Comparison(torch.autograd.Function):
    """The four figures of ``compare`` with their gradient written out: q = softmax(draft), p = softmax(teacher),

        d log q(label) = onehot - q        d KL = q - p        d acceptance = q (c - sum(q c)) / 2, c = sign(p - q)

    Half the passes over the vocabulary, and a third of the memory, of the same formulas left to autograd.
    """

    @staticmethod
    def forward(ctx: Any, draft_BAKV: Tensor, teacher_BAKV: Tensor, label_BAK1: Tensor) -> tuple[Tensor, ...]:
        draft_logprobs_BAKV, teacher_logprobs_BAKV = draft_BAKV.log_softmax(-1), teacher_BAKV.log_softmax(-1)
        labels = (draft_logprobs_BAKV.gather(-1, label_BAK1), teacher_logprobs_BAKV.gather(-1, label_BAK1))
        p_BAKV = teacher_logprobs_BAKV.exp()
        divergence_BAK = teacher_logprobs_BAKV.sub_(draft_logprobs_BAKV).mul_(p_BAKV).sum(-1)
        q_BAKV = draft_logprobs_BAKV.exp_()
        ctx.save_for_backward(q_BAKV, p_BAKV, label_BAK1)
        draft_BAK, teacher_BAK = (part.squeeze(-1) for part in labels)
        ctx.mark_non_differentiable(teacher_BAK)
        return draft_BAK, teacher_BAK, divergence_BAK, torch.minimum(p_BAKV, q_BAKV).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, label: Tensor, _: Tensor, divergence: Tensor, acceptance: Tensor
    ) -> tuple[Tensor, None, None]:
        q_BAKV, p_BAKV, label_BAK1 = ctx.saved_tensors
        label_BAK1_grad, divergence_BAK1, acceptance_BAK1 = (g.unsqueeze(-1) for g in (label, divergence, acceptance))
        grad_BAKV = (p_BAKV - q_BAKV).sign_().mul_(acceptance_BAK1 / 2)
        inner_BAK1 = torch.linalg.vecdot(grad_BAKV, q_BAKV).unsqueeze(-1)
        grad_BAKV.add_(divergence_BAK1 - label_BAK1_grad - inner_BAK1).mul_(q_BAKV)
        grad_BAKV.addcmul_(p_BAKV, divergence_BAK1, value=-1)
        return grad_BAKV.scatter_add_(-1, label_BAK1, label_BAK1_grad), None, None


def teacher_logits(last_hidden_BTD: Tensor, anchors_BA: Tensor, block_size: int, head_VD: Tensor) -> Tensor:
    """The target's logits for every slot: its head on the last hidden state at p + j, which predicts p + j + 1.
    Returns: [B, A, K, V], float32 or better.
    """
    hidden_BAKD = gather_positions(last_hidden_BTD, slot_positions(anchors_BA, block_size))
    logits_BAKV = F.linear(hidden_BAKD.to(head_VD.dtype), head_VD)
    return logits_BAKV.to(torch.promote_types(logits_BAKV.dtype, torch.float32))


def slot_weights(valid_BAK: Tensor, decay_positions: float) -> Tensor:
    """exp(-j / decay_positions) for a valid slot j, else 0. Returns: float64 [B, A, K]. Source: DeepSpec."""
    slots_K = torch.arange(valid_BAK.shape[-1], device=valid_BAK.device, dtype=torch.float64)
    return valid_BAK * torch.exp(-slots_K / decay_positions)


def denominators(targets: BlockTargets, decay_positions: float) -> Tensor:
    """Sum of slot weights and number of blocks with a valid slot, float64 [2], known before any forward pass.

    The caller hands their sum over ranks and accumulation window to ``objective``: the sum of the losses of all ranks
    and micro-steps is then the loss of the pooled batch, however it was cut.
    """
    weight = slot_weights(targets.valid_BAK, decay_positions).sum()
    return torch.stack([weight, targets.valid_BAK[..., 0].sum().double()])


def cross_entropy(agreement: Agreement, weights_BAK: Tensor) -> Tensor:
    """Weighted sum of -log q(label)."""
    return -(weights_BAK * agreement.draft_logprobs_BAK).sum()


def forward_kl(agreement: Agreement, weights_BAK: Tensor) -> Tensor:
    """Weighted sum of KL(target || draft)."""
    return (weights_BAK * agreement.divergence_BAK).sum()


def total_variation(agreement: Agreement, weights_BAK: Tensor) -> Tensor:
    """Weighted sum of sum_v |q - p|, which is twice the total variation. Source: DeepSpec's L1 term."""
    return (weights_BAK * 2 * (1 - agreement.acceptance_BAK)).sum()


def confidence_bce(agreement: Agreement, confidence_logits_BAK: Tensor, weights_BAK: Tensor) -> Tensor:
    """Weighted sum of the binary cross-entropy of the confidence against the detached acceptance.
    Gradients reach the backbone through the confidence logits, as in DeepSpec.
    """
    label_BAK = agreement.acceptance_BAK.detach().clamp(0, 1)
    bce_BAK = F.binary_cross_entropy_with_logits(confidence_logits_BAK, label_BAK, reduction="none")
    return (weights_BAK * bce_BAK).sum()


def expected_acceptance_teacher_forced(agreement: Agreement, valid_BAK: Tensor) -> Tensor:
    """Sum over blocks of E_tf = sum_k prod_{i<=k} alpha_i, accepted drafts without the bonus token.
    It replaces the acceptance of the sampled path by its mean slot by slot; the error has no fixed sign.
    Source: DeepSpec, tau_probabilistic - 1 (specs/dspark.md 5.1).
    """
    return _expected_length(agreement.acceptance_BAK, agreement.acceptance_BAK, valid_BAK)


def expected_acceptance_ratio(agreement: Agreement, valid_BAK: Tensor) -> Tensor:
    """Sum over blocks of E_ratio = sum_k prod_{i<k} min(1, q_i(y_i) / p_i(y_i)) * alpha_k, y the text itself.
    On text sampled from the target at temperature 1 without truncation its mean is the number of drafts that
    speculative decoding accepts, and its gradient is unbiased, through the ratios too. Source: specs/dspark.md 5.1.
    """
    ratio_BAK = (agreement.draft_logprobs_BAK - agreement.teacher_logprobs_BAK).clamp(max=0).exp()
    return _expected_length(agreement.acceptance_BAK, ratio_BAK, valid_BAK)


def objective(
    output: DraftOutput,
    teacher_logits_BAKV: Tensor,
    targets: BlockTargets,
    section: ObjectiveSection,
    acceptance_weight: float,
    pooled: Tensor,
) -> tuple[Tensor, Metrics]:
    """The training loss of one micro-step and what to log of it.

    Every slot term is sum(weight * term) / (pooled[0] + 1e-6). The acceptance term is the sum over blocks with a valid
    slot of 1 - E / block_size, divided by pooled[1]; E counts valid slots only and block_size is the full width, so a
    block cut short scores low but its gradient weighs like any other's.
    Shapes: pooled float64 [2], ``denominators`` summed over ranks and window. acceptance_weight is
    section.acceptance_length after its warm-up; it may be 0.
    Returns: the scalar loss, and detached (numerator, denominator) pairs of this micro-step to sum before dividing.
    """
    agreement = compare(output.logits_BAKV, teacher_logits_BAKV, targets.label_ids_BAK)
    dtype = agreement.acceptance_BAK.dtype
    weights_BAK = slot_weights(targets.valid_BAK, section.decay_positions).to(dtype)
    weight, num_blocks = (pooled[0] + EPSILON).to(dtype), pooled[1].clamp(min=1).to(dtype)
    terms = {
        "cross_entropy": cross_entropy(agreement, weights_BAK),
        "forward_kl": forward_kl(agreement, weights_BAK),
        "total_variation": total_variation(agreement, weights_BAK),
    }
    if output.confidence_logits_BAK is not None:
        terms["confidence"] = confidence_bce(agreement, output.confidence_logits_BAK, weights_BAK)
    lengths = {
        "ratio": expected_acceptance_ratio(agreement, targets.valid_BAK),
        "teacher_forced": expected_acceptance_teacher_forced(agreement, targets.valid_BAK),
    }
    # Terms stay in the graph at a passing weight of 0: data parallel training wants a gradient for every parameter.
    parts = [getattr(section, k) / weight * v for k, v in terms.items() if getattr(section, k) or k == "confidence"]
    local_weight, local_blocks = denominators(targets, section.decay_positions)
    if section.acceptance_length:
        shortfall = local_blocks.to(dtype) - lengths[section.acceptance_form] / targets.valid_BAK.shape[-1]
        parts.append(acceptance_weight / num_blocks * shortfall)
    loss = torch.stack(parts).sum() if parts else output.logits_BAKV.sum() * 0
    metrics = {name: (term.detach(), local_weight) for name, term in terms.items()}
    metrics |= {f"expected_acceptance_{form}": (length.detach(), local_blocks) for form, length in lengths.items()}
    return loss, metrics | slot_metrics(agreement, output.confidence_logits_BAK, targets.valid_BAK, weights_BAK)


@torch.no_grad()
def slot_metrics(
    agreement: Agreement, confidence_logits_BAK: Tensor | None, valid_BAK: Tensor, weights_BAK: Tensor
) -> Metrics:
    """Figures over valid slots, as (numerator, denominator) pairs.

    ``conditional_acceptance_k``: mean acceptance of slot k given that the slots before it were accepted.
    ``confidence_bias`` and ``confidence_abs_error``: weighted mean and mean size of confidence - acceptance;
    ``confidence_cumprod_bias`` compares the products of both over the slots so far. Source: DeepSpec's training log.
    """
    acceptance_BAK = agreement.acceptance_BAK
    counts_K = valid_BAK.sum((0, 1))
    sums_K = (acceptance_BAK * valid_BAK).sum((0, 1))
    metrics = {f"conditional_acceptance_{k}": (sums_K[k], counts_K[k]) for k in range(len(counts_K))}
    if confidence_logits_BAK is None:
        return metrics
    confidence_BAK = confidence_logits_BAK.sigmoid()
    gaps = {
        "confidence_bias": confidence_BAK - acceptance_BAK,
        "confidence_abs_error": (confidence_BAK - acceptance_BAK).abs(),
        "confidence_cumprod_bias": confidence_BAK.cumprod(-1) - acceptance_BAK.cumprod(-1),
    }
    return metrics | {name: ((weights_BAK * gap).sum(), weights_BAK.sum()) for name, gap in gaps.items()}


def _expected_length(step_BAK: Tensor, go_on_BAK: Tensor, valid_BAK: Tensor) -> Tensor:
    """Sum over blocks of sum_k (prod_{i<k} go_on_i) * step_k over valid slots, by the loop that defines it."""
    reach_BA = valid_BAK[..., 0].to(step_BAK.dtype)
    length_BA = torch.zeros_like(reach_BA)
    for slot in range(step_BAK.shape[-1]):
        reach_BA = reach_BA * valid_BAK[..., slot]
        length_BA = length_BA + reach_BA * step_BAK[..., slot]
        reach_BA = reach_BA * go_on_BAK[..., slot]
    return length_BA.sum()
