"""Acceptance statistics of speculative decoding with intervals over prompts, and two drafts on the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark.decode.round import Round
from dspark.decode.teacher_forced import TeacherForced, round_starts

Interval = tuple[float, float]
NUM_RESAMPLES = 2000
SMALLEST_ERROR = 0.25
"""Of a resample, as a share of the sample's: one that missed the few prompts that differ would divide by nearly 0."""


@dataclass(frozen=True)
class AcceptanceStatistics:
    """How long the accepted runs are. Position k of a tuple is slot k of the block (slot 0 drafts the first token).

    ``mean_acceptance_length``: tokens committed / rounds, the token after the accepted ones included; the token after
    the prompt counts nowhere. ``interval`` is its 95 % bootstrap interval over prompts.
    ``mean_acceptance_length_per_prompt``: every prompt's own mean, averaged over the prompts that have a round, so that
    a long text counts no more than a short one; ``interval_per_prompt`` is its interval.
    ``mean_acceptance_length_uncut``: the same over the rounds that the end of the text did not cut; None if all were.
    ``verify_rate``: tokens committed / rows verified.
    ``survival``: rounds that accepted slot k / rounds that proposed it. ``conditional``: the same among rounds that
    accepted every slot before k; None where none did.
    ``histogram``: rounds with 0, 1, ... accepted drafts.
    """

    num_prompts: int
    num_rounds: int
    num_tokens: int
    mean_acceptance_length: float
    interval: Interval
    mean_acceptance_length_per_prompt: float
    interval_per_prompt: Interval
    mean_acceptance_length_uncut: float | None
    mean_accepted_drafts: float
    verify_rate: float
    survival: tuple[float, ...]
    conditional: tuple[float | None, ...]
    histogram: tuple[int, ...]


def acceptance_statistics(rounds_by_prompt: Sequence[Sequence[Round]]) -> AcceptanceStatistics:
    """Pool the rounds of all prompts. Raises: ValueError without a single round.
    Source: dspark.md 6.1 (DeepSpec's counts) and 7.4. ``conditional`` is counted, not survival's ratio: the two agree
    when every round proposes the whole block, and only the count is right when some propose less.
    """
    rounds = [counts for prompt in rounds_by_prompt for counts in prompt]
    if not rounds:
        raise ValueError("no rounds to measure: every text ended before the draft was asked")
    tokens = [sum(counts.acceptance_length for counts in prompt) for prompt in rounds_by_prompt]
    num_tokens = sum(tokens)
    means = [total / len(prompt) for total, prompt in zip(tokens, rounds_by_prompt, strict=True) if prompt]
    uncut = [counts.acceptance_length for counts in rounds if not counts.is_cut]
    slots = range(max(counts.num_proposed for counts in rounds))
    accepted = [sum(counts.accepted_drafts > k for counts in rounds) for k in slots]
    proposed = [sum(counts.num_proposed > k for counts in rounds) for k in slots]
    reached = [sum(counts.num_proposed > k <= counts.accepted_drafts for counts in rounds) for k in slots]
    return AcceptanceStatistics(
        num_prompts=len(rounds_by_prompt),
        num_rounds=len(rounds),
        num_tokens=num_tokens,
        mean_acceptance_length=num_tokens / len(rounds),
        interval=bootstrap_interval(tokens, list(map(len, rounds_by_prompt))),
        mean_acceptance_length_per_prompt=sum(means) / len(means),
        interval_per_prompt=bootstrap_interval(means, [1.0] * len(means)),
        mean_acceptance_length_uncut=sum(uncut) / len(uncut) if uncut else None,
        mean_accepted_drafts=sum(counts.accepted_drafts for counts in rounds) / len(rounds),
        verify_rate=num_tokens / (sum(counts.num_proposed for counts in rounds) + len(rounds)),
        survival=tuple(accepted[k] / proposed[k] for k in slots),
        conditional=tuple(accepted[k] / reached[k] if reached[k] else None for k in slots),
        histogram=tuple(sum(counts.accepted_drafts == n for counts in rounds) for n in (*slots, len(slots))),
    )


def bootstrap_interval(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> Interval:
    """The studentised 95 % interval of sum(numerators) / sum(denominators) when prompts are drawn again with return.

    It holds the truth more often than the percentile interval where prompts are few or a few of them are unlike the
    others. Its bounds stay within the prompts' own ratios; a single prompt, or equal ones, give a point.
    Pairs with a denominator of zero (texts without a round) say nothing about the ratio and are left out.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 12.5; the standard error is that of a linearised
    ratio. Bounding a resample's standard error from below is ours.
    """
    pairs = [pair for pair in zip(numerators, denominators, strict=True) if pair[1] > 0]
    pairs_P2 = torch.tensor(pairs, dtype=torch.float64)
    ratios_P = pairs_P2[:, 0] / pairs_P2[:, 1]
    low, high = studentised_interval(pairs_P2[:, None], seed, num_resamples)
    return max(low, float(ratios_P.min())), min(high, float(ratios_P.max()))


@dataclass(frozen=True)
class TeacherForcedStatistics:
    """The acceptance length that a draft should have by ``TeacherForced``, with its 95 % bootstrap interval over
    prompts. ``survival``: of slot k, over the blocks that have it.
    """

    expected_acceptance_length: float
    interval: Interval
    survival: tuple[float, ...]
    num_anchors: int


def teacher_forced_statistics(texts: Sequence[TeacherForced]) -> TeacherForcedStatistics:
    """Pool the ``lengths`` of one text a prompt over all blocks. Raises: ValueError without a single block."""
    sums, blocks = [sum(text.lengths) for text in texts], [len(text.anchors) for text in texts]
    if not any(blocks):
        raise ValueError("no blocks to measure: no text is longer than a block or ends at a stop token")
    survival = torch.tensor([text.survival_sums for text in texts if text.anchors], dtype=torch.float64).sum(0)
    counts = torch.tensor([text.slot_counts for text in texts if text.anchors]).sum(0)
    mean, interval = sum(sums) / sum(blocks), bootstrap_interval(sums, blocks)
    return TeacherForcedStatistics(mean, interval, tuple((survival / counts)[counts > 0].tolist()), sum(blocks))


@dataclass(frozen=True)
class DecodingGap:
    """Mean acceptance lengths of the same rounds: as they were decoded, and by ``TeacherForced.path_lengths``.
    ``difference`` = decoded - forced, with its 95 % bootstrap interval over prompts. Where drafting sees what training
    showed it is 0 if greedy and 0 on average if drawn.
    """

    num_rounds: int
    decoded: float
    forced: float
    difference: float
    interval: Interval


def decoding_gap(texts: Sequence[TeacherForced], rounds_by_prompt: Sequence[Sequence[Round]]) -> DecodingGap:
    """Compare rounds with the estimates at their starts, over the rounds that have one.
    Raises: ValueError for an anchor that is no round start, a round that a confidence threshold shortened (forced
    blocks are whole), or no round at all.
    """
    pairs = []
    for text, rounds in zip(texts, rounds_by_prompt, strict=True):
        at = dict(zip(round_starts(rounds), rounds, strict=True))
        if not set(text.anchors) <= at.keys():
            raise ValueError(f"anchors must be round starts, {sorted(at)}, got {list(text.anchors)}")
        there = [at[anchor] for anchor in text.anchors]
        if any(counts.num_proposed < len(text.slot_counts) and not counts.is_cut for counts in there):
            raise ValueError("rounds propose less than a whole block; decode without a confidence threshold")
        decoded = sum(counts.acceptance_length for counts in there)
        pairs += [((decoded, len(there)), (sum(text.path_lengths), len(there)))] if there else []
    if not pairs:
        raise ValueError("no rounds to compare: every text ended within its first block")
    return DecodingGap(sum(num_rounds for (_, num_rounds), _ in pairs), *difference_of_means(pairs))


@dataclass(frozen=True)
class PairedComparison:
    """Two drafts on the same prompts: their pooled mean acceptance lengths and ``difference`` = first - second, with
    its 95 % bootstrap interval over prompts. ``p_value``: see ``swap_p_value``.
    """

    num_prompts: int
    first: float
    second: float
    difference: float
    interval: Interval
    p_value: float


def compare_pairs(first: Mapping[Any, Sequence[Round]], second: Mapping[Any, Sequence[Round]]) -> PairedComparison:
    """Compare two drafts prompt by prompt, which leaves out how much prompts differ from each other.

    The keys say what was decoded and how (prompt, temperature, seed); both drafts must have decoded the same. Prompts
    are drawn again together with both drafts' rounds. A prompt in which either draft had no round is left out.
    Raises: ValueError when the prompts differ, or when none has rounds of both.
    """
    lonely = sorted(map(str, first.keys() ^ second.keys()))
    if lonely:
        raise ValueError(f"{len(lonely)} prompts were decoded by one draft only, the first is {lonely[0]}")
    both = [prompt for prompt, rounds in first.items() if rounds and second[prompt]]
    if not both:
        raise ValueError("no prompt has rounds of both drafts")
    rounds = [[draft[prompt] for draft in (first, second)] for prompt in both]
    counts = [[(sum(r.acceptance_length for r in of_draft), len(of_draft)) for of_draft in pair] for pair in rounds]
    p_value = swap_p_value(torch.tensor(counts, dtype=torch.float64))
    return PairedComparison(len(both), *difference_of_means(counts), p_value)


def difference_of_means(pairs: Sequence[Any]) -> tuple[float, float, float, Interval]:
    """Of (numerator, denominator) twice for every prompt: both ratios of sums, the first less the second, and the
    95 % interval of that.
    """
    pairs_P22 = torch.tensor(pairs, dtype=torch.float64)
    first, second = (pairs_P22[..., 0].sum(0) / pairs_P22[..., 1].sum(0)).tolist()
    return first, second, first - second, studentised_interval(pairs_P22)


def swap_p_value(counts_P22: torch.Tensor, seed: int = 0, num_resamples: int = NUM_RESAMPLES) -> float:
    """How often the pooled means differ at least as much, in either direction, when a coin decides in every prompt
    which draft is called the first (a sign flip of the prompt's difference).

    Exact in this sense: were the two drafts' counts of a prompt exchangeable, for instance those of one draft with two
    seeds, then P(p <= x) <= x for every x, however few prompts or flips; the observed labels count as one of the
    flips. Of drafts that only share their mean it is an approximation for many prompts. Where there are no more than
    ``num_resamples`` ways to flip, all are counted, each once.
    Shapes: counts_P22 float64: of every prompt and both drafts the tokens and the rounds (at least one).
    Returns: at least 1 / (num_resamples + 1).
    """
    num_prompts = len(counts_P22)
    is_exact = 2**num_prompts <= num_resamples
    if is_exact:
        places_P = torch.arange(num_prompts)
        is_swapped_SP = (torch.arange(2**num_prompts)[:, None] >> places_P & 1).double()
    else:
        generator = torch.Generator().manual_seed(seed)
        is_swapped_SP = torch.randint(2, (num_resamples, num_prompts), generator=generator).double()
    moved_S2 = is_swapped_SP @ (counts_P22[:, 1] - counts_P22[:, 0])
    sums_22 = counts_P22.sum(0)
    first_S2, second_S2 = sums_22[0] + moved_S2, sums_22[1] - moved_S2
    difference_S = first_S2[:, 0] / first_S2[:, 1] - second_S2[:, 0] / second_S2[:, 1]
    observed = sums_22[0, 0] / sums_22[0, 1] - sums_22[1, 0] / sums_22[1, 1]
    num_as_large = int((difference_S.abs() >= observed.abs() * (1 - 1e-12)).sum())  # a sum in another order is no less
    return num_as_large / len(is_swapped_SP) if is_exact else (1 + num_as_large) / (num_resamples + 1)


def studentised_interval(counts_PC2: torch.Tensor, seed: int = 0, num_resamples: int = NUM_RESAMPLES) -> Interval:
    """The studentised 95 % interval of one ratio of sums (C = 1), or of the first minus the second (C = 2), prompts
    drawn again.
    """
    generator = torch.Generator().manual_seed(seed)
    num_prompts = len(counts_PC2)
    choice_SP = torch.randint(num_prompts, (num_resamples, num_prompts), generator=generator)
    (value,), (error,) = _value_and_error(counts_PC2[None])
    value_S, error_S = _value_and_error(counts_PC2[choice_SP])
    smallest = max(float(error) * SMALLEST_ERROR, torch.finfo(torch.float64).tiny)
    t_S = (value_S - value) / error_S.clamp(min=smallest)
    below, above = torch.quantile(t_S, torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(value - above * error), float(value - below * error)


def _value_and_error(counts_SPC2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ratio, or the difference of ratios, of every resample, and its linearised standard error over prompts."""
    sums_SC2 = counts_SPC2.sum(1)
    ratio_SC = sums_SC2[..., 0] / sums_SC2[..., 1]
    residual_SPC = counts_SPC2[..., 0] - ratio_SC[:, None] * counts_SPC2[..., 1]
    sign_C = torch.tensor([1.0, -1.0], dtype=torch.float64)[: ratio_SC.shape[1]]
    pull_SP = (residual_SPC / sums_SC2[:, None, :, 1]) @ sign_C
    return ratio_SC @ sign_C, pull_SP.square().sum(1).sqrt()
