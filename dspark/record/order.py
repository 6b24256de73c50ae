"""In which order a record is read: shards drawn anew for every pass, and sequences among those of a few shards."""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SHUFFLED_SHARDS = 8
"""Shards whose sequences are read in one drawn order; the record itself was written in a drawn order, too."""


class ReadingOrder:
    """The endless stream of a record's sequences: pass after pass, each of them once a pass.

    A pass draws an order of the shards, cuts it into groups, and draws an order of each group's sequences, so whoever
    reads the stream needs the shards of one group or two at a time. ``starts``: the number of the first sequence of
    every shard, and that of all (``Manifest.starts``).
    """

    def __init__(self, starts: Sequence[int], seed: int) -> None:
        self.starts, self.seed = starts, seed
        self.num_sequences, self.num_shards = starts[-1], len(starts) - 1
        self.groups_a_pass = -(-self.num_shards // SHUFFLED_SHARDS)
        self._pass = lru_cache(maxsize=4)(self._draw_pass)
        self._group = lru_cache(maxsize=4)(self._draw_group)

    def place(self, place: int) -> tuple[int, int]:
        """The pass, from 0, and the sequence that stand at a place of the stream."""
        epoch, rest = divmod(place, self.num_sequences)
        ends = self._pass(epoch)[1]
        group = bisect_right(ends, rest)
        return epoch, int(self._group(epoch, group)[rest - (ends[group - 1] if group else 0)])

    def group_at(self, place: int) -> int:
        """The group, counted over all passes, that a place of the stream lies in."""
        epoch, rest = divmod(place, self.num_sequences)
        return epoch * self.groups_a_pass + bisect_right(self._pass(epoch)[1], rest)

    def shards_from(self, group: int, number: int) -> list[int]:
        """The first ``number`` different shards of a group, counted over all passes, and of those behind it."""
        found: dict[int, None] = {}
        number = min(number, self.num_shards)
        while len(found) < number:
            epoch, first = divmod(group, self.groups_a_pass)
            shards = self._pass(epoch)[0]
            found |= dict.fromkeys(shards[first * SHUFFLED_SHARDS : (first + 1) * SHUFFLED_SHARDS])
            group += 1
        return list(found)[:number]

    def _draw_pass(self, epoch: int) -> tuple[list[int], list[int]]:
        """The shards in their order, and where in the pass each group ends."""
        shards = torch.randperm(self.num_shards, generator=generator_of(self.seed, "shards", epoch)).tolist()
        sizes = [self.starts[shard + 1] - self.starts[shard] for shard in shards]
        ends = list(accumulate(sizes))
        return shards, [*ends[SHUFFLED_SHARDS - 1 :: SHUFFLED_SHARDS], *ends[-1:]][: self.groups_a_pass]

    def _draw_group(self, epoch: int, group: int) -> Tensor:
        shards = self._pass(epoch)[0][group * SHUFFLED_SHARDS : (group + 1) * SHUFFLED_SHARDS]
        members_S = torch.cat([torch.arange(self.starts[shard], self.starts[shard + 1]) for shard in shards])
        return members_S[torch.randperm(len(members_S), generator=generator_of(self.seed, "order", epoch, group))]


def drawn_order(num_sequences: int, seed: int) -> NDArray[np.int64]:
    """In which order a record holds sequences: any few shards are like all others, however the sources were sorted."""
    return torch.randperm(num_sequences, generator=generator_of(seed, "record")).numpy()


def generator_of(*key: object) -> torch.Generator:
    """A generator that depends on the key alone."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
