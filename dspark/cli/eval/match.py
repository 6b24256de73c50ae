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
from dspark.eval.measure import DRAFT, Measurement, Prompts, compare, decode_batches
from dspark.eval.records import Journal, keys_of
from dspark.eval.tasks import TaskPrompts
from dspark.eval.timing import DecodedText

TURN_SEEDS = 2**32


class Match(NamedTuple):
    """Contenders; their texts in the journal are taken from it, others are decoded and go into it."""

    speakers: Mapping[str, Speaker]
    models: Models
    plan: EvalSection
    seed: int
    journal: Journal
    is_shown: bool

    def of_task(self, task: str, found: TaskPrompts, chat: ChatFormat) -> dict[str, list[Measurement]]:
        """Of every contender the measurements, one a turn and temperature. Raises: PromptError for a dialogue that
        grows too long. Every turn has numbers of its own: those that drew the answer before it are in the prompt.
        """
        measured: dict[str, list[Measurement]] = {name: [] for name in self.speakers}
        temperatures, pair = self.plan.temperatures, (self.models.target, self.models.draft)
        stop_ids = () if found.is_endless else tuple(chat.stop_token_ids)
        asked: list[Prompts] = [found.ids] * len(temperatures)
        dialogues = [list(found.conversations)] * len(temperatures)
        for turn in count(1):
            name = task if turn == 1 else f"{task}, turn {turn}"
            plan = self.plan.model_copy(update={"tasks": (name,)})
            decode = partial(self.decode, name, self.seed + (turn - 1) * TURN_SEEDS)
            for way, ms in compare(self.speakers, pair, asked, plan, stop_ids, decode).items():
                measured[way] += ms
            if turn == self.plan.turns or not any(dialogue.later_turns for dialogue in dialogues[0]):
                break
            keys = [keys_of(name, at, DRAFT, len(part)) for at, part in zip(temperatures, asked, strict=True)]
            answers = [[self.journal.texts[key] for key in part] for part in keys]
            dialogues = [go_on(chat, *both) for both in zip(dialogues, answers, strict=True)]
            positions = self.models.draft.config.max_position_embeddings
            asked = [[encode_turn(chat, dialogue, positions) for dialogue in part] for part in dialogues]
        return measured

    def decode(self, task: str, seed: int, name: str, prompts: Prompts, sampling: Sampling) -> list[DecodedText]:
        """As ``compare`` asks for it."""
        texts, size = self.journal.texts, self.plan.batch_size
        keys = keys_of(task, sampling.temperature, name, len(prompts))
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
