"""Which recorded sequences a step reads, in which order, and how they become one padded batch."""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from dspark.config import RunConfig
from dspark.draft.anchors import sample_anchors
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
    """B sequences padded on the right to the longest, with the anchors to train on and their places in the record.
    Shapes: ids_BT, lengths_B, anchors_BA int64; loss_mask_BT, keep_BA bool; taps and last_hidden zeros in the padding.
    """

    ids_BT: Tensor
    loss_mask_BT: Tensor
    lengths_B: Tensor
    taps_BTLD: Tensor
    last_hidden_BTD: Tensor
    anchors_BA: Tensor
    keep_BA: Tensor
    indices: tuple[int, ...]

    def to(self, device: torch.device) -> Self:
        """The same batch with its tensors on ``device``."""
        names = [field.name for field in fields(self) if field.name != "indices"]
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
    return [read_batch(record, micro_step, run.train.num_anchors, run.seed) for micro_step in draws]


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


def read_batch(record: Record, draws: Sequence[Draw], num_anchors: int, seed: int) -> Batch:
    """Read the drawn sequences, choose anchors (by seed, pass and index only) and pad to one batch on the CPU."""
    sequences = [record[draw.index] for draw in draws]
    lengths = [len(sequence.ids_T) for sequence in sequences]
    anchors = []
    for sequence, length, draw in zip(sequences, lengths, draws, strict=True):
        generator = _generator(seed, "anchors", draw.epoch, draw.index)
        anchors.append(sample_anchors(sequence.loss_mask_T[None], torch.tensor([length]), num_anchors, generator))
    return Batch(
        ids_BT=_stack([sequence.ids_T for sequence in sequences]),
        loss_mask_BT=_stack([sequence.loss_mask_T for sequence in sequences]),
        lengths_B=torch.tensor(lengths),
        taps_BTLD=_stack([sequence.taps_TLD for sequence in sequences]),
        last_hidden_BTD=_stack([sequence.last_hidden_TD for sequence in sequences]),
        anchors_BA=_stack([anchors_1A[0] for anchors_1A, _ in anchors]),
        keep_BA=_stack([keep_1A[0] for _, keep_1A in anchors]),
        indices=tuple(draw.index for draw in draws),
    )


def _stack(rows: Sequence[Tensor]) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.stack([pad(row, [0, 0] * (row.ndim - 1) + [0, longest - len(row)]) for row in rows])


@lru_cache(maxsize=2)
def _permutation(num_sequences: int, seed: int, epoch: int) -> list[int]:
    order: list[int] = torch.randperm(num_sequences, generator=_generator(seed, "order", epoch)).tolist()
    return order


def _generator(*key: object) -> torch.Generator:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
