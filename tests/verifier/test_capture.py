"""Captured steps: equal to eager ones over many inputs, with and without chained launches, and never waited for."""

from collections.abc import Iterator

import pytest
import torch
from verifying import random_ids

from dspark.verifier import Step, Verifier
from dspark.verifier.capture import Captured

WINDOW = 5


def test_elsewhere_the_function_itself_runs() -> None:
    runs: list[int] = []
    captured = Captured(lambda: runs.append(1), torch.device("cpu"))
    assert not runs
    captured()
    assert runs == [1]
    assert captured.num_launches() is None


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
            plain.ids_T.copy_(random_ids(verifier.vocab_size, WINDOW, seed))
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
