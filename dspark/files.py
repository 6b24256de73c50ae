"""Files appear whole: written beside their place, flushed, renamed; and the checksum that says they still are."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dspark.errors import ConfigError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file (a text in UTF-8) that is either absent (or as before) or complete. Its folder exists.
    Raises: ConfigError where something lies that is no file, which the renaming would put an end to.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no file: nothing was written; give another path")
    beside = partial_of(path)
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    put_in_place(beside, path)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; what the disk refuses is an OSError that names it, as with any other file."""
    try:
        save_file(dict(tensors), path, metadata)
        path.chmod(0o644)  # as other files; the library lets only the owner read
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error


def partial_of(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(f".{path.name}.partial")


def put_in_place(beside: Path, path: Path) -> None:
    """Flush a finished file (or folder) to the disk and give it its name, replacing a file of that name."""
    flush(beside)
    beside.replace(path)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder beside ``folder`` to write files into; it then takes that place, and a former one's, whole.
    A kill at any moment leaves what was there before, or all of the new; for an instant the former one's name is
    .NAME.former, until this is called again.
    """
    partial, former = partial_of(folder), folder.with_name(f".{folder.name}.former")
    if former.exists() and not folder.exists():  # killed between the two renames
        former.rename(folder)
    for left_over in (partial, former):
        shutil.rmtree(left_over, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for path in [*partial.iterdir(), partial]:
        flush(path)
    if folder.exists():
        folder.rename(former)
    partial.rename(folder)
    flush(folder.parent)
    shutil.rmtree(former, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def check_writable(folder: Path, option: str) -> None:
    """Make the folder, before the hours of work. Raises: ConfigError when nothing can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option}: nothing can be written in {folder}; choose another folder")


@contextmanager
def claim(folder: Path, *, is_shared: bool = False) -> Iterator[None]:
    """Make the folder and be its only writer until the block ends, or one of those that share it.
    Raises: ConfigError when another one writes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(f"{folder}: another process writes here; wait for it, or choose another folder") from error
    finally:
        os.close(handle)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises: ConfigError when the file holds something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def differences(made: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What of ``now`` is not as something that lies there was ``made``, in words; empty where all is the same."""
    return ", ".join(f"{key} {made[key]!r} (now {now[key]!r})" for key in now if made[key] != now[key])


def file_sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
