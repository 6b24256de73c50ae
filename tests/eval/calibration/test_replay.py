"""A replay of recorded rounds: what a budget commits of them, in what time, and which one is found the best."""

from itertools import pairwise
from math import inf

import pytest
import torch

from dspark.decode.round import Round
from dspark.decode.scheduler import StepTimes, admit, best_budget, share
from dspark.errors import ConfigError
from dspark.eval.calibration import replay
from dspark.eval.calibration.replay import Step, batch_rates, fixed, side_by_side, tokens_per_second

FLAT = StepTimes({1: 1.0, 100: 1.0})
SLOTS = 2


def text(*accepted: int, name: float = 0.0) -> list[Round]:
    """Rounds of two drafted tokens; their confidences say which text and which round it is."""
    return [Round(SLOTS, a, a + 1, False, (name, float(place))) for place, a in enumerate(accepted)]


def names(steps: list[Step], temperatures: tuple[float, ...] = (1.0, 1.0)) -> list[list[tuple[int, int]]]:
    """Text and round of every row."""
    logits = [torch.tensor(step.confidences, dtype=torch.float64).logit() for step in steps]
    return [[(round(a * temperatures[0]), round(b * temperatures[1])) for a, b in rows.tolist()] for rows in logits]


def test_texts_lie_side_by_side_and_the_next_one_takes_the_place_of_one_that_ended() -> None:
    texts = [text(0, 1, 2, name=1.0), text(2, name=2.0), text(1, 0, name=3.0)]
    steps = side_by_side(texts, 2, (2.0, 0.5))
    assert names(steps, (2.0, 0.5)) == [[(1, 0), (2, 0)], [(1, 1), (3, 0)], [(1, 2), (3, 1)]]
    assert [step.acceptance_lengths for step in steps] == [[1, 3], [2, 2], [3, 1]]
    assert names(side_by_side(texts, 1, (1.0, 1.0))) == [
        [(n, i)] for n, i in ((1, 0), (1, 1), (1, 2), (2, 0), (3, 0), (3, 1))
    ]
    assert names(side_by_side([text(0, name=1.0), text(0, 0, name=2.0)], 2, (1.0, 1.0))) == [
        [(1, 0), (2, 0)],
        [(1, 0), (2, 1)],
    ]


def test_lagged_confidences_are_those_of_two_rounds_before_and_certain_until_there_are_any() -> None:
    steps = side_by_side([text(0, 0, 0, 0, name=1.0), text(0, 0, 0, name=2.0)], 1, (1.0, 1.0))
    now = [step.confidences[0] for step in steps]
    assert [step.lagged[0] for step in steps] == [[1, 1], [1, 1], now[0], now[1], [1, 1], [1, 1], now[4]]


@pytest.mark.parametrize(
    ("counts", "tokens"), [([0, 0], 2), ([1, 0], 3), ([2, 0], 4), ([0, 1], 3), ([0, 2], 3), ([2, 2], 5)], ids=str
)
def test_a_verified_prefix_commits_what_was_accepted_of_it_and_one_more(counts: list[int], tokens: int) -> None:
    step = Step([[0.5] * 2] * 2, [[1.0] * 2] * 2, [3, 2])  # two and one accepted
    assert tokens_per_second([step], StepTimes({1: 4.0, 10: 4.0}), lambda _: counts) == tokens / 4


def test_an_accepted_stop_token_has_none_behind_it() -> None:
    (step,) = side_by_side([[Round(2, 2, 2, True, (0.0, 0.0))]], 1, (1.0, 1.0))
    rates = [tokens_per_second([step], FLAT, lambda _, n=count: [n]) for count in range(3)]
    assert rates == [1, 2, 2], "verified up to the token before it, the stop token is the target's own"


def test_time_goes_by_the_tokens_of_a_step() -> None:
    steps = [Step([[0.9, 0.9]], [[1.0, 1.0]], [3]), Step([[0.9, 0.9]], [[1.0, 1.0]], [1])]
    curve = StepTimes({1: 1.0, 2: 10.0, 3: 100.0})
    assert [tokens_per_second(steps, curve, fixed(budget)) for budget in range(3)] == [2 / 2, 3 / 20, 4 / 200]


def random_texts(num: int, seed: int = 0) -> list[list[Round]]:
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(num):
        logits_TK = 2 * torch.randn(int(torch.randint(1, 9, (1,), generator=generator)), 3, generator=generator)
        is_kept_TK = torch.rand(logits_TK.shape, generator=generator) < logits_TK.sigmoid()
        kept = is_kept_TK.cumprod(1).sum(1).tolist()
        texts.append([Round(3, a, a + 1, False, tuple(row)) for a, row in zip(kept, logits_TK.tolist(), strict=True)])
    return texts


def test_the_best_budget_is_the_best_of_all_and_every_way_is_what_its_name_says() -> None:
    texts, curve, temperatures = random_texts(9), StepTimes({1: 1.0, 3: 1.2, 20: 5.0}), (1.0, 2.0, 0.5)
    rows = list(batch_rates(texts, temperatures, curve))
    assert [row.batch_size for row in rows] == [1, 2, 4, 8], "nine texts"
    for row in rows:
        steps = side_by_side(texts, row.batch_size, temperatures)
        budgets = range(min(3 * row.batch_size, 20 - row.batch_size) + 1)
        rates = [tokens_per_second(steps, curve, lambda s, b=b: share(s.confidences, b)) for b in budgets]
        assert (row.undrafted, row.budgeted) == (rates[0], max(rates))
        assert rates[row.budget] == row.budgeted
        assert row.whole == (rates[-1] if row.batch_size < 8 else None), "32 tokens were not measured"
        assert row.admitted == tokens_per_second(steps, curve, lambda s: admit(s.confidences, curve))
        old = tokens_per_second(steps, curve, lambda s: share(s.confidences, best_budget(s.lagged, curve)))
        new = tokens_per_second(steps, curve, lambda s: share(s.confidences, best_budget(s.confidences, curve)))
        assert row.lagged == old != new
    assert len({row.budget for row in rows}) > 1


def test_where_tokens_cost_nothing_all_are_verified_and_where_they_cost_everything_none() -> None:
    texts = random_texts(4, seed=1)
    free = list(batch_rates(texts, (1.0,) * 3, FLAT))
    assert all(row.whole == row.budgeted == row.admitted for row in free)
    assert all(one.budgeted < two.budgeted for one, two in pairwise(free))
    dear = list(batch_rates(texts, (1.0,) * 3, StepTimes({1: 1.0, 20: 1e6})))
    assert all((row.budget, row.budgeted, row.lagged) == (0, row.undrafted, row.undrafted) for row in dear)
    assert all(row.admitted == row.undrafted for row in dear)


def test_batches_end_where_times_do() -> None:
    texts = random_texts(9)
    rows = list(batch_rates(texts, (1.0,) * 3, StepTimes({1: 1.0, 5: 2.0})))
    assert [row.batch_size for row in rows] == [1, 2, 4]
    with pytest.raises(ConfigError, match="measured from 2 to 5 tokens, asked for 1"):
        list(batch_rates(texts, (1.0,) * 3, StepTimes({2: 1.0, 5: 2.0})))


def test_certainties_are_replayed_too() -> None:
    (step,) = side_by_side([[Round(2, 1, 2, False, (inf, -inf))]], 1, (3.0, 0.3))
    assert step.confidences == [[1.0, 0.0]]
    assert replay.LAG_STEPS == 2
