"""Every pass reads each sequence once, in another order, and needs a few shards at a time."""

import pytest
from recorded import describe, make_sequences

from dspark.record import order as module
from dspark.record.order import ReadingOrder, drawn_order

STARTS = [0, 3, 4, 9, 11, 12, 20, 21]


@pytest.fixture(autouse=True)
def _three_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHUFFLED_SHARDS", 3)


def test_every_pass_reads_each_sequence_once_and_in_another_order() -> None:
    order = ReadingOrder(STARTS, 0)
    passes = [[order.place(21 * epoch + place) for place in range(21)] for epoch in range(3)]
    for epoch, each in enumerate(passes):
        assert {found for found, _ in each} == {epoch}
        assert sorted(index for _, index in each) == list(range(21))
    orders = [tuple(index for _, index in each) for each in passes]
    assert len({*orders, tuple(range(21))}) == 4
    other = ReadingOrder(STARTS, 1)
    assert [other.place(place)[1] for place in range(21)] != list(orders[0])


def test_the_order_of_a_record_is_drawn_by_the_seed_and_leaves_nothing_out() -> None:
    orders = [drawn_order(20, seed).tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert all(sorted(each) == list(range(20)) for each in orders)


def test_a_group_of_shards_is_read_whole_before_the_next_begins() -> None:
    order = ReadingOrder(STARTS, 0)
    shard_of = {index: number for number in range(7) for index in range(STARTS[number], STARTS[number + 1])}
    for place in range(63):
        group = order.group_at(place)
        assert shard_of[order.place(place)[1]] in order.shards_from(group, 3)
        assert group >= order.group_at(max(0, place - 1))
    assert order.group_at(62) == 8
    mixed = [shard_of[order.place(place)[1]] for place in range(12)]
    assert sorted(mixed) != mixed


def test_the_shards_that_come_next_are_told_across_a_pass() -> None:
    order = ReadingOrder(STARTS, 0)
    assert sorted(order.shards_from(0, 99)) == list(range(7))
    here, behind = order.shards_from(2, 1), order.shards_from(3, 3)
    assert order.shards_from(2, 4)[:1] == here
    assert [shard for shard in order.shards_from(2, 7) if shard in behind][:1] == [
        shard for shard in behind if shard not in here
    ][:1]


def test_one_shard_is_an_order_too() -> None:
    manifest = describe(make_sequences(), shard_tokens=1000)
    order = ReadingOrder(manifest.starts, 0)
    assert sorted(order.place(place)[1] for place in range(7)) == list(range(7))
    assert [order.group_at(place) for place in (0, 6, 7)] == [0, 0, 1]
