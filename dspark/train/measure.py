"""What a step costs, on made-up data of a target's size and through training's own code."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cached_property, partial
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from dspark.config import DraftConfig, RunConfig
from dspark.draft.model import DraftModel, DraftOutput
from dspark.train.batches import Batch, Record, read_windows, share_of
from dspark.train.log import PooledMetrics, moment, seconds_between
from dspark.train.objective import denominators
from dspark.train.setup import fresh_draft, prepare
from dspark.train.step import Learner, draft_blocks, gradient_exchange, judge_blocks, micro_step, train_step
from dspark.types import RecordedSequence

LOGIT_DEVIATION = 2.0
"""Of the made-up teacher's logits over the vocabulary."""
WARMUPS, REPEATS = 3, 20
"""Calls before the clock starts (compilers and tuners have run then), and calls of which the median is taken."""


class RandomRecord(list[RecordedSequence]):
    """Sequences of ``record.max_tokens`` random tokens in host memory, all to be predicted, with states from a normal
    law in the target's dtype. They are drawn from the run's seed.
    """

    def __init__(self, run: RunConfig, num_sequences: int) -> None:
        draft, num_tokens, dtype = run.draft, run.record.max_tokens, getattr(torch, run.target.dtype)
        generator = torch.Generator().manual_seed(run.seed)
        normal = partial(torch.randn, generator=generator, dtype=dtype)
        super().__init__(
            RecordedSequence(
                ids_T=torch.randint(draft.vocab_size, (num_tokens,), generator=generator),
                loss_mask_T=torch.ones(num_tokens, dtype=torch.bool),
                taps_TLD=normal(num_tokens, len(draft.target_layer_ids), draft.hidden_size),
                last_hidden_TD=normal(num_tokens, draft.hidden_size),
            )
            for _ in range(num_sequences)
        )

    @property
    def starts(self) -> list[int]:
        """As of a record of one shard."""
        return [0, len(self)]

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """ids_T and loss_mask_T of a sequence."""
        return self[index].ids_T, self[index].loss_mask_T


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


def least_bytes(run: RunConfig) -> int:
    """Bytes that training surely takes on the device: the draft's float32 weights and gradients, its optimizer's
    moments and moving average, the target's tables and one batch. Activations and pieces of logits come on top.
    """
    draft, itemsize = run.draft, int(getattr(torch, run.target.dtype).itemsize)
    with torch.device("meta"):
        num_weights = sum(parameter.numel() for parameter in DraftModel(draft).parameters())
    copies = (4 if run.train.optimizer == "adamw" else 3) + bool(run.train.ema_decay)
    rows = 2 * draft.vocab_size + run.train.batch_size * run.record.max_tokens * (len(draft.target_layer_ids) + 1)
    return copies * 4 * num_weights + itemsize * rows * draft.hidden_size


def count_operations(config: DraftConfig, batch: Batch) -> dict[str, int]:
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
    valid, teachers = len(batch.slots.places_N), len(batch.slots.teachers_M)
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


class MicroStep:
    """The first micro-step of the run on data that is on the device already, and its two halves alone.

    Gradients are not exchanged between processes, as in all micro-steps of a step but the last. ``clear`` drops every
    gradient and belongs before each call.
    """

    def __init__(self, learner: Learner, record: Record) -> None:
        self.learner, device = learner, learner.accelerator.device
        share = share_of(learner.accelerator, learner.run.train)
        with closing(read_windows(record, learner.run, share, share.starts(0, 1), device)) as windows:
            _, feed = next(windows)
            self.here = next(feed)
        self.pooled = denominators(self.here.slots, learner.run.objective.decay_positions)
        self.step = learner.run.objective.acceptance_warmup_steps  # the first with all of every term

    @cached_property
    def output(self) -> DraftOutput:
        """What the draft says, in leaves of its own; made when it is first asked for, as ``pulls`` is."""
        with torch.no_grad():
            said = draft_blocks(self.learner.wrapped, self.here)
        return DraftOutput(*(None if x is None else x.detach().requires_grad_() for x in said))  # type: ignore[arg-type]

    @cached_property
    def pulls(self) -> list[Tensor]:
        """A random gradient of each thing that the draft says."""
        generator = torch.Generator(self.pooled.device).manual_seed(self.learner.run.seed)
        normal = partial(torch.randn, generator=generator, device=self.pooled.device)
        return [normal(x.shape, dtype=x.dtype) for x in _own_tensors(self.output)]

    def clear(self) -> None:
        """No gradient is held."""
        for tensor in (*self.learner.draft.parameters(), *self.__dict__.get("output", ())):
            if tensor is not None:
                tensor.grad = None

    def whole(self) -> Tensor:
        """Forward and backward, as ``train_step`` does them. Returns: the loss."""
        loss, _ = micro_step(self.learner, self.here, self.pooled, self.step, is_last=False)
        return loss

    def loss(self) -> Tensor:
        """From what the draft said to the loss and the gradients of hidden, mixed, markov and confidence logits."""
        loss, _ = judge_blocks(self.learner, self.output, self.here, self.pooled, self.step)
        torch.autograd.backward(loss)
        return loss.detach()

    def body(self) -> None:
        """The draft alone: forward, and backward from a random gradient of what it says."""
        with gradient_exchange(self.learner, is_last=False):
            torch.autograd.backward(_own_tensors(draft_blocks(self.learner.wrapped, self.here)), self.pulls)


@contextmanager
def whole_steps(learner: Learner, record: Record) -> Iterator[Callable[[], None]]:
    """Yields a function that takes the next step of training, from the wait for its data to the sums of its metrics;
    it can be called as often as ``time_calls`` does.
    """
    run, device, share = learner.run, learner.accelerator.device, share_of(learner.accelerator, learner.run.train)
    starts = share.starts(0, WARMUPS + REPEATS)
    steps, metrics = count(), PooledMetrics(learner.stopwatch)
    with closing(read_windows(record, run, share, starts, device)) as windows:

        def take() -> None:
            window, feed = next(windows)
            metrics.add(train_step(learner, window, next(steps), feed))

        yield take


def _own_tensors(said: DraftOutput) -> list[Tensor]:
    """What the draft computed; markov_VR is a parameter."""
    return [x for x in (said.hidden_AKD, said.mixed_AKR, said.confidence_logits_AK) if x is not None]
