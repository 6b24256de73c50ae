"""Times of a cycle's parts on a GPU. The whole is timed and recorded as a step is: ``time_step``, ``record_step``."""

from collections.abc import Callable
from functools import partial

import torch

from dspark.verifier.calls import call
from dspark.verifier.capture import Captured
from dspark.verifier.drafting.cycle import Cycle
from dspark.verifier.timing import Clock, rewind


@torch.no_grad()
def time_parts(cycle: Cycle, clock: Clock, context_tokens: int) -> dict[str, float]:
    """Microseconds of draft, verify, commit and update, each as a graph of its own, after ``context_tokens``."""
    verifier, drafter = cycle.verifier, cycle.drafter
    rewind(verifier, context_tokens)
    drafts = cycle.draft(call)
    window, count_1, next_id_1 = cycle.verify(drafts, call)
    start_1 = verifier.buffers.length_1.clone()
    parts: dict[str, Callable[[], object]] = {
        "draft": partial(cycle.draft, call),
        "verify": partial(cycle.verify, drafts, call),
        "commit": partial(cycle.commit, window, count_1, next_id_1, call),
        "update": partial(drafter.update, window, start_1, count_1, call),
    }
    found = {}
    for name, part in parts.items():
        captured = Captured(part, clock.device, cycle.memory(), cycle.generator)
        found[name] = clock.time(captured)
        rewind(verifier, context_tokens)
    return found
