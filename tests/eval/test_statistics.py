"""Acceptance statistics: golden numbers, the identities between them, and an interval that covers."""

from typing import Any

import pytest
import torch

from dspark.decode.round import Round
from dspark.eval.statistics import acceptance_statistics, bootstrap_interval


def whole(accepted: int, proposed: int = 5) -> Round:
    return Round(proposed, accepted, accepted + 1, is_cut=False, confidence_logits=())


def golden_rounds(run: dict[str, Any]) -> list[Round]:
    rows = zip(run["proposal_lengths"], run["accepted_drafts"], run["acceptance_lengths"], strict=True)
    return [Round(*row, is_cut=row[1] == row[2], confidence_logits=()) for row in rows]


@pytest.mark.parametrize("number", range(5))
def test_the_pooled_numbers_are_golden(dspark_golden: dict[str, Any], number: int) -> None:
    run = dspark_golden["decode_end_to_end"]["runs"][number]
    result = acceptance_statistics([golden_rounds(run)])
    assert result.mean_acceptance_length == pytest.approx(run["mean_acceptance_length"], rel=1e-12)
    assert result.verify_rate == pytest.approx(run["verify_rate"], rel=1e-12)
    assert result.num_rounds == len(run["acceptance_lengths"])
    assert result.num_tokens == sum(run["acceptance_lengths"])


def test_the_identities_hold_when_every_round_proposes_the_whole_block() -> None:
    accepted = torch.randint(0, 6, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    result = acceptance_statistics([[whole(n) for n in accepted[:120]], [whole(n) for n in accepted[120:]]])
    assert result.mean_acceptance_length == pytest.approx(1 + sum(result.survival))
    assert result.mean_accepted_drafts == pytest.approx(sum(result.survival))
    previous = 1.0
    for survival, conditional in zip(result.survival, result.conditional, strict=True):
        assert conditional == pytest.approx(survival / previous)
        previous = survival
    assert sum(result.histogram) == 300
    assert sum(n * count for n, count in enumerate(result.histogram)) == sum(accepted)


def test_slots_that_a_round_did_not_propose_do_not_count_against_it() -> None:
    result = acceptance_statistics([[whole(2, 2), whole(1, 3), whole(0, 0), whole(3, 3)]])
    assert result.survival == (1.0, 2 / 3, 1 / 2)
    assert result.conditional == (1.0, 2 / 3, 1.0)
    assert result.histogram == (1, 1, 1, 1)


def test_a_slot_never_reached_has_no_conditional_acceptance() -> None:
    result = acceptance_statistics([[whole(0, 2), whole(0, 2)]])
    assert result.survival == (0.0, 0.0)
    assert result.conditional == (0.0, None)


def test_cut_rounds_are_left_out_of_the_second_mean_only() -> None:
    cut = Round(num_proposed=1, accepted_drafts=1, acceptance_length=1, is_cut=True, confidence_logits=())
    result = acceptance_statistics([[whole(3), cut], [whole(5)]])
    assert result.mean_acceptance_length == pytest.approx(11 / 3)
    assert result.mean_acceptance_length_uncut == pytest.approx(5.0)
    assert acceptance_statistics([[cut]]).mean_acceptance_length_uncut is None


def test_the_mean_is_pooled_over_rounds_not_averaged_over_prompts() -> None:
    result = acceptance_statistics([[whole(5)], [whole(0)] * 9, []])
    assert result.mean_acceptance_length == pytest.approx(1.5)
    assert result.num_prompts == 3


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        acceptance_statistics([[], []])


def test_the_interval_repeats_with_its_seed_and_shrinks_to_a_point_for_equal_prompts() -> None:
    lengths, rounds = [9.0, 20.0, 31.0, 8.0], [4.0, 5.0, 6.0, 7.0]
    assert bootstrap_interval(lengths, rounds, seed=4) == bootstrap_interval(lengths, rounds, seed=4)
    assert bootstrap_interval(lengths, rounds, 4, 101) != bootstrap_interval(lengths, rounds, 5, 101)
    assert bootstrap_interval([6.0, 6.0], [2.0, 2.0]) == (3.0, 3.0)
    assert bootstrap_interval([6.0, 0.0], [2.0, 0.0]) == (3.0, 3.0)


def coverage(is_over_prompts: bool) -> float:
    """How often the interval holds the true ratio, 3, of prompts that differ in difficulty and in rounds."""
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for number in range(300):
        rounds_P = torch.randint(5, 25, (40,), generator=generator).double()
        level_P = 3.0 + torch.randn(40, generator=generator).double()
        lengths_P = rounds_P * level_P + rounds_P.sqrt() * torch.randn(40, generator=generator)
        if not is_over_prompts:
            rounds = int(rounds_P.sum())
            lengths_P = (level_P.repeat_interleave(rounds_P.long()) + torch.randn(rounds, generator=generator))[:400]
            rounds_P = torch.ones_like(lengths_P)
        low, high = bootstrap_interval(lengths_P.tolist(), rounds_P.tolist(), seed=number, num_resamples=400)
        hits += low <= 3.0 <= high
    return hits / 300


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    assert 0.90 <= coverage(is_over_prompts=True) <= 0.98


def test_an_interval_over_rounds_would_cover_too_rarely() -> None:
    """Rounds of one prompt resemble each other: this is why prompts are drawn, not rounds."""
    assert coverage(is_over_prompts=False) < 0.75
