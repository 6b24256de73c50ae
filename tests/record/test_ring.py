"""A few shards are there at a time, always those that training reads next."""

from functools import partial
from pathlib import Path

import pytest
from recorded import contents, describe, make_sequences, make_target

from dspark.errors import ConfigError, RecordError
from dspark.record import order as order_module
from dspark.record import ring as module
from dspark.record.capture import capture, take_turns
from dspark.record.leases import Leases
from dspark.record.reader import RecordReader
from dspark.record.ring import RING_FILE, Patience, Ring
from dspark.record.writer import ShardWriter, missing_shards, start_record

SEQUENCES = make_sequences((9, 4, 30, 7, 12, 2, 8, 15, 11, 5))


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ring:
    for where in (order_module, module):
        monkeypatch.setattr(where, "SHUFFLED_SHARDS", 2)
    manifest = describe(SEQUENCES, shard_tokens=10, seed=3)
    assert len(manifest.shards) == 9
    start_record(tmp_path, manifest)
    return Ring(tmp_path, manifest, seed=3, capacity=4)


def record_missing(ring: Ring) -> None:
    """As a recorder does until nothing is missing."""
    leases = Leases(ring.folder)

    def missing() -> list[int] | None:
        return ring.missing() or None

    turns = take_turns(missing, leases, 0.01)
    capture(
        make_target(), SEQUENCES, ring.manifest, turns,
        partial(ShardWriter, ring.folder, ring.manifest, leases), lambda *_: None,
    )  # fmt: skip


def test_training_finds_every_sequence_of_two_passes_and_few_shards_lie_there_at_a_time(ring: Ring) -> None:
    manifest, most = ring.manifest, 0
    reader = RecordReader(ring.folder, lambda path: record_missing(ring))
    steps = ring.accompany((step for step in range(20)), range(20))
    for place in range(20):
        assert next(steps) == place
        _, index = ring.order.place(place)
        assert reader[index].ids_T.equal(SEQUENCES[index].ids_T)
        there = {n for n in range(9) if n not in (missing_shards(ring.folder, manifest) or ())}
        assert there <= set(ring.wanted() or ())
        most = max(most, len(there))
    assert most == ring.capacity
    assert ring.missing() is not None
    assert next(steps, None) is None
    assert ring.missing() is None


def test_a_recorder_that_comes_first_begins_with_what_training_reads_first(ring: Ring) -> None:
    assert ring.wanted() == ring.order.shards_from(0, 4)
    record_missing(ring)
    assert sorted(path.name for path in ring.folder.glob("shard*")) == sorted(
        f"shard-{number:05d}.safetensors" for number in ring.order.shards_from(0, 4)
    )
    before = contents(ring.folder)
    ring.move_to(0)
    assert {name: content for name, content in contents(ring.folder).items() if name != RING_FILE} == before


def test_steps_that_need_more_shards_than_there_are_at_a_time_are_refused(ring: Ring) -> None:
    ring.check(range(0, 20, 2), 2)
    with pytest.raises(ConfigError, match=r"record.ring_shards must be at least [6-9]: 6 sequences are read ahead"):
        ring.check(range(0, 20, 6), 6)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"group": "x"}', '{"place": 1}'])
def test_a_damaged_ring_file_is_told(ring: Ring, content: str) -> None:
    (ring.folder / RING_FILE).write_text(content)
    with pytest.raises(RecordError, match=r"ring.json: not what a trainer writes .*; delete it"):
        ring.wanted()


def test_a_long_wait_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = [0.0], list[str]()
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    patience = Patience(told.append)
    for _ in range(1000):
        patience(tmp_path / "shard-00000.safetensors")
    assert len(told) == 1
    assert "shard-00000.safetensors: it is written while dspark record runs" in told[0]


def test_a_shard_that_training_deleted_is_not_kept_open(ring: Ring) -> None:
    reader = RecordReader(ring.folder, lambda path: record_missing(ring))
    for place in range(10):
        ring.move_to(place)
        reader[ring.order.place(place)[1]]
        assert set(reader._shards) <= set(ring.wanted() or ())


def test_an_ordinary_record_is_no_ring(ring: Ring) -> None:
    record_missing(ring)
    with pytest.raises(ConfigError, match=r"holds an ordinary record; leave out record.ring_shards"):
        ring.begin()
    for path in ring.folder.glob("shard-*"):
        path.unlink()
    ring.begin()
    record_missing(ring)
    ring.begin()
    ring.move_to(12)
    before = ring.wanted()
    ring.begin()
    assert ring.wanted() == before
    assert list(ring.accompany((step for step in range(1)), range(1))) == [0]
    assert ring.wanted() is None
    ring.begin()
    assert ring.wanted() == ring.order.shards_from(0, 4)


def test_another_seed_than_the_records_is_refused_before_anything_goes(ring: Ring) -> None:
    with pytest.raises(RecordError, match="seed is 3 there and 4 now"):
        Ring(ring.folder, ring.manifest, seed=4, capacity=4)
