"""What other numbers of verified tokens would have earned: recorded rounds of many texts, replayed side by side."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch

from dspark.decode.round import Round
from dspark.decode.scheduler import Confidences, StepTimes, admit, best_budget, share

LAG_STEPS = 2
"""How old the confidences are that choose a budget, as in SGLang (dspark.md 6.2)."""


class Step(NamedTuple):
    """A pass over several texts, a row a text: the confidences of what is drafted, those of ``LAG_STEPS`` rounds
    before, and the tokens that the round committed when it verified its whole block.
    """

    confidences: Confidences
    lagged: Confidences
    acceptance_lengths: Sequence[int]


class BatchRates(NamedTuple):
    """Tokens a second of ``batch_size`` texts in step. ``undrafted``: with nothing verified but anchors; ``whole``:
    with all that was drafted, None where so many tokens were not measured; ``budgeted``: with the best fixed ``budget``
    a step; ``lagged``: with the best by the confidences of ``LAG_STEPS`` rounds before; ``admitted``: by Algorithm 1.
    """

    batch_size: int
    undrafted: float
    whole: float | None
    budget: int
    budgeted: float
    lagged: float
    admitted: float


def batch_rates(
    texts: Sequence[Sequence[Round]], temperatures: Sequence[float], step_times: StepTimes
) -> Iterator[BatchRates]:
    """For 1, 2, 4, ... texts in step, as far as there are texts and measured times.

    Assumed: a round of which fewer tokens are verified commits the accepted ones of these and the token behind them;
    the text then goes on with its next recorded round, as if that did not depend on where it starts; a step takes what
    its number of tokens takes, however they spread over texts and however long these are, and nothing else takes time;
    a text that ends makes room for another at once. The best budget is chosen and measured on the same rounds.
    Raises: ConfigError when not even one token was measured.
    """
    for batch_size in (2**power for power in range(min(len(texts), step_times.most_tokens).bit_length())):
        rate = partial(tokens_per_second, side_by_side(texts, batch_size, temperatures), step_times)
        whole, room = batch_size * len(temperatures), step_times.most_tokens - batch_size
        rates = [rate(fixed(budget)) for budget in range(min(whole, room) + 1)]
        lagged = rate(lambda step: share(step.confidences, best_budget(step.lagged, step_times)))
        admitted = rate(lambda step: admit(step.confidences, step_times))
        of_whole, best = rates[whole] if whole <= room else None, max(rates)
        yield BatchRates(batch_size, rates[0], of_whole, rates.index(best), best, lagged, admitted)


def fixed(budget: int) -> Callable[[Step], list[int]]:
    """The same budget in every step."""
    return lambda step: share(step.confidences, budget)


def side_by_side(texts: Sequence[Sequence[Round]], batch_size: int, temperatures: Sequence[float]) -> list[Step]:
    """As many steps as hold the rounds of all texts once: a row takes the next text when its own has ended, after the
    last one the first. Confidences are those at ``temperatures``; for the first ``LAG_STEPS`` rounds of a text the
    lagged ones are 1. Texts have a round each at least, and are ``batch_size`` at least.
    """
    tensor = partial(torch.tensor, dtype=torch.float64)
    logits = [tensor([counts.confidence_logits for counts in rounds]) for rounds in texts]
    sure = [(logits_TK / tensor(temperatures)).sigmoid().tolist() for logits_TK in logits]
    fresh, waiting, steps = [1.0] * len(temperatures), cycle(range(len(texts))), []
    rows = [(next(waiting), 0) for _ in range(batch_size)]
    for _ in range(-(-sum(map(len, texts)) // batch_size)):
        lagged = [sure[text][place - LAG_STEPS] if place >= LAG_STEPS else fresh for text, place in rows]
        lengths = [texts[text][place].acceptance_length for text, place in rows]
        steps.append(Step([sure[text][place] for text, place in rows], lagged, lengths))
        rows = [(text, at + 1) if at + 1 < len(texts[text]) else (next(waiting), 0) for text, at in rows]
    return steps


def tokens_per_second(steps: Sequence[Step], step_times: StepTimes, choose: Callable[[Step], list[int]]) -> float:
    """What is committed by the time that it takes, when ``choose`` says how many drafted tokens of each text a step
    verifies. A round that ended in an accepted stop token has none behind it, and verified up to the token before it
    has the stop token as the one behind: either way ``acceptance_length`` is the most.
    """
    num_tokens, seconds = 0, 0.0
    for step in steps:
        counts = choose(step)
        num_tokens += sum(min(n, count + 1) for n, count in zip(step.acceptance_lengths, counts, strict=True))
        seconds += step_times(len(counts) + sum(counts))
    return num_tokens / seconds
