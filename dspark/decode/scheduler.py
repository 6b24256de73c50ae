"""Which drafted tokens of many texts one pass of the target verifies, when it may not verify all."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import isfinite
from operator import mul
from pathlib import Path

from numpy import interp

from dspark.errors import ConfigError
from dspark.files import read_json

Confidences = Sequence[Sequence[float]]
"""How sure a draft is of its tokens, each in [0, 1] and given those before it: a row a text, a number a token."""


class StepTimes:
    """Seconds that a pass of the target takes over so many tokens of all texts together (anchors counted), on straight
    lines between the points that were measured. Nothing is said of fewer or of more tokens than those.
    """

    def __init__(self, seconds: Mapping[int, float], place: object = "step times") -> None:
        """``seconds`` by number of tokens. Raises: ConfigError of ``place`` for fewer than two, or what cannot be."""
        if len(seconds) < 2 or not all(n > 0 and isfinite(s) and s > 0 for n, s in seconds.items()):
            raise ConfigError(f"{place}: expected positive seconds of two numbers of tokens or more, found {seconds}")
        self._tokens, self._seconds = zip(*sorted(seconds.items()), strict=True)
        self._place, self.most_tokens = place, max(seconds)

    @classmethod
    def read(cls, path: Path) -> "StepTimes":
        """Those in a JSON file: an object of seconds by number of tokens, or what ``dspark bench verify --json`` wrote
        (its chained launches, back to back; drafting is not in it). Raises: ConfigError for anything else.
        """
        tree = read_json(path)
        try:
            if "windows" in tree:
                tree = {row["tokens"]: row["chained"]["burst_microseconds"] / 1e6 for row in tree["windows"]}
            seconds = {int(num_tokens): float(value) for num_tokens, value in tree.items()}
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            kinds = "seconds by number of tokens, or the file of dspark bench verify --json"
            raise ConfigError(f"{path}: expected {kinds}, found {type(error).__name__} {error}") from error
        return cls(seconds, path)

    def __call__(self, num_tokens: int) -> float:
        """Raises: ConfigError outside of what was measured."""
        if not self._tokens[0] <= num_tokens <= self.most_tokens:
            reach = f"measured from {self._tokens[0]} to {self.most_tokens} tokens"
            raise ConfigError(f"{self._place}: {reach}, asked for {num_tokens}; measure it")
        return float(interp(num_tokens, self._tokens, self._seconds))


def ranked(confidences: Confidences) -> list[tuple[float, int, int]]:
    """The tokens of all texts as (-a_{r,j}, slot j, row r), the likeliest survivor first: a token survives with
    probability a_{r,j} = c_{r,0} ... c_{r,j}. Of equal ones the earlier slot comes first, then the lower row. As a
    text's survivals never rise, its tokens stand in their order.
    """
    assert all(0 <= confidence <= 1 for row in confidences for confidence in row), "also false for what is no number"
    return sorted(
        (-survival, slot, row)
        for row, of_row in enumerate(confidences)
        for slot, survival in enumerate(accumulate(of_row, mul))
    )


def share(confidences: Confidences, budget: int) -> list[int]:
    """How many drafted tokens of each text are verified when all texts together may have ``budget`` of them: those that
    most likely survive.

    Lossless for a budget that is fixed beforehand. The choice is what one gets by taking tokens one after the other,
    each time the likeliest next one of any text: c_{r,j} is known before token (r, j) is drawn, so a token is taken
    because of tokens taken before it, never because of itself or of what follows it, which ranks behind it. A budget
    chosen from these very confidences would leak: whether a token is taken would depend on confidences behind it, and
    so on itself. ``admit`` and ``best_budget`` are the two ways out.
    Returns: one count a text. Source: DSpark (arXiv 2607.05147), prefix scheduler (specs/dspark.md 6.2).
    """
    assert budget >= 0
    rows = [row for *_, row in ranked(confidences)[:budget]]
    return [rows.count(row) for row in range(len(confidences))]


def admit(confidences: Confidences, step_times: StepTimes) -> list[int]:
    """How many drafted tokens of each text are verified when each has to pay: from the likeliest survivor on, they are
    taken while each raises the expected tokens a second, (R + sum of a) / step_times(R + tokens taken) of R >= 1 texts.

    Lossless, because it stops at the first token that does not pay, although later ones might make up for it: what
    ranks behind a token has no say in whether it is taken. More tokens than were measured are never taken.
    Returns: one count a text. Raises: ConfigError when not even the R anchors were measured.
    Source: DSpark (arXiv 2607.05147), Algorithm 1 (specs/dspark.md 6.2).
    """
    rates = _rates(confidences, step_times)
    worse = (taken for taken in range(len(rates) - 1) if not rates[taken + 1] > rates[taken])
    return share(confidences, next(worse, len(rates) - 1))


def best_budget(confidences: Confidences, step_times: StepTimes) -> int:
    """The budget with the most expected tokens a second, of equal ones the smallest, and never more than was measured.

    Lossless for ``share`` only with confidences of an earlier step, for those of the tokens that are shared out would
    leak (see there). A text that had none then counts as sure of its whole block.
    Raises: ConfigError when not even an anchor a text was measured. Source: SGLang's planner (specs/dspark.md 6.2),
    which also leaves out survivals below 1e-6; this does not.
    """
    rates = _rates(confidences, step_times)
    return rates.index(max(rates))


def _rates(confidences: Confidences, step_times: StepTimes) -> list[float]:
    """Expected tokens a second of taking none, one, two, ... of the likeliest survivors."""
    num_texts = len(confidences)
    survivals = [-negative for negative, *_ in ranked(confidences)[: max(step_times.most_tokens - num_texts, 0)]]
    expected = accumulate(survivals, initial=float(num_texts))
    return [tokens / step_times(num_texts + taken) for taken, tokens in enumerate(expected)]
