"""A shard is there whole or not at all, and a run that was stopped anywhere ends with the same bytes."""

import os
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from recorded import contents, describe, make_sequences, record_everything

from dspark.errors import RecordError
from dspark.record import writer
from dspark.record.format import MANIFEST_FILE, read_manifest
from dspark.record.writer import missing_shards, start_record

CHILD = """
import sys, time
from pathlib import Path
from recorded import record_everything
from dspark.record import writer

name = sys.argv[2]
owner = writer if name == "put_in_place" else writer.ShardWriter
place = getattr(owner, name)

def stop(*arguments):
    is_here = "shard-00002" in str(arguments[1]) if name == "put_in_place" else arguments[0].index == 2
    if not is_here:
        return place(*arguments)
    if name == "_write":
        place(arguments[0], [arguments[1][0][:3]], arguments[2])
    print("here", flush=True)
    time.sleep(60)

setattr(owner, name, stop)
record_everything(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("place", ["_write", "finish", "put_in_place"])
def test_a_run_killed_while_writing_goes_on_to_the_same_bytes(record: Path, tmp_path: Path, place: str) -> None:
    """Killed in the middle of a sequence, before a shard's index, and between a shard and its name."""
    killed = tmp_path / "killed"
    folders = [Path(__file__).parent.parent, Path(__file__).parent.parent.parent]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(killed), place],
        env=os.environ | {"PYTHONPATH": ":".join(map(str, folders))},
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline().startswith(b"here")  # of two threads, perhaps
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    missing = missing_shards(killed, read_manifest(killed)) or []
    assert {2, 3} <= set(missing)
    assert list(killed.glob(".shard-00002*.partial"))
    assert list(killed.glob(".shard-00002*.lease"))
    assert record_everything(killed) == sum(read_manifest(killed).shards[number].num_sequences for number in missing)
    assert contents(killed) == contents(record)


def test_a_complete_record_is_not_computed_again(record: Path) -> None:
    before = contents(record)
    assert record_everything(record) == 0
    assert contents(record) == before


@pytest.mark.parametrize("damage", ["deleted", "truncated"])
def test_a_damaged_shard_is_written_again_to_the_same_bytes(record: Path, damage: str) -> None:
    before = contents(record)
    shard = record / "shard-00001.safetensors"
    if damage == "deleted":
        shard.unlink()
    else:
        os.truncate(shard, 100)
    assert record_everything(record) == 1
    assert contents(record) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_fingerprint", "9" * 64),
        ("tokenizer_fingerprint", "9" * 64),
        ("template_fingerprint", None),
        ("target_layer_ids", (1, 2)),
        ("dtype", "bfloat16"),
        ("text_sha256", "9" * 64),
        ("thinking", (True,)),
        ("temperatures", (0.7,)),
        ("answers", "given"),
        ("shard_tokens", 21),
        ("taps", "float8"),
        ("seed", 5),
    ],
)
def test_a_record_of_something_else_is_refused_and_nothing_is_lost(record: Path, key: str, value: Any) -> None:
    before = contents(record)
    found = getattr(read_manifest(record), key)
    with pytest.raises(RecordError) as error:
        record_everything(record, **{key: value})
    assert f"{key} {found!r} (now {value!r})" in str(error.value)
    assert f"{record}: " in str(error.value)
    assert "another record.folder" in str(error.value)
    assert contents(record) == before


def test_another_path_to_the_target_or_newer_packages_may_go_on(record: Path) -> None:
    before = contents(record)
    assert record_everything(record, target="./table", versions={"torch": "3"}) == 0
    assert contents(record) == before


def test_other_texts_are_told_by_their_shards(record: Path) -> None:
    with pytest.raises(RecordError, match="its shards have other sizes"):
        start_record(record, describe(make_sequences((9, 4, 9))))


def test_a_full_disk_is_foreseen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(writer, "disk_usage", lambda _: usage(2900, 0, 2900))
    with pytest.raises(RecordError, match=r"needs about .* GB more, .* GB are free"):
        start_record(tmp_path / "record", describe(make_sequences()))
    assert contents(tmp_path / "record") == {}
    start_record(tmp_path / "record", describe(make_sequences()), capacity_shards=1)


@pytest.mark.parametrize("where", ["pwrite", "fdatasync"])
def test_a_disk_that_fails_keeps_what_is_complete(
    tmp_path: Path, record: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Also where it says so once, at a flush before the last."""
    folder, works, failures = tmp_path / "failing", getattr(os, where), iter([OSError(28, "No space left on device")])

    def fails(file: int, *rest: Any) -> Any:
        if "shard-00002" in os.readlink(f"/proc/self/fd/{file}"):
            for failure in failures:
                raise failure
        return works(file, *rest)

    monkeypatch.setattr(os, where, fails)
    with pytest.raises(RecordError, match=r"shard-00002.*No space left on device.*shards that are complete stay"):
        record_everything(folder)
    whole = {f"shard-{number:05d}.safetensors" for number in (0, 1, 3)}
    assert set(contents(folder)) <= {MANIFEST_FILE, *whole}
    monkeypatch.setattr(os, where, works)
    assert record_everything(folder) >= 2
    assert contents(folder) == contents(record)
