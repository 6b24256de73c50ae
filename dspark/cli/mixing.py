"""What ``prepare`` and ``record`` read: the sources of a run, or the mixture that a YAML file among them describes."""

from itertools import chain
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.cli.terminal import count_progress
from dspark.config import RunConfig
from dspark.data.mixture import HELD_OUT_FILE, TRAIN_FILE, MixtureReport, load_mixture, mix
from dspark.errors import ConfigError
from dspark.eval.tasks import load_task
from dspark.files import claim

FOLDER = "prompts"


def prompt_sources(run: RunConfig) -> tuple[str, ...]:
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
        report = mix(mixture, folder, apart, on_row)
    Console(soft_wrap=True, highlight=False).print(_table(report), f"in {folder}: {TRAIN_FILE}, {HELD_OUT_FILE}")
    return (str(folder / TRAIN_FILE),)


def _table(report: MixtureReport) -> Table:
    table = Table(box=SIMPLE)
    columns = [source.rows() for source in report.sources]
    for heading in (columns[0][0][0], *(rows[0][1] for rows in columns)):
        table.add_column(Text(heading), overflow="fold")
    for same in list(zip(*columns, strict=True))[1:]:
        table.add_row(same[0][0], *(number for _, number in same))
    return table
