"""What the commands share with the terminal: the ``--device`` option, checked before anything is loaded, and bars."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark.eval.timing import DecodedText

ItemT = TypeVar("ItemT")
DEFAULT_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check_device(name: str) -> str:
    """Returns: the name. Raises: typer.BadParameter for a device that this machine lacks or that is not supported."""
    found = torch.cuda.device_count()
    here = ["cpu", *["cuda"][:found], *(f"cuda:{number}" for number in range(found))]
    if name not in here:
        told = f"torch finds {found} CUDA devices; use --device cpu"
        raise typer.BadParameter(f"expected one of {', '.join(here)}, got {name!r}: {told}")
    return name


LeaveOut = Annotated[bool, typer.Option("--leave-out-unusable", help="Go on without the rows that cannot be used.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.", callback=check_device)]


@contextmanager
def count_progress(name: str, total: int | None, is_shown: bool = True) -> Iterator[Callable[..., int]]:
    """Show ``name`` and a bar of ``total`` on stderr; the function given advances it by its argument, or one, sets
    what stands behind the name, and says how far the bar is.
    """
    console = Console(stderr=True)
    words = TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)) as bar:
        task = bar.add_task(name, total=total)

        def advance(count: int = 1, behind: str = "") -> int:
            bar.update(task, advance=count, description=name + behind)
            return int(bar.tasks[task].completed)

        yield advance


def counted(items: Iterable[ItemT], name: str, total: int | None = None, is_shown: bool = True) -> Iterator[ItemT]:
    """The same items; how many there were is shown as ``count_progress`` does."""
    with count_progress(name, total, is_shown) as advance:
        for item in items:
            advance()
            yield item


@contextmanager
def token_progress(name: str, total: int | None) -> Iterator[Callable[..., Any]]:
    """The same for what is made of tokens: the function takes how many more there are, their tokens, and what stands
    behind the speed until it is called again.
    """
    start, num_tokens = time.monotonic(), 0
    with count_progress(name, total) as advance:

        def take(count: int, num_new_tokens: int, behind: str = "") -> int:
            nonlocal num_tokens
            num_tokens += num_new_tokens
            return advance(count, f": {num_tokens / (time.monotonic() - start):,.0f} tokens/s{behind}")

        yield take


@contextmanager
def text_progress(name: str, total: int, is_shown: bool = True) -> Iterator[Callable[[DecodedText], None]]:
    """The same for texts, which the function given takes: the acceptance length so far stands behind the name."""
    num_tokens = num_rounds = 0
    with count_progress(name, total, is_shown) as advance:

        def take(text: DecodedText) -> None:
            nonlocal num_tokens, num_rounds
            num_tokens += sum(counts.acceptance_length for counts in text.rounds)
            num_rounds += len(text.rounds)
            advance(1, f": {num_tokens / num_rounds:.2f} tokens a round" if num_rounds else "")

        yield take
