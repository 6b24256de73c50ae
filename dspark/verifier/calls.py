"""How a pass calls its kernels: directly, or remembering every call so that a stage can be timed on its own."""

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Call = partial[Any]
"""A kernel call that can be made again on the same inputs."""


class Caller(Protocol):
    """Runs one kernel of a stage. A stage's name is what tables call it."""

    def __call__(self, stage: str, function: Callable[P, R], /, *args: P.args, **options: P.kwargs) -> R: ...


def call(stage: str, function: Callable[P, R], /, *args: P.args, **options: P.kwargs) -> R:
    """Just run it."""
    return function(*args, **options)


def named(kind: str, call: Caller, **always: bool) -> Caller:
    """Calls stages of one kind, every one with these options."""

    def run(stage: str, function: Any, /, *args: Any, **options: Any) -> Any:
        return call(f"{kind} {stage}".lstrip(), function, *args, **always | options)

    return run


class Recorder(dict[str, list[Call]]):
    """A ``Caller`` that runs every call and keeps it, in order, under its stage."""

    def __call__(self, stage: str, function: Callable[P, R], /, *args: P.args, **options: P.kwargs) -> R:
        self.setdefault(stage, []).append(partial(function, *args, **options))
        return function(*args, **options)
