"""Budgets that have to pay: the curve of step times, Algorithm 1, the best budget, and that none of them bends the law.

The law is exact: every draft and every outcome of small random models is enumerated, over two texts and several steps.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from math import inf, nan, prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.decode.scheduler import StepTimes, admit, best_budget, share
from dspark.errors import ConfigError

BENCH = Path(__file__).parents[2] / "eval/results/h200-verify-emulated-tp4-windows.json"
CURVE = StepTimes({1: 1.0, 3: 2.0, 4: 4.0, 20: 8.0})


def test_times_lie_on_lines_between_the_measured_points() -> None:
    assert [CURVE(n) for n in (1, 2, 3, 4, 12, 20)] == [1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    assert CURVE.most_tokens == 20
    for beyond in (0, 21):
        with pytest.raises(ConfigError, match=f"step times: measured from 1 to 20 tokens, asked for {beyond}"):
            CURVE(beyond)


def test_times_are_read_from_a_measurement_or_from_a_mapping(tmp_path: Path) -> None:
    measured = StepTimes.read(BENCH)
    assert measured.most_tokens == 16
    assert measured(1) == pytest.approx(1626.43e-6, rel=1e-5)
    assert measured(3) == pytest.approx((1885.61e-6 + 2390.22e-6) / 2, rel=1e-5)
    path = tmp_path / "times.json"
    path.write_text('{"8": 0.5, "1": 0.25}')
    assert StepTimes.read(path)(8) == 0.5


@pytest.mark.parametrize(
    "tree",
    [
        *({}, {"1": 1.0}, {"1": 1.0, "2": 0.0}, {"1": 1.0, "2": inf}, {"1": nan, "2": 1.0}, {"0": 1.0, "2": 2.0}),
        *({"one": 1.0, "2": 2.0}, {"1": None, "2": 2.0}),
        *({"windows": []}, {"windows": 3}, {"windows": [{"tokens": 9}]}, {"windows": [{"tokens": 9, "chained": 1}]}),
    ],
    ids=str,
)
def test_what_is_no_curve_is_refused_by_its_name(tmp_path: Path, tree: object) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"times.json: expected (positive )?seconds"):
        StepTimes.read(path)


def rate(confidences: list[list[float]], counts: list[int], times: StepTimes) -> float:
    """Expected tokens a second when these counts are verified: the definition."""
    expected = sum(prod(row[: j + 1]) for row, n in zip(confidences, counts, strict=True) for j in range(n))
    return (len(confidences) + expected) / times(len(confidences) + sum(counts))


CONFIDENCES = st.lists(
    st.lists(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]) | st.floats(0, 1), max_size=5), min_size=1, max_size=3
)
TIMES = st.lists(st.floats(0.5, 2.0), min_size=2, max_size=20).map(
    lambda seconds: StepTimes({3 * n + 1: sum(seconds[: n + 1]) for n in range(len(seconds))})
)


@settings(max_examples=60, deadline=None)
@given(CONFIDENCES, TIMES)
def test_a_budget_is_the_best_of_all_that_were_measured(confidences: list[list[float]], times: StepTimes) -> None:
    most = min(sum(map(len, confidences)), times.most_tokens - len(confidences))
    rates = [rate(confidences, share(confidences, budget), times) for budget in range(most + 1)]
    best = best_budget(confidences, times)
    assert rates[best] == pytest.approx(max(rates), rel=1e-12)
    assert all(earlier < rates[best] * (1 + 1e-12) for earlier in rates[:best])


@settings(max_examples=60, deadline=None)
@given(CONFIDENCES, TIMES)
def test_algorithm_1_takes_tokens_while_each_pays(confidences: list[list[float]], times: StepTimes) -> None:
    taken = sum(counts := admit(confidences, times))
    assert counts == share(confidences, taken)
    most = min(sum(map(len, confidences)), times.most_tokens - len(confidences))
    rates = [rate(confidences, share(confidences, budget), times) for budget in range(most + 1)]
    assert all(rates[n + 1] > rates[n] * (1 - 1e-12) for n in range(taken))
    assert taken == most or rates[taken + 1] <= rates[taken] * (1 + 1e-12)


def test_algorithm_1_stops_at_the_first_token_that_does_not_pay_and_the_best_budget_goes_on() -> None:
    sure, stair = [[0.95] * 6], StepTimes({1: 1.0, 3: 2.0, 4: 4.0, 7: 4.1})
    assert admit(sure, stair) == [2]
    assert best_budget(sure, stair) == 6
    assert admit([[1.0, 1.0, 1.0]], StepTimes({1: 1.0, 3: 1.0})) == [2], "the fourth token was not measured"
    assert best_budget([[1.0, 1.0, 1.0]], StepTimes({1: 1.0, 3: 1.0})) == 2
    assert admit([[0.5]], StepTimes({1: 1.0, 2: 1.5})) == [0], "what earns nothing is not verified"
    with pytest.raises(ConfigError, match="measured from 1 to 3 tokens, asked for 4"):
        admit([[1.0]] * 4, StepTimes({1: 1.0, 3: 1.0}))


def leaks(choose: Callable[[list[list[float]]], list[int]], confidences: list[list[float]], random: object) -> bool:
    """Whether any token is taken, or left out, because of the confidences behind it."""
    counts = choose(confidences)
    for row, of_row in enumerate(confidences):
        for slot in range(len(of_row)):
            other = [random.random() for _ in of_row[slot + 1 :]]  # type: ignore[attr-defined]
            changed = choose([*confidences[:row], [*of_row[: slot + 1], *other], *confidences[row + 1 :]])
            if (changed[row] > slot) != (counts[row] > slot):
                return True
    return False


@settings(max_examples=60, deadline=None)
@given(CONFIDENCES, TIMES, st.randoms(use_true_random=False))
def test_what_algorithm_1_takes_does_not_depend_on_itself_or_on_what_follows(
    confidences: list[list[float]], times: StepTimes, random: object
) -> None:
    assert not leaks(lambda now: admit(now, times), confidences, random)


def test_a_budget_that_is_best_for_the_current_confidences_depends_on_what_follows() -> None:
    times = StepTimes({1: 1.0, 2: 2.0, 3: 2.1})
    assert [share(now, best_budget(now, times)) for now in ([[0.9, 0.9]], [[0.9, 0.1]])] == [[2], [0]]


SIZE, SLOTS, ROWS = 2, 2, 2
"""Tokens, drafted tokens of a text, and texts."""
Text = tuple[int, ...]
Table = tuple[tuple[float, ...], ...]
State = tuple[tuple[Text, ...], Table]
"""The texts, and the confidences of the step before."""
Choose = Callable[[Table, Table], list[int]]
"""How many tokens of each text are verified, by the confidences of this step and of the one before."""
STEPS = StepTimes({2: 1.0, 3: 1.35, 4: 1.5, 5: 1.8, 6: 1.9})


class Models:
    """Random laws of target and draft after every text, which are not alike, and confidences, right or wrong, in what
    the draft says after every text: they are known before it is drawn.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        texts = [(row, text) for row in range(ROWS) for n in range(9) for text in product(range(SIZE), repeat=n)]
        laws = torch.softmax(1.5 * torch.randn(len(texts), 2, SIZE, generator=generator).double(), -1).tolist()
        self.target, self.draft = ({key: law[side] for key, law in zip(texts, laws, strict=True)} for side in (0, 1))
        sure = torch.rand(len(texts), generator=generator).double().sqrt().tolist()
        self.confidence = dict(zip(texts, sure, strict=True))

    def confidences(self, row: int, text: Text, drafted: Text) -> tuple[float, ...]:
        return tuple(self.confidence[row, text + drafted[:slot]] for slot in range(SLOTS))

    def drafts(self, row: int, text: Text) -> Iterator[tuple[Text, float]]:
        for drafted in product(range(SIZE), repeat=SLOTS):
            yield drafted, prod(self.draft[row, text + drafted[:slot]][drafted[slot]] for slot in range(SLOTS))

    def outcomes(self, row: int, text: Text, verified: Text) -> Iterator[tuple[Text, float]]:
        """What is committed, with its probability: the rule of speculative sampling."""
        reached = 1.0
        for slot, token in enumerate(verified):
            p, q = self.target[row, text + verified[:slot]], self.draft[row, text + verified[:slot]]
            kept = min(1.0, p[token] / q[token])
            left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
            for new in range(SIZE):
                if kept < 1 and left[new]:
                    yield (*verified[:slot], new), reached * (1 - kept) * left[new] / sum(left)
            reached *= kept
        for new, share_ in enumerate(self.target[row, text + verified]):
            yield (*verified, new), reached * share_

    def step(self, states: dict[State, float], choose: Choose) -> tuple[dict[State, float], set[Text]]:
        """A round of all texts; and the counts that were chosen."""
        found, chosen = Counter[State](), set()
        for (texts, before), chance in states.items():
            for drafts in product(*(self.drafts(row, text) for row, text in enumerate(texts))):
                now = tuple(self.confidences(row, texts[row], drafted) for row, (drafted, _) in enumerate(drafts))
                counts = choose(now, before)
                chosen.add(tuple(counts))
                blocks = [drafted[:count] for (drafted, _), count in zip(drafts, counts, strict=True)]
                for ends in product(*(self.outcomes(row, texts[row], block) for row, block in enumerate(blocks))):
                    new = tuple(text + end for text, (end, _) in zip(texts, ends, strict=True))
                    found[new, now] += chance * prod(q for _, q in drafts) * prod(p for _, p in ends)
        return dict(found), chosen

    def said(self, row: int, text: Text, after: int) -> float:
        return prod(self.target[row, text[:place]][text[place]] for place in range(after, len(text)))

    def deviation(self, choose: Choose, num_steps: int) -> float:
        """How much the joint law of the texts, when the target completes them, differs from its own, in all."""
        fresh = ((1.0,) * SLOTS,) * ROWS
        states, length, varied = {(((),) * ROWS, fresh): 1.0}, num_steps * (SLOTS + 1), False
        for _ in range(num_steps):
            states, chosen = self.step(states, choose)
            varied |= len(chosen) > 1
        assert varied, "the choice has to depend on what is drawn"
        committed = [text for n in range(length + 1) for text in product(range(SIZE), repeat=n)]
        place, whole = {text: number for number, text in enumerate(committed)}, committed[-(SIZE**length) :]
        joint_CC = torch.zeros(len(committed), len(committed), dtype=torch.float64)
        for (texts, _), chance in states.items():
            joint_CC[place[texts[0]], place[texts[1]]] += chance
        ends = [
            [
                [self.said(row, text, len(start)) * (text[: len(start)] == start) for text in whole]
                for start in committed
            ]
            for row in range(ROWS)
        ]
        first_CW, second_CW = torch.tensor(ends, dtype=torch.float64)
        return float((first_CW.T @ joint_CC @ second_CW - torch.outer(first_CW[0], second_CW[0])).abs().sum())


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(3)


def lagged(now: Table, before: Table) -> list[int]:
    return share(now, best_budget(before, STEPS))


def test_text_under_algorithm_1_keeps_the_targets_law(models: Models) -> None:
    assert models.deviation(lambda now, _: admit(now, STEPS), 2) < 1e-12


def test_text_under_a_budget_of_the_step_before_keeps_the_targets_law(models: Models) -> None:
    assert models.deviation(lagged, 2) < 1e-12


def test_a_budget_that_is_best_for_the_current_confidences_is_noticed(models: Models) -> None:
    assert models.deviation(lambda now, _: share(now, best_budget(now, STEPS)), 1) > 1e-3


def test_algorithm_1_on_confidences_of_the_slot_behind_is_noticed(models: Models) -> None:
    assert models.deviation(lambda now, _: admit([[*row[1:], row[-1]] for row in now], STEPS), 1) > 1e-3
