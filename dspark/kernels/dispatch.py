"""What every operation does where it is called: it checks its tensors, once, and picks the form that runs."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, dtype, float64, int32

from dspark.kernels import MAX_TOKENS

P = ParamSpec("P")
R = TypeVar("R")
Sizes = dict[str, int]
"""By the letters that end a tensor's name (types.py)."""


def check(
    sizes: Sizes, *dtypes: dtype, num_strided: int = 0, is_window: bool = False, **tensors: Tensor | None
) -> Sizes:
    """Hold tensors against the letters of their names: ``check({"D": 64}, float32, x_TD=x_TD)``. None fits.

    A letter without a size takes that of the first tensor that has it; 1 and 2 are their own. The tensors share one
    dtype, out of ``dtypes`` (none given: each has any), and are contiguous, or behind the first ``num_strided``
    dimensions. The T tokens of a window are 1 to 16, as many as a verify step takes.
    Returns: ``sizes`` and what was learnt. Raises: ValueError for another shape, dtype or other strides.
    """
    sizes = {"1": 1, "2": 2, **sizes}
    for name, x in tensors.items():
        if x is None:
            continue
        letters, shape = name.rpartition("_")[2], x.shape
        is_right = len(letters) == len(shape) and tuple(map(sizes.setdefault, letters, shape)) == shape
        if is_right and is_window and not 1 <= sizes.get("T", 1) <= MAX_TOKENS:
            raise ValueError(f"{name}: expected 1 to {MAX_TOKENS} tokens, found {sizes['T']}")
        is_right = is_right and (not dtypes or x.dtype in dtypes)
        if not is_right or not (x.is_contiguous() or x[(0,) * num_strided].is_contiguous()):
            expected = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
            where = f" behind dimension {num_strided}" if num_strided else ""
            raise ValueError(
                f"{name}: expected [{expected}] {' or '.join(map(str, dtypes))}, contiguous{where}, "
                f"found {list(shape)} {x.dtype} with strides {x.stride()}"
            )
        dtypes = dtypes and (x.dtype,)
    return sizes


def check_counters(counters: Tensor, least: int = 1) -> None:
    """Raises: ValueError for other counters than int32, and fewer than ``least``."""
    check({"N": max(least, counters.numel())}, int32, counters_N=counters)


def form_for(x: Tensor, reference: Callable[P, R], module: str = "kernel", **options: Any) -> Callable[P, R]:
    """``reference`` for tensors on a CPU or in float64; else what has its name in the module beside it, with these
    options too.

    A kernel's module is imported when it is first asked for: it needs Triton, which a CPU may lack.
    """
    if not x.is_cuda or x.dtype == float64:
        return reference
    package = reference.__module__.rpartition(".")[0]
    return partial(getattr(import_module(f"{package}.{module}"), reference.__name__), **options)
