"""What ``prepare`` reads: the sources of a run, or the mixture that a YAML file among them describes."""

from itertools import chain
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from dspark.cli.terminal import count_progress
from dspark.config import RunConfig
from dspark.data.mixture import HELD_OUT_FILE, TRAIN_FILE, MixtureReport, load_mixture, mix
from dspark.errors import ConfigError, PromptError
from dspark.eval.tasks import load_task
from dspark.files import claim

FOLDER = "prompts"


def prompt_sources(run: RunConfig, is_leaving_out: bool) -> tuple[str, ...]:
    """``data.sources``; in place of a mixture its rows, which are made in record.folder/prompts, once.
    Raises: ConfigError for a mixture beside other sources; as ``load_mixture``, ``mix`` and ``load_task``.
    """
    sources = run.data.sources
    if not any(Path(source).suffix.lower() in {".yaml", ".yml"} for source in sources):
        return sources
    if len(sources) != 1:
        raise ConfigError(f"{run.name}: data.sources holds a mixture and {len(sources) - 1} more; name them all in it")
    mixture, folder = load_mixture(Path(sources[0])), run.record.folder / FOLDER
    apart = chain.from_iterable(load_task(name) for name in mixture.apart_from)
    with claim(run.record.folder), count_progress("rows, read twice", None) as on_row:

        def heard(row: Any) -> None:
            on_row()
            if isinstance(row, PromptError) and not is_leaving_out:
                raise PromptError(f"{row}; mend it, or run again with --leave-out-unusable")

        report = mix(mixture, folder, apart, heard)
    Console(soft_wrap=True, highlight=False).print(_table(report), f"in {folder}: {TRAIN_FILE}, {HELD_OUT_FILE}")
    return (str(folder / TRAIN_FILE),)


def _table(report: MixtureReport) -> Table:
    columns = [source.rows() for source in report.sources]
    headings = (columns[0][0][0], *(rows[0][1] for rows in columns))
    table = Table(*(Column(Text(heading), overflow="fold") for heading in headings), box=SIMPLE)
    for same in list(zip(*columns, strict=True))[1:]:
        table.add_row(same[0][0], *(number for _, number in same))
    return table
