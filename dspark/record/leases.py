"""Who records which shard: a file beside each, so that machines that share nothing but the folder do not repeat work.

What is written does not depend on it: two recorders of one shard write the same bytes, and each file appears whole.
"""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from dspark.record.format import shard_name

LEASE_SECONDS = 120.0
"""A lease that nobody touched for so long is its holder's no more."""


class Leases:
    """The leases in a record's folder as one process sees them.

    A holder touches its lease while it works. Others read no clock but their own: they note when they saw a lease
    change last, and take it over when that is ``seconds`` ago, at once where its holder was a process of this machine.
    """

    def __init__(self, folder: Path, seconds: float = LEASE_SECONDS) -> None:
        self.folder, self.seconds, self.name = folder, seconds, writer_name()
        self._seen: dict[int, tuple[int, float]] = {}
        self._held = set[int]()

    def take(self, index: int) -> bool:
        """Whether the shard is this process's to record now."""
        path = self._path(index)
        if index in self._held:  # a slow flush touches nothing
            return False
        if self._is_expired(index, path):
            path.unlink(missing_ok=True)
        try:
            path.symlink_to(self.name)  # the one way to make a name and what it says at once
        except FileExistsError:
            return False
        self._held.add(index)
        return True

    def touch(self, index: int) -> None:
        """Say that the shard is being worked on."""
        with suppress(FileNotFoundError):  # taken over: who did so writes the same bytes
            os.utime(self._path(index), follow_symlinks=False)

    def release(self, index: int) -> None:
        """Give the shard back, finished or not."""
        self._path(index).unlink(missing_ok=True)
        self._held.discard(index)

    def _is_expired(self, index: int, path: Path) -> bool:
        try:
            changed, holder = path.lstat().st_mtime_ns, str(path.readlink())
        except FileNotFoundError:
            return False
        if is_dead(holder):
            return True
        now = time.monotonic()
        if self._seen.get(index, (0, 0.0))[0] != changed:
            self._seen[index] = (changed, now)
        return now - self._seen[index][1] >= self.seconds

    def _path(self, index: int) -> Path:
        return self.folder / f".{shard_name(index)}.lease"


def writer_name() -> str:
    """Of this process among those that write into a folder that machines share, or containers of one name."""
    space = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()}.{space.stat().st_ino if space.exists() else 0}-{os.getpid()}"


def is_dead(name: str) -> bool:
    """Whether the writer of this name was a process of this machine, and is there no more."""
    host, _, process = name.rpartition("-")  # "a-1-17" is a process of the machine a-1, not of a
    try:
        if host == writer_name().rpartition("-")[0] and process.isdigit():
            os.kill(int(process), 0)
    except OSError as error:
        return not isinstance(error, PermissionError)
    return False
