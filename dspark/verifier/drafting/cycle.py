"""The whole cycle on the device, enqueued a cycle ahead: the host reads every result one cycle late."""

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.errors import CheckpointError, ConfigError, DraftMismatchError
from dspark.verifier.blocks import Window
from dspark.verifier.calls import Caller, call
from dspark.verifier.drafting.acceptance import accept
from dspark.verifier.drafting.drafter import Drafter, Drafts, Sampler
from dspark.verifier.engine import Verifier, VerifierCache
from dspark.verifier.step import Choice, Resident, choose_greedily

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one are greedy, as in ``dspark.decode``."""


class Slot(NamedTuple):
    """Memory of the host that a cycle's result_N and confidence_K (empty without a head) are copied to without
    waiting, and what says that they are there.
    """

    result_N: Tensor
    confidence_K: Tensor
    event: torch.cuda.Event | None


class CycleOutput(NamedTuple):
    """What a cycle drafted and committed.
    result_N is what the host reads, int64: how many tokens of the window were committed, the id after them, then all
    drafts, of which the first count - 1 were accepted.
    """

    result_N: Tensor
    drafts: Drafts


class Cycle(Resident[CycleOutput]):
    """Draft, verify, accept, commit and update as one graph, for one sequence at a time.

    One graph, since chained launches end where a graph ends, each graph costs a start, and nothing is decided between
    the parts. All state lies on the device: a cycle is enqueued before the result of the one before is known. A
    temperature of 0 is greedy; above, drafts and target are drawn at it, from ``generator`` (of the verifier's device,
    of one seed on all ranks) or the device's own.
    Raises: ConfigError for another temperature, or drawing on several ranks without a generator; DraftMismatchError for
    a drafter that was made for another verifier.
    """

    def __init__(
        self, verifier: Verifier, drafter: Drafter, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> None:
        if not 0 <= temperature < inf:
            raise ConfigError(f"a temperature is a number from 0 on, got {temperature}")
        if temperature >= GREEDY_TEMPERATURE and generator is None and verifier.ranks.world_size > 1:
            raise ConfigError("several ranks draw the same tokens only from generators of one seed: give them such")
        if drafter.verifier is not verifier:
            raise DraftMismatchError("this drafter was made for another verifier; make one for this")
        self.drafter, self._sampler, self._cache = drafter, None, VerifierCache()
        device, wide = verifier.weights.device, torch.promote_types(verifier.weights.dtype, torch.float32)
        if temperature >= GREEDY_TEMPERATURE:
            self._sampler = Sampler(torch.full((1,), 1 / temperature, dtype=wide, device=device), generator)
        self._slots = deque(_slot(drafter, wide, device) for _ in range(2))
        self._pending: deque[tuple[Slot, int]] = deque()
        self._num_committed = 0
        self.confidence_logits: tuple[float, ...] = ()
        """Those of the round that was received last, a drafted token each; () for a draft without the head."""
        super().__init__(verifier, drafter.num_drafts + 1, generator)

    @torch.no_grad()
    def take(self, call: Caller = call) -> CycleOutput:
        drafts = self.draft(call)
        window, count_1, next_id_1 = self.verify(drafts, call)
        start_1 = call("Start", self.verifier.buffers.length_1.clone)
        self.commit(window, count_1, next_id_1, call)
        self.drafter.update(window, start_1, count_1, call)
        return CycleOutput(call("Result", self._result, count_1), drafts)

    def draft(self, call: Caller) -> Drafts:
        """Put drafts behind the anchor."""
        return self.drafter.draft(self._sampler, call)

    def verify(self, drafts: Drafts, call: Caller) -> tuple[Window, Tensor, Tensor]:
        """The target's pass over anchor and drafts, and what is kept of them: count_1 and next_id_1."""
        window = self.verifier.read(self.num_tokens, call)
        if self._sampler is None:
            return window, *choose_greedily(self.verifier, window.hidden_TD, call)
        assert drafts.logits_KV is not None
        logits_TV = call("Head", self.verifier.logits, window.hidden_TD)
        return window, *self._accept(drafts.logits_KV, logits_TV, self._sampler, call)

    def rounds(self, prompt_ids_T: Tensor) -> Iterator[list[int]]:
        """The prefill's new id, then every cycle's new ids, without end; the next cycle is enqueued before each.
        Raises: ValueError once another text has taken this one's place.
        """
        self.begin(prompt_ids_T)
        own = self._cache
        while True:
            self.verifier.check_held(own)
            self.enqueue()
            yield self.receive()

    @torch.no_grad()
    def begin(self, prompt_ids_T: Tensor) -> None:
        """Prefill both models and choose the first id. An earlier sequence is forgotten.
        Raises: ConfigError as ``Verifier.prefill``; CheckpointError where the target's logits are no numbers; RankError
        for a rank that was lost meanwhile.
        """
        verifier = self.verifier
        self._pending.clear()
        self._cache, output = verifier.prefill([prompt_ids_T])
        logits_1V = verifier.logits(output.last_hidden_ND[-1:])
        is_damaged = bool(logits_1V.isnan().any())
        verifier.ranks.check()
        if is_damaged:
            raise CheckpointError("the target's logits of the prompt are not numbers; its weights are damaged")
        first_id_1 = logits_1V.argmax(-1)
        if self._sampler is not None:
            _, first_id_1 = self._accept(logits_1V[:0], logits_1V, self._sampler, call)
        self.drafter.begin(torch.cat((prompt_ids_T[1:].to(first_id_1.device), first_id_1)), output)
        verifier.ids_T[:1] = first_id_1
        self._num_committed = len(prompt_ids_T)
        self._send(CycleOutput(self._result(torch.ones_like(first_id_1)), Drafts(None, None)), 0)

    def enqueue(self) -> None:
        """Start a cycle, after ``begin`` and with at most one result not received.
        Raises: ConfigError when the sequence outgrows the memory; ValueError out of turn.
        """
        self.verifier.check_held(self._cache)
        if len(self._pending) == len(self._slots):
            raise ValueError("two results wait: receive one before a third cycle")
        self._send(self(), self.num_tokens)

    def receive(self) -> list[int]:
        """Wait for the oldest result that was not read: its new ids. Raises: ValueError when there is none."""
        if not self._pending:
            raise ValueError("no result waits: enqueue a cycle before")
        slot, reserved_tokens = self._pending.popleft()
        if slot.event is not None:
            slot.event.synchronize()
        count, next_id, *drafted = slot.result_N.tolist()
        self.confidence_logits = tuple(slot.confidence_K.tolist())
        self._num_committed += min(count, reserved_tokens)
        self.verifier.most_tokens = self._num_committed + sum(reserved for _, reserved in self._pending)
        return [*drafted[: count - 1], next_id]

    def _send(self, output: CycleOutput, reserved_tokens: int) -> None:
        self._slots.rotate()
        slot, confidence_K = self._slots[0], output.drafts.confidence_K
        slot.result_N.copy_(output.result_N, non_blocking=True)
        if confidence_K is not None:
            slot.confidence_K.copy_(confidence_K, non_blocking=True)
        if slot.event is not None:
            slot.event.record()
        self._pending.append((slot, reserved_tokens))

    def _result(self, count_1: Tensor) -> Tensor:
        return torch.cat((count_1, self.verifier.ids_T[: self.num_tokens]))

    def _accept(self, draft_KV: Tensor, logits_TV: Tensor, sampler: Sampler, call: Caller) -> Choice:
        ids_T = self.verifier.ids_T[: len(logits_TV)]
        uniforms_T = torch.rand(ids_T.shape, dtype=torch.float64, device=ids_T.device, generator=sampler.generator)
        return call("Accept", accept, ids_T, draft_KV, logits_TV, sampler.inverse_temperature_1, uniforms_T)


def _slot(drafter: Drafter, wide: torch.dtype, device: torch.device) -> Slot:
    is_gpu = device.type == "cuda"
    event = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]
    result_N = torch.empty(2 + drafter.num_drafts, dtype=torch.int64, pin_memory=is_gpu)
    num_confidences = drafter.num_drafts if drafter.has_confidence else 0
    return Slot(result_N, torch.empty(num_confidences, dtype=wide, pin_memory=is_gpu), event)
