"""What a step costs: made-up data of a target's size, parts of a micro-step alone, their operations, and a clock."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from dspark.config import DraftConfig, RunConfig
from dspark.draft.model import DraftModel, DraftOutput
from dspark.train.batches import Batch, Record, Share, read_window, read_windows
from dspark.train.log import PooledMetrics
from dspark.train.objective import denominators
from dspark.train.setup import fresh_draft, prepare
from dspark.train.slots import PIECE_NUMBERS, lay_out
from dspark.train.step import Learner, draft_blocks, gradient_exchange, judge_blocks, micro_step, train_step
from dspark.types import RecordedSequence

WARMUPS, REPEATS = 3, 20
"""Calls before the clock starts (compilers and tuners have run then), and calls of which the median is taken."""
LOGIT_DEVIATION = 2.0
"""Of the made-up teacher's logits over the vocabulary."""


class RandomRecord:
    """Sequences of ``record.max_tokens`` random tokens in host memory, all to be predicted, with states from a normal
    law in the target's dtype: ``len(record)``, ``record[i]``. They are drawn from the run's seed.
    """

    def __init__(self, run: RunConfig, num_sequences: int) -> None:
        draft, num_tokens, dtype = run.draft, run.record.max_tokens, getattr(torch, run.target.dtype)
        generator = torch.Generator().manual_seed(run.seed)
        normal = partial(torch.randn, generator=generator, dtype=dtype)
        self._sequences = [
            RecordedSequence(
                ids_T=torch.randint(draft.vocab_size, (num_tokens,), generator=generator),
                loss_mask_T=torch.ones(num_tokens, dtype=torch.bool),
                taps_TLD=normal(num_tokens, len(draft.target_layer_ids), draft.hidden_size),
                last_hidden_TD=normal(num_tokens, draft.hidden_size),
            )
            for _ in range(num_sequences)
        ]

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> RecordedSequence:
        return self._sequences[index]


def random_learner(accelerator: Accelerator, run: RunConfig) -> Learner:
    """The run's new draft on tables from a normal law, the same on every rank, as training would hold it.
    Last hidden states of deviation 1 get logits of deviation ``LOGIT_DEVIATION`` from the head.
    """
    generator = torch.Generator(accelerator.device).manual_seed(run.seed)
    draft, dtype = fresh_draft(run.draft, run.seed), getattr(torch, run.target.dtype)
    shape = (run.draft.vocab_size, run.draft.hidden_size)
    normal = partial(torch.randn, shape, generator=generator, device=accelerator.device, dtype=dtype)
    head_VD = normal().mul_(LOGIT_DEVIATION / run.draft.hidden_size**0.5)
    draft.bind(normal().mul_(0.02), head_VD)
    return prepare(accelerator, draft, run)


def share_of(learner: Learner) -> Share:
    """This process's share of every step."""
    train, accelerator = learner.run.train, learner.accelerator
    return Share(train.batch_size, train.accumulation_steps, accelerator.process_index, accelerator.num_processes)


class MicroStep:
    """The first micro-step of the run on data that is on the device already, and its two halves alone.

    Gradients are not exchanged between processes, as in all micro-steps of a step but the last. ``clear`` drops every
    gradient and belongs before each call.
    """

    def __init__(self, learner: Learner, record: Record) -> None:
        self.learner, device = learner, learner.accelerator.device
        self.batch = read_window(record, learner.run, 0, share_of(learner))[0]
        self.here = self.batch.to(device)
        self.pooled = denominators(self.batch.targets, learner.run.objective.decay_positions).to(device)
        with torch.no_grad():
            said = draft_blocks(learner, self.here)
        *three, confidence = said
        hidden_AKD, mixed_AKR, markov_VR = (x.detach().requires_grad_() for x in three)
        confidence = None if confidence is None else confidence.detach().requires_grad_()
        self.output = DraftOutput(hidden_AKD, mixed_AKR, markov_VR, confidence)
        generator = torch.Generator(device).manual_seed(learner.run.seed)
        self._pulls = [
            torch.randn(x.shape, generator=generator, device=device, dtype=x.dtype) for x in _own_tensors(said)
        ]

    def clear(self) -> None:
        """No gradient is held."""
        for tensor in (*self.learner.draft.parameters(), *self.output):
            if tensor is not None:
                tensor.grad = None

    def whole(self) -> Tensor:
        """Forward and backward, as ``train_step`` does them. Returns: the loss."""
        loss, _ = micro_step(self.learner, self.batch, self.here, self.pooled, self._step, is_last=False)
        return loss

    def loss(self) -> Tensor:
        """From what the draft said to the loss and the gradients of hidden, mixed, markov and confidence logits."""
        loss, _ = judge_blocks(self.learner, self.output, self.batch, self.here, self.pooled, self._step)
        torch.autograd.backward(loss)
        return loss.detach()

    def body(self) -> None:
        """The draft alone: forward, and backward from a random gradient of what it says."""
        with gradient_exchange(self.learner, is_last=False):
            torch.autograd.backward(_own_tensors(draft_blocks(self.learner, self.here)), self._pulls)

    @property
    def _step(self) -> int:
        return self.learner.run.objective.acceptance_warmup_steps


@contextmanager
def whole_steps(learner: Learner, record: Record) -> Iterator[Callable[[], None]]:
    """Yields a function that takes the next step of training, from the wait for its data to the sums of its metrics;
    it can be called as often as ``time_calls`` does.
    """
    share, steps, metrics = share_of(learner), count(), PooledMetrics()
    with closing(read_windows(record, learner.run, share, share.starts(0, WARMUPS + REPEATS))) as windows:  # type: ignore[type-var]
        yield lambda: metrics.add(train_step(learner, next(windows), next(steps)))


def count_operations(config: DraftConfig, batch: Batch, device_type: str) -> dict[str, int]:
    """Floating-point operations of a micro-step's products, forward and backward, by part; a multiply-add is two.

    ``head`` the frozen head on every valid slot, on every teacher row that the slots' layout keeps (one for all slots
             of a piece that share it), and the gradient of the slots by it; the head itself has none
    ``markov`` W2 on every valid slot, and both gradients
    ``body`` the layers' matrices, and the Markov head's own ones, on every slot of every block, and both gradients
    ``context`` keys and values of all T tokens in every layer, and both gradients
    ``features`` fc on all T tokens and the gradient of its weights; the taps have none
    ``attention`` by visible keys: a slot sees what stands before its anchor and its own block; two products forward
             and five backward, which makes the scores again
    Left out: norms, rotations, softmax, the confidence row, embeddings, and what activation checkpointing repeats.
    """
    width, vocab, rank = config.hidden_size, config.vocab_size, config.markov_rank
    num_tokens, num_blocks, num_slots = len(batch.ids_T), len(batch.anchors_A), config.block_size
    numbers = PIECE_NUMBERS["cuda" if device_type == "cuda" else "cpu"]
    slots = lay_out(batch.targets.valid_AK, batch.anchors_A, numbers, vocab)
    valid, teachers = len(slots.places_N), len(slots.teachers_M)
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    layer = width * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    mixing = {"vanilla": 0, "gated": (width + rank) * rank, "rnn": (width + 2 * rank) * 3 * rank}
    visible = int((batch.anchors_A - batch.starts_A + num_slots).sum()) * num_slots
    layers = config.num_hidden_layers
    return {
        "head": 2 * width * vocab * (2 * valid + teachers),
        "markov": 3 * 2 * rank * vocab * valid,
        "body": 3 * 2 * num_blocks * num_slots * (layers * layer + mixing[config.markov_head_type]),
        "context": 3 * 2 * num_tokens * layers * width * 2 * keys,
        "features": 2 * 2 * num_tokens * len(config.target_layer_ids) * width * width,
        "attention": 7 * 2 * layers * queries * visible,
    }


@dataclass(frozen=True)
class Timing:
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
    marks = []
    for _ in range(REPEATS):
        before()
        start = _mark(is_gpu)
        call()
        marks.append((start, _mark(is_gpu)))
    if is_gpu:
        torch.cuda.synchronize(device)
    times = [a.elapsed_time(b) if is_gpu else (b - a) * 1e3 for a, b in marks]
    peak = torch.cuda.max_memory_allocated(device) if is_gpu else None
    return Timing(median(times), min(times), max(times), peak)


def least_bytes(run: RunConfig) -> int:
    """Bytes that training surely takes on the device: the draft's float32 weights and gradients, its optimizer's
    moments, the target's tables and one batch. Activations and pieces of logits come on top.
    """
    draft, itemsize = run.draft, int(getattr(torch, run.target.dtype).itemsize)
    with torch.device("meta"):
        num_weights = sum(parameter.numel() for parameter in DraftModel(draft).parameters())
    copies = 4 if run.train.optimizer == "adamw" else 3
    rows = 2 * draft.vocab_size + run.train.batch_size * run.record.max_tokens * (len(draft.target_layer_ids) + 1)
    return copies * 4 * num_weights + itemsize * rows * draft.hidden_size


def _own_tensors(said: DraftOutput) -> list[Tensor]:
    """What the draft computed; markov_VR is a parameter."""
    return [x for x in (said.hidden_AKD, said.mixed_AKR, said.confidence_logits_AK) if x is not None]


def _mark(is_gpu: bool) -> Any:
    if not is_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
