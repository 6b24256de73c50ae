"""A shard is one process's at a time, and nobody's for long after that process has ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.record.leases import Leases, is_dead, writer_name

HOST = writer_name().rpartition("-")[0]


def someone_else(folder: Path, index: int, holder: str) -> Path:
    path = folder / f".shard-{index:05d}.safetensors.lease"
    path.symlink_to(holder)
    return path


def test_a_lease_is_taken_once_and_given_back(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    assert leases.take(3)
    assert not Leases(tmp_path).take(3)
    assert Leases(tmp_path).take(4)
    leases.release(3)
    assert Leases(tmp_path).take(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".shard-00003.safetensors.lease",
        ".shard-00004.safetensors.lease",
    ]


def test_what_a_dead_process_of_this_machine_held_is_free_at_once(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = int(child.stdout)
    assert is_dead(f"{HOST}-{dead}")
    assert not is_dead(writer_name())
    assert not is_dead(f"another-{HOST}-{dead}")
    someone_else(tmp_path, 0, f"{HOST}-{dead}")
    assert Leases(tmp_path).take(0)
    someone_else(tmp_path, 1, f"{HOST}-{os.getppid()}")
    assert not Leases(tmp_path).take(1)


def test_another_machines_lease_is_free_when_it_has_not_changed_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    path, leases = someone_else(tmp_path, 0, "another-machine-17"), Leases(tmp_path, seconds=60)
    os.utime(path, (1, 1), follow_symlinks=False)  # its clock may say anything
    assert not leases.take(0)
    clock[0] += 59
    assert not leases.take(0)
    os.utime(path, (2, 2), follow_symlinks=False)
    clock[0] += 59
    assert not leases.take(0)
    clock[0] += 60
    assert leases.take(0)
    assert str(path.readlink()) == writer_name()


def test_a_holder_that_was_taken_for_dead_goes_on(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    assert leases.take(0)
    Leases(tmp_path).release(0)
    leases.touch(0)
    leases.release(0)
    assert list(tmp_path.iterdir()) == []


def test_a_process_does_not_take_its_own_shard_twice_however_long_it_flushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    leases = Leases(tmp_path, seconds=60)
    assert leases.take(0)
    assert not leases.take(0)
    clock[0] += 61
    assert not leases.take(0)
    leases.release(0)
    assert leases.take(0)
