"""A record being written: shards appear whole, the manifest after each of them, and a stopped run goes on."""

from pathlib import Path
from shutil import disk_usage

import torch

from dspark.errors import RecordError
from dspark.files import file_sha256, partial_of, put_in_place, save_tensors, write_whole
from dspark.record.format import MANIFEST_FILE, Manifest, ShardEntry, read_manifest, shard_name


class RecordWriter:
    """Writes the shards of one record. ``manifest`` always says what is complete on disk."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    def has_shard(self, index: int) -> bool:
        """Whether shard ``index`` is in the manifest and its file is there in full length."""
        if index >= len(self.manifest.shards):
            return False
        entry = self.manifest.shards[index]
        path = self.folder / entry.file
        return path.is_file() and path.stat().st_size == entry.num_bytes

    def write_shard(self, index: int, tensors: dict[str, torch.Tensor]) -> None:
        """Write one shard whole (shapes: see ``format``) and only then enter it in the manifest.
        Shards come in order, or replace one whose file was deleted. Raises: RecordError when the disk refuses.
        """
        shards = self.manifest.shards
        assert index <= len(shards)
        path = self.folder / shard_name(index)
        beside = partial_of(path)
        try:
            save_tensors(tensors, beside)
            sha256 = file_sha256(beside)
            put_in_place(beside, path)
            entry = ShardEntry(
                file=path.name,
                sha256=sha256,
                num_bytes=path.stat().st_size,
                num_sequences=len(tensors["offsets_S1"]) - 1,
                num_tokens=len(tensors["ids_N"]),
                num_supervised=len(tensors["label_logprobs_M"]),
            )
            shards = (*shards[:index], entry, *shards[index + 1 :])
            manifest = Manifest.model_validate(self.manifest.model_dump() | {"shards": shards})
            write_whole(self.folder / MANIFEST_FILE, manifest.model_dump_json(indent=1))
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise RecordError(
                f"{path}: cannot be written ({error}); {len(self.manifest.shards)} shards are complete and stay: "
                "make room, then run dspark record again to go on"
            ) from error
        self.manifest = manifest


def open_writer(folder: Path, description: Manifest) -> RecordWriter:
    """Start a record (``description``: no shards), or go on with the one in ``folder`` made from the very same things.
    Raises: RecordError naming every difference, or when the disk cannot hold what is to come.
    """
    assert not description.shards
    folder.mkdir(parents=True, exist_ok=True)
    is_new = not (folder / MANIFEST_FILE).exists()
    found = description if is_new else read_manifest(folder)
    old, new = (manifest.model_dump(exclude={"shards", "versions", "target"}) for manifest in (found, description))
    differing = [f"{key} is {old[key]!r} there and {new[key]!r} now" for key in old if old[key] != new[key]]
    if differing:
        raise RecordError(f"{folder}: holds another record: {'; '.join(differing)}; give another record.folder")
    needed_bytes = found.num_bytes - sum(shard.num_bytes for shard in found.shards)
    free_bytes = disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise RecordError(
            f"{folder}: needs about {needed_bytes / 1e9:.1f} GB more, {free_bytes / 1e9:.1f} GB are free; give this "
            "run another record.folder, fewer conversations (data.max_conversations) or fewer draft.target_layer_ids"
        )
    if is_new:
        write_whole(folder / MANIFEST_FILE, found.model_dump_json(indent=1))
    return RecordWriter(folder, found)
