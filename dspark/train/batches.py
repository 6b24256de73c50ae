"""Which recorded sequences a step reads, in which order, and how they become one packed row."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from itertools import chain, tee
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from dspark.config import RunConfig, TrainSection
from dspark.draft.anchors import BlockTargets, block_targets, sample_anchors
from dspark.train.slots import PIECE_NUMBERS, Slots, lay_out
from dspark.types import RecordedSequence

CPU = torch.device("cpu")


class Record(Protocol):
    """What training needs of a record: its length and its sequences by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> RecordedSequence: ...


@dataclass(frozen=True)
class Draw:
    """A recorded sequence and the pass over the record in which it is read; with the seed it fixes the anchors."""

    epoch: int
    index: int


@dataclass(frozen=True)
class Batch:
    """Sequences packed into one row of T tokens without padding, their blocks, and their places in the record.

    Shapes: ids_T, positions_T int64, positions start from 0 in every sequence; starts_A, anchors_A int64, where in the
    row the sequence of a block and its anchor stand, in the row's order; last_hidden_TD after the final norm. A batch
    without an anchor has one block at place 0 that counts nothing, so that every parameter has a gradient.
    """

    ids_T: Tensor
    positions_T: Tensor
    taps_TLD: Tensor
    last_hidden_TD: Tensor
    starts_A: Tensor
    anchors_A: Tensor
    slots: Slots
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """How many sequences a step reads and which of them are this process's."""

    batch_size: int
    accumulation_steps: int
    rank: int
    world_size: int

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimisation step over all processes."""
        return self.batch_size * self.accumulation_steps * self.world_size

    def starts(self, sequences_seen: int, num_steps: int) -> range:
        """Sequences seen before each of the next ``num_steps`` steps."""
        return range(sequences_seen, sequences_seen + num_steps * self.sequences_per_step, self.sequences_per_step)


def share_of(accelerator: Accelerator, train: TrainSection) -> Share:
    """This process's share of every step."""
    return Share(train.batch_size, train.accumulation_steps, accelerator.process_index, accelerator.num_processes)


READERS = 2
"""Steps read ahead, each in a thread of its own; host memory holds their windows beside the one that is used."""


def read_windows(
    record: Record, run: RunConfig, share: Share, starts: range, device: torch.device = CPU
) -> Iterator[list[Batch]]:
    """The window of every step in ``starts`` (sequences seen before it), in order, read ahead by threads."""
    with ThreadPoolExecutor(READERS) as pool:
        pending: deque[Future[list[Batch]]] = deque()
        for start in starts:
            pending.append(pool.submit(read_window, record, run, start, share, device))
            if len(pending) > READERS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def read_window(
    record: Record, run: RunConfig, sequences_seen: int, share: Share, device: torch.device = CPU
) -> list[Batch]:
    """This process's micro-batches of the step after ``sequences_seen`` sequences. All are needed at once: the
    denominators of the whole step are known before its first backward pass.
    """
    draws = window_draws(len(record), run.seed, sequences_seen, share)
    return [read_batch(record, each, run, device) for each in draws]


def with_feed(windows: Iterable[list[Batch]], device: torch.device) -> Iterator[tuple[list[Batch], Iterator[Batch]]]:
    """The windows, each with the one feed of all their batches on ``device``; it is ahead across their borders too."""
    ours, theirs = tee(windows)
    feed = copied_ahead(chain.from_iterable(theirs), device)
    for window in ours:
        yield window, feed


def copied_ahead(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on ``device``, in order; a GPU gets each on a side stream while it works on the one before.

    A copy's memory is the working stream's own, so what a used batch leaves serves the next one without a wait, and
    two are there at a time. On a CPU they are handed on as they are, none before it is asked for.
    """
    if device.type != "cuda":
        yield from batches
        return
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    under_way: deque[tuple[Batch, torch.cuda.Event]] = deque()
    try:
        for batch in batches:
            under_way.append(_start_copy(batch, main, side))
            if len(under_way) > 1:
                yield _arrived(*under_way.popleft(), main)
        while under_way:
            yield _arrived(*under_way.popleft(), main)
    finally:
        main.wait_stream(side)  # the memory of a copy that nobody waited for is not used again before it is done


def _start_copy(batch: Batch, main: torch.cuda.Stream, side: torch.cuda.Stream) -> tuple[Batch, torch.cuda.Event]:
    """Copy on ``side`` into memory of ``main``. Returns: the batch to be, and the event that says it is there."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def place(x: Tensor) -> Tensor:
        pairs.append((torch.empty_like(x, device=main.device), x))
        return pairs[-1][0]

    there = _with_tensors(batch, place)
    side.wait_stream(main)  # until here ``main`` may be at work in what the memory held before
    with torch.cuda.stream(side):
        for ours, theirs in pairs:
            ours.copy_(theirs, non_blocking=True)
    return there, side.record_event()


def _arrived(batch: Batch, event: torch.cuda.Event, main: torch.cuda.Stream) -> Batch:
    main.wait_event(event)
    return batch


def _with_tensors(record: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A dataclass with ``change`` of every tensor in it and in the dataclasses it holds."""
    found = {field.name: getattr(record, field.name) for field in fields(record)}
    changed = {name: change(x) for name, x in found.items() if isinstance(x, Tensor)}
    changed |= {name: _with_tensors(x, change) for name, x in found.items() if is_dataclass(x)}
    return replace(record, **changed)


def window_draws(num_sequences: int, seed: int, sequences_seen: int, share: Share) -> list[list[Draw]]:
    """The draws of one step for one process, a list for each micro-step.

    The record is read in a new permutation each pass, without a gap. The step takes the next sequences of that stream,
    so ``sequences_seen`` alone says what it learns from, however it is split over processes and micro-steps.
    """
    window = []
    for micro_step in range(share.accumulation_steps):
        start = sequences_seen + (micro_step * share.world_size + share.rank) * share.batch_size
        places = [divmod(place, num_sequences) for place in range(start, start + share.batch_size)]
        window.append([Draw(epoch, _permutation(num_sequences, seed, epoch)[place]) for epoch, place in places])
    return window


def read_batch(record: Record, draws: Sequence[Draw], run: RunConfig, device: torch.device = CPU) -> Batch:
    """Read the drawn sequences, choose anchors (by seed, pass and index only) and pack them into one row.

    The batch is on the host and all that ``device`` needs is made: for a GPU its memory is pinned.
    """
    block_size = run.draft.block_size
    sequences = [record[draw.index] for draw in draws]
    positions, starts, anchors, targets, start = [], [], [], [], 0
    for sequence, draw in zip(sequences, draws, strict=True):
        generator = _generator(run.seed, "anchors", draw.epoch, draw.index)
        anchors_A = sample_anchors(sequence.loss_mask_T, run.train.num_anchors, generator)
        targets.append(block_targets(sequence.ids_T, sequence.loss_mask_T, anchors_A, block_size))
        positions.append(torch.arange(len(sequence.ids_T)))
        starts.append(torch.full_like(anchors_A, start))
        anchors.append(start + anchors_A)
        start += len(sequence.ids_T)
    if not sum(map(len, anchors)):
        starts, anchors, nothing_1K = [torch.zeros(1).long()], [torch.zeros(1).long()], torch.zeros(1, block_size)
        targets = [BlockTargets(nothing_1K.long(), nothing_1K.bool())]
    whole = BlockTargets(*(torch.cat([getattr(each, x.name) for each in targets]) for x in fields(BlockTargets)))
    numbers = PIECE_NUMBERS["cuda" if device.type == "cuda" else "cpu"]
    batch = Batch(
        ids_T=torch.cat([sequence.ids_T for sequence in sequences]),
        positions_T=torch.cat(positions),
        taps_TLD=torch.cat([sequence.taps_TLD for sequence in sequences]),
        last_hidden_TD=torch.cat([sequence.last_hidden_TD for sequence in sequences]),
        starts_A=torch.cat(starts),
        anchors_A=torch.cat(anchors),
        slots=lay_out(whole, torch.cat(anchors), numbers, run.draft.vocab_size),
        indices=tuple(draw.index for draw in draws),
    )
    pinned: Batch = _with_tensors(batch, Tensor.pin_memory) if device.type == "cuda" else batch
    return pinned


@lru_cache(maxsize=2)
def _permutation(num_sequences: int, seed: int, epoch: int) -> list[int]:
    order: list[int] = torch.randperm(num_sequences, generator=_generator(seed, "order", epoch)).tolist()
    return order


def _generator(*key: object) -> torch.Generator:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
