"""The time and the memory of a call that is made again and again, on a GPU or a CPU."""

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch

from dspark.train.timing import moment, seconds_between

WARMUPS, REPEATS = 3, 20
"""Calls before the clock starts (compilers and tuners have run then), and calls of which the median is taken."""


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
