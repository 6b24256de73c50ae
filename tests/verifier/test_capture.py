"""Captured steps: equal to eager ones over many inputs, with and without chained launches, and never waited for."""

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
from verifying import random_ids

from dspark.verifier import Step, Verifier
from dspark.verifier.capture import Captured, uncollected

WINDOW = 5


def test_elsewhere_the_function_itself_runs() -> None:
    runs: list[int] = []
    captured = Captured(lambda: runs.append(1), torch.device("cpu"))
    assert not runs
    captured()
    assert runs == [1]
    assert captured.num_launches() is None


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_off_inside_and_as_before_behind_also_after_a_failure(is_on: bool) -> None:
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() == is_on
        with contextlib.suppress(KeyError), uncollected():
            raise KeyError
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()


@pytest.fixture
def _fast_memory(_fresh_memory_is_nan: None) -> Iterator[None]:
    """Without the fills of fresh memory, which would stand between chained kernels."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
@pytest.mark.usefixtures("_fast_memory")
@torch.no_grad()
def test_replays_equal_eager_steps_whether_chained_or_not(verifier: Verifier) -> None:
    verifier.prefill([random_ids(verifier.vocab_size, 9)])
    chained = Step(verifier, WINDOW)
    verifier.is_chained = False
    plain = Step(verifier, WINDOW)
    assert chained.captured.num_launches() > 6 * verifier.num_layers
    before = [tensor.clone() for tensor in verifier.buffers.memory()]
    for seed in range(200):
        found = []
        for take in (chained.captured, plain.captured, plain.take):
            for tensor, content in zip(verifier.buffers.memory(), before, strict=True):
                tensor.copy_(content)
            verifier.ids_T[:WINDOW].copy_(random_ids(verifier.vocab_size, WINDOW, seed))
            output = take()
            found.append([tensor.clone() for tensor in (*output, *verifier.buffers.memory())])
        for other in found[1:]:
            assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True)), seed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="watches a GPU's stream")
@torch.no_grad()
def test_steps_are_enqueued_without_waiting_for_the_device(verifier: Verifier) -> None:
    verifier.prefill([random_ids(verifier.vocab_size, 9)])
    step = Step(verifier, 4)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
def test_an_older_graph_that_becomes_garbage_does_not_end_a_capture() -> None:
    device = torch.device("cuda")
    x_1 = torch.zeros(1, device=device)
    gc.collect()
    older = [Captured(lambda: x_1.add_(1), device)]

    def add_two() -> torch.Tensor:
        if older and torch.cuda.is_current_stream_capturing():
            graph = older.pop()
            vars(graph)["itself"] = graph
            del graph
            assert len([[] for _ in range(10_000)]) == 10_000  # enough to wake the collector
        return x_1.add_(2)

    captured = Captured(add_two, device, changed=[x_1])
    assert not older
    assert gc.isenabled()
    before = float(x_1)
    captured()
    assert float(x_1) == before + 2
