"""Prompt lookup: what is proposed, and that the text stays the target's own whatever it is."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from speculating import speculate
from toy import TableTarget, chi_square_p_value, toy_pair

from dspark.decode.drafter import Drafter, LookupDrafter, ModelDrafter, look_up
from dspark.decode.generation import generate
from dspark.decode.round import Block
from dspark.decode.sampling import Sampling, Uniforms, row_uniforms, token_probs
from dspark.errors import DraftMismatchError

NO_TAPS = torch.empty(1, 0, 0)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 1]),
        ([7, 3, 5, 5, 5, 8, 3], [5, 5, 5]),
        ([1, 2, 3, 4, 4, 4, 2, 3, 5, 5, 5, 1, 2, 3], [4, 4, 4]),
        ([3, 4, 4, 4, 3, 5, 5, 5, 3], [5, 5, 5]),
        ([6, 6, 6, 6, 6], [6, 6]),
        ([1, 2, 1], [2, 1]),
        ([1, 2, 3], []),
        ([1], []),
    ],
    ids=str,
)
def test_what_followed_the_longest_match_is_proposed(ids: list[int], expected: list[int]) -> None:
    """The longest match first; of equally long ones the latest that a whole block follows; else the earliest."""
    assert look_up(ids, 3) == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 6))
def test_a_proposal_follows_a_match_that_no_longer_one_outdoes(ids: list[int], block_size: int) -> None:
    def matches(length: int) -> list[int]:
        end = ids[len(ids) - length :]
        return [place for place in range(length, len(ids)) if ids[place - length : place] == end]

    found = look_up(ids, block_size)
    longest = next((length for length in (3, 2, 1) if length < len(ids) and matches(length)), None)
    if longest is None:
        assert found == []
        return
    follow = [ids[place : place + block_size] for place in matches(longest)]
    assert found in follow
    assert len(found) == max(map(len, follow))


def test_a_block_is_one_hot_and_takes_no_random_number() -> None:
    drafter: Drafter = LookupDrafter(3, 10)
    drafter.extend([1, 2, 3, 4], NO_TAPS)
    drafter.extend([9, 1], NO_TAPS)
    block = drafter.draw(2, Sampling(1.0, 1), iter([]).__next__)
    assert (block.anchor_id, block.ids_K.tolist(), block.confidence_logits) == (2, [3, 4, 9], ())
    assert torch.equal(block.probs_KV, torch.nn.functional.one_hot(block.ids_K, 10).float())
    empty = drafter.draw(7, Sampling(1.0, 1), iter([]).__next__)
    assert (tuple(empty.ids_K.shape), tuple(empty.probs_KV.shape)) == ((0,), (0, 10))


class Listening(LookupDrafter):
    """Checks what it is told at every block: the text before the anchor, with a row of states for each token."""

    def __init__(self, text: list[int]) -> None:
        super().__init__(4, SIZE)
        self.text = text

    def extend(self, ids: Sequence[int], taps_TLD: torch.Tensor) -> None:
        super().extend(ids, taps_TLD)
        assert len(ids) == len(taps_TLD) >= 1

    def draw(self, anchor_id: int, sampling: Sampling, uniforms: Uniforms) -> Block:
        told = [*self.ids, anchor_id]
        assert told == (self.text + told[len(self.text) :])[: len(told)]
        return super().draw(anchor_id, sampling, uniforms)


def test_a_drafter_is_told_the_whole_text_and_nothing_else() -> None:
    for seed in range(12):
        target = TableTarget(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)))
        sampling, prompt_T = Sampling(0.0, 23), torch.tensor(PROMPT)
        (plain_T,) = generate(target, [prompt_T], sampling, [row_uniforms(0, 0)])
        speculate(target, partial(Listening, PROMPT + plain_T.tolist()), prompt_T, sampling, row_uniforms(0, 0))


SIZE, PROMPT = 5, [0, 1, 2, 0, 1, 3, 0, 1]


def table() -> TableTarget:
    return TableTarget(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(8)))


@pytest.mark.parametrize("stop", [(), (0,), (1,), (2,), (3,), (4,)], ids=str)
def test_greedy_text_is_plain_text(stop: tuple[int, ...]) -> None:
    accepted = set()
    for seed in range(12):
        target = TableTarget(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)))
        sampling, prompt_T = Sampling(0.0, 23, stop), torch.tensor(PROMPT)
        (plain_T,) = generate(target, [prompt_T], sampling, [row_uniforms(0, 0)])
        text = speculate(target, partial(LookupDrafter, 4, SIZE), prompt_T, sampling, row_uniforms(0, 0))
        assert text.ids_T.tolist() == plain_T.tolist()
        accepted |= {counts.accepted_drafts for counts in text.rounds}
    assert stop or accepted >= {0, 4}


def p_value(drafter: type[LookupDrafter], sampling: Sampling) -> float:
    """How well 1500 texts of two tokens follow the law of the target, whose rows depend on the last token alone."""
    target, counts = table(), torch.zeros(SIZE, SIZE)
    for number in range(1500):
        uniforms = row_uniforms(4, number)
        text = speculate(target, partial(drafter, 3, SIZE), torch.tensor(PROMPT), sampling, uniforms)
        counts[tuple(text.ids_T.tolist())] += 1
    probs_VV = token_probs(target.logits_SV, sampling)
    return chi_square_p_value(counts.flatten(), (probs_VV[PROMPT[-1]][:, None] * probs_VV).flatten())


class Doubtful(LookupDrafter):
    """A planted fault: it says that its token was drawn with probability 0.6."""

    def draw(self, anchor_id: int, sampling: Sampling, uniforms: Uniforms) -> Block:
        block = super().draw(anchor_id, sampling, uniforms)
        return Block(block.anchor_id, block.ids_K, 0.6 * block.probs_KV, ())


SAMPLINGS = [Sampling(1.0, 2), Sampling(0.7, 2, top_k=4), Sampling(1.3, 2, top_p=0.8)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_text_has_the_law_of_the_target(sampling: Sampling) -> None:
    assert p_value(LookupDrafter, sampling) > 1e-3


def test_rows_that_are_not_what_was_drawn_from_break_the_law() -> None:
    assert p_value(Doubtful, SAMPLINGS[0]) < 1e-6


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_a_narrow_draft_proposes_and_verifies_no_more_than_it_draws(num_drafts: int) -> None:
    target, draft = toy_pair()
    taken: list[int] = []
    numbers = row_uniforms(1, 0)
    uniforms = lambda: taken.append(1) or numbers()  # type: ignore[func-returns-value]  # noqa: E731
    text = speculate(
        target, partial(ModelDrafter, draft, 0.0, num_drafts), torch.tensor([2]), Sampling(1.0, 9), uniforms
    )
    assert {(counts.num_proposed, len(counts.confidence_logits)) for counts in text.rounds} == {
        (num_drafts, num_drafts)
    }
    assert set(target.verified_tokens) == {num_drafts + 1}
    assert len(taken) == 1 + len(text.rounds) * (2 * num_drafts + 1)


def test_all_drafts_are_the_whole_block() -> None:
    target, draft = toy_pair()
    given = (torch.tensor([2]), Sampling(1.0, 40))
    makes = [draft, partial(ModelDrafter, draft, 0.0, draft.config.block_size), partial(ModelDrafter, draft)]
    texts = [speculate(target, make, *given, row_uniforms(1, 0)) for make in makes]
    assert texts[0].ids_T.tolist() == texts[1].ids_T.tolist() == texts[2].ids_T.tolist()
    assert texts[0].rounds == texts[1].rounds == texts[2].rounds


@pytest.mark.parametrize("num_drafts", [0, -1, 4])
def test_more_drafts_than_a_block_or_none_are_refused(num_drafts: int) -> None:
    with pytest.raises(
        DraftMismatchError, match=f"num_drafts must be 1 to 3, the draft's block size, got {num_drafts}"
    ):
        ModelDrafter(toy_pair()[1], num_drafts=num_drafts)
