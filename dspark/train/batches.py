"""Which recorded sequences a step reads, in which order, and how they become one packed row."""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Protocol, Self

import torch
from torch import Tensor

from dspark.config import RunConfig, TrainSection
from dspark.draft.anchors import BlockTargets, block_targets, sample_anchors
from dspark.types import RecordedSequence


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
    targets: BlockTargets
    indices: tuple[int, ...]

    def to(self, device: torch.device) -> Self:
        """The same batch with its tensors on ``device``, but for the targets."""
        names = [field.name for field in fields(self) if field.name not in ("targets", "indices")]
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


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


READERS = 2
"""Steps read ahead, each in a thread of its own; host memory holds their windows beside the one that is used."""


def read_windows(record: Record, run: RunConfig, share: Share, starts: range) -> Iterator[list[Batch]]:
    """The window of every step in ``starts`` (sequences seen before it), in order, read ahead by threads."""
    with ThreadPoolExecutor(READERS) as pool:
        pending: deque[Future[list[Batch]]] = deque()
        for start in starts:
            pending.append(pool.submit(read_window, record, run, start, share))
            if len(pending) > READERS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def read_window(record: Record, run: RunConfig, sequences_seen: int, share: Share) -> list[Batch]:
    """This process's micro-batches of the step after ``sequences_seen`` sequences. All are needed at once: the
    denominators of the whole step are known before its first backward pass.
    """
    draws = window_draws(len(record), run.seed, sequences_seen, share)
    return [read_batch(record, each, run.train, run.draft.block_size, run.seed) for each in draws]


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


def read_batch(record: Record, draws: Sequence[Draw], train: TrainSection, block_size: int, seed: int) -> Batch:
    """Read the drawn sequences, choose anchors (by seed, pass and index only) and pack them into one row on the CPU."""
    sequences = [record[draw.index] for draw in draws]
    positions, starts, anchors, targets, start = [], [], [], [], 0
    for sequence, draw in zip(sequences, draws, strict=True):
        generator = _generator(seed, "anchors", draw.epoch, draw.index)
        anchors_A = sample_anchors(sequence.loss_mask_T, train.num_anchors, generator)
        targets.append(block_targets(sequence.ids_T, sequence.loss_mask_T, anchors_A, block_size))
        positions.append(torch.arange(len(sequence.ids_T)))
        starts.append(torch.full_like(anchors_A, start))
        anchors.append(start + anchors_A)
        start += len(sequence.ids_T)
    if not sum(map(len, anchors)):
        starts, anchors, nothing_1K = [torch.zeros(1).long()], [torch.zeros(1).long()], torch.zeros(1, block_size)
        targets = [BlockTargets(nothing_1K.long(), nothing_1K.bool())]
    return Batch(
        ids_T=torch.cat([sequence.ids_T for sequence in sequences]),
        positions_T=torch.cat(positions),
        taps_TLD=torch.cat([sequence.taps_TLD for sequence in sequences]),
        last_hidden_TD=torch.cat([sequence.last_hidden_TD for sequence in sequences]),
        starts_A=torch.cat(starts),
        anchors_A=torch.cat(anchors),
        targets=BlockTargets(
            torch.cat([each.label_ids_AK for each in targets]), torch.cat([each.valid_AK for each in targets])
        ),
        indices=tuple(draw.index for draw in draws),
    )


@lru_cache(maxsize=2)
def _permutation(num_sequences: int, seed: int, epoch: int) -> list[int]:
    order: list[int] = torch.randperm(num_sequences, generator=_generator(seed, "order", epoch)).tolist()
    return order


def _generator(*key: object) -> torch.Generator:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
