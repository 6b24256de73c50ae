"""What the commands share with the terminal: the ``--device`` option, checked before anything is loaded, and bars."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark.eval.timing import DecodedText

DEFAULT_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check_device(name: str) -> str:
    """Returns: the name. Raises: typer.BadParameter for a device that this machine lacks or that is not supported."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in {"cpu", "cuda"}:
        raise typer.BadParameter(f"expected cpu, cuda or cuda:N, got {name!r}")
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise typer.BadParameter(f"{name!r} is not here: torch finds {found} CUDA devices; use --device cpu")
    return name


Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.", callback=check_device)]


@contextmanager
def count_progress(name: str, total: int, is_shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show ``name`` and a bar of ``total`` on stderr; the function given advances it by its argument, or one, and sets
    what stands behind the name.
    """
    console = Console(stderr=True)
    words = TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)) as bar:
        task = bar.add_task(name, total=total)
        yield lambda count=1, behind="": bar.update(task, advance=count, description=name + behind)


@contextmanager
def text_progress(name: str, total: int, is_shown: bool = True) -> Iterator[Callable[[DecodedText], None]]:
    """The same for texts, which the function given takes: the acceptance length so far stands behind the name."""
    lengths: list[int] = []
    with count_progress(name, total, is_shown) as advance:

        def take(text: DecodedText) -> None:
            lengths.extend(counts.acceptance_length for counts in text.rounds)
            advance(1, f": {sum(lengths) / len(lengths):.2f} tokens a round" if lengths else "")

        yield take
