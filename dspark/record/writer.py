"""A record being written: each shard appears whole, and a recorder that was stopped, or another one, goes on."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from shutil import disk_usage

import numpy as np
from torch import Tensor, uint8
from xxhash import xxh3_64, xxh3_64_hexdigest

from dspark.errors import RecordError
from dspark.files import differences, put_in_place
from dspark.record.format import MANIFEST_FILE, Manifest, front_bytes, read_manifest, shard_header, shard_name
from dspark.record.leases import Leases, is_dead, writer_name
from dspark.record.reader import is_there


class ShardWriter:
    """One shard on its way. ``sizes``: tokens and predicted ones of its sequences, which threads may add in any order;
    ``finish`` gives the file its name.

    Every process writes into a file of its own beside it, so two that record the same shard do not meet: the later one
    replaces it by the same bytes. Raises: RecordError when the disk refuses; nothing of the shard is left then.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, leases: Leases, index: int, sizes: Sequence[tuple[int, int]]
    ) -> None:
        self.path, self.manifest, self.index, self.leases = folder / shard_name(index), manifest, index, leases
        self.sizes, self._checksums_S = sizes, np.zeros(len(sizes), np.uint64)
        assert (len(sizes), *map(sum, zip(*sizes, strict=True))) == manifest.shards[index]
        lengths = (manifest.sequence_bytes(*size) for size in sizes)
        self._begins = list(accumulate(lengths, initial=front_bytes(len(sizes))))
        self._beside = self.path.with_name(f".{self.path.name}.{writer_name()}.partial")
        with self._telling():
            self._file = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def add(self, row: int, fields: Mapping[str, Tensor]) -> None:
        """The fields of a sequence of the shard, on the host; shapes and dtypes as ``Manifest.fields``."""
        checksum, parts = xxh3_64(), []
        for name, span in self.manifest.fields(*self.sizes[row]).items():
            values = fields[name]
            assert (values.dtype, tuple(values.shape)) == (span.dtype, span.shape), name
            parts.append(values.contiguous().reshape(-1).view(uint8).numpy().data)
            checksum.update(parts[-1])
        self._write(parts, self._begins[row])
        self._checksums_S[row] = checksum.intdigest()

    def flush(self) -> None:
        """Wait until the disk holds what was added."""
        with self._telling():
            os.fdatasync(self._file)

    def finish(self) -> None:
        """Write header and index, flush, and put the file in its place."""
        index = self._checksums_S.tobytes() + np.array(self.sizes, np.int32).T.tobytes()
        header = shard_header(self.manifest, self.index, xxh3_64_hexdigest(index))
        self._write([memoryview(header + index)], 0)
        with self._telling():
            put_in_place(self._beside, self.path)
            os.close(self._file)
        self.leases.release(self.index)

    def discard(self) -> None:
        """Leave nothing of a shard that was not finished."""
        with suppress(OSError):
            os.close(self._file)
        self._beside.unlink(missing_ok=True)
        self.leases.release(self.index)

    def _write(self, parts: list[memoryview], begin: int) -> None:
        with self._telling():
            for part in parts:
                while part:
                    written = os.pwrite(self._file, part, begin)  # two GB at a time, or what there is room for
                    begin, part = begin + written, part[written:]

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Raises: RecordError in place of what the disk refuses."""
        try:
            yield
        except OSError as error:
            self._beside.unlink(missing_ok=True)
            hint = "the shards that are complete stay: make room, then run dspark record again to go on"
            raise RecordError(f"{self.path}: cannot be written ({error}); {hint}") from error


def start_record(folder: Path, description: Manifest, capacity_shards: int = 0) -> None:
    """Write the manifest, or find the very same in ``folder``, and what killed processes of this machine left there.
    ``capacity_shards``: how many are there at a time, 0 for all.
    Raises: RecordError naming every difference, or when the disk cannot hold what is to come.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = check_same(folder, description) if (folder / MANIFEST_FILE).exists() else description
    sizes = [found.shard_bytes(index) for index in range(len(found.shards))]
    there_bytes = sum(size for index, size in enumerate(sizes) if is_there(folder, found, index))
    needed_bytes = sum(sorted(sizes)[-capacity_shards:]) - there_bytes
    check_room(folder, needed_bytes, "needs about")
    if found is description:
        beside = folder / f".{MANIFEST_FILE}.{writer_name()}.partial"  # several may begin it at once
        beside.write_text(found.model_dump_json())
        put_in_place(beside, folder / MANIFEST_FILE)
    _remove_leftovers(folder, found)


def check_room(folder: Path, needed_bytes: float, needs: str) -> None:
    """Raises: RecordError when the disk of ``folder``, which need not be there yet, does not hold so much more."""
    free_bytes = disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
    if needed_bytes > free_bytes:
        raise RecordError(
            f"{folder}: {needs} {needed_bytes / 1e9:.1f} GB more, {free_bytes / 1e9:.1f} GB are free; give this "
            "run another record.folder, fewer conversations (data.max_conversations), fewer draft.target_layer_ids, "
            "record.taps=float8, or record.ring_shards to train at once"
        )


def check_same(folder: Path, description: Manifest) -> Manifest:
    """The manifest there. Raises: RecordError naming every difference from what it should be."""
    found = read_manifest(folder)
    told = differences(found.model_dump(), description.model_dump(exclude={"versions", "target", "shards"}))
    if found.shards != description.shards:
        told = f"{told}; its shards have other sizes".removeprefix("; ")
    if told:
        raise RecordError(f"{folder}: holds another record: {told}; give another record.folder")
    return found


def missing_shards(folder: Path, manifest: Manifest) -> list[int] | None:
    """The shards that are not there yet; None when all are. Whatever has a shard's name is whole."""
    there = set(os.listdir(folder))
    return [index for index in range(len(manifest.shards)) if shard_name(index) not in there] or None


def _remove_leftovers(folder: Path, manifest: Manifest) -> None:
    """Shards that were cut off, and files that killed processes of this machine were at."""
    leases = Leases(folder)
    for index in range(len(manifest.shards)):
        if is_there(folder, manifest, index):
            leases.release(index)  # its holder was killed at its last word
        else:
            (folder / shard_name(index)).unlink(missing_ok=True)
    host = writer_name().rpartition("-")[0]
    for path in folder.glob(f".*.{host}-*.partial"):
        if is_dead(host + path.stem.rpartition(f".{host}")[2]):
            path.unlink(missing_ok=True)
