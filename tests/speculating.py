"""Whole texts of a speaker, and speculative decoding of one prompt, as the tests of decoding want them."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

import torch

from dspark.decode.drafter import Draft
from dspark.decode.generation import DraftSpeaker
from dspark.decode.round import Round
from dspark.decode.sampling import Sampling, Uniforms
from dspark.decode.speaking import Spoken, Stopwatch
from dspark.types import CacheT, Target
from dspark.verifier.drafting import Cycle


@dataclass(frozen=True)
class Generation:
    """A generated text (ids_T int64, new ids only, on the CPU) and the rounds that made it."""

    ids_T: torch.Tensor
    rounds: tuple[Round, ...]


def gather(steps: Iterable[list[Spoken]], num_texts: int) -> list[Generation]:
    """The whole texts of ``num_texts`` rows, once a speaker has said everything."""
    ids: list[list[int]] = [[] for _ in range(num_texts)]
    rounds: list[list[Round]] = [[] for _ in range(num_texts)]
    for news in steps:
        for row, new_ids, counts in news:
            ids[row] += new_ids
            rounds[row] += [] if counts is None else [counts]
    return [Generation(torch.tensor(of_row), tuple(made)) for of_row, made in zip(ids, rounds, strict=True)]


def speculate(
    target: Target[CacheT], draft: Draft, prompt_ids_T: torch.Tensor, sampling: Sampling, uniforms: Uniforms
) -> Generation:
    """Speculative decoding of one prompt."""
    (text,) = gather(DraftSpeaker(target, draft)([prompt_ids_T], sampling, [uniforms], Stopwatch()), 1)
    return text


def cycle_text(whole: Cycle, prompt_ids_T: torch.Tensor, num_new: int) -> list[int]:
    """The first ``num_new`` ids of a cycle's rounds behind a prompt."""
    return list(islice(chain.from_iterable(whole.rounds(prompt_ids_T)), num_new))
