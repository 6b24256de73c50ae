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
FATES = {
    "read": "read",
    "unusable": "without a prompt",
    "filtered": "filtered out",
    "of_tasks": "in a task",
    "repeated": "there before",
    "near": "nearly the same",
    "left": "not drawn",
    "held_out": "held out",
    "taken": "taken",
}


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
    table = Table("rows", box=SIMPLE)
    for source in report.sources:
        table.add_column(Text(source.path), overflow="fold")
    for field, words in FATES.items():
        table.add_row(words, *(str(getattr(source, field)) for source in report.sources))
    return table
