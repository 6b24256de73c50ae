"""A record, opened at random: one range of a shard for a sequence, whose checksum is verified before it is used."""

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from dspark.errors import RecordError
from dspark.record.format import MANIFEST_FILE, Manifest, Span, front_bytes, read_manifest, shard_header, shard_name
from dspark.types import RecordedSequence

Wait = Callable[[Path], None]
OPEN_SHARDS = 64
"""Shards whose files and indices are kept open."""


@dataclass(frozen=True)
class ShardIndex:
    """An open shard: where each sequence begins in its file (int64), and how much each holds."""

    number: int
    file: BinaryIO
    begins_S: NDArray[np.int64]
    num_tokens_S: NDArray[np.int32]
    num_supervised_S: NDArray[np.int32]
    checksums_S: NDArray[np.uint64]


class RecordReader:
    """The sequences of a record: ``len(reader)``, ``reader[i]``. Only the asked-for sequence is read from disk.

    ``wait`` is called with a shard that is not there yet, until it is. Without it the whole record must be there; or
    with ``is_whole`` false only what is read.
    Raises: RecordError when the folder holds no record, an unfinished one, or a damaged manifest.
    """

    def __init__(self, folder: Path | str, wait: Wait | None = None, *, is_whole: bool = True) -> None:
        self.folder = Path(folder)
        while wait and not (self.folder / MANIFEST_FILE).is_file():
            wait(self.folder / MANIFEST_FILE)
        self.manifest = read_manifest(self.folder)
        self._wait = wait
        self._shards: OrderedDict[int, ShardIndex] = OrderedDict()
        self._opening = Lock()
        num_shards = len(self.manifest.shards)
        asked = range(0 if wait or not is_whole else num_shards)
        missing = sum(not is_there(self.folder, self.manifest, number) for number in asked)
        if missing:
            done = f"{num_shards - missing} of {num_shards} shards are recorded"
            raise RecordError(f"{self.folder}: {done}; run dspark record again to finish")

    @property
    def starts(self) -> list[int]:
        """The number of the first sequence of every shard, and that of all."""
        return self.manifest.starts

    def members(self, number: int) -> range:
        """The sequences of a shard."""
        return range(*self.starts[number : number + 2])

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> RecordedSequence:
        """Sequence ``index`` (0-based). Raises: IndexError; RecordError naming a truncated or altered shard."""
        fields = self.fields(index)
        loss_mask_T, taps_TLD, hidden_MD = (fields[key] for key in ("loss_mask_T", "taps_TLD", "last_hidden_MD"))
        last_hidden_TD = hidden_MD.new_zeros(len(loss_mask_T), hidden_MD.shape[1])
        last_hidden_TD[:-1][loss_mask_T[1:]] = hidden_MD
        scales_TL = fields.get("tap_scales_TL")
        return RecordedSequence(fields["ids_T"].long(), loss_mask_T, taps_TLD, last_hidden_TD, scales_TL)

    def text(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids_T and loss_mask_T of a sequence, without its states and unverified. Raises: as ``reader[index]``."""
        shard, row, spans = self._find(index)
        wanted = (spans[name] for name in ("ids_T", "loss_mask_T"))
        ids_T, loss_mask_T = (self._read(shard, row, s.begin, s.end).view(s.dtype) for s in wanted)
        return ids_T.long(), loss_mask_T

    def fields(self, index: int) -> dict[str, torch.Tensor]:
        """Every field of a sequence, as ``format`` says. Raises: as ``reader[index]``."""
        shard, row, spans = self._find(index)
        content_X = self._read(shard, row, 0, max(span.end for span in spans.values()))
        if xxh3_64_intdigest(content_X.numpy().data) != shard.checksums_S[row]:
            raise self._damaged(shard.number, f"sequence {index} has not the bytes that were written")
        return {name: content_X[s.begin : s.end].view(s.dtype).view(s.shape) for name, s in spans.items()}

    def _find(self, index: int) -> tuple[ShardIndex, int, dict[str, Span]]:
        """The shard that holds sequence ``index``, its row there, and its fields."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.folder}: sequence {index} of {len(self)}")
        number = bisect_right(self.starts, index) - 1
        shard, row = self._open(number), index - self.starts[number]
        return shard, row, self.manifest.fields(int(shard.num_tokens_S[row]), int(shard.num_supervised_S[row]))

    def _read(self, shard: ShardIndex, row: int, begin: int, end: int) -> torch.Tensor:
        content_X, place = torch.empty(end - begin, dtype=torch.uint8), int(shard.begins_S[row]) + begin
        view, done = content_X.numpy().data, 0
        while done < len(view):  # the system hands out 2 GB at a time
            if not (count := os.preadv(shard.file.fileno(), [view[done:]], place + done)):
                raise self._damaged(shard.number, "it is shorter than it was")
            done += count
        return content_X

    def _open(self, number: int) -> ShardIndex:
        path = self.folder / shard_name(number)
        while self._wait and number not in self._shards and not is_there(self.folder, self.manifest, number):
            self._wait(path)
        with self._opening:  # threads read, and each shard is opened once
            if number in self._shards:
                self._shards.move_to_end(number)
                return self._shards[number]
            if not path.is_file():
                raise self._damaged(number, "no such file")
            if self._wait:  # what training has deleted takes room while it is open
                for gone in [each for each in self._shards if not is_there(self.folder, self.manifest, each)]:
                    del self._shards[gone]
            shard = self._shards[number] = self._read_index(number, path)
            if len(self._shards) > OPEN_SHARDS:
                self._shards.popitem(last=False)  # whoever reads in it still holds its file
            return shard

    def _read_index(self, number: int, path: Path) -> ShardIndex:
        manifest = self.manifest
        num_sequences, num_tokens, num_supervised = manifest.shards[number]
        file = path.open("rb", buffering=0)
        head = file.read(front_bytes(num_sequences))
        header, content = head[: front_bytes(0)], head[front_bytes(0) :]
        is_whole = is_there(self.folder, manifest, number)
        if not is_whole or header != shard_header(manifest, number, xxh3_64_hexdigest(content)):
            raise self._damaged(number, "its size, header or index is not what the manifest says")
        checksums_S = np.frombuffer(content, np.uint64, num_sequences)
        num_tokens_S = np.frombuffer(content, np.int32, num_sequences, 8 * num_sequences)
        num_supervised_S = np.frombuffer(content, np.int32, num_sequences, 12 * num_sequences)
        if (num_tokens_S.sum(dtype=np.int64), num_supervised_S.sum(dtype=np.int64)) != (num_tokens, num_supervised):
            raise self._damaged(number, "its sequences are not those of the manifest")
        sizes = zip(num_tokens_S.tolist(), num_supervised_S.tolist(), strict=True)
        lengths = [manifest.sequence_bytes(*size) for size in sizes]
        begins_S = len(head) + np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        return ShardIndex(number, file, begins_S, num_tokens_S, num_supervised_S, checksums_S)

    def _damaged(self, number: int, found: str) -> RecordError:
        hint = "delete it, and a recorder writes it anew" if self._wait else "dspark record --repair records it anew"
        return RecordError(f"{self.folder / shard_name(number)}: {found}; {hint}")


def is_there(folder: Path, manifest: Manifest, number: int) -> bool:
    """Whether a shard's file is there in full length; a shard appears whole."""
    path = folder / shard_name(number)
    return path.is_file() and path.stat().st_size == manifest.shard_bytes(number)
