"""A budget of drafted tokens: who gets it, that it is never exceeded, and what needs none."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speculating import gather
from toy import SIZE, TableTarget, sure, toy_draft, toy_pair

from dspark.decode.drafter import Draft, LookupDrafter
from dspark.decode.generation import DraftSpeaker, generate
from dspark.decode.sampling import Sampling, Uniforms, row_uniforms
from dspark.decode.scheduler import share
from dspark.decode.speaking import Spoken, Stopwatch
from dspark.errors import DraftMismatchError

NOT_A_NUMBER = float("nan")


@pytest.mark.parametrize(
    ("confidences", "budget", "counts"),
    [
        ([[0.9, 0.8], [0.7, 0.9]], 0, [0, 0]),
        ([[0.9, 0.8], [0.7, 0.9]], 1, [1, 0]),
        ([[0.9, 0.8], [0.7, 0.9]], 2, [2, 0]),
        ([[0.9, 0.8], [0.7, 0.9]], 3, [2, 1]),
        ([[0.9, 0.8], [0.7, 0.9]], 9, [2, 2]),
        ([[0.5, 1.0], [0.9, 0.5]], 2, [1, 1]),  # a sure token behind an unsure one survives as seldom as that
        ([[1.0, 1.0], [1.0]], 2, [1, 1]),  # of equal ones the earlier slot, and then
        ([[1.0], [1.0, 1.0], [1.0]], 2, [1, 1, 0]),  # the lower row
        ([[0.0, 1.0], [0.0, 0.5]], 3, [2, 1]),
        ([[], [0.1], []], 2, [0, 1, 0]),
        ([], 5, []),
    ],
    ids=str,
)
def test_the_likeliest_survivors_are_verified(confidences: list[list[float]], budget: int, counts: list[int]) -> None:
    assert share(confidences, budget) == counts


CONFIDENCES = st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]) | st.floats(0, 1), max_size=6), max_size=4)


@settings(max_examples=200, deadline=None)
@given(CONFIDENCES, st.integers(0, 12), st.randoms(use_true_random=False))
def test_what_is_taken_does_not_depend_on_itself_or_on_what_follows(
    confidences: list[list[float]], budget: int, random: object
) -> None:
    """A slot's token bears on the confidences behind it only: other ones there leave the slot taken, or left out."""
    counts = share(confidences, budget)
    assert sum(counts) == min(budget, sum(map(len, confidences)))
    taken = [prod(row[: j + 1]) for row, count in zip(confidences, counts, strict=True) for j in range(count)]
    left = [prod(row[: j + 1]) for row, n in zip(confidences, counts, strict=True) for j in range(n, len(row))]
    assert not taken or not left or min(taken) >= max(left) * (1 - 1e-12)
    for row, of_row in enumerate(confidences):
        for slot in range(len(of_row)):
            other = [random.random() for _ in of_row[slot + 1 :]]  # type: ignore[attr-defined]
            changed = share([*confidences[:row], [*of_row[: slot + 1], *other], *confidences[row + 1 :]], budget)
            assert (changed[row] > slot) == (counts[row] > slot)


@pytest.mark.parametrize("wrong", [NOT_A_NUMBER, -0.1, 1.1])
def test_a_confidence_that_is_none_is_our_own_mistake(wrong: float) -> None:
    with pytest.raises(AssertionError):
        share([[0.5], [0.5, wrong]], 1)


PROMPTS = [torch.tensor(ids) for ids in ([1], [2, 3, 0], [0, 0], [3, 2])]


def speak(draft: Draft, sampling: Sampling, budget: int | None) -> tuple[TableTarget, list[list[Spoken]]]:
    target, _ = toy_pair()
    numbers: list[Uniforms] = [row_uniforms(9, row) for row in range(len(PROMPTS))]
    return target, list(DraftSpeaker(target, draft, budget)(PROMPTS, sampling, numbers, Stopwatch()))


@pytest.mark.parametrize("budget", [0, 1, 3, 7])
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_a_pass_verifies_its_budget_or_all_that_was_drafted_and_never_more(budget: int, threshold: float) -> None:
    draft, sampling = sure(toy_pair()[1], threshold), Sampling(1.0, 12)
    target, steps = speak(draft, sampling, budget)
    proposed = [[said.counts.num_proposed for said in news if said.counts] for news in steps[1:]]
    assert all(sum(row) <= budget for row in proposed)
    assert target.verified_tokens == [1 + max(row) for row in proposed]
    if threshold == 0:
        assert all(sum(row) == min(budget, 3 * len(row)) for row in proposed)
    if budget == 0:
        lengths = [len(text.rounds) for text in gather(steps, len(PROMPTS))]
        assert lengths == [12] * len(PROMPTS), "one token a round, and the one that DeepSpec adds"
    if budget == 7:
        assert len({tuple(row) for row in proposed if len(row) == len(PROMPTS)}) > 1, "it goes to whoever is surer"


@pytest.mark.parametrize("sampling", [Sampling(0.0, 20), Sampling(1.0, 20, (3,))], ids=str)
def test_a_budget_for_everything_is_none(sampling: Sampling) -> None:
    draft = toy_pair()[1]
    assert speak(draft, sampling, 3 * len(PROMPTS))[1] == speak(draft, sampling, None)[1]


@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_greedy_text_is_plain_text_whatever_the_budget(budget: int) -> None:
    target, draft = toy_pair()
    for stop in ((), (0,), (1,), (2,)):
        sampling = Sampling(0.0, 15, stop)
        plain = generate(target, PROMPTS, sampling, [row_uniforms(0, 0)] * len(PROMPTS))
        texts = gather(speak(draft, sampling, budget)[1], len(PROMPTS))
        assert [text.ids_T.tolist() for text in texts] == [text.tolist() for text in plain]


def test_a_budget_without_confidences_is_refused() -> None:
    _, draft = toy_pair()
    fields = {"enable_confidence_head": False, "confidence_head_with_markov": False}
    headless = toy_draft(draft.config.model_dump() | fields, seed=4)
    for unsure in (headless, lambda: LookupDrafter(3, SIZE)):
        with pytest.raises(DraftMismatchError, match="budget of 2 drafted tokens needs a draft with a confidence head"):
            speak(unsure, Sampling(0.0, 4), 2)
    with pytest.raises(ValueError, match="budget must be at least 0, got -1"):
        speak(draft, Sampling(0.0, 4), -1)
