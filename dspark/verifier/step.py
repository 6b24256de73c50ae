"""The device-resident step: verify a window, accept greedily, commit, and leave the next token in place."""

from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, TypeVar

import torch

from dspark.kernels import head
from dspark.verifier.blocks import Window
from dspark.verifier.calls import Caller, call, named
from dspark.verifier.capture import Captured
from dspark.verifier.engine import Verifier
from dspark.verifier.ranks import Ranks

OutputT = TypeVar("OutputT")
Choice = tuple[torch.Tensor, torch.Tensor]


class StepOutput(NamedTuple):
    """What a step committed: the first count_1 ids of its window (all int64, on the device), and the id after them.
    Shapes: taps_TLD and hidden_TD of the whole window; rows from count_1 on belong to refused tokens.
    """

    count_1: torch.Tensor
    next_id_1: torch.Tensor
    taps_TLD: torch.Tensor
    hidden_TD: torch.Tensor


class Resident(ABC, Generic[OutputT]):
    """A window of T tokens and all that follows it, ``take``, captured once: nothing in it reads the device.

    A replayed one gives its output in the same memory each time. Without a rank it means nothing: the next one raises
    that, or ``ranks.check`` once the output was read.
    """

    def __init__(self, verifier: Verifier, num_tokens: int, generator: torch.Generator | None = None) -> None:
        verifier.make_room(num_tokens)
        verifier.drop_stage()  # a trial run writes over the latent rows that it wrote
        self.verifier, self.num_tokens, self.generator = verifier, num_tokens, generator
        self.captured = Captured(self.take, verifier.weights.device, self.memory(), generator)

    def memory(self) -> tuple[torch.Tensor, ...]:
        """What a trial run must put back."""
        return (*self.verifier.buffers.memory(), self.verifier.ids_T)

    def __call__(self) -> OutputT:
        """Enqueue it. Raises: ConfigError when the sequence outgrows the memory."""
        self.verifier.make_room(self.num_tokens)
        self.verifier.drop_stage()
        self.verifier.most_tokens += self.num_tokens
        return self.captured()

    @abstractmethod
    def take(self, call: Caller = call) -> OutputT:
        """The thing itself, kernel by kernel."""

    def commit(self, window: Window, count_1: torch.Tensor, next_id_1: torch.Tensor, call: Caller) -> None:
        """Make what is kept permanent, and the id after it the next anchor."""
        self.verifier.commit_window(window, count_1, call)
        call("Next id", self.verifier.ids_T[:1].copy_, next_id_1)


class Step(Resident[StepOutput]):
    """Greedy verification of windows of T tokens. Before a step the verifier's ``ids_T`` holds the last committed
    choice, then T-1 drafted tokens; after it ids_T[0] is the next choice.
    """

    @torch.no_grad()
    def take(self, call: Caller = call) -> StepOutput:
        window = self.verifier.read(self.num_tokens, call)
        count_1, next_id_1 = choose_greedily(self.verifier, window.hidden_TD, call)
        self.commit(window, count_1, next_id_1, call)
        return StepOutput(count_1, next_id_1, window.taps_TLD, window.hidden_TD)


def choose_greedily(verifier: Verifier, hidden_TD: torch.Tensor, call: Caller) -> Choice:
    """``head.accept`` of the first T of ids_T by the target's choices at T last hidden states."""
    weights, ids_T = verifier.weights, verifier.ids_T[: len(hidden_TD)]
    run = named("", call, is_chained=verifier.is_chained)
    inputs = (hidden_TD, weights.head_VD, weights.first_id, verifier.buffers.counters)
    return accept_best(ids_T, run("Head and arg-max", head.greedy, *inputs), verifier.ranks, run, "Arg-max exchange")


def accept_best(ids_T: torch.Tensor, best: Choice, ranks: Ranks, run: Caller, exchange: str = "exchange") -> Choice:
    """``head.accept`` by what is largest over all ranks; of a window of one: its largest."""
    if ranks.world_size == 1:
        every = [values_T[None] for values_T in best]
    else:
        every = [run(exchange, ranks.gather, values_T) for values_T in best]
    return run("Accept", head.accept, ids_T, *every)
