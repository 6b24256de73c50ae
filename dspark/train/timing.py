"""Where a step's time goes, and what a call takes again and again, on the clock of the device."""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

WARMUPS, REPEATS = 3, 20
"""Calls before the clock starts (compilers and tuners have run then), and calls of which the median is taken."""
KINDS = ("data_wait", "forward", "backward", "optimizer", "communication")
"""What a step's time is spent on; it is the rest that goes into rows, checkpoints and the loop itself."""


def moment(device: torch.device) -> Any:
    """Now; on a GPU an event in its stream, which is still to come and has to be waited for before it is compared."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream(device).record_event(event)


def seconds_between(start: Any, end: Any) -> float:
    """The time from one moment to another of the same device."""
    return float(start.elapsed_time(end) / 1e3 if isinstance(start, torch.cuda.Event) else end - start)


class Timing(NamedTuple):
    """Of one call among many back to back: milliseconds, and the most bytes that torch's allocator gave out meanwhile
    (None where there is no GPU), with all that lies there anyway.
    """

    milliseconds: float
    least_milliseconds: float
    most_milliseconds: float
    peak_bytes: int | None


def time_calls(call: Callable[[], Any], device: torch.device, before: Callable[[], None] = lambda: None) -> Timing:
    """Median, least and most of ``REPEATS`` calls after ``WARMUPS``; ``before`` runs ahead of each, untimed.

    Calls follow each other as micro-steps do: the host does not wait for the device between them, so its work hides
    behind the device's unless the call itself waits.
    """
    is_gpu = device.type == "cuda"
    for _ in range(WARMUPS):
        before()
        call()
    if is_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    moments = []
    for _ in range(REPEATS):
        before()
        start = moment(device)
        call()
        moments.append((start, moment(device)))
    if is_gpu:
        torch.cuda.synchronize(device)
    times = [seconds_between(*pair) * 1e3 for pair in moments]
    peak = torch.cuda.max_memory_allocated(device) if is_gpu else None
    return Timing(median(times), min(times), max(times), peak)


class Stopwatch:
    """Laps between moments; on a GPU a moment is an event in its stream, which nobody waits for before ``read``.

    ``communication`` is known under DDP only: the rest of backward after the last bucket of gradients was sent off, and
    the sums over ranks that a step asks for. Elsewhere the exchange of gradients is a part of backward and of the
    optimizer, and those sums of the rest.
    """

    def __init__(self, device: torch.device, wrapped: nn.Module) -> None:
        self._device, self._is_gpu = device, device.type == "cuda"
        self.sees_exchange = isinstance(wrapped, DistributedDataParallel)
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.register_comm_hook(wrapped.process_group, self._exchange)
        self.restart()

    def restart(self) -> None:
        """Forget all laps; the first one begins now."""
        self._laps: list[tuple[str, Any]] = [("", moment(self._device))]

    def lap(self, kind: str = "") -> None:
        """The time since the lap before went into ``kind``, by default one that is not reported."""
        self._laps.append((kind, moment(self._device)))

    def read(self) -> tuple[dict[str, float], float]:
        """Wait for the device and start anew. Returns: seconds of every kind and of all laps."""
        self.lap()
        if self._is_gpu:
            self._laps[-1][1].synchronize()
        seconds = dict.fromkeys(("", *KINDS), 0.0)
        for (_, start), (kind, end) in pairwise(self._laps):
            seconds[kind] += seconds_between(start, end)
        self._laps = self._laps[-1:]
        shown = KINDS if self.sees_exchange else KINDS[:-1]
        return {kind: seconds[kind] for kind in shown}, sum(seconds.values())

    def _exchange(self, group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's own mean over ranks, with a lap where it is sent off: what follows the last one is a wait for it."""
        self.lap("backward")
        return allreduce_hook(group, bucket)
