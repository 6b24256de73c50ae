"""Named sets of prompts: each a small YAML in eval/tasks that says where the prompts are loaded from."""

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import yaml

from dspark.config import PositiveInt, Section, validated
from dspark.data.conversations import Conversation, read_conversations
from dspark.errors import ConfigError, PromptError

REPOSITORY = Path(__file__).parents[2]
TASKS = REPOSITORY / "eval" / "tasks"


class TaskDefinition(Section):
    """One eval/tasks/NAME.yaml. ``prompt`` is a format string over a row's fields and becomes the first user turn.
    ``source`` is a file of the repository, the import name of a package with ``data.read_problems()``, or a hub name.
    """

    reads: Literal["file", "package", "hub"]
    source: str
    subset: str | None = None
    split: str = "test"
    data_files: str | None = None
    prompt: str | None = None
    max_prompts: PositiveInt | None = None


def task_names(folder: Path = TASKS) -> tuple[str, ...]:
    """The tasks that can be named."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def load_task(name: str, max_prompts: int | None = None, folder: Path = TASKS) -> tuple[Conversation, ...]:
    """The prompts of a task, in order: a name of ``task_names()``, or a JSONL or parquet file of the user.
    Raises: ConfigError for an unknown name or a wrong definition; PromptError when the prompts are not on this machine
    and cannot be fetched, or when there are none. Source: DeepSpec's tasks and sample counts (specs/dspark.md 7.1).
    """
    if Path(name).suffix in {".jsonl", ".parquet"}:
        definition = TaskDefinition(reads="file", source=str(Path(name).absolute()))
    else:
        definition = _read_definition(name, folder)
    limit = min(filter(None, (max_prompts, definition.max_prompts)), default=None)
    if definition.reads == "file":
        conversations = tuple(read_conversations((str(REPOSITORY / definition.source),), "train", limit))
    else:
        rows = _package_rows(name, definition) if definition.reads == "package" else _hub_rows(name, definition)
        turns = ({"role": "user", "content": _fill(name, definition, row)} for row in islice(rows, limit))
        conversations = tuple(Conversation(name, index, (turn,)) for index, turn in enumerate(turns, 1))
    if not conversations:
        raise PromptError(f"task {name}: {definition.source} holds no prompts")
    return conversations


def _read_definition(name: str, folder: Path) -> TaskDefinition:
    path = folder / f"{name}.yaml"
    if name not in task_names(folder):
        known = ", ".join(task_names(folder))
        raise ConfigError(f"task {name}: not known; expected one of {known}, or a .jsonl or .parquet file")
    return validated(TaskDefinition, yaml.safe_load(path.read_text(encoding="utf-8")), path)


def _package_rows(name: str, definition: TaskDefinition) -> Iterable[Mapping[str, Any]]:
    if importlib.util.find_spec(definition.source) is None:
        package = definition.source.replace("_", "-")
        raise PromptError(f"task {name}: the package {package} is not installed; run: pip install {package}")
    problems: Mapping[str, Mapping[str, Any]] = importlib.import_module(f"{definition.source}.data").read_problems()
    return problems.values()


def _hub_rows(name: str, definition: TaskDefinition) -> Iterable[Mapping[str, Any]]:
    from datasets.load import load_dataset

    try:
        rows: Iterable[Mapping[str, Any]] = load_dataset(
            definition.source, definition.subset, split=definition.split, data_files=definition.data_files
        )
    except (OSError, ValueError) as error:
        raise PromptError(
            f"task {name}: the data set {definition.source} is neither in the cache of `datasets` nor reachable "
            f"({error}); on a machine with network run: hf download --repo-type dataset {definition.source}"
        ) from error
    return rows


def _fill(name: str, definition: TaskDefinition, row: Mapping[str, Any]) -> str:
    try:
        return (definition.prompt or "{prompt}").format(**row).strip()
    except (KeyError, IndexError) as error:
        raise PromptError(f"task {name}: a row of the data has no {error}; its fields are {', '.join(row)}") from error
