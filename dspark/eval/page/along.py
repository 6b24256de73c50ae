"""Acceptance along the text and by the length of the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.ticker import MaxNLocator

from dspark.decode.teacher_forced import round_starts
from dspark.eval.statistics import bootstrap_interval
from dspark.eval.timing import DecodedText


@dataclass(frozen=True)
class Bucket:
    """What lies at low..high - 1 tokens: how much it is, its mean acceptance length and that one's interval."""

    low: int
    high: int
    count: int
    mean_acceptance_length: float
    interval: tuple[float, float]


def by_start(texts: Sequence[DecodedText], width: int) -> list[Bucket]:
    """Rounds by where in the answer they start; the first starts at token 1, for token 0 comes with the prompt."""
    pairs = [pair for text in texts for pair in zip(round_starts(text.rounds), text.rounds, strict=True)]
    return _buckets([(anchor + 1, counts.acceptance_length, 1) for anchor, counts in pairs], width)


def by_length(texts: Sequence[DecodedText]) -> list[Bucket]:
    """Texts that have a round by how many tokens they have."""
    counted = [(len(text.ids_T), sum(r.acceptance_length for r in text.rounds), len(text.rounds)) for text in texts]
    return _buckets([item for item in counted if item[2]], step_width(texts))


def step_width(texts: Sequence[DecodedText]) -> int:
    """A round number of tokens that cuts the longest text in some five parts."""
    locator = MaxNLocator(5, steps=[1, 2, 5, 10], integer=True)
    return int(locator.tick_values(0, max([5, *(len(text.ids_T) for text in texts)]))[1])


def _buckets(counted: Sequence[tuple[int, int, int]], width: int) -> list[Bucket]:
    """Of (place, tokens, rounds); empty buckets are left out."""
    buckets = []
    for step, group in groupby(sorted(counted), key=lambda item: item[0] // width):
        _, tokens, rounds = zip(*group, strict=True)
        mean, bounds = sum(tokens) / sum(rounds), bootstrap_interval(tokens, rounds)
        buckets.append(Bucket(step * width, (step + 1) * width, len(tokens), mean, bounds))
    return buckets
