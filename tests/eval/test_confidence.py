"""Calibration and ranking of the confidence head, against hand-made cases and definitions spelt out in loops."""

import math

import pytest
import torch

from dspark.decode.round import Round
from dspark.eval.confidence import auroc, calibration, confidence_statistics


def logit(*probs: float) -> tuple[float, ...]:
    return tuple(math.log(p / (1 - p)) for p in probs)


def drafted(accepted: int, proposed: int, *probs: float) -> Round:
    return Round(proposed, accepted, accepted + 1, is_cut=False, confidence_logits=logit(*probs))


def random_rounds(num: int, block_size: int = 5, seed: int = 0) -> list[Round]:
    """Few distinct logits, so that there are ties; some blocks shortened."""
    generator = torch.Generator().manual_seed(seed)
    rounds = []
    for _ in range(num):
        proposed, level = torch.randint(0, block_size + 1, (2,), generator=generator).tolist()
        logits_K = torch.randint(-6, 7, (block_size,), generator=generator) / 2 + (level - 2) / 4
        is_accepted_K = torch.rand(block_size, generator=generator) < torch.sigmoid(0.7 * logits_K + 0.3)
        accepted = min(int(is_accepted_K.cumprod(0).sum()), proposed)
        rounds.append(Round(proposed, accepted, accepted + 1, False, tuple(logits_K.tolist())))
    return rounds


def observed(rounds: list[Round], slots: range) -> list[tuple[float, bool]]:
    """The definition: a slot counts when it was proposed and all slots before it were accepted."""
    found = []
    for counts in rounds:
        is_accepted = [k < counts.accepted_drafts for k in range(counts.num_proposed)]
        for k in slots:
            if k < counts.num_proposed and all(is_accepted[:k]):
                found.append((counts.confidence_logits[k], is_accepted[k]))
    return found


def test_three_rounds_counted_by_hand() -> None:
    rounds = [drafted(1, 3, 0.92, 0.65, 0.5), drafted(0, 3, 0.75, 0.5, 0.5), drafted(2, 2, 0.95, 0.65, 0.1)]
    result = confidence_statistics(rounds)
    both = result.overall  # (0.92 yes, 0.65 no), (0.75 no), (0.95 yes, 0.65 yes)
    assert both.num_slots == 5
    assert both.acceptance == pytest.approx(3 / 5)
    assert both.mean_confidence == pytest.approx((0.92 + 0.65 + 0.75 + 0.95 + 0.65) / 5)
    assert both.brier == pytest.approx((0.08**2 + 0.65**2 + 0.75**2 + 0.05**2 + 0.35**2) / 5)
    assert both.ece == pytest.approx((2 * (1 - 0.935) + 2 * (0.65 - 0.5) + 0.75) / 5)
    assert both.auroc == pytest.approx((2 + 2 + 0.5) / 6), "0.92 and 0.95 beat both, 0.65 ties with one"
    assert [b.num_slots for b in both.bins] == [0, 0, 0, 0, 0, 0, 2, 1, 0, 2]
    assert (both.bins[6].low, both.bins[6].high, both.bins[6].acceptance) == (0.6, 0.7, 0.5)
    assert (both.bins[0].mean_confidence, both.bins[0].acceptance) == (None, None)
    first, second, third = result.slots
    assert first is not None
    assert second is not None
    assert (first.num_slots, first.auroc, second.num_slots, second.auroc) == (3, 1.0, 2, 0.5)
    assert third is None, "no round accepted slots 0 and 1 and proposed slot 2"


@pytest.mark.parametrize("seed", range(4))
def test_every_number_is_its_definition_in_loops(seed: int) -> None:
    rounds = random_rounds(200, seed=seed)
    result = confidence_statistics(rounds)
    for found, slots in ((result.overall, range(5)), *((c, range(k, k + 1)) for k, c in enumerate(result.slots))):
        pairs = [(1 / (1 + math.exp(-value)), is_accepted) for value, is_accepted in observed(rounds, slots)]
        assert found is not None
        assert found.num_slots == len(pairs)
        assert found.brier == pytest.approx(sum((p - y) ** 2 for p, y in pairs) / len(pairs))
        ece = 0.0
        for place in range(10):
            inside = [(p, y) for p, y in pairs if place / 10 <= p < (place + 1) / 10]
            ece += abs(sum(p - y for p, y in inside)) / len(pairs)
            assert found.bins[place].num_slots == len(inside)
        assert found.ece == pytest.approx(ece)
        wins = [(p > q) + (p == q) / 2 for p, y in pairs if y for q, z in pairs if not z]
        assert found.auroc == (pytest.approx(sum(wins) / len(wins)) if wins else None)


def test_true_probabilities_are_calibrated_and_overconfident_ones_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_N = torch.randn(100_000, generator=generator, dtype=torch.float64)
    is_accepted_N = torch.rand(100_000, generator=generator) < torch.sigmoid(logits_N)
    good, bad = calibration(logits_N, is_accepted_N), calibration(4 * logits_N, is_accepted_N)
    assert good.ece < 0.01 < 0.1 < bad.ece
    assert good.brier < bad.brier
    assert good.auroc == bad.auroc, "ranks do not change"


def test_certainties_have_their_bins_and_are_ranked_beyond_what_a_probability_resolves() -> None:
    logits_N = torch.tensor([-math.inf, math.inf, 50.0, 60.0], dtype=torch.float64)
    result = calibration(logits_N, torch.tensor([False, True, False, True]))
    assert (result.bins[0].num_slots, result.bins[9].num_slots) == (1, 3)
    assert result.brier == pytest.approx(0.25)
    assert result.auroc == 1.0


@pytest.mark.parametrize("outcome", [True, False])
def test_a_ranking_needs_both_outcomes(outcome: bool) -> None:
    assert auroc(torch.tensor([1.0, 2.0]), torch.tensor([outcome, outcome])) is None
    result = confidence_statistics([drafted(int(outcome), 1, 0.7)])
    assert result.overall.auroc is None
    assert result.overall.ece == pytest.approx(0.3 if outcome else 0.7)


def test_a_ranking_without_knowledge_is_worth_a_half_and_a_reversed_one_nothing() -> None:
    is_positive_N = torch.tensor([True, False, True, False, False])
    assert auroc(torch.ones(5), is_positive_N) == 0.5
    assert auroc(-is_positive_N.double(), is_positive_N) == 0.0


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="no drafted token"):
        confidence_statistics([])
    with pytest.raises(ValueError, match="no drafted token"):
        confidence_statistics([drafted(0, 0, 0.5)])
    with pytest.raises(ValueError, match="needs a confidence head"):
        confidence_statistics([drafted(1, 2, 0.5, 0.5), drafted(0, 2)])
    with pytest.raises(ValueError, match="not a number"):
        confidence_statistics([Round(1, 0, 1, False, (math.nan,))])
