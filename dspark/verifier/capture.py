"""A function without arguments as a CUDA graph; on other devices the function itself."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL, byref, c_size_t, c_void_p
from typing import Generic, TypeVar

import torch

ResultT = TypeVar("ResultT")
WARMUPS = 2


class Captured(Generic[ResultT]):
    """Runs ``function`` again and again on tensors that stay where they are.

    On a GPU every run replays one graph, and the result lies in the same memory each time: read it before the next run.
    Warming up and capturing run the function; ``changed`` names the tensors whose content that must not alter,
    ``generator`` what it draws from if not from the device's own.
    """

    def __init__(
        self, function: Callable[[], ResultT], device: torch.device, changed: Sequence[torch.Tensor] = (),
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            before = [tensor.clone() for tensor in changed]
            self._capture(device, generator)
            for tensor, content in zip(changed, before, strict=True):
                tensor.copy_(content)

    def _capture(self, device: torch.device, generator: torch.Generator | None) -> None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                self._function()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        if generator is not None:
            self._graph.register_generator_state(generator)
        with uncollected(), torch.cuda.graph(self._graph):
            self._result = self._function()
        self._graph.instantiate()

    def __call__(self) -> ResultT:
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._result

    def num_launches(self) -> int | None:
        """Nodes of the graph; None where there is no graph or the driver does not tell."""
        if self._graph is None:
            return None
        count = c_size_t()
        try:
            get_nodes = CDLL("libcuda.so.1").cuGraphGetNodes
            status = get_nodes(c_void_p(self._graph.raw_cuda_graph()), None, byref(count))
        except (OSError, AttributeError, RuntimeError):
            return None
        return count.value if status == 0 else None


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector: an older graph that it frees, as one in a cycle, would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
