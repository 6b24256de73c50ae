"""The bar for losslessness: on the shipped target with the shipped draft, 20,000 rounds follow the target's own law.

``draw_block``, ``verify_blocks`` and ``accept`` are the real ones. Contexts are fixed, so what the two models say is
computed once for each text that follows them, and the draft is asked for two slots, so that these texts stay few.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import pytest
import torch

from dspark.data.chat import ChatFormat, encode_prompt
from dspark.decode import round as round_module
from dspark.decode.generation import DraftSpeaker, generate
from dspark.decode.round import Block, accept, draw_block, verify_blocks
from dspark.decode.sampling import Sampling, Uniforms, draw, row_uniforms, token_probs
from dspark.draft.model import DraftModel
from dspark.draft.proposal import ContextCache, extend, propose
from dspark.eval.tasks import load_task
from dspark.export.draft_folder import check_target, read_draft
from dspark.target.loading import NANO_FOLDER, load_target, target_facts
from dspark.target.tokenizer import load_tokenizer
from dspark.types import Proposal, Target, TargetOutput

LEVEL = 1e-3
"""A test at this level calls a lossless decoder wrong once in a thousand seeds; the seed is fixed."""
NUM_ROUNDS, NUM_SLOTS, SEED = 20_000, 2, 3
BATCH = 32
CONTEXTS = ((4, 4), (5, 15), (1, 21))
"""Held-out prompt and new tokens after it: places where neither model is sure and the draft mostly proposes too often
what the target says anyway, so that a small error of the rule moves much."""
FREE, NUCLEUS = Sampling(1.0, 1), Sampling(1.0, 1, top_p=0.9)
Text = tuple[int, ...]


@dataclass
class Place:
    """A context, the anchor after it, and what both models say about the texts that follow (logits, by text)."""

    target: Target[Any]
    draft: DraftModel
    ids_T: torch.Tensor
    draft_rows: dict[Text, torch.Tensor] = field(default_factory=dict)
    target_rows: dict[Text, torch.Tensor] = field(default_factory=dict)
    confidence_rows: dict[Text, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def context(self) -> ContextCache:
        context = ContextCache(self.draft)
        extend(self.draft, context, self.target.prefill([self.ids_T[:-1]])[1].taps_NLD)
        return context

    def propose(self, draft: DraftModel, context: ContextCache, anchor_id: int, pick: Any, _: None) -> Proposal:
        """The real proposal, asked once for every text."""
        ids: list[int] = []
        for slot in range(NUM_SLOTS):
            if tuple(ids) not in self.draft_rows:
                said = iter([*ids, *[0] * NUM_SLOTS])
                proposal = propose(draft, context, anchor_id, lambda _, said=said: next(said))
                self.draft_rows[tuple(ids)] = proposal.logits_KV[slot]
                self.confidence_rows[tuple(ids)] = cast(torch.Tensor, proposal.confidence_logits_K)[slot]
            ids.append(pick(self.draft_rows[tuple(ids)]))
        return Proposal(torch.tensor(ids), torch.empty(NUM_SLOTS, 0), None)

    @torch.no_grad()
    def read(self, texts: Sequence[Text]) -> None:
        """Have the target verify what follows the anchor, many texts in a pass."""
        texts = [text for text in texts if text not in self.target_rows]
        cache, _ = self.target.prefill([self.ids_T[:-1]] * BATCH)
        for start in range(0, len(texts), BATCH):
            some = texts[start : start + BATCH]
            ids_BT = torch.tensor([[int(self.ids_T[-1]), *text] for text in (some * BATCH)[:BATCH]])
            logits_BTV = self.target.logits(self.target.verify(ids_BT, cache).last_hidden_ND).view(*ids_BT.shape, -1)
            self.target_rows |= zip(some, logits_BTV[: len(some)].clone(), strict=False)


class Reader:
    """A target that has read everything: hidden states are its logits."""

    def __init__(self, rows: dict[Text, torch.Tensor]) -> None:
        self.rows = rows

    def verify(self, ids_1T: torch.Tensor, cache: None) -> TargetOutput:
        return TargetOutput(torch.empty(ids_1T.shape[1], 0, 0), self.rows[tuple(ids_1T[0, 1:].tolist())])

    def commit(self, cache: None, counts_B: torch.Tensor) -> None:
        pass

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Rounds:
    """Many rounds at one place; blocks are drawn once, and can then be verified by right and by wrong rules."""

    def __init__(self, place: Place, sampling: Sampling) -> None:
        self.place, self.sampling = place, sampling
        self.probs: dict[int, torch.Tensor] = {}
        self.blocks: dict[Text, Block] = {}
        self.drawn: list[Text] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(round_module, "propose", place.propose)
            patch.setattr(round_module, "token_probs", self.token_probs)
            uniforms = row_uniforms(SEED, 0)
            for _ in range(NUM_ROUNDS):
                block = draw_block(place.draft, place.context, int(place.ids_T[-1]), sampling, uniforms)
                self.drawn.append(tuple(block.ids_K.tolist()))
                self.blocks.setdefault(self.drawn[-1], block)
        place.read(list(self.blocks))

    def token_probs(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """The real one, once for each tensor: they all live as long as the place."""
        if id(logits) not in self.probs:
            self.probs[id(logits)] = token_probs(logits, sampling)
        return self.probs[id(logits)]

    def commit(self) -> Counter[Text]:
        """What the rounds commit."""
        reader = cast(Target[None], Reader(self.place.target_rows))
        uniforms = row_uniforms(SEED, 1)
        committed: Counter[Text] = Counter()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(round_module, "token_probs", self.token_probs)
            for text in self.drawn:
                block = {0: self.blocks[text]}
                verified = verify_blocks(reader, None, block, self.sampling, [uniforms], lambda _: None)
                committed[tuple(verified[0].ids)] += 1
        return committed

    def nodes(self, committed: Counter[Text]) -> Iterator[tuple[Text, torch.Tensor, torch.Tensor]]:
        """Every text that something was committed after: it, the counts of what, and the target's own law there."""
        after: dict[Text, Counter[int]] = {}
        for text, count in committed.items():
            for slot, new_id in enumerate(text):
                after.setdefault(text[:slot], Counter())[new_id] += count
        whole = {text[:slot]: (text, slot) for text in self.blocks for slot in range(NUM_SLOTS + 1)}
        for text, counts in after.items():
            block, slot = whole[text]
            probs_V = self.token_probs(self.place.target_rows[block], self.sampling)[slot].double()
            counts_V = torch.zeros_like(probs_V)
            counts_V[list(counts)] = torch.tensor(list(counts.values()), dtype=torch.float64)
            yield text, counts_V, probs_V


def p_value(statistic: float, freedom: int) -> float:
    assert freedom, "nothing to compare"
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def p_values(many: Sequence[Rounds], committed: Sequence[Counter[Text]] | None = None) -> tuple[float, float]:
    """Two chi-square tests of all that was committed, each token against the target's law after the text before it.
    ``committed``: None for what each of the rounds commits alone.

    The first has a bin a token, those that are expected fewer than five times pooled. The second has two: tokens that
    the draft proposes more often than the target says them, and the others. It hears a wrong rate of acceptance, which
    moves tokens from one to the other and which the many bins of the first would drown in noise.
    """
    tokens, freedom, sides, places = 0.0, 0, 0.0, 0
    for rounds, found_texts in zip(many, committed or [rounds.commit() for rounds in many], strict=True):
        moved, variance = [0.0] * NUM_SLOTS, [0.0] * NUM_SLOTS
        for text, counts_V, probs_V in rounds.nodes(found_texts):
            expected_V = probs_V / probs_V.sum() * counts_V.sum()
            assert not counts_V[probs_V == 0].any(), "a token that the target never says"
            is_rare_V = expected_V < 5
            expected = torch.cat((expected_V[~is_rare_V], expected_V[is_rare_V].sum()[None]))
            found = torch.cat((counts_V[~is_rare_V], counts_V[is_rare_V].sum()[None]))
            if expected[-1] < 5:  # too few still: they join the bin before
                expected = torch.cat((expected[:-2], expected[-2:].sum()[None]))
                found = torch.cat((found[:-2], found[-2:].sum()[None]))
            tokens += float(((found - expected) ** 2 / expected).sum())
            freedom += len(expected) - 1
            if len(text) < NUM_SLOTS:
                draft_V = rounds.token_probs(rounds.place.draft_rows[text], rounds.sampling)
                is_over_V = draft_V > probs_V
                share = float(probs_V[is_over_V].sum() / probs_V.sum())
                moved[len(text)] += float(counts_V[is_over_V].sum() - share * counts_V.sum())
                variance[len(text)] += float(share * (1 - share) * counts_V.sum())
        heard = [m**2 / v for m, v in zip(moved, variance, strict=True) if v]
        sides += sum(heard)
        places += len(heard)
    return p_value(tokens, freedom), p_value(sides, places)


@pytest.fixture(scope="module")
def places() -> list[Place]:
    facts, where = target_facts(NANO_FOLDER), NANO_FOLDER / "draft"
    sizes = {"vocab_size": facts.vocab_size, "hidden_size": facts.hidden_size, "num_layers": facts.num_layers}
    target = load_target(NANO_FOLDER, target_layer_ids=check_target(where, **sizes).target_layer_ids)
    draft = read_draft(where, (target.embedding_VD, target.head_VD))
    draft.config = draft.config.model_copy(update={"block_size": NUM_SLOTS})
    chat = ChatFormat(load_tokenizer(NANO_FOLDER), facts.stop_token_ids)
    prompts = [encode_prompt(chat, conversation) for conversation in load_task("heldout", 12)]
    found = []
    for number, new_tokens in CONTEXTS:
        (text_T,) = generate(target, [prompts[number]], Sampling(1.0, new_tokens), [row_uniforms(0, number)])
        found.append(Place(target, draft, torch.cat((prompts[number], text_T))))
    return found


@pytest.fixture(scope="module")
def free(places: list[Place]) -> list[Rounds]:
    return [Rounds(place, FREE) for place in places]


@pytest.fixture(scope="module")
def nucleus(places: list[Place]) -> list[Rounds]:
    return [Rounds(places[0], NUCLEUS)]


@pytest.fixture(params=["free", "nucleus"])
def rounds(request: pytest.FixtureRequest) -> list[Rounds]:
    """At temperature 1, three places; and the first of them with top-p 0.9."""
    return cast(list[Rounds], request.getfixturevalue(request.param))


def test_what_is_committed_follows_the_target(rounds: list[Rounds]) -> None:
    by_token, by_side = p_values(rounds)
    assert by_token > LEVEL
    assert by_side > LEVEL


def accept_too_often(ids_K: torch.Tensor, draft_KV: torch.Tensor, target_NV: torch.Tensor, uniforms: Uniforms) -> Any:
    """By 2 %: a token is kept while u < 1.02 p / q."""
    factors = iter([1 / 1.02] * len(ids_K))
    return accept(ids_K, draft_KV, target_NV, lambda: uniforms() * next(factors, 1.0))


def test_two_per_cent_too_many_acceptances_are_noticed(rounds: list[Rounds], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_module, "accept", accept_too_often)
    assert min(p_values(rounds[:1])) < LEVEL / 10


def test_a_last_token_from_the_target_instead_of_the_residual_is_noticed(
    nucleus: list[Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rule(ids_K: torch.Tensor, draft_KV: torch.Tensor, target_NV: torch.Tensor, uniforms: Uniforms) -> Any:
        accepted, _ = accept(ids_K, draft_KV, target_NV, uniforms)
        return accepted, int(draw(target_NV[accepted][None], [uniforms()]))

    monkeypatch.setattr(round_module, "accept", rule)
    assert min(p_values(nucleus)) < LEVEL / 10


def test_a_draft_row_that_is_not_truncated_as_it_was_drawn_is_noticed(nucleus: list[Rounds]) -> None:
    """The ids come from the nucleus, the rule is told the whole softmax: q is too small, so too much is kept."""
    (rounds,) = nucleus
    whole = copy(rounds)
    rows = rounds.place.draft_rows
    whole.blocks = {
        text: replace(block, probs_KV=torch.stack([token_probs(rows[text[:slot]], FREE) for slot in range(NUM_SLOTS)]))
        for text, block in rounds.blocks.items()
    }
    assert min(p_values([whole])) < LEVEL / 10


NUM_PASSES, BUDGET = NUM_ROUNDS // len(CONTEXTS), 3
"""A round at each place a pass, and half of the drafted tokens are verified."""


class TogetherReader:
    """A target that has read everything, with a row a place. Hidden states are probabilities; nobody sees padding's."""

    def __init__(self, many: Sequence[Rounds]) -> None:
        self.rows = [
            {text: rounds.token_probs(rows_NV, rounds.sampling) for text, rows_NV in rounds.place.target_rows.items()}
            for rounds in many
        ]
        self.target_layer_ids = many[0].place.draft.config.target_layer_ids
        self.texts: list[Text] = []
        """What is drafted in this pass, before the budget."""

    def verify(self, ids_BT: torch.Tensor, cache: None) -> TargetOutput:
        num_tokens = ids_BT.shape[1]
        rows = [rows[text][:num_tokens] for rows, text in zip(self.rows, self.texts, strict=True)]
        return TargetOutput(torch.empty(ids_BT.numel(), 0, 0), torch.cat(rows))

    def commit(self, cache: None, counts_B: torch.Tensor) -> None:
        pass

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def commit_together(
    many: Sequence[Rounds], budget: int, num_passes: int = NUM_PASSES
) -> tuple[list[Counter[Text]], Counter[Text]]:
    """What passes with a budget commit at every place, and how many drafted tokens of each the passes verified."""
    reader = TogetherReader(many)
    target = cast(Target[None], reader)
    speaker = DraftSpeaker(target, many[0].place.draft, budget)
    uniforms = [row_uniforms(SEED, 2 + row) for row in range(len(many))]
    committed, shares = [Counter[Text]() for _ in many], Counter[Text]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_module, "token_probs", lambda probs, _: probs)
        for number in range(num_passes):
            # rounds of other numbers, for those of one number were drawn from the same random numbers
            reader.texts = [rounds.drawn[number + row * NUM_PASSES] for row, rounds in enumerate(many)]
            drafted = {
                row: rounds.blocks[text] for row, (rounds, text) in enumerate(zip(many, reader.texts, strict=True))
            }
            blocks = speaker.cut(drafted)
            shares[tuple(len(block.ids_K) for block in blocks.values())] += 1
            for row, verified in verify_blocks(target, None, blocks, FREE, uniforms, lambda _: None).items():
                committed[row][tuple(verified.ids)] += 1
    return committed, shares


def told(rounds: Rounds, logits: Callable[[Text], Sequence[torch.Tensor]]) -> Rounds:
    """The same rounds with confidences."""
    sure = copy(rounds)
    sure.blocks = {
        text: replace(block, confidence_logits=tuple(map(float, logits(text)))) for text, block in rounds.blocks.items()
    }
    return sure


def confident(rounds: Rounds, delay: int = 0) -> Rounds:
    """The rounds with the draft's own confidences, or, a fault, with those of a slot further on."""
    rows = rounds.place.confidence_rows
    return told(rounds, lambda text: [rows[text[: min(slot + delay, NUM_SLOTS - 1)]] for slot in range(NUM_SLOTS)])


def test_what_is_committed_with_a_budget_follows_the_target(free: list[Rounds]) -> None:
    committed, shares = commit_together([confident(rounds) for rounds in free], BUDGET)
    assert all(sum(counts) == BUDGET for counts in shares)
    assert min(count for _, count in shares.most_common(2)) > NUM_PASSES / 20, "the share depends on what is drawn"
    by_token, by_side = p_values(free, committed)
    assert by_token > LEVEL
    assert by_side > LEVEL


def test_a_scheduler_that_looks_at_what_the_drawn_token_is_worth_is_noticed(free: list[Rounds]) -> None:
    def peek(rounds: Rounds) -> Rounds:
        target = rounds.place.target_rows

        def acceptance(text: Text) -> torch.Tensor:
            block = rounds.blocks[text]
            probs_NV, ids_K1 = rounds.token_probs(target[text], FREE), block.ids_K[:, None]
            ratios_K = (probs_NV[:-1].gather(1, ids_K1) / block.probs_KV.gather(1, ids_K1)).squeeze(1)
            return torch.logit(ratios_K.clamp(max=1).double())

        return told(rounds, acceptance)

    assert (
        min(p_values(free, commit_together([peek(rounds) for rounds in free], BUDGET, NUM_PASSES // 4)[0])) < LEVEL / 10
    )


def test_a_scheduler_that_ranks_a_token_by_the_confidence_behind_it_is_noticed(free: list[Rounds]) -> None:
    """With two tokens for three texts, whose first ones then compete with what they were drawn as."""
    late = [confident(rounds, delay=1) for rounds in free]
    assert min(p_values(free, commit_together(late, 2, NUM_PASSES // 4)[0])) < LEVEL / 10
