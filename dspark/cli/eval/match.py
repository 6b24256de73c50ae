"""The contenders of an evaluation at work on one task: turn by turn, and the texts that are there already."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from dspark.cli.eval.contenders import Models
from dspark.cli.terminal import text_progress
from dspark.config import EvalSection
from dspark.data.chat import ChatFormat, encode_prompt
from dspark.data.conversations import Conversation
from dspark.decode.speaking import Speaker
from dspark.errors import PromptError
from dspark.eval.comparison import Contender, compare, draws, expect
from dspark.eval.measure import Decode, DecodedText, Each
from dspark.eval.records import Journal, TextKey
from dspark.eval.tasks import TaskPrompts

TURN_SEEDS = 2**32


class Texts:
    """The texts of an evaluation: those in the journal are taken from it, others are decoded and go into it."""

    def __init__(self, known: Mapping[TextKey, DecodedText], journal: Journal | None, is_shown: bool) -> None:
        self.kept: dict[TextKey, DecodedText] = {}
        self._known, self._journal, self._is_shown = journal.texts if journal else known, journal, is_shown

    @contextmanager
    def watch(self, task: str, name: str, temperature: float, total: int) -> Iterator[Each]:
        """As ``compare`` asks for it."""
        with text_progress(f"{task}, {name}, T = {temperature:g}", total, self._is_shown) as advance:

            def each(numbers: Sequence[int], decode: Decode) -> Sequence[DecodedText]:
                keys = {number: TextKey(task, temperature, name, number) for number in numbers}
                lacking = [number for number in numbers if keys[number] not in self._known]
                new = dict(zip(lacking, decode(lacking), strict=True)) if lacking else {}
                found = [new[number] if number in new else self._known[keys[number]] for number in numbers]
                for number, text in zip(numbers, found, strict=True):
                    if self._journal and number in new:
                        self._journal.append(keys[number], text)
                    self.kept[keys[number]] = text
                    advance(text)
                return found

            yield each


@dataclass(frozen=True)
class Match:
    """Contenders on a task, whose texts end at ``stop_token_ids``."""

    speakers: Mapping[str, Speaker]
    models: Models
    plan: EvalSection
    stop_token_ids: tuple[int, ...]
    seed: int
    texts: Texts

    def of_task(self, task: str, found: TaskPrompts, chat: ChatFormat) -> dict[str, tuple[Contender, ...]]:
        """Of every turn, by its name: the contenders. Raises: PromptError for a dialogue that grows too long."""
        num_temperatures = len(self.plan.temperatures)
        turns = {task: self.compare(task, 1, [found.ids] * num_temperatures)}
        dialogues = [list(found.conversations)] * num_temperatures
        for turn in range(2, self.plan.turns + 1 if dialogues[0] else 2):
            answers = turns[turn_name(task, turn - 1)][-1].texts
            dialogues = [go_on(chat, *both) for both in zip(dialogues, answers, strict=True)]
            if dialogues[0]:
                positions = self.models.draft.config.max_position_embeddings
                asked = [[encode_turn(chat, dialogue, positions) for dialogue in part] for part in dialogues]
                turns[turn_name(task, turn)] = self.compare(task, turn, asked)
            else:
                break
        return turns

    def compare(self, task: str, turn: int, prompts: Sequence[Sequence[torch.Tensor]]) -> tuple[Contender, ...]:
        """All contenders on a turn's prompts at every temperature, the draft with what teacher forcing expects of it.
        Every turn has numbers of its own: those that drew the answer before it are in the prompt already.
        """
        parts: list[tuple[Contender, ...]] = []
        name, seed = turn_name(task, turn), self.seed + (turn - 1) * TURN_SEEDS
        for temperature, ids in zip(self.plan.temperatures, prompts, strict=True):
            part = self.plan.model_copy(update={"tasks": (name,), "temperatures": (temperature,)})
            random, watch = (self.stop_token_ids, seed), partial(self.texts.watch, name)
            *others, own = compare(self.speakers, self.models.target, ids, part, random, watch)
            sampling = draws(part, temperature, self.stop_token_ids)
            own = expect(own, (self.models.target, self.models.draft), ids, [sampling])
            parts.append((*others, own))
        return tuple(
            Contender(same[0].name, tuple(c.measurements[0] for c in same), tuple(c.texts[0] for c in same))
            for same in zip(*parts, strict=True)
        )


def turn_name(task: str, turn: int) -> str:
    """What a turn of a task's conversations is called."""
    return task if turn == 1 else f"{task}, turn {turn}"


def encode_turn(chat: ChatFormat, dialogue: Conversation, positions: int) -> torch.Tensor:
    """The ids of a dialogue up to the next answer. Raises: PromptError for more than the draft has positions for."""
    ids_T = encode_prompt(chat, dialogue)
    if len(ids_T) > positions:
        long = f"{len(ids_T)} tokens with the answers so far; the draft has positions for {positions}"
        raise PromptError(f"{dialogue.place}: {long}; give fewer --turns or --max-new-tokens")
    return ids_T


def go_on(chat: ChatFormat, dialogues: Sequence[Conversation], answers: Sequence[DecodedText]) -> list[Conversation]:
    """The dialogues that have a further turn, with the answers so far and that turn."""
    found = []
    for dialogue, answer in zip(dialogues, answers, strict=True):
        if dialogue.later_turns:
            said = str(chat.tokenizer.decode(answer.ids_T.tolist(), skip_special_tokens=True))
            turn, *later = dialogue.later_turns
            new = ({"role": "assistant", "content": said}, {"role": "user", "content": turn})
            found.append(replace(dialogue, messages=(*dialogue.messages, *new), later_turns=tuple(later)))
    return found
