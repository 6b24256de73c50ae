"""Which recorded sequences a step reads, in which order, and how they become one packed row and the slots in it."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import tee
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from dspark.config import RunConfig, TrainSection
from dspark.draft.anchors import BlockTargets, block_targets, sample_anchors, slot_positions
from dspark.kernels.transfer import onto
from dspark.layers.float8 import from_float8
from dspark.record.order import ReadingOrder, generator_of
from dspark.types import RecordedSequence

CPU = torch.device("cpu")
PIECE_NUMBERS = {"cpu": 1 << 19, "cuda": 161_000_000}
"""Logits of a piece: on a CPU what its caches hold, on a GPU what keeps a product busy (1,024 rows of Ling's)."""
PartT = TypeVar("PartT")
MadeT = TypeVar("MadeT")


class Record(Protocol):
    """What training needs of a record: the number of each shard's first sequence, and that of all; its sequences by
    index, and their texts alone.
    """

    @property
    def starts(self) -> list[int]: ...

    def __getitem__(self, index: int) -> RecordedSequence: ...

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """ids_T and loss_mask_T of a sequence, without its states."""
        ...


@dataclass(frozen=True)
class Slots:
    """The slots of A blocks, valid_AK bool, and the N valid ones in the order of the batch.

    places_N int64 says where in [A, K] a valid slot lies, labels_N int64 what it should say. teachers_M int64: places
    in [T] of the states that teach, piece after piece; slots that share a position share its row within a piece, and
    teacher_rows_N int64 says which of the piece's rows a slot has. block_rows_A1 int64, one longer than A: how many
    valid slots lie before a block. On the host are the pieces: ranges of N, of M and of A.
    """

    valid_AK: Tensor
    places_N: Tensor
    labels_N: Tensor
    teacher_rows_N: Tensor
    teachers_M: Tensor
    block_rows_A1: Tensor
    pieces: list[tuple[slice, slice, slice]]


@dataclass(frozen=True)
class Plan:
    """What a micro-step learns from, known before a state is read: its sequences and the blocks in their texts.

    The sequences lie one after another in a row of T tokens. Shapes: ids_T, positions_T int64, positions start from 0
    in every sequence; starts_A, anchors_A int64, where in the row the sequence of a block and its anchor stand, in the
    row's order. Where the texts have fewer than two anchors, blocks at place 0 that count nothing make them two: every
    parameter has a gradient, and a compiled graph, which would take a single one for a number of its own, serves all.
    ``indices`` are the sequences' places in the record.
    """

    ids_T: Tensor
    positions_T: Tensor
    starts_A: Tensor
    anchors_A: Tensor
    slots: Slots
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Batch(Plan):
    """A plan with what the target said: taps_TLD, and last_hidden_TD after the final norm. Under way taps may be
    float8, to be multiplied by tap_scales_TL.
    """

    taps_TLD: Tensor
    last_hidden_TD: Tensor
    tap_scales_TL: Tensor | None = None


class Share(NamedTuple):
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


Draw = tuple[int, int]
"""The pass over the record in which a sequence is read, and its place there; with the seed they fix the anchors."""
Fed = Generator[tuple[list[Plan], Iterator[Batch]]]
"""The micro-steps of each step, and the feed of their batches."""
AHEAD = 2
"""Plans of steps, and batches, that threads make ahead of the one in use."""


def read_windows(record: Record, run: RunConfig, share: Share, starts: range, device: torch.device) -> Fed:
    """This process's micro-steps of every step in ``starts`` (sequences seen before it), in order. All of a step's are
    needed at once: its denominators are known before its first backward pass.

    Each comes with the one feed of all their batches on ``device``; it is ahead across their borders too. Whoever takes
    a window takes as many batches off the feed, and closes this when done. What cannot be read is told when it is its
    turn, not before.
    """
    order = ReadingOrder(record.starts, run.seed)

    def plan(start: int) -> list[Plan]:
        return [plan_batch(record, each, run, device) for each in window_draws(order, start, share)]

    def read(part: tuple[Future[list[Plan]], int]) -> Batch:
        window, place = part
        return fill(record, window.result()[place], device)

    windows = started_ahead(plan, starts)
    ours, theirs = tee(windows)
    reading = started_ahead(read, ((window, place) for window in theirs for place in range(share.accumulation_steps)))
    with closing(windows), closing(reading), closing(copied_ahead(reading, device)) as feed:
        for window in ours:
            yield window.result(), feed


def started_ahead(make: Callable[[PartT], MadeT], parts: Iterable[PartT]) -> Generator[Future[MadeT]]:
    """What ``make`` makes of every part, in order; threads are ``AHEAD`` of what was taken."""
    pool, pending = ThreadPoolExecutor(AHEAD), deque[Future[MadeT]]()
    try:
        for part in parts:
            pending.append(pool.submit(make, part))
            if len(pending) > AHEAD:
                yield pending.popleft()
        while pending:
            yield pending.popleft()
    finally:
        pool.shutdown(cancel_futures=True)


def copied_ahead(batches: Iterable[Future[Batch]], device: torch.device) -> Generator[Batch]:
    """The batches on ``device``, in order; a GPU gets each on a side stream while it works on the one before.

    A copy's memory is the working stream's own, so what a used batch leaves serves the next one without a wait, and
    two are there at a time. On a CPU they are handed on as they are, none before it is asked for.
    """
    if device.type != "cuda":
        for batch in batches:
            yield _widened(batch.result())
        return
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    under_way: deque[tuple[Batch, torch.cuda.Event]] = deque()
    try:
        for batch in batches:
            if under_way and batch.exception():
                yield _arrived(*under_way.popleft(), main)
            under_way.append(_start_copy(batch.result(), main, side))
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
    return _widened(batch)


def _widened(batch: Batch) -> Batch:
    """Taps as the draft reads them."""
    if batch.tap_scales_TL is None:
        return batch
    taps_TLD = from_float8(batch.taps_TLD, batch.tap_scales_TL, batch.last_hidden_TD.dtype)
    return replace(batch, taps_TLD=taps_TLD, tap_scales_TL=None)


def _with_tensors(record: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A dataclass with ``change`` of every tensor in it and in the dataclasses it holds."""
    changed = {name: change(x) for name, x in vars(record).items() if isinstance(x, Tensor)}
    changed |= {name: _with_tensors(x, change) for name, x in vars(record).items() if is_dataclass(x)}
    return replace(record, **changed)


def window_draws(order: ReadingOrder, sequences_seen: int, share: Share) -> list[list[Draw]]:
    """The draws of one step for one process, a list for each micro-step.

    The step takes the next sequences of the record's stream, so ``sequences_seen`` alone says what it learns from,
    however it is split over processes and micro-steps.
    """
    window = []
    for micro_step in range(share.accumulation_steps):
        start = sequences_seen + (micro_step * share.world_size + share.rank) * share.batch_size
        window.append([order.place(place) for place in range(start, start + share.batch_size)])
    return window


def plan_batch(record: Record, draws: Sequence[Draw], run: RunConfig, device: torch.device = CPU) -> Plan:
    """Choose the anchors of the drawn sequences, by seed, pass and index only, and lay their blocks out in one row, on
    the CPU and in pieces that suit ``device``.
    """
    block_size = run.draft.block_size
    ids, positions, starts, anchors, targets, start = [], [], [], [], [], 0
    for epoch, index in draws:
        ids_T, loss_mask_T = record.text(index)
        generator = generator_of(run.seed, "anchors", epoch, index)
        anchors_A = sample_anchors(loss_mask_T, run.train.num_anchors, generator)
        targets.append(block_targets(ids_T, loss_mask_T, anchors_A, block_size))
        ids.append(ids_T)
        positions.append(torch.arange(len(ids_T)))
        starts.append(torch.full_like(anchors_A, start))
        anchors.append(start + anchors_A)
        start += len(ids_T)
    if missing := max(0, 2 - sum(map(len, anchors))):
        nothing_A, nothing_AK = torch.zeros(missing).long(), torch.zeros(missing, block_size)
        starts, anchors = [nothing_A, *starts], [nothing_A, *anchors]
        targets = [BlockTargets(nothing_AK.long(), nothing_AK.bool()), *targets]
    whole = BlockTargets(*(torch.cat([getattr(each, x.name) for each in targets]) for x in fields(BlockTargets)))
    anchors_A, numbers = torch.cat(anchors), PIECE_NUMBERS["cuda" if device.type == "cuda" else "cpu"]
    slots = lay_out(whole, anchors_A, numbers, run.draft.vocab_size)
    row = torch.cat(ids), torch.cat(positions), torch.cat(starts), anchors_A
    return Plan(*row, slots, tuple(index for _, index in draws))


def lay_out(targets: BlockTargets, anchors_A: Tensor, numbers: int, vocab_size: int) -> Slots:
    """Cut the valid slots into pieces of whole blocks, of about ``numbers`` logits each. All tensors on the CPU."""
    num_blocks, num_slots = targets.valid_AK.shape
    places_N = targets.valid_AK.flatten().nonzero()[:, 0]
    teachers_N = slot_positions(anchors_A, num_slots).flatten()[places_N]
    block_rows_A1 = torch.cat((places_N.new_zeros(1), targets.valid_AK.sum(1).cumsum(0)))
    rows_N, pieces, teachers, start, end = torch.empty_like(places_N), [], [], 0, 0
    blocks_a_piece = max(1, numbers // (num_slots * vocab_size))
    for first in range(0, num_blocks, blocks_a_piece):
        last = min(first + blocks_a_piece, num_blocks)
        stop = int(block_rows_A1[last])
        if stop > start:
            here_M, rows_N[start:stop] = teachers_N[start:stop].unique(return_inverse=True)  # type: ignore[no-untyped-call]
            pieces.append((slice(start, stop), slice(end, end + len(here_M)), slice(first, last)))
            teachers.append(here_M)
            start, end = stop, end + len(here_M)
    teachers_M = torch.cat(teachers) if teachers else places_N
    labels_N = targets.label_ids_AK.flatten()[places_N]
    return Slots(targets.valid_AK, places_N, labels_N, rows_N, teachers_M, block_rows_A1, pieces)


def blank_batch(run: RunConfig, device: torch.device) -> Batch:
    """One sequence of ``record.max_tokens``, 4,096 at most, with as many anchors as the run allows, on ``device``.
    It says nothing, zeros everywhere, and depends on the run alone.
    """
    draft, num_tokens = run.draft, min(run.record.max_tokens, 4096)
    text = torch.zeros(num_tokens).long(), torch.ones(num_tokens).bool()
    plan = plan_batch(SimpleNamespace(text=lambda _: text), [(0, 0)], run, device)
    there: Plan = _with_tensors(plan, partial(onto, device))
    states = partial(torch.zeros, device=device, dtype=getattr(torch, run.target.dtype))
    taps_TLD = states(num_tokens, len(draft.target_layer_ids), draft.hidden_size)
    return Batch(**vars(there), taps_TLD=taps_TLD, last_hidden_TD=states(num_tokens, draft.hidden_size))


def fill(record: Record, plan: Plan, device: torch.device = CPU) -> Batch:
    """The plan with its sequences' states, on the host; for a GPU in pinned memory."""
    sequences, is_pinned = [record[index] for index in plan.indices], device.type == "cuda"
    here: Plan = _with_tensors(plan, Tensor.pin_memory) if is_pinned else plan
    scales = () if sequences[0].tap_scales_TL is None else ("tap_scales_TL",)
    parts = {name: [getattr(each, name) for each in sequences] for name in ("taps_TLD", "last_hidden_TD", *scales)}
    return Batch(**(vars(here) | {name: _joined(tensors, is_pinned) for name, tensors in parts.items()}))


def _joined(parts: list[Tensor], is_pinned: bool) -> Tensor:
    """One after another; pinned memory, which torch keeps and lends again, is written once and nothing else made."""
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    return torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=is_pinned))
