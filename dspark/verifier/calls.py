"""How a pass calls its kernels: directly, or remembering every call so that a stage can be timed on its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


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


class Call(NamedTuple):
    """A kernel call that can be made again on the same inputs."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.args, **self.options)


@dataclass
class Recorder:
    """A ``Caller`` that runs every call and keeps it, in order, under its stage."""

    stages: dict[str, list[Call]] = field(default_factory=dict)

    def __call__(self, stage: str, function: Callable[P, R], /, *args: P.args, **options: P.kwargs) -> R:
        self.stages.setdefault(stage, []).append(Call(function, args, options))
        return function(*args, **options)
