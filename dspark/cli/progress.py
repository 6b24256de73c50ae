"""A progress bar that counts things, for the doors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def count_progress(name: str, total: int) -> Iterator[Callable[..., None]]:
    """Show ``name`` and a bar of ``total``; the function given advances it by its argument, or one. On stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda count=1: progress.advance(task, count)
