"""Texts written in step: each is what it is alone, whoever writes beside it, and the clock knows what took how long."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from speculating import Generation, gather, speculate
from tiny import VOCAB_SIZE, write_tiny_qwen3
from toy import SIZE, TableTarget, move, sure, toy_pair

from dspark.data.chat import ChatFormat, encode_prompt
from dspark.decode import speaking
from dspark.decode.drafter import Draft, LookupDrafter
from dspark.decode.generation import DraftSpeaker, PlainSpeaker, generate
from dspark.decode.round import Block
from dspark.decode.sampling import Sampling, Uniforms, row_uniforms
from dspark.decode.speaking import Speaker, Stopwatch
from dspark.draft.model import DraftModel
from dspark.eval.tasks import load_task
from dspark.export.draft_folder import read_draft
from dspark.target.loading import NANO_FOLDER, load_target, target_facts
from dspark.target.tokenizer import load_tokenizer
from dspark.target.transformers_target import load_transformers_target

SAMPLINGS = [Sampling(0.0, 16), Sampling(1.0, 16)]
PROMPTS = [torch.tensor(ids) for ids in ([1], [2, 3, 0, 1, 2, 3], [0, 0], [3, 2, 2, 1])]


def numbers(count: int) -> list[Uniforms]:
    return [row_uniforms(5, row) for row in range(count)]


def said_as_alone(target: Any, draft: Draft, prompts: Sequence[torch.Tensor], sampling: Sampling) -> list[Generation]:
    """The texts of all prompts, written in step, once each of them is the text that its prompt has alone."""
    steps = DraftSpeaker(target, draft)(prompts, sampling, numbers(len(prompts)), Stopwatch())
    together = gather(steps, len(prompts))
    for prompt_ids_T, text, uniforms in zip(prompts, together, numbers(len(prompts)), strict=True):
        alone = speculate(target, draft, prompt_ids_T, sampling, uniforms)
        assert text.ids_T.tolist() == alone.ids_T.tolist()
        bare = [[replace(counts, confidence_logits=()) for counts in each.rounds] for each in (text, alone)]
        assert bare[0] == bare[1]
        for counts, expected in zip(text.rounds, alone.rounds, strict=True):
            assert counts.confidence_logits == pytest.approx(expected.confidence_logits, abs=1e-9)
    return together


def stopping(target: Any, draft: Draft, prompt_ids_T: torch.Tensor, sampling: Sampling) -> Sampling:
    """The sampling that ends the first text in its middle, and others elsewhere or not at all."""
    ids_T = speculate(target, draft, prompt_ids_T, sampling, *numbers(1)).ids_T
    return replace(sampling, stop_token_ids=(int(ids_T[len(ids_T) // 2]),))


def lengths(texts: Sequence[Generation]) -> set[int]:
    return {len(text.ids_T) for text in texts}


@pytest.fixture(scope="module")
def nano() -> tuple[Any, DraftModel, list[torch.Tensor]]:
    facts, dtype = target_facts(NANO_FOLDER), torch.float64
    target = load_target(NANO_FOLDER, target_layer_ids=(1, 2, 4, 5, 6), dtype=dtype)
    draft = read_draft(NANO_FOLDER / "draft", (target.embedding_VD, target.head_VD), dtype=dtype)
    chat = ChatFormat(load_tokenizer(NANO_FOLDER), facts.stop_token_ids)
    prompts = [
        encode_prompt(chat, conversation)[-length:]
        for conversation, length in zip(load_task("heldout", 3), (40, 11, 24), strict=True)
    ]
    return target, draft, prompts


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_texts_of_the_shipped_pair_are_what_they_are_alone(
    nano: tuple[Any, DraftModel, list[torch.Tensor]], sampling: Sampling
) -> None:
    """Its target has recurrent layers: a row that commits one token too many or too few goes another way."""
    target, draft, prompts = nano
    texts = said_as_alone(target, draft, prompts, stopping(target, draft, prompts[0], sampling))
    assert len({counts.accepted_drafts for text in texts for counts in text.rounds}) > 3, "many counts were seen"
    assert len(lengths(texts)) > 1, "they end at different times"


class Knowing(LookupDrafter):
    """Knows how texts go on by their first ids, errs at every fifth place, and drafts from none to four tokens."""

    def __init__(self, texts: dict[int, list[int]]) -> None:
        super().__init__(4, VOCAB_SIZE)
        self.texts = texts

    def draw(self, anchor_id: int, sampling: Sampling, uniforms: Uniforms) -> Block:
        here = len(self.ids) + 1
        known = self.texts[self.ids[0]][here : here + here % 5]
        ids_K = torch.tensor([known_id ^ ((here + j) % 5 == 0) for j, known_id in enumerate(known)], dtype=torch.int64)
        return Block(anchor_id, ids_K, torch.nn.functional.one_hot(ids_K, VOCAB_SIZE).double(), ())


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_texts_of_another_family_are_what_they_are_alone(tmp_path: Path, sampling: Sampling) -> None:
    target = load_transformers_target(write_tiny_qwen3(tmp_path / "model"), (0, 2), torch.float64, "cpu")
    prompts = [torch.tensor(ids) for ids in ([5, 9, 200, 31], [7], [100, 2, 2, 45, 8, 19, 3])]
    known = generate(target, prompts, sampling, numbers(3))
    knowing = partial(Knowing, {int(p[0]): [*p.tolist(), *t.tolist()] for p, t in zip(prompts, known, strict=True)})
    texts = said_as_alone(target, knowing, prompts, stopping(target, knowing, prompts[0], sampling))
    assert {counts.num_proposed for text in texts for counts in text.rounds} >= {0, 1, 2, 3}
    assert len(lengths(texts)) > 1


def toys(dtype: torch.dtype = torch.float64) -> tuple[TableTarget, DraftModel]:
    target, draft = toy_pair()
    tables = target.token_table.to(dtype), target.position_table.to(dtype)
    wide = TableTarget(target.logits_SV.to(dtype), move, tables, target.target_layer_ids)
    assert draft.embedding_VD is not None
    assert draft.head_VD is not None
    draft.to(dtype).bind(draft.embedding_VD.to(dtype), draft.head_VD.to(dtype))
    return wide, draft


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("kind", ["draft", "threshold", "fewer", "lookup"])
def test_blocks_of_any_lengths_go_together(kind: str, sampling: Sampling) -> None:
    target, draft = toys()
    makes: dict[str, Draft] = {
        "draft": draft,
        "threshold": sure(draft, 0.4),
        "fewer": partial(sure(draft, 0.0), num_drafts=2),
        "lookup": partial(LookupDrafter, 4, SIZE),
    }
    seen = set()
    for stop in ((), (3,)):
        stopped = replace(sampling, stop_token_ids=stop)
        texts = said_as_alone(target, makes[kind], PROMPTS, stopped)
        if sampling.is_greedy:
            plain = generate(target, PROMPTS, stopped, numbers(4))
            assert [text.ids_T.tolist() for text in texts] == [text.tolist() for text in plain]
        steps = DraftSpeaker(target, makes[kind])(PROMPTS, stopped, numbers(4), Stopwatch())
        seen |= {tuple(news.counts.num_proposed for news in step if news.counts) for step in steps}
    if kind in {"threshold", "lookup"}:
        assert any(0 in proposed and any(proposed) for proposed in seen), "a text without a draft beside one with"


def test_a_text_that_has_ended_commits_nothing_and_is_heard_no_more() -> None:
    target, draft = toys()
    sampling = Sampling(1.0, 30, stop_token_ids=(3,))
    steps = list(DraftSpeaker(target, draft)(PROMPTS, sampling, numbers(4), Stopwatch()))
    ends = [max(step for step, news in enumerate(steps) if row in {said.row for said in news}) for row in range(4)]
    assert len(set(ends)) > 2
    assert [(said.row, len(said.ids), said.counts) for said in steps[0]] == [(row, 1, None) for row in range(4)]
    for step, news in enumerate(steps):
        assert [said.row for said in news] == [row for row in range(4) if step <= ends[row]]
        assert all(said.counts is not None for said in news) or step == 0
    for step, counts in enumerate(target.commits[1:], start=1):
        assert [count > 0 for count in counts] == [step <= end for end in ends]
    assert len(target.commits) == len(steps), "nothing is verified once all have ended"


@pytest.mark.parametrize("speaker", [PlainSpeaker(toys()[0]), DraftSpeaker(*toys())], ids=["plain", "draft"])
def test_no_prompts_and_prompts_that_stop_at_once_need_no_round(speaker: Speaker) -> None:
    assert list(speaker([], Sampling(0.0, 5), [], Stopwatch())) == []
    steps = list(speaker(PROMPTS, Sampling(1.0, 5, tuple(range(SIZE))), numbers(4), Stopwatch()))
    assert [[said.row for said in news] for news in steps] == [[0, 1, 2, 3]]


class Clock:
    """Time that passes only where something is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def slow(self, method: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            self.now += seconds
            return method(*given)

        return run


@pytest.mark.parametrize("is_drafted", [False, True])
def test_every_phase_has_its_own_time_and_what_the_listener_does_is_other(
    is_drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(speaking.time, "perf_counter", lambda: clock.now)
    target, _ = toys()
    for name, seconds in (("prefill", 1000.0), ("verify", 10.0), ("commit", 1.0)):
        setattr(target, name, clock.slow(getattr(target, name), seconds))
    drafter = type("Slow", (LookupDrafter,), {"draw": clock.slow(LookupDrafter.draw, 0.25)})
    speaker: Speaker = DraftSpeaker(target, partial(drafter, 4, SIZE)) if is_drafted else PlainSpeaker(target)
    stopwatch = Stopwatch()
    clock.now += 7
    num_steps = num_texts = 0
    for news in speaker(PROMPTS, Sampling(0.0, 6), numbers(4), stopwatch):
        num_steps, num_texts = num_steps + 1, num_texts + len(news)
        clock.now += 100_000
    rounds, drawn = num_steps - 1, num_texts - len(PROMPTS)
    expected = {"other": 7 + 1e5 * num_steps, "prefill": 1001.0, "verify": 10.0 * rounds, "commit": 1.0 * rounds}
    if is_drafted:
        expected["draft"] = 0.25 * drawn
    assert stopwatch.phase_seconds == expected
    assert rounds > 1
    assert stopwatch.seconds() == sum(expected.values())
