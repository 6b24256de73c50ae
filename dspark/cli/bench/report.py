"""What a measurement says: lines on the terminal, and everything as JSON where a file was asked for."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dspark.eval.tables import read_template
from dspark.files import write_whole
from dspark.provenance import describe_launch

Json = Annotated[Path | None, typer.Option(dir_okay=False, writable=True, help="Also write everything there.")]

_LINES = read_template(Path(__file__).with_name("lines.j2"))


def line(name: str, *facts: Any) -> str:
    """What a macro of lines.j2 says of the facts."""
    return str(getattr(_LINES.module, name)(*facts))


class Report(dict[str, Any]):
    """All that was measured, behind where it comes from; only the first rank prints and writes."""

    def __init__(self, path: Path | None, is_first: bool = True, **facts: Any) -> None:
        super().__init__(provenance=describe_launch(sys.argv), **facts)
        self._path = path if is_first else None
        self.console = Console(soft_wrap=True, highlight=False, markup=False, quiet=not is_first)

    def say(self, text: str) -> None:
        """Print, and write what was measured so far."""
        self.console.print(text)
        self.save()

    def save(self) -> None:
        """Write all that was measured, where a file was asked for."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(self, indent=2) + "\n")
