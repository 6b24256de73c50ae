"""Acceptance statistics: golden numbers, the identities between them, intervals that cover, and pairs of drafts."""

from typing import Any

import pytest
import torch

from dspark.decode.round import Round
from dspark.decode.teacher_forced import TeacherForced
from dspark.eval.statistics import (
    acceptance_statistics,
    bootstrap_interval,
    compare_pairs,
    decoding_gap,
    studentised_interval,
    swap_p_value,
    teacher_forced_statistics,
)


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


def test_every_prompt_counts_once_in_the_mean_per_prompt() -> None:
    result = acceptance_statistics([[whole(5)], [whole(0)] * 9, [], [whole(1), whole(2)]])
    assert result.mean_acceptance_length_per_prompt == pytest.approx((6 + 1 + 2.5) / 3)
    assert result.interval_per_prompt == bootstrap_interval([6.0, 1.0, 2.5], [1.0, 1.0, 1.0])
    assert result.interval == bootstrap_interval([6, 9, 0, 5], [1, 9, 0, 2])


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        acceptance_statistics([[], []])


def test_the_interval_repeats_with_its_seed_and_shrinks_to_a_point_for_equal_prompts() -> None:
    lengths, rounds = [9.0, 20.0, 31.0, 8.0] * 5, [4.0, 5.0, 6.0, 7.0] * 5
    assert bootstrap_interval(lengths, rounds, seed=4) == bootstrap_interval(lengths, rounds, seed=4)
    assert bootstrap_interval(lengths, rounds, 4, 101) != bootstrap_interval(lengths, rounds, 5, 101)
    assert bootstrap_interval([6.0, 6.0], [2.0, 2.0]) == (3.0, 3.0)
    assert bootstrap_interval([7.0, 21.0, 14.0], [3.0, 9.0, 6.0]) == (7 / 3, 7 / 3)
    assert bootstrap_interval([6.0, 0.0], [2.0, 0.0]) == (3.0, 3.0)


def test_an_interval_stays_within_the_prompts_and_near_them_when_only_one_differs() -> None:
    assert bootstrap_interval([2.0, 6.0], [1.0, 1.0]) == (2.0, 6.0)
    low, high = bootstrap_interval([64.0] * 39 + [96.0], [64.0] * 40)
    assert low == pytest.approx(1.0, abs=0.005)
    assert 1.04 < high < 1.08, "1 of 40 prompts seen may be 1 of 8 in truth: 1 + 0.5 / 8"


def draw_pairs(num: int, generator: torch.Generator, gain: float = 1.0) -> torch.Tensor:
    """Tokens and rounds of two drafts on texts of 30 to 200 tokens, easy ones in fewer rounds. Every prompt has a
    probability that a token is accepted, each round at most 7; ``gain`` multiplies the first draft's lengths.
    Shapes: [num, 2 drafts, 2] float64.
    """
    levels_P = torch._sample_dirichlet(torch.tensor([4.0, 2.0]).expand(num, 2), generator=generator)[:, 0]
    wanted_P = torch.randint(30, 200, (num,), generator=generator)
    accepted_PDR = (torch.rand(num, 2, 200, generator=generator).log() / levels_P.log()[:, None, None]).floor()
    tokens_PDR = (accepted_PDR.clamp(max=7) + 1).cumsum(2) * torch.tensor([[gain], [1.0]])
    rounds_PD = (tokens_PDR < wanted_P[:, None, None]).sum(2) + 1
    tokens_PD = tokens_PDR.gather(2, rounds_PD[..., None] - 1)[..., 0]
    return torch.stack((tokens_PD, rounds_PD), dim=2).double()


def true_lengths(gain: float = 1.0) -> list[float]:
    """Of both drafts, over 200,000 prompts."""
    generator = torch.Generator().manual_seed(99)
    sums_22 = torch.stack([draw_pairs(20_000, generator, gain).sum(0) for _ in range(10)]).sum(0)
    return (sums_22[:, 0] / sums_22[:, 1]).tolist()


@pytest.mark.parametrize("num_prompts", [12, 40, 120])
def test_the_interval_covers_the_truth_as_often_as_it_says(num_prompts: int) -> None:
    """Of 1000 simulated evaluations; the percentile interval covers in 88 % (12 prompts) and 92 % (40) of them."""
    truth, generator = true_lengths()[1], torch.Generator().manual_seed(num_prompts)
    hits = 0
    for number in range(1000):
        tokens_P, rounds_P = draw_pairs(num_prompts, generator)[:, 1].unbind(1)
        low, high = bootstrap_interval(tokens_P.tolist(), rounds_P.tolist(), seed=number, num_resamples=400)
        hits += low <= truth <= high
    assert 0.93 <= hits / 1000 <= 0.97


def test_an_interval_over_rounds_would_cover_too_rarely() -> None:
    """Rounds of one prompt resemble each other: this is why prompts are drawn, not rounds."""
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for number in range(200):
        level_P = 3.0 + torch.randn(40, generator=generator).double()
        lengths_N = level_P.repeat_interleave(10) + torch.randn(400, generator=generator)
        low, high = bootstrap_interval(lengths_N.tolist(), [1.0] * 400, seed=number, num_resamples=400)
        hits += low <= 3.0 <= high
    assert hits < 150


def test_the_interval_of_a_difference_covers_the_true_difference() -> None:
    (first, second), generator = true_lengths(1.05), torch.Generator().manual_seed(1)
    hits = 0
    for number in range(1000):
        low, high = studentised_interval(draw_pairs(40, generator, 1.05), number, 600)
        hits += low <= first - second <= high
    assert 930 <= hits <= 970, hits


@pytest.mark.parametrize("num_prompts", [6, 40])
def test_p_values_of_two_equal_drafts_are_uniform(num_prompts: int) -> None:
    generator = torch.Generator().manual_seed(2)
    num = 1000
    found = [swap_p_value(draw_pairs(num_prompts, generator), number, 499) for number in range(num)]
    values_S = torch.tensor(found, dtype=torch.float64).sort().values
    shares_S = torch.arange(1, num + 1) / num
    for level in (0.01, 0.05, 0.1):
        spread = 3 * (level * (1 - level) / num) ** 0.5
        assert (values_S <= level).double().mean() <= level + spread, "no more false alarms than it says"
    if num_prompts == 40:  # of 6 prompts there are but 64 flips, and p-values between them do not occur
        assert (values_S - shares_S).abs().max() < 1.63 / num**0.5, "Kolmogorov and Smirnov at 1 %"
        assert (values_S <= 0.05).double().mean() >= 0.03, "nor is it shy"


def test_a_gain_of_five_percent_is_found_where_the_intervals_of_both_drafts_overlap() -> None:
    generator = torch.Generator().manual_seed(3)
    found = overlapping = 0
    for number in range(50):
        counts_P22 = draw_pairs(120, generator, 1.05)
        found += swap_p_value(counts_P22, number, 999) <= 0.05 and studentised_interval(counts_P22, number, 999)[0] > 0
        first, second = (bootstrap_interval(*counts_P22[:, d].T.tolist(), seed=number) for d in (0, 1))
        overlapping += first[0] < second[1]
    assert found >= 45, found
    assert overlapping >= 45, overlapping


def test_a_comparison_holds_both_means_and_their_difference() -> None:
    first = {("a", 7): [whole(3), whole(2)], ("b", 7): [whole(4)], ("c", 7): [whole(1)], ("d", 7): []}
    second = {("b", 7): [whole(2)], ("a", 7): [whole(1)] * 3, ("d", 7): [whole(5)], ("c", 7): [whole(1), whole(0)]}
    result = compare_pairs(first, second)
    assert (result.num_prompts, result.first, result.second) == (3, 14 / 4, 12 / 6)
    assert result.difference == pytest.approx(1.5)
    assert result.interval[0] < 1.5 < result.interval[1]
    back = compare_pairs(second, first)
    assert back.difference == -result.difference
    assert back.p_value == result.p_value, "in either direction"
    assert compare_pairs(first, second) == result


def test_the_p_value_is_the_share_of_label_swaps_that_differ_as_much() -> None:
    counts_P22 = torch.tensor([[[9, 2], [6, 3]], [[8, 3], [5, 2]], [[7, 3], [4, 4]], [[6, 2], [9, 4]]]).double()
    as_much, observed = 0, 0.0
    for flips in range(16):
        pairs = [pair.flip(0) if flips >> row & 1 else pair for row, pair in enumerate(counts_P22)]
        (first, second) = torch.stack(pairs).sum(0)
        difference = abs(float(first[0] / first[1] - second[0] / second[1]))
        observed = observed if flips else difference
        as_much += difference >= observed
    assert 1 < as_much < 16
    assert swap_p_value(counts_P22, 0, 16) == as_much / 16
    twice = torch.cat((counts_P22, torch.tensor([[[3, 1], [3, 1]]] * 12)))  # too many to be counted, and no other gap
    one = swap_p_value(twice, 0, 20_000)
    assert one == pytest.approx(swap_p_value(twice, 1, 65_536), abs=0.01)


def test_a_draft_compared_with_itself_does_not_differ() -> None:
    same = {index: [whole(index % 5), whole(2)] for index in range(9)}
    result = compare_pairs(same, dict(same))
    assert (result.difference, result.interval, result.p_value) == (0.0, (0.0, 0.0), 1.0)


def test_drafts_on_different_prompts_are_not_compared() -> None:
    rounds = [whole(1)]
    with pytest.raises(ValueError, match=r"2 prompts were decoded by one draft only, the first is \('a', 1\)"):
        compare_pairs({("a", 0): rounds, ("a", 1): rounds}, {("a", 0): rounds, ("b", 1): rounds})
    with pytest.raises(ValueError, match="no prompt has rounds of both"):
        compare_pairs({0: rounds, 1: []}, {0: [], 1: rounds})


FORCED = (
    TeacherForced((0, 3), (2.5, 3.5), (2.0, 3.0), (1.5, 1.5, 1.0), (2, 2, 2)),
    TeacherForced((), (), (), (0.0,) * 3, (0,) * 3),
    TeacherForced((2,), (1.5,), (1.75,), (0.5, 0.0, 0.0), (1, 0, 0)),
)


def test_teacher_forced_texts_are_pooled_over_blocks_and_slots_over_those_that_have_them() -> None:
    result = teacher_forced_statistics(FORCED)
    assert result.expected_acceptance_length == pytest.approx(7.5 / 3)
    assert result.interval == bootstrap_interval([6.0, 0.0, 1.5], [2, 0, 1])
    assert result.survival == pytest.approx((2 / 3, 1.5 / 2, 1 / 2))
    assert result.num_anchors == 3
    short = teacher_forced_statistics(FORCED[1:])
    assert (short.survival, short.interval) == ((0.5,), (1.5, 1.5)), "a slot that no block has is not there"
    with pytest.raises(ValueError, match="no blocks to measure"):
        teacher_forced_statistics(FORCED[1:2])


def test_the_gap_is_between_the_same_rounds_prompt_by_prompt() -> None:
    stopped = Round(num_proposed=1, accepted_drafts=1, acceptance_length=1, is_cut=True, confidence_logits=())
    rounds = [[whole(2, 3), whole(3, 3), whole(0, 3)], [], [whole(1, 3), stopped]]
    result = decoding_gap(FORCED, rounds)
    assert (result.num_rounds, result.decoded, result.forced) == (3, (3 + 4 + 1) / 3, (2 + 3 + 1.75) / 3)
    assert result.difference == pytest.approx(result.decoded - result.forced)
    counts_P22 = torch.tensor([[[7.0, 2], [5.0, 2]], [[1.0, 1], [1.75, 1]]], dtype=torch.float64)
    assert result.interval == studentised_interval(counts_P22)


def test_a_gap_wants_whole_blocks_at_round_starts() -> None:
    with pytest.raises(ValueError, match=r"round starts, \[0, 2\], got \[0, 3\]"):
        decoding_gap(FORCED[:1], [[whole(1, 3), whole(3, 3)]])
    with pytest.raises(ValueError, match="confidence threshold"):
        decoding_gap(FORCED[:1], [[whole(2, 2), whole(3, 3)]])
    with pytest.raises(ValueError, match="no rounds to compare"):
        decoding_gap(FORCED[1:2], [[whole(2, 3)]])
