"""The device-resident step: verify a window, accept greedily, commit, and leave the next token in place."""

from typing import NamedTuple

import torch

from dspark.kernels import head
from dspark.verifier.calls import Caller, call
from dspark.verifier.capture import Captured
from dspark.verifier.engine import Verifier


class StepOutput(NamedTuple):
    """What a step committed: the first count_1 ids of its window (all int64, on the device), and the id after them.

    Shapes: taps_TLD and hidden_TD of the whole window; rows from count_1 on belong to refused tokens.
    """

    count_1: torch.Tensor
    next_id_1: torch.Tensor
    taps_TLD: torch.Tensor
    hidden_TD: torch.Tensor


class Step:
    """Greedy verification of windows of T tokens, captured once; nothing in it reads the device from the host.

    Before a step ``ids_T`` holds the last committed choice, then T-1 drafted tokens; after it ids_T[0] is the next
    choice. A replayed step gives its output in the same memory each time.
    """

    def __init__(self, verifier: Verifier, num_tokens: int) -> None:
        verifier.make_room(num_tokens)
        verifier.dense(num_tokens)
        self.verifier, self.num_tokens = verifier, num_tokens
        self.ids_T = verifier.ids_T[:num_tokens]
        device, changed = verifier.weights.device, (*verifier.buffers.memory(), verifier.ids_T)
        self.captured = Captured(self.take, device, changed)

    def __call__(self) -> StepOutput:
        """Take the step. Raises: ConfigError when the sequence outgrows the memory."""
        self.verifier.make_room(self.num_tokens)
        self.verifier.drop_stage()
        self.verifier.most_tokens += self.num_tokens
        return self.captured()

    @torch.no_grad()
    def take(self, call: Caller = call) -> StepOutput:
        """The step itself, kernel by kernel."""
        verifier, weights = self.verifier, self.verifier.weights
        window = verifier.read(self.num_tokens, call)
        best_T, best_ids_T = call(
            "Head and arg-max",
            head.greedy,
            window.hidden_TD,
            weights.head_VD,
            weights.first_id,
            verifier.buffers.counters,
            is_chained=verifier.is_chained,
        )
        count_1, next_id_1 = call(
            "Accept",
            head.accept,
            self.ids_T,
            best_T[None],
            best_ids_T[None],
            is_chained=verifier.is_chained,
        )
        verifier.commit_window(window, count_1, call)
        call("Next id", self.ids_T[:1].copy_, next_id_1)
        return StepOutput(count_1, next_id_1, window.taps_TLD, window.hidden_TD)
