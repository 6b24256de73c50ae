"""Files appear whole: written beside their place, flushed, renamed; and the checksum that says they still are."""

import hashlib
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file that is either absent (or as before) or complete. Its folder exists."""
    beside = partial_of(path)
    beside.write_text(text, encoding="utf-8")
    put_in_place(beside, path)


def partial_of(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(f".{path.name}.partial")


def put_in_place(beside: Path, path: Path) -> None:
    """Flush a finished file (or folder) to the disk and give it its name, replacing a file of that name."""
    flush(beside)
    beside.replace(path)


def flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def file_sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
