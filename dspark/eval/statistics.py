"""Acceptance statistics of speculative decoding, pooled over rounds, with an interval over prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark.decode.round import Round


@dataclass(frozen=True)
class AcceptanceStatistics:
    """How long the accepted runs are. Position k of a tuple is slot k of the block (slot 0 drafts the first token).

    ``mean_acceptance_length``: tokens committed / rounds, the token after the accepted ones included; the token after
    the prompt counts nowhere. ``interval`` is its 95 % bootstrap interval over prompts.
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
    interval: tuple[float, float]
    mean_acceptance_length_uncut: float | None
    mean_accepted_drafts: float
    verify_rate: float
    survival: tuple[float, ...]
    conditional: tuple[float | None, ...]
    histogram: tuple[int, ...]


def acceptance_statistics(
    rounds_by_prompt: Sequence[Sequence[Round]], seed: int = 0, num_resamples: int = 2000
) -> AcceptanceStatistics:
    """Pool the rounds of all prompts. Raises: ValueError without a single round.
    Source: dspark.md 6.1 (DeepSpec's counts) and 7.4. ``conditional`` is counted, not survival's ratio: the two agree
    when every round proposes the whole block, and only the count is right when some propose less.
    """
    rounds = [counts for prompt in rounds_by_prompt for counts in prompt]
    if not rounds:
        raise ValueError("no rounds to measure: every text ended before the draft was asked")
    tokens = [sum(counts.acceptance_length for counts in prompt) for prompt in rounds_by_prompt]
    num_tokens = sum(tokens)
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
        interval=bootstrap_interval(tokens, list(map(len, rounds_by_prompt)), seed, num_resamples),
        mean_acceptance_length_uncut=sum(uncut) / len(uncut) if uncut else None,
        mean_accepted_drafts=sum(counts.accepted_drafts for counts in rounds) / len(rounds),
        verify_rate=num_tokens / (sum(counts.num_proposed for counts in rounds) + len(rounds)),
        survival=tuple(accepted[k] / proposed[k] for k in slots),
        conditional=tuple(accepted[k] / reached[k] if reached[k] else None for k in slots),
        histogram=tuple(sum(counts.accepted_drafts == n for counts in rounds) for n in (*slots, len(slots))),
    )


def bootstrap_interval(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0, num_resamples: int = 2000
) -> tuple[float, float]:
    """The 95 % percentile interval of sum(numerators) / sum(denominators) when prompts are drawn again with return.
    Pairs with a denominator of zero (texts without a round) say nothing about the ratio and are left out.
    """
    pairs = [pair for pair in zip(numerators, denominators, strict=True) if pair[1] > 0]
    pairs_P2 = torch.tensor(pairs, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    choice_SP = torch.randint(len(pairs), (num_resamples, len(pairs)), generator=generator)
    sums_S2 = pairs_P2[choice_SP].sum(1)
    low, high = torch.quantile(sums_S2[:, 0] / sums_S2[:, 1], torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(low), float(high)
