"""Which form of an operation runs where."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, float64

P = ParamSpec("P")
R = TypeVar("R")


def form_for(x: Tensor, reference: Callable[P, R], module: str = "kernel", **options: Any) -> Callable[P, R]:
    """``reference`` for tensors on a CPU or in float64; else what has its name in the module beside it, with these
    options too.

    A kernel's module is imported when it is first asked for: it needs Triton, which a CPU may lack.
    """
    if not x.is_cuda or x.dtype == float64:
        return reference
    package = reference.__module__.rpartition(".")[0]
    return partial(getattr(import_module(f"{package}.{module}"), reference.__name__), **options)
