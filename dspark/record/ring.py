"""Recording and training at once: a trainer says how far it has read, recorders keep the shards that it needs next."""

import json
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from dspark.errors import ConfigError, RecordError
from dspark.files import write_whole
from dspark.record.format import Manifest, shard_name
from dspark.record.order import SHUFFLED_SHARDS, ReadingOrder
from dspark.record.reader import is_there

WindowT = TypeVar("WindowT")
RING_FILE = "ring.json"
POLL_SECONDS, PATIENCE_SECONDS = 0.1, 30.0
"""How often a shard that is to come is looked for, and after how long the wait is told."""


class Ring:
    """The shards that are there at a time: ``capacity`` of those that training reads next, from its place on.

    Which ones those are follows from the seed and from the group that the trainer reads (``ring.json``): recorders
    write what is missing, the trainer deletes all others, and each may be stopped and started at any moment.
    """

    def __init__(self, folder: Path, manifest: Manifest, seed: int, capacity: int) -> None:
        self.folder, self.manifest, self.capacity = folder, manifest, capacity
        self.order = ReadingOrder(manifest.starts, seed)
        self._group = -1
        if seed != manifest.seed:
            raise RecordError(
                f"{folder}: seed is {manifest.seed} there and {seed} now; give the record's, or record anew"
            )

    def begin(self) -> None:
        """Say that this is a ring; where training had ended, that another one is to come.
        Raises: ConfigError for an ordinary record, of which training would delete what it has read.
        """
        path = self.folder / RING_FILE
        if not path.is_file() and any(self.folder.glob("shard-*")):
            raise ConfigError(
                f"{self.folder}: holds an ordinary record; leave out record.ring_shards, or give another folder"
            )
        if not path.is_file() or self.wanted() is None:
            write_whole(path, json.dumps({"group": 0}))

    def wanted(self) -> list[int] | None:
        """The shards that should be there, the next one first; None when training has ended.
        Raises: RecordError for a ring.json that is none.
        """
        path = self.folder / RING_FILE
        try:
            group = json.loads(path.read_bytes())["group"] if path.is_file() else 0
            return None if group is None else self.order.shards_from(int(group), self.capacity)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise RecordError(f"{path}: not what a trainer writes ({error}); delete it") from error

    def missing(self) -> list[int] | None:
        """Those of ``wanted`` that are not there."""
        numbers = self.wanted()
        return numbers and [number for number in numbers if not is_there(self.folder, self.manifest, number)]

    def check(self, starts: Iterable[int], num_sequences: int) -> None:
        """Raises: ConfigError when steps that wait for so many sequences, from these places of the stream on, need more
        shards at a time than the ring holds.
        """
        spans = (self.order.group_at(start + num_sequences - 1) - self.order.group_at(start) + 1 for start in starts)
        needed = max(spans, default=0) * SHUFFLED_SHARDS
        if self.capacity < min(needed, len(self.manifest.shards)):
            raise ConfigError(f"record.ring_shards must be at least {needed}: {num_sequences} sequences are read ahead")

    def move_to(self, place: int) -> None:
        """Training reads from this place of the stream on: shards that it does not need for now go."""
        group = self.order.group_at(place)
        if group != self._group:
            write_whole(self.folder / RING_FILE, json.dumps({"group": group}))
            self._group, wanted = group, set(self.order.shards_from(group, self.capacity))
            for number in range(len(self.manifest.shards)):
                if number not in wanted:
                    (self.folder / shard_name(number)).unlink(missing_ok=True)

    def accompany(self, windows: Generator[WindowT], starts: Sequence[int]) -> Generator[WindowT]:
        """The windows of steps from these places of the stream on; the ring goes along, and its recorders end behind
        the last one.
        """
        with closing(windows):
            for start in starts:
                self.move_to(start)
                yield next(windows)
        write_whole(self.folder / RING_FILE, json.dumps({"group": None}))


class Patience:
    """Waits for a shard that a recorder is to write, a moment a call; ``tell`` is told once of each long wait."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._is_over = tell, False
        self._since: dict[Path, float] = {}

    def interrupt(self, *_: object) -> None:
        """What a SIGINT is to do: the threads that wait end, and then the program. Raises: KeyboardInterrupt."""
        self._is_over = True
        raise KeyboardInterrupt

    def __call__(self, path: Path) -> None:
        if self._is_over:
            raise RecordError(f"{path}: was waited for when training was stopped")
        time.sleep(POLL_SECONDS)
        since = self._since.setdefault(path, time.monotonic())
        if time.monotonic() - since >= PATIENCE_SECONDS:
            self._since[path] = math.inf
            self._tell(f"waiting for {path}: it is written while dspark record runs with this config")
