"""What every way to write texts gives, step by step, and the clock that runs meanwhile."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from dspark.decode.round import Round
from dspark.decode.sampling import Sampling, Uniforms


class Spoken(NamedTuple):
    """What one step added to one text: its place in the batch, its new ids (some or none), and the round that made
    them (None: the token after the prompt, and every token of plain decoding).
    """

    row: int
    ids: list[int]
    counts: Round | None


class Stopwatch:
    """Seconds since it was made, by what they were spent on, as the host sees them: a phase ends when its numbers have
    been read, so that on a GPU what was only enqueued counts to the phase that waits for it.
    """

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.phase_seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """The time since the last lap went into ``phase``."""
        now = time.perf_counter()
        self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._start


class Speaker(Protocol):
    """Writes a text behind each of some prompts, all in step."""

    @property
    def is_drafting(self) -> bool:
        """Whether it works in rounds; if not, it is plain decoding."""

    def __call__(
        self, prompts: Sequence[torch.Tensor], sampling: Sampling, uniforms: Sequence[Uniforms], stopwatch: Stopwatch
    ) -> Iterator[list[Spoken]]:
        """Every step's news, texts that have ended left out; the first one is the token after each prompt. A text's
        last news come no later than its last round ends. Row b draws from uniforms[b] alone.
        Shapes: prompts int64 [T_b], T_b >= 1.
        """
