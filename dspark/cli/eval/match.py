"""The contenders of an evaluation at work on one task: turn by turn, and the texts that are there already."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import NamedTuple

import torch

from dspark.cli.eval.contenders import Models
from dspark.cli.terminal import text_progress
from dspark.config import EvalSection
from dspark.data.chat import ChatFormat, encode_prompt
from dspark.data.conversations import Conversation
from dspark.decode.sampling import Sampling
from dspark.decode.speaking import Speaker
from dspark.errors import PromptError
from dspark.eval.comparison import Contender, compare
from dspark.eval.measure import Prompts, decode_batches
from dspark.eval.records import Journal, TextKey
from dspark.eval.tasks import TaskPrompts
from dspark.eval.timing import DecodedText

TURN_SEEDS = 2**32


class Match(NamedTuple):
    """Contenders on a task, whose texts end at ``stop_token_ids``; those in the journal are taken from it, others are
    decoded and go into it.
    """

    speakers: Mapping[str, Speaker]
    models: Models
    plan: EvalSection
    stop_token_ids: tuple[int, ...]
    seed: int
    journal: Journal
    is_shown: bool

    def of_task(self, task: str, found: TaskPrompts, chat: ChatFormat) -> dict[str, tuple[Contender, ...]]:
        """Of every turn, by its name: the contenders. Raises: PromptError for a dialogue that grows too long.
        Every turn has numbers of its own: those that drew the answer before it are in the prompt already.
        """
        turns: dict[str, tuple[Contender, ...]] = {}
        asked: list[Prompts] = [found.ids] * len(self.plan.temperatures)
        dialogues = [list(found.conversations)] * len(self.plan.temperatures)
        for turn in count(1):
            name = task if turn == 1 else f"{task}, turn {turn}"
            turns[name] = self.compare(name, asked, self.seed + (turn - 1) * TURN_SEEDS)
            if turn == self.plan.turns or not any(dialogue.later_turns for dialogue in dialogues[0]):
                break
            answers = turns[name][-1].texts
            dialogues = [go_on(chat, *both) for both in zip(dialogues, answers, strict=True)]
            positions = self.models.draft.config.max_position_embeddings
            asked = [[encode_turn(chat, dialogue, positions) for dialogue in part] for part in dialogues]
        return turns

    def compare(self, task: str, prompts: Sequence[Prompts], seed: int) -> tuple[Contender, ...]:
        """All contenders on the prompts of every temperature."""
        plan, pair = self.plan.model_copy(update={"tasks": (task,)}), (self.models.target, self.models.draft)
        return compare(self.speakers, pair, prompts, plan, self.stop_token_ids, partial(self.decode, task, seed))

    def decode(self, task: str, seed: int, name: str, prompts: Prompts, sampling: Sampling) -> list[DecodedText]:
        """As ``compare`` asks for it."""
        texts, size = self.journal.texts, self.plan.batch_size
        keys = [TextKey(task, sampling.temperature, name, number) for number in range(len(prompts))]
        parts = (keys[start : start + size] for start in range(0, len(keys), size))
        lacking = list(filter(None, ([key for key in part if key not in texts] for part in parts)))
        numbers = [[key.prompt_index for key in batch] for batch in lacking]
        with text_progress(f"{task}, {name}, T = {sampling.temperature:g}", len(keys), self.is_shown) as advance:
            for known in filter(None, map(texts.get, keys)):
                advance(known)
            decoded = decode_batches(self.speakers[name], prompts, sampling, seed, numbers)
            for batch, found in zip(lacking, decoded, strict=True):
                for key, text in zip(batch, found, strict=True):
                    self.journal.append(key, text)
                    advance(text)
        return [texts[key] for key in keys]


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
