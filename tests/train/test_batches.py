"""Which sequences a step reads, with which anchors, and that neither depends on how the work is split."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_run import LENGTHS, Sequences, make_run, make_sequences, read_batch, read_window, ready

from dspark.errors import RecordError
from dspark.layers.float8 import from_float8, to_float8
from dspark.record.order import ReadingOrder
from dspark.train.batches import (
    AHEAD,
    CPU,
    Batch,
    Draw,
    Share,
    copied_ahead,
    read_windows,
    window_draws,
)


def stream(num_sequences: int, seed: int, count: int) -> list[Draw]:
    order = ReadingOrder([0, num_sequences], seed)
    return [window_draws(order, place, Share(1, 1, 0, 1))[0][0] for place in range(count)]


def test_every_pass_reads_each_sequence_once_and_in_another_order() -> None:
    draws = stream(7, 0, 21)
    passes = [[index for number, index in draws if number == epoch] for epoch in range(3)]
    assert all(sorted(each) == list(range(7)) for each in passes)
    assert len({tuple(each) for each in passes}) == 3
    assert stream(7, 1, 7) != draws[:7]


@pytest.mark.parametrize(
    ("batch_size", "accumulation_steps", "world_size"), [(1, 4, 3), (3, 4, 1), (2, 1, 6), (12, 1, 1)]
)
def test_a_step_reads_the_same_sequences_however_it_is_split(
    batch_size: int, accumulation_steps: int, world_size: int
) -> None:
    shares = [Share(batch_size, accumulation_steps, rank, world_size) for rank in range(world_size)]
    assert {share.sequences_per_step for share in shares} == {12}
    found = [draw for share in shares for micro in window_draws(ReadingOrder([0, 7], 0), 24, share) for draw in micro]
    assert Counter(found) == Counter(stream(7, 0, 36)[24:])


def test_anchors_depend_on_seed_pass_and_sequence_only(tmp_path: Path) -> None:
    sequences = make_sequences()
    run = make_run(tmp_path)
    alone = read_batch(sequences, [(0, 3)], run)
    among = read_batch(sequences, [(0, 1), (0, 3)], run)
    assert torch.equal(among.anchors_A[among.starts_A > 0] - LENGTHS[1], alone.anchors_A)
    for draw, seed in (((1, 3), run.seed), ((0, 3), run.seed + 1)):
        other = read_batch(sequences, [draw], run.model_copy(update={"seed": seed}))
        assert not torch.equal(other.anchors_A, alone.anchors_A)


def test_a_batch_holds_its_sequences_in_one_row_without_padding(tmp_path: Path) -> None:
    sequences, run = make_sequences(), make_run(tmp_path)
    alone = [read_batch(sequences, [(0, index)], run) for index in (0, 1)]
    batch = read_batch(sequences, [(0, 0), (0, 1)], run)
    assert batch.indices == (0, 1)
    for name in ("ids_T", "taps_TLD", "last_hidden_TD"):
        assert torch.equal(getattr(batch, name), torch.cat([getattr(sequence, name) for sequence in sequences[:2]]))
    assert batch.positions_T.tolist() == [*range(LENGTHS[0]), *range(LENGTHS[1])]
    assert batch.starts_A.tolist() == [0] * len(alone[0].anchors_A) + [LENGTHS[0]] * len(alone[1].anchors_A)
    assert torch.equal(batch.anchors_A, torch.cat([alone[0].anchors_A, LENGTHS[0] + alone[1].anchors_A]))
    for name in ("labels_N", "valid_AK"):
        assert torch.equal(getattr(batch.slots, name), torch.cat([getattr(each.slots, name) for each in alone]))
    # The short sequence supervises six tokens: five may follow an anchor.
    assert len(alone[0].anchors_A) == 5
    assert len(alone[1].anchors_A) == run.train.num_anchors


def test_there_are_two_blocks_or_more_and_those_added_count_nothing(tmp_path: Path) -> None:
    sequences = make_sequences()
    for sequence in sequences:
        sequence.loss_mask_T[:] = False
    batch = read_batch(sequences, [(0, 0), (0, 2)], make_run(tmp_path))
    assert (batch.starts_A.tolist(), batch.anchors_A.tolist()) == ([0, 0], [0, 0])
    assert batch.slots.valid_AK.tolist() == [[False] * 4] * 2
    sequences[2].loss_mask_T[20:22] = True  # the first of them is an anchor
    batch = read_batch(sequences, [(0, 0), (0, 2)], make_run(tmp_path))
    assert (batch.starts_A.tolist(), batch.anchors_A.tolist()) == ([0, LENGTHS[0]], [0, LENGTHS[0] + 20])
    assert batch.slots.valid_AK.tolist() == [[False] * 4, [True, False, False, False]]


def test_float8_taps_are_what_they_were_rounded_to_when_the_draft_reads_them(tmp_path: Path) -> None:
    sequences, run = make_sequences(), make_run(tmp_path)
    rounded = Sequences(
        replace(each, taps_TLD=values_TLD, tap_scales_TL=scales_TL)
        for each in sequences
        for values_TLD, scales_TL in [to_float8(each.taps_TLD)]
    )
    plain, stored = (read_window(record, run, 0, Share(2, 2, 0, 1)) for record in (sequences, rounded))
    assert all(batch.taps_TLD.dtype == torch.float8_e4m3fn for batch in stored)
    for ours, theirs in zip(copied_ahead(map(ready, stored), CPU), plain, strict=True):
        assert ours.tap_scales_TL is None
        assert ours.taps_TLD.equal(from_float8(*to_float8(theirs.taps_TLD), torch.float32))
        assert not ours.taps_TLD.equal(theirs.taps_TLD)
        assert ours.last_hidden_TD.equal(theirs.last_hidden_TD)


def test_windows_and_batches_read_ahead_are_those_of_their_steps_in_order(tmp_path: Path) -> None:
    run, sequences, share = make_run(tmp_path), make_sequences(), Share(2, 2, 0, 1)
    starts = share.starts(8, num_steps=11)
    assert (starts[0], starts[-1], len(starts)) == (8, 48, 11)
    for start, (window, feed) in zip(starts, read_windows(sequences, run, share, starts, CPU), strict=True):
        alone, fed = read_window(sequences, run, start, share), [next(feed) for _ in window]
        for plan, batch, expected in zip(window, fed, alone, strict=True):
            assert plan.indices == batch.indices == expected.indices
            for found in (plan, batch):
                assert torch.equal(found.anchors_A, expected.anchors_A)
            assert torch.equal(batch.taps_TLD, expected.taps_TLD)
            assert torch.equal(batch.last_hidden_TD, expected.last_hidden_TD)


def test_a_cpu_is_fed_the_very_batches_of_the_windows_and_none_before_it_is_asked_for(tmp_path: Path) -> None:
    run, sequences = make_run(tmp_path), make_sequences()
    given, taken = read_window(sequences, run, 0, Share(2, 3, 0, 1)), []

    def reading() -> Iterator[Future[Batch]]:
        for batch in given:
            taken.append(batch)
            yield ready(batch)

    for count, batch in enumerate(copied_ahead(reading(), torch.device("cpu"))):
        assert batch is given[count]
        assert len(taken) == count + 1
    assert len(taken) == 3


def assert_no_thread() -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]


@pytest.mark.parametrize("part", ["text", "states"])
@pytest.mark.parametrize("bad", [0, 5, 9])
def test_what_cannot_be_read_ends_the_run_at_its_own_step_and_no_earlier(tmp_path: Path, part: str, bad: int) -> None:
    class Damaged(Sequences):
        def text(self, index: int) -> tuple[Tensor, Tensor]:
            if part == "text" and index == bad:
                raise RecordError("damaged")
            return super().__getitem__(index).ids_T, super().__getitem__(index).loss_mask_T

        def __getitem__(self, index: Any) -> Any:
            if index == bad:
                raise RecordError("damaged")
            return super().__getitem__(index)

    sequences, run, share = Damaged(make_sequences() * 2), make_run(tmp_path), Share(1, 2, 0, 1)
    order = [index for _, index in stream(len(sequences), run.seed, 14)]
    fed: list[int] = []

    def read_all() -> None:
        for window, feed in read_windows(sequences, run, share, share.starts(0, 7), CPU):
            for _ in window:
                fed.extend(next(feed).indices)

    with pytest.raises(RecordError, match="damaged"):
        read_all()
    assert_no_thread()
    place = order.index(bad)
    assert fed == order[: place if part == "states" else place // 2 * 2]


def test_no_more_than_a_few_batches_are_read_ahead_of_the_one_in_use(tmp_path: Path) -> None:
    """A step of 64 micro-steps would take gigabytes."""
    read: list[int] = []

    class Counting(Sequences):
        def text(self, index: int) -> tuple[Tensor, Tensor]:
            return super().__getitem__(index).ids_T, super().__getitem__(index).loss_mask_T

        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    sequences, run = Counting(make_sequences() * 4), make_run(tmp_path)
    share = Share(1, 20, 0, 1)
    ahead = read_windows(sequences, run, share, share.starts(0, 1), CPU)
    _, feed = next(ahead)
    for count in range(5):
        next(feed)
        time.sleep(0.05)
        assert count + 1 <= len(read) <= count + 1 + AHEAD
    ahead.close()
    time.sleep(0.05)
    assert len(read) <= 5 + AHEAD
    assert_no_thread()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has streams")
NUMBERS = 1 << 26


def large_batches(tmp_path: Path) -> list[Batch]:
    """Six batches, pinned, of which each takes a GPU milliseconds to get; number i is full of i."""
    gpu = torch.device("cuda")
    (batch,) = read_window(make_sequences(), make_run(tmp_path), 0, Share(1, 1, 0, 1), gpu)
    return [replace(batch, taps_TLD=torch.full((NUMBERS,), float(i)).pin_memory()) for i in range(6)]


@needs_gpu
def test_what_a_gpu_reads_early_and_late_in_a_micro_step_is_what_was_read_from_the_record(tmp_path: Path) -> None:
    given, found = large_batches(tmp_path), []
    feed = copied_ahead(map(ready, given), torch.device("cuda"))
    for _ in given:
        here = next(feed)
        early = here.taps_TLD[-1].clone()  # a copy that was not waited for is not there yet
        torch.cuda._sleep(40_000_000)
        found.append((early, here.taps_TLD.sum(), here.slots.labels_N.clone(), here.ids_T.clone()))
        del here  # memory that is filled again too early has the next one's numbers when the sum is made
    for i, (batch, (early, total, labels_N, ids_T)) in enumerate(zip(given, found, strict=True)):
        assert (float(early), float(total)) == (i, i * NUMBERS)
        assert torch.equal(labels_N.cpu(), batch.slots.labels_N)
        assert torch.equal(ids_T.cpu(), batch.ids_T)


@needs_gpu
def test_two_batches_are_on_the_gpu_at_a_time_however_far_the_host_is_ahead(tmp_path: Path) -> None:
    given = large_batches(tmp_path)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    feed = copied_ahead(map(ready, given), torch.device("cuda"))
    for _ in given:
        next(feed)
        torch.cuda._sleep(40_000_000)
    assert 1.9 < (torch.cuda.max_memory_allocated() - before) / (4 * NUMBERS) < 2.1
