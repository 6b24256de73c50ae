"""Replaying captured functions against a GPU's clock."""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from dspark.kernels import MAX_TOKENS
from dspark.verifier.calls import Call, call
from dspark.verifier.capture import Captured
from dspark.verifier.drafting import Cycle
from dspark.verifier.engine import Verifier
from dspark.verifier.ranks import ALONE, Ranks
from dspark.verifier.step import Resident
from dspark.verifier.timing.stages import call_bytes, rewind

REPLAYS = 20
COLD_BYTES = 256 << 20
"""Far more than the last-level cache of a GPU (50 MB on an H200): writing as much leaves nothing else in it."""
READ_BYTES = 4 << 30


class StageTime(NamedTuple):
    """A stage of one step: how many calls, and launches (None: unknown), bytes and microseconds of one call."""

    name: str
    num_calls: int
    num_launches: float | None
    num_bytes: float
    microseconds: float


class StepTime(NamedTuple):
    """A whole step of T tokens as one graph; ``burst`` is the mean over replays back to back."""

    num_tokens: int
    is_chained: bool
    num_launches: int | None
    microseconds: float
    burst_microseconds: float


class Clock:
    """Times captured functions on one device, each replay after the cache was swept.

    The time of a graph that does next to nothing is taken off, so that a stage of few calls is not charged for the
    start of its graph. Ranks meet before each replay, so that none is charged for another's host.
    """

    def __init__(self, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.device, self._ranks = device, ranks
        self.start_microseconds = 0.0
        self._sweep = torch.empty(COLD_BYTES, dtype=torch.uint8, device=device)
        self._flag = torch.zeros(1, device=device)
        self.start_microseconds = self.time(Captured(lambda: self._flag.add_(1), device))

    def time(self, captured: Callable[[], object]) -> float:
        """Median microseconds of a replay."""
        times = [self._series(captured, 1, is_cold=True) for _ in range(REPLAYS)]
        return max(median(times) - self.start_microseconds, 0.1)

    def time_burst(self, captured: Callable[[], object]) -> float:
        """Mean microseconds of a replay among many back to back."""
        return self._series(captured, REPLAYS, is_cold=False) / REPLAYS

    def _series(self, captured: Callable[[], object], number: int, is_cold: bool) -> float:
        """Microseconds of so many replays; ``is_cold`` sweeps the cache before them."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._ranks.gather(self._flag)
        if is_cold:
            self._sweep.zero_()
        before.record()
        for _ in range(number):
            captured()
        after.record()
        torch.cuda.synchronize(self.device)
        return float(before.elapsed_time(after)) * 1e3


def read_bandwidth(clock: Clock, free_bytes: int) -> float:
    """Bytes a second of the fastest of several read-only tilings over 4 GB, or half of what is free."""
    from dspark.kernels import reading  # Triton, which a CPU may lack

    size = min(READ_BYTES, free_bytes // 2)
    x_N = torch.ones(size // 4 // 65536 * 65536, dtype=torch.int32, device=clock.device)
    times = [clock.time(Captured(partial(reading.read_sums, x_N, *t), clock.device)) for t in reading.TILINGS]
    return x_N.nbytes / min(times) * 1e6


def time_stages(
    verifier: Verifier, stages: dict[str, list[Call]], clock: Clock, context_tokens: int
) -> Iterator[StageTime]:
    """Time every stage on its own: all its calls of a step in one graph. What they do to the states does not matter."""
    for name, calls in stages.items():
        rewind(verifier, context_tokens)
        num_bytes = sum(call_bytes(call, context_tokens) for call in calls)
        captured = Captured(partial(_run, calls), clock.device)
        launches, number = captured.num_launches(), len(calls)
        microseconds = clock.time(captured) / number
        yield StageTime(name, number, launches and launches / number, num_bytes / number, microseconds)
    rewind(verifier, context_tokens)


def time_step(step: Resident[Any], clock: Clock, context_tokens: int) -> StepTime:
    """Time a whole step; the length is set back before each series, which the memory has room for."""
    verifier = step.verifier
    rewind(verifier, context_tokens)
    microseconds = clock.time(step.captured)
    rewind(verifier, context_tokens)
    burst = clock.time_burst(step.captured)
    rewind(verifier, context_tokens)
    return StepTime(step.num_tokens, verifier.is_chained, step.captured.num_launches(), microseconds, burst)


@torch.no_grad()
def time_parts(cycle: Cycle, clock: Clock, context_tokens: int) -> dict[str, float]:
    """Microseconds of draft, verify, commit and update, each as a graph of its own, after ``context_tokens``."""
    verifier = cycle.verifier
    rewind(verifier, context_tokens)
    drafts = cycle.draft(call)
    window, count_1, next_id_1 = cycle.verify(drafts, call)
    start_1 = verifier.buffers.length_1.clone()
    parts: dict[str, Callable[[], object]] = {
        "draft": partial(cycle.draft, call),
        "verify": partial(cycle.verify, drafts, call),
        "commit": partial(cycle.commit, window, count_1, next_id_1, call),
        "update": partial(cycle.drafter.update, window, start_1, count_1, call),
    }
    found = {}
    for name, part in parts.items():
        captured = Captured(part, clock.device, cycle.memory(), cycle.generator)
        found[name] = clock.time(captured)
        rewind(verifier, context_tokens)
    return found


def slack_tokens(num_tokens: int) -> int:
    """Room that a series of replays needs behind the context."""
    return REPLAYS * num_tokens + MAX_TOKENS


def _run(calls: list[Call]) -> None:
    for each in calls:
        each()
