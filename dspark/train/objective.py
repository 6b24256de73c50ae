"""How good a draft's blocks are: the loss terms, the expected acceptance length, and their denominators."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.config import ObjectiveSection
from dspark.draft.anchors import BlockTargets
from dspark.draft.model import SAME_GRAPHS, DraftOutput
from dspark.kernels.agreement import Figures, Piece, Scales, Slopes, Weights, judge, slopes
from dspark.train.batches import Batch, Slots

Metrics = dict[str, tuple[Tensor, Tensor]]
EPSILON = 1e-6
"""Added to the pooled sum of slot weights, as DeepSpec does; a window without a valid slot gives zero, not NaN."""


def summed(parts: Iterable[Metrics]) -> Metrics:
    """Numerators and denominators of every name added up, in float64."""
    sums: Metrics = {}
    for part in parts:
        for name, (numerator, denominator) in part.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + numerator.double(), before[1] + denominator.double())
    return sums


def slot_weights(valid_AK: Tensor, decay_positions: float) -> Tensor:
    """exp(-j / decay_positions) for a valid slot j, else 0. Returns: float64 [A, K]. Source: DeepSpec."""
    slots_K = torch.arange(valid_AK.shape[-1], device=valid_AK.device, dtype=torch.float64)
    return valid_AK * torch.exp(-slots_K / decay_positions)


def denominators(targets: BlockTargets | Slots, decay_positions: float) -> Tensor:
    """Sum of slot weights and number of blocks with a valid slot, float64 [2], known before any forward pass.

    The caller hands their sum over ranks and accumulation window to ``objective``: the sum of the losses of all ranks
    and micro-steps is then the loss of the pooled batch, however it was cut.
    """
    weight = slot_weights(targets.valid_AK, decay_positions).sum()
    return torch.stack([weight, targets.valid_AK[..., 0].sum().double()])


def cross_entropy(agreement: Figures, weights_AK: Tensor) -> Tensor:
    """Weighted sum of -log q(label)."""
    return -(weights_AK * agreement.draft_logprobs).sum()


def forward_kl(agreement: Figures, weights_AK: Tensor) -> Tensor:
    """Weighted sum of KL(target || draft)."""
    return (weights_AK * agreement.divergence).sum()


def total_variation(agreement: Figures, weights_AK: Tensor) -> Tensor:
    """Weighted sum of sum_v |q - p|, which is twice the total variation. Source: DeepSpec's L1 term."""
    return (weights_AK * 2 * (1 - agreement.acceptance)).sum()


def confidence_bce(agreement: Figures, confidence_logits_AK: Tensor, weights_AK: Tensor) -> Tensor:
    """Weighted sum of the binary cross-entropy of the confidence against the detached acceptance.
    Gradients reach the backbone through the confidence logits, as in DeepSpec.
    """
    label_AK = agreement.acceptance.detach().clamp(0, 1)
    bce_AK = F.binary_cross_entropy_with_logits(confidence_logits_AK, label_AK, reduction="none")
    return (weights_AK * bce_AK).sum()


def expected_acceptance_teacher_forced(agreement: Figures, valid_AK: Tensor) -> Tensor:
    """Sum over blocks of E_tf = sum_k prod_{i<=k} alpha_i, accepted drafts without the bonus token.
    It replaces the acceptance of the sampled path by its mean slot by slot; the error has no fixed sign.
    Source: DeepSpec, tau_probabilistic - 1 (specs/dspark.md 5.1).
    """
    return _expected_length(agreement.acceptance, agreement.acceptance, valid_AK)


def expected_acceptance_ratio(agreement: Figures, valid_AK: Tensor) -> Tensor:
    """Sum over blocks of E_ratio = sum_k prod_{i<k} min(1, q_i(y_i) / p_i(y_i)) * alpha_k, y the text itself.
    On text sampled from the target at temperature 1 without truncation its mean is the number of drafts that
    speculative decoding accepts, and its gradient is unbiased, through the ratios too. Source: specs/dspark.md 5.1.
    """
    ratio_AK = (agreement.draft_logprobs - agreement.teacher_logprobs).clamp(max=0).exp()
    return _expected_length(agreement.acceptance, ratio_AK, valid_AK)


def objective(
    output: DraftOutput,
    head_VD: Tensor,
    here: Batch,
    section: ObjectiveSection,
    acceptance_weight: float,
    pooled: Tensor,
) -> tuple[Tensor, Metrics]:
    """The training loss of what the draft said about a batch, and what to log of it; head_VD is the target's.

    The teacher of slot j of the block anchored at p is the last hidden state at p + j, which predicts p + j + 1.

    Every slot term is sum(weight * term) / (pooled[0] + 1e-6). The acceptance term is the sum over blocks with a valid
    slot of 1 - E / block_size, divided by pooled[1]; E counts valid slots only and block_size is the full width, so a
    block cut short scores low but its gradient weighs like any other's. Nothing is computed of slots that are not
    valid, and the teacher's logits of a position once for all slots of a piece that it teaches.
    Shapes: all tensors on the draft's device, where nothing is waited for; pooled float64 [2], ``denominators`` summed
    over ranks and window. acceptance_weight is section.acceptance_length after its warm-up; it may be 0.
    Returns: the scalar loss, and detached (numerator, denominator) pairs of this micro-step to sum before dividing.
    """
    slots, device = here.slots, output.hidden_AKD.device
    weigh, score = (fused(part, device) for part in (scales, total))
    dtype = torch.promote_types(output.markov_VR.dtype, torch.float32)
    weights_AK, local_weight, scale = weigh(slots.valid_AK, pooled, section.decay_positions, acceptance_weight, dtype)
    hidden_ND, mixed_NR = (x.flatten(0, 1)[slots.places_N] for x in (output.hidden_AKD, output.mixed_AKR))
    tables = (head_VD, output.markov_VR, here.last_hidden_TD[slots.teachers_M])
    pieces = [Piece(rows, teachers, slots.teacher_rows_N[rows]) for rows, teachers, _ in slots.pieces]
    block_rows = {rows.start: slots.block_rows_A1[blocks.start : blocks.stop + 1] for rows, _, blocks in slots.pieces}
    terms = (section.cross_entropy, section.forward_kl, section.total_variation, section.decay_positions)
    weights = Weights(*terms, section.acceptance_length > 0, section.acceptance_form == "ratio")

    def price(rows: slice, figures: Figures) -> Slopes:
        return slopes(figures, block_rows[rows.start], rows, slots.valid_AK.shape[1], scale, weights)

    pull, figures = judge(hidden_ND, mixed_NR, *tables, slots.labels_N, pieces, price)
    agreement = Figures(*(_on_grid(x_N, slots.places_N, slots.valid_AK.shape) for x_N in figures))
    confidence = (output.confidence_logits_AK, section.confidence)
    loss, metrics = score(agreement, confidence, slots.valid_AK, (weights_AK, local_weight), scale, weights)
    # ``pull``, a zero, carries the gradients of all but the confidence, which torch makes.
    whole_loss: Tensor = loss + pull.to(dtype)
    return whole_loss, metrics


@lru_cache
def fused(part: Callable[..., Any], device: torch.device) -> Any:
    """A part of the objective: hundreds of small operations, on a GPU a few kernels for any weights and blocks."""
    return torch.compile(part, dynamic=True, options=SAME_GRAPHS) if device.type == "cuda" else part


def scales(
    valid_AK: Tensor, pooled: Tensor, decay_positions: float, acceptance_weight: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Scales]:
    """The weight of every slot, their sum in float64, and the scales for ``denominators`` of ``pooled``."""
    weights_AK = slot_weights(valid_AK, decay_positions)
    length = acceptance_weight / pooled[1].clamp(min=1) / valid_AK.shape[1]
    return weights_AK.to(dtype), weights_AK.sum(), Scales((pooled[0] + EPSILON).to(dtype), length.to(dtype))


def total(
    agreement: Figures,
    confidence: tuple[Tensor | None, float],
    valid_AK: Tensor,
    slot_sums: tuple[Tensor, Tensor],
    scale: Scales,
    weights: Weights,
) -> tuple[Tensor, Metrics]:
    """The loss and what to log; ``confidence`` is the logits and their weight, ``slot_sums`` the slots' weights and
    their sum. A confidence head stays in the graph at a weight of 0: data parallel training wants a gradient for every
    parameter.
    """
    (logits_AK, confidence_weight), (weights_AK, local_weight) = confidence, slot_sums
    blocks = valid_AK[:, 0].sum().double()
    terms = {
        "cross_entropy": (weights.cross_entropy, cross_entropy(agreement, weights_AK)),
        "forward_kl": (weights.forward_kl, forward_kl(agreement, weights_AK)),
        "total_variation": (weights.total_variation, total_variation(agreement, weights_AK)),
    }
    if logits_AK is not None:
        terms["confidence"] = (confidence_weight, confidence_bce(agreement, logits_AK, weights_AK))
    lengths = {
        "ratio": expected_acceptance_ratio(agreement, valid_AK),
        "teacher_forced": expected_acceptance_teacher_forced(agreement, valid_AK),
    }
    parts = [weight / scale.weight * term for weight, term in terms.values()]
    if weights.has_length:
        length = lengths["ratio" if weights.is_ratio else "teacher_forced"]
        parts.append(scale.length * (blocks.to(weights_AK.dtype) * valid_AK.shape[1] - length))
    metrics = {name: (term.detach(), local_weight) for name, (_, term) in terms.items()}
    metrics |= {f"expected_acceptance_{form}": (length.detach(), blocks) for form, length in lengths.items()}
    metrics |= slot_metrics(agreement, logits_AK, valid_AK, weights_AK)
    return torch.stack(parts).sum(), metrics


def _on_grid(x_N: Tensor, places_N: Tensor, shape: Sequence[int]) -> Tensor:
    """Numbers of slots at their places, zero elsewhere."""
    return x_N.new_zeros(math.prod(shape)).index_put((places_N,), x_N).view(*shape)


@torch.no_grad()
def slot_metrics(agreement: Figures, logits_AK: Tensor | None, valid_AK: Tensor, weights_AK: Tensor) -> Metrics:
    """Figures over valid slots, as (numerator, denominator) pairs.

    ``conditional_acceptance_k``: mean acceptance of slot k given that the slots before it were accepted;
    ``argmax_agreement``: how often the teacher's most likely token is one of the draft's (in 16 bits several can be).
    ``confidence_bias`` and ``confidence_abs_error``: weighted mean and mean size of confidence - acceptance;
    ``confidence_cumprod_bias`` compares the products of both over the slots so far. Source: DeepSpec's training log.
    """
    acceptance_AK = agreement.acceptance
    counts_K = valid_AK.sum(0)
    sums_K = (acceptance_AK * valid_AK).sum(0)
    metrics = {f"conditional_acceptance_{k}": (sums_K[k], counts_K[k]) for k in range(len(counts_K))}
    metrics["argmax_agreement"] = (agreement.agrees.sum(), counts_K.sum())
    if logits_AK is None:
        return metrics
    confidence_AK = logits_AK.sigmoid()
    gaps = {
        "confidence_bias": confidence_AK - acceptance_AK,
        "confidence_abs_error": (confidence_AK - acceptance_AK).abs(),
        "confidence_cumprod_bias": confidence_AK.cumprod(-1) - acceptance_AK.cumprod(-1),
    }
    return metrics | {name: ((weights_AK * gap).sum(), weights_AK.sum()) for name, gap in gaps.items()}


def _expected_length(step_AK: Tensor, go_on_AK: Tensor, valid_AK: Tensor) -> Tensor:
    """Sum over blocks of sum_k (prod_{i<k} go_on_i) * step_k over valid slots, by the loop that defines it."""
    reach_A = valid_AK[..., 0].to(step_AK.dtype)
    length_A = torch.zeros_like(reach_A)
    for slot in range(step_AK.shape[-1]):
        reach_A = reach_A * valid_AK[..., slot]
        length_A = length_A + reach_A * step_AK[..., slot]
        reach_A = reach_A * go_on_AK[..., slot]
    return length_A.sum()
