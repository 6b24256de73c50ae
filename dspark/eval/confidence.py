"""How far the confidence head can be believed: its probabilities against what the target accepted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark.decode.round import Round

NUM_BINS = 10


@dataclass(frozen=True)
class Bin:
    """The slots whose confidence lies in [low, high), the last bin with 1: a dot of a reliability diagram. Without a
    slot both means are None.
    """

    low: float
    high: float
    num_slots: int
    mean_confidence: float | None
    acceptance: float | None


@dataclass(frozen=True)
class Calibration:
    """Confidence against outcome over ``num_slots`` slots, each worth the same.

    ``ece``: expected calibration error, the bins' mean of |mean confidence - acceptance|, weighted by their slots.
    ``brier``: mean square of confidence - outcome. ``auroc``: how often an accepted slot has the higher confidence of
    an accepted and a rejected one, ties counting half; None when all were accepted or all rejected.
    """

    num_slots: int
    mean_confidence: float
    acceptance: float
    ece: float
    brier: float
    auroc: float | None
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class ConfidenceStatistics:
    """``overall`` pools all slots; position k of ``slots`` is slot k of the block, None where it was never reached."""

    overall: Calibration
    slots: tuple[Calibration | None, ...]


def confidence_statistics(rounds: Sequence[Round]) -> ConfidenceStatistics:
    """Compare the head's probabilities with what the target accepted. Slot k of a round counts when it was proposed and
    every slot before it was accepted: the head's probability is conditional on that, and nothing else was observed.
    Raises: ValueError without a slot that counts, or when one of them has no confidence or one that is NaN.
    """
    reached: list[tuple[int, float, bool]] = []
    for counts in rounds:
        num_reached = min(counts.accepted_drafts + 1, counts.num_proposed)
        if len(counts.confidence_logits) < num_reached:
            raise ValueError("a drafted token has no confidence; the draft needs a confidence head")
        reached += [(k, counts.confidence_logits[k], counts.accepted_drafts > k) for k in range(num_reached)]
    if not reached:
        raise ValueError("no drafted token to measure: no round proposed any")
    places, logits, outcomes = zip(*reached, strict=True)
    slot_N, is_accepted_N = torch.tensor(places), torch.tensor(outcomes)
    logits_N = torch.tensor(logits, dtype=torch.float64)
    if logits_N.isnan().any():
        raise ValueError("a confidence is not a number")
    of_slots = [slot_N == k for k in range(max(len(counts.confidence_logits) for counts in rounds))]
    slots = (calibration(logits_N[is_k], is_accepted_N[is_k]) if is_k.any() else None for is_k in of_slots)
    return ConfidenceStatistics(calibration(logits_N, is_accepted_N), tuple(slots))


def calibration(logits_N: torch.Tensor, is_accepted_N: torch.Tensor) -> Calibration:
    """ECE, Brier score and AUROC of sigmoid(logits_N) against the outcomes.
    Shapes: logits_N float64 (infinite ones are certainties), N >= 1; is_accepted_N bool.
    Source: Guo et al. 2017, On Calibration of Modern Neural Networks, eq. 3 (ECE); Brier 1950. The paper of DSpark
    (dspark.md 6.2) bins the product of a block's confidences, which this does not.
    """
    probs_N, outcome_N = torch.sigmoid(logits_N), is_accepted_N.double()
    place_N = (probs_N * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    bins = []
    for place in range(NUM_BINS):
        probs_M, outcome_M = probs_N[place_N == place], outcome_N[place_N == place]
        means = (float(probs_M.mean()), float(outcome_M.mean())) if len(probs_M) else (None, None)
        bins.append(Bin(place / NUM_BINS, (place + 1) / NUM_BINS, len(probs_M), *means))
    gaps = torch.zeros(NUM_BINS, dtype=torch.float64).index_add(0, place_N, probs_N - outcome_N)
    return Calibration(
        num_slots=len(probs_N),
        mean_confidence=float(probs_N.mean()),
        acceptance=float(outcome_N.mean()),
        ece=float(gaps.abs().sum()) / len(probs_N),
        brier=float((probs_N - outcome_N).square().mean()),
        auroc=auroc(logits_N, is_accepted_N),
        bins=tuple(bins),
    )


def auroc(scores_N: torch.Tensor, is_positive_N: torch.Tensor) -> float | None:
    """The area under the ROC curve, from the ranks of the scores; equal scores share their mean rank. None when one
    class is empty. Shapes: scores_N any float; is_positive_N bool. Source: Hanley and McNeil 1982 (its rank statistic).
    """
    num_positive = int(is_positive_N.sum())
    num_negative = len(is_positive_N) - num_positive
    if not num_positive or not num_negative:
        return None
    _, place_N, count_U = torch.unique(scores_N, return_inverse=True, return_counts=True)
    rank_U = count_U.cumsum(0).double() - (count_U - 1) / 2
    rank_sum = float(rank_U[place_N][is_positive_N].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)
