"""A row says where the time went: sleeps planted in each part of a step come out under its name."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_run import Sequences, make_learner, make_sequences

from dspark.train import log
from dspark.train.batches import CPU, Share, read_windows
from dspark.train.log import KINDS, PooledMetrics, Row, Stopwatch
from dspark.train.step import train_step

SECONDS = 0.1


class SlowRecord(Sequences):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(SECONDS)
        return super().__getitem__(index)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(SECONDS)
        return gradient


def row_with_a_sleep_in(part: str, folder: Path) -> Row:
    """The row of two steps of a run that is slow in one part."""
    learner = make_learner(folder)
    record = SlowRecord(make_sequences()) if part == "data_wait" else make_sequences()
    if part == "forward":
        learner.draft.fc.register_forward_pre_hook(lambda *_: time.sleep(SECONDS))
    elif part == "backward":
        learner.draft.fc.register_forward_hook(lambda _, __, output: SlowBackward.apply(output))
    elif part == "optimizer":
        learner.optimizer.optimizer.register_step_pre_hook(lambda *_: time.sleep(8 * SECONDS))
    share = Share(1, 4, 0, 1)
    metrics = PooledMetrics(learner.stopwatch)
    windows = read_windows(record, learner.run, share, share.starts(0, num_steps=2), CPU)
    for step, (window, feed) in enumerate(windows):
        metrics.add(train_step(learner, window, step, feed))
        if part == "rest":
            time.sleep(4 * SECONDS)
        learner.stopwatch.lap()
    return metrics.row(step=2, rate=0.5)


@pytest.mark.parametrize("part", [*KINDS[:-1], "rest"])
def test_a_planted_sleep_is_found_where_it_was_planted(tmp_path: Path, part: str) -> None:
    row = row_with_a_sleep_in(part, tmp_path)
    shares = {name: value for name, value in row.items() if name.endswith("_share")}
    assert set(shares) == {f"{kind}_share" for kind in KINDS[:-1]}
    assert all(0 <= share <= 1 for share in shares.values())
    assert sum(shares.values()) <= 1 + 1e-9
    # The first window's four sequences are read one after another, the second's beside them.
    assert shares.pop(f"{part}_share", 1 - sum(shares.values())) > 0.5
    assert sum(shares.values()) < 0.5


def test_seconds_are_those_since_the_last_reading() -> None:
    stopwatch = Stopwatch(CPU, nn.Identity())
    for _ in range(2):
        time.sleep(SECONDS / 2)
        stopwatch.lap("forward")
        time.sleep(SECONDS)
        seconds, total = stopwatch.read()
        assert SECONDS / 2 <= seconds["forward"] < SECONDS
        assert total >= 1.5 * SECONDS
    time.sleep(SECONDS)
    stopwatch.restart()
    assert stopwatch.read()[1] < SECONDS / 2


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", store, timedelta(seconds=30), world_size=1, rank=0)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_slow", [True, False])
def test_waiting_for_gradients_of_others_is_communication(monkeypatch: pytest.MonkeyPatch, is_slow: bool) -> None:
    def late(_: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        threading.Timer(SECONDS * is_slow, future.set_result, [bucket.buffer()]).start()
        return future

    monkeypatch.setattr(log, "allreduce_hook", late)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    wrapped = DistributedDataParallel(model)
    stopwatch = Stopwatch(CPU, wrapped)
    loss = SlowBackward.apply(wrapped(torch.ones(2, 3))).sum()
    stopwatch.restart()
    loss.backward()
    stopwatch.lap("communication")
    seconds, _ = stopwatch.read()
    assert set(seconds) == set(KINDS)
    assert SECONDS <= seconds["backward"] < 2 * SECONDS
    assert (seconds["communication"] >= 0.8 * SECONDS) == is_slow
    assert all(parameter.grad is not None for parameter in model.parameters())
