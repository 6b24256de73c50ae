"""What every kernel asks of a multiprocessor."""

import ctypes
from typing import Any

import pytest
import triton

from dspark.kernels import launch


def test_every_kernel_but_the_commit_asks_for_the_most_shared_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int | None, int, int]] = []
    hooks: list[Any] = []

    class Driver:
        @staticmethod
        def cuFuncSetAttribute(function: ctypes.c_void_p, attribute: int, value: int) -> int:
            asked.append((function.value, attribute, value))
            return 0 if function.value != 99 else 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver)
    monkeypatch.setattr(triton.knobs.runtime.kernel_load_end_hook, "add", hooks.append)
    launch.keep_shared_memory.cache_clear()
    launch.keep_shared_memory()
    launch.keep_shared_memory()
    launch.keep_shared_memory.cache_clear()
    (hook,) = hooks
    hook(None, 7, "ring_kernel", {}, "")
    hook(None, 8, "commit_kernel", {}, "")
    assert asked == [(7, 9, 100)], "preferred share of shared memory, per cent"
    with pytest.raises(AssertionError, match="of a_kernel: error 1"):
        hook(None, 99, "a_kernel", {}, "")
