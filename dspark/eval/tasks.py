"""Named sets of prompts: small YAML files in eval/tasks say where real ones lie; synthetic ones are made to length."""

import importlib.resources
import importlib.util
import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
import yaml
from huggingface_hub import hf_hub_download
from pydantic import Field, model_validator
from rich.table import Table

from dspark.config import NonNegativeInt, PositiveInt, Section, validated
from dspark.data.chat import ChatFormat, encode_prompt
from dspark.data.conversations import Conversation, read_conversations, read_rows, stream_rows
from dspark.errors import ConfigError, PromptError
from dspark.eval.tables import render

REPOSITORY = Path(__file__).parents[2]
TASKS = REPOSITORY / "eval" / "tasks"
SYNTHETIC = {"random": "random:LENGTH", "long": "long:LENGTH[:FILE]"}
"""How each kind is written; ``tasks.j2`` says what its prompts are made of."""
QUESTION = "What is the text above about? Answer in a few sentences."
NUM_SYNTHETIC = 8
"""Prompts of a synthetic task when the caller does not say how many."""
MAX_LENGTH = 2**20
"""Tokens of a synthetic prompt; a slip of the keyboard is refused before the memory is asked for."""
_log = logging.getLogger(__name__)


class _NotHereError(PromptError):
    """The rows of a source are not on this machine and cannot be fetched; another source may have some."""


class TaskSource(Section):
    """Where rows lie and how one becomes the first user turn.

    ``source`` is a file of the repository, the import name of a package, or a hub data set. ``data_files`` are the
    .jsonl and .parquet files read from it; a package without any has ``data.read_problems()``. ``prompt`` is a format
    string over a row's fields; ``prompt_without`` replaces it for rows where the named field is empty. ``later_turns``
    are those of the user turns that follow the target's answers.
    """

    reads: Literal["file", "package", "hub"]
    source: str
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    """The commit of a hub data set; without one, its newest state is read."""
    data_files: tuple[str, ...] = ()
    num_rows: PositiveInt | None = None
    """How many rows there are; another number is refused, so that no other set is measured under this name."""
    prompt: str = "{prompt}"
    prompt_without: Mapping[str, str] = Field(default_factory=dict)
    later_turns: tuple[str, ...] = ()
    licence: str = "not stated"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reads == "hub" and not self.data_files:
            raise ValueError("a hub data set needs data_files, the .jsonl or .parquet files to read")
        if self.reads != "hub" and self.revision:
            raise ValueError(f"revision is a commit of a hub data set, but {self.source} is a {self.reads}")
        return self

    @property
    def origin(self) -> str:
        """The source in words, with its commit."""
        words = {"file": self.source, "package": f"package {self.source}", "hub": f"hub {self.source}"}
        return words[self.reads] + (f" at {self.revision[:12]}" if self.revision else "")


class TaskDefinition(TaskSource):
    """One eval/tasks/NAME.yaml: its source, those to read ``otherwise`` (in order) when that one is not on this machine
    and cannot be fetched, and which of the rows are measured.
    """

    max_prompts: PositiveInt | None = None
    selection_seed: NonNegativeInt | None = None
    """When there are more than ``max_prompts`` rows: they are shuffled by ``random.Random(selection_seed)`` first."""
    wording: str = "as the rows have it"
    """Where the words of ``prompt`` come from."""
    otherwise: tuple[TaskSource, ...] = ()


class TaskPrompts(NamedTuple):
    """What a task measures: int64 ids [T] of each prompt, and, to stand beside every number, where they come from and
    whether they are synthetic. ``is_endless``: no stop token ends its texts, so that all have max_new_tokens.
    ``conversations``: what the ids were made of, () for synthetic ones.
    """

    ids: tuple[torch.Tensor, ...]
    origin: str
    is_synthetic: bool = False
    is_endless: bool = False
    conversations: tuple[Conversation, ...] = ()


def task_names(folder: Path = TASKS) -> tuple[str, ...]:
    """The tasks that can be named."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def load_task(name: str, max_prompts: int | None = None, folder: Path = TASKS) -> tuple[Conversation, ...]:
    """The prompts of a task, in order: a name of ``task_names()``, or a JSONL or parquet file of the user.

    When not the first source of the task was read, every conversation's ``source`` names the one that was, and a
    warning is logged. Raises: ConfigError for an unknown name or a wrong definition; PromptError when the prompts are
    not on this machine and cannot be fetched, are not as many as stated, or when there are none.
    Source: DeepSpec's tasks, wordings and selection (specs/dspark.md 7.1; its eval.py and eval/base_evaluator.py).
    """
    return _load(name, max_prompts, folder)[0]


def num_prompts(name: str, max_prompts: int | None = None, folder: Path = TASKS) -> int:
    """How many prompts of a task are measured: as its definition states; those of a file are counted.
    Raises: ConfigError as ``load_task``.
    """
    if _synthetic(name) is not None:
        return max_prompts or NUM_SYNTHETIC
    definition = _definition(name, folder)
    rows = definition.num_rows or sum(1 for _ in stream_rows((str(REPOSITORY / definition.source),), "train"))
    return min(filter(None, (rows, max_prompts, definition.max_prompts)))


def load_prompts(
    name: str, chat: ChatFormat, max_prompts: int | None = None, *, seed: int = 0, max_tokens: int | None = None
) -> TaskPrompts:
    """The prompts of any task as ids: of ``load_task`` through the chat template, or synthetic ones of exact length.

    ``random:8192`` draws that many ids a prompt, by ``seed``; prompt n is the same however many are asked for, and no
    stop token ends its text: the fixed-length workload of serving benchmarks.
    ``long:4096`` and ``long:131072:FILE`` are real text with a question at its end, through the chat template; no text
    is used twice. ``max_tokens``: positions that the draft has for a prompt.
    Returns: int64 ids [T]. Raises: as ``load_task``; ConfigError for a wrong length, or one beyond ``max_tokens``;
    PromptError for a longer prompt of another task, or a text that is too short.
    """
    if (synthetic := _synthetic(name)) is None:
        conversations, origin = _load(name, max_prompts, TASKS)
        ids = tuple(encode_prompt(chat, conversation) for conversation in conversations)
        for conversation, ids_T in zip(conversations, ids, strict=True):
            if max_tokens is not None and len(ids_T) > max_tokens:
                long = f"{conversation.place}: {len(ids_T)} tokens"
                raise PromptError(f"{long}; the draft has positions for {max_tokens}")
        return TaskPrompts(ids, origin, conversations=conversations)
    kind, length, file = synthetic
    if max_tokens is not None and length > max_tokens:
        raise ConfigError(f"task {name}: {length} tokens; the draft has positions for {max_tokens}; ask for less")
    if kind == "random":
        ids = _random_ids(chat, length, max_prompts or NUM_SYNTHETIC, seed)
        return TaskPrompts(ids, f"synthetic: {length} random ids a prompt, seed {seed}", True, is_endless=True)
    path = file or str(REPOSITORY / _definition("heldout", TASKS).source)
    ids = _long_ids(chat, name, length, max_prompts or NUM_SYNTHETIC, path)
    origin = f"synthetic: text of {file or 'the held-out prompts'} cut to {length} tokens"
    return TaskPrompts(ids, origin, is_synthetic=True)


def describe_tasks() -> list[Table | str]:
    """Every task: real or synthetic, how many prompts of how many rows, its sources, licence and wording."""
    tasks = {name: _definition(name, TASKS) for name in task_names()}
    return render(Path(__file__).with_name("tasks.j2"), tasks=tasks, num_synthetic=NUM_SYNTHETIC)


def _load(name: str, max_prompts: int | None, folder: Path) -> tuple[tuple[Conversation, ...], str]:
    if _synthetic(name) is not None:
        raise ConfigError(f"task {name}: a synthetic task holds ids, not conversations, and cannot be used here")
    definition = _definition(name, folder)
    refusals: list[str] = []
    for source in (definition, *definition.otherwise):
        try:
            found = _conversations(f"{name} ({source.source})" if refusals else name, source)
        except _NotHereError as error:
            refusals.append(str(error))
            continue
        if refusals:
            said = (name, refusals[-1], len(found), source.origin)
            _log.warning("task %s: %s; the %d rows of %s are read instead", *said)
        return _selected(definition, found, max_prompts), source.origin
    raise PromptError(f"task {name}: {'; and '.join(refusals)}")


def _definition(name: str, folder: Path) -> TaskDefinition:
    if Path(name).suffix in {".jsonl", ".parquet"}:
        return TaskDefinition(reads="file", source=str(Path(name).absolute()))
    path = folder / f"{name}.yaml"
    if name not in task_names(folder):
        known = ", ".join((*task_names(folder), *SYNTHETIC.values()))
        raise ConfigError(f"task {name}: not known; expected one of {known}, or a .jsonl or .parquet file")
    return validated(TaskDefinition, yaml.safe_load(path.read_text(encoding="utf-8")), path)


def _conversations(name: str, source: TaskSource) -> list[Conversation]:
    if source.reads == "file":
        found = read_conversations((str(REPOSITORY / source.source),), "train")
    else:
        rows = _package_rows(source) if source.reads == "package" else _hub_rows(source)
        # Filled as they come: rows of livecodebench hold gigabytes of tests beside their question.
        turns = (_fill(name, source, row) for row in rows)
        found = [
            Conversation(name, index, ({"role": "user", "content": first},), later_turns=tuple(later))
            for index, (first, *later) in enumerate(turns, 1)
        ]
    if not found:
        raise PromptError(f"task {name}: {source.source} holds no prompts")
    if source.num_rows not in {None, len(found)}:
        raise PromptError(f"task {name}: {source.origin} holds {len(found)} rows; expected {source.num_rows}")
    return found


def _selected(task: TaskDefinition, found: list[Conversation], max_prompts: int | None) -> tuple[Conversation, ...]:
    order = list(range(len(found)))
    if task.selection_seed is not None and len(found) > (task.max_prompts or len(found)):
        random.Random(task.selection_seed).shuffle(order)
    limit = min(filter(None, (max_prompts, task.max_prompts)), default=None)
    return tuple(found[index] for index in order[:limit])


def _package_rows(source: TaskSource) -> Iterable[Mapping[str, Any]]:
    if importlib.util.find_spec(source.source) is None:
        package = source.source.replace("_", "-")
        raise _NotHereError(f"the package {package} is not installed; run: pip install {package}")
    if not source.data_files:
        problems: Mapping[str, Mapping[str, Any]] = importlib.import_module(f"{source.source}.data").read_problems()
        return problems.values()
    folder = importlib.resources.files(source.source)
    lacking = [file for file in source.data_files if not folder.joinpath(file).is_file()]
    if lacking:
        raise _NotHereError(f"the package {source.source} has no {lacking[0]}; install another version of it")
    return _rows_of(str(folder.joinpath(file)) for file in source.data_files)


def _hub_rows(source: TaskSource) -> Iterable[Mapping[str, Any]]:
    try:
        fetch = partial(hf_hub_download, source.source, repo_type="dataset", revision=source.revision)
        paths = list(map(fetch, source.data_files))
    except (OSError, ValueError) as error:
        revision = f" --revision {source.revision}" if source.revision else ""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _NotHereError(
            f"{source.source} is neither in the cache of the hub nor reachable ({reason}); on a machine with network "
            f"run: hf download --repo-type dataset {source.source} {' '.join(source.data_files)}{revision}"
        ) from error
    return _rows_of(paths)


def _rows_of(paths: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    return (row for path in paths for _, row in read_rows(path))


def _fill(name: str, source: TaskSource, row: Mapping[str, Any]) -> list[str]:
    """The user turns of a row."""
    without = (prompt for field, prompt in source.prompt_without.items() if not row.get(field))
    try:
        return [turn.format(**row) for turn in (next(without, source.prompt), *source.later_turns)]
    except (KeyError, IndexError) as error:
        raise PromptError(f"task {name}: a row of the data has no {error}; its fields are {', '.join(row)}") from error


def _synthetic(name: str) -> tuple[str, int, str] | None:
    """Kind, length and file of a synthetic task's name; nothing for other names."""
    kind, _, rest = name.partition(":")
    if kind not in SYNTHETIC:
        return None
    length, _, file = rest.partition(":")
    is_number = length.isascii() and length.isdecimal() and len(length) <= len(str(MAX_LENGTH))
    if not is_number or not 1 <= int(length) <= MAX_LENGTH:
        form = SYNTHETIC[kind]
        raise ConfigError(f"task {name}: expected {form}, LENGTH from 1 to {MAX_LENGTH} tokens, got {length!r}")
    if file and (kind != "long" or Path(file).suffix not in {".jsonl", ".parquet"}):
        raise ConfigError(f"task {name}: expected {SYNTHETIC[kind]}, FILE a .jsonl or .parquet file, got {file!r}")
    return kind, int(length), file


def _random_ids(chat: ChatFormat, length: int, num_prompts: int, seed: int) -> tuple[torch.Tensor, ...]:
    tokenizer = chat.tokenizer
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, *chat.stop_token_ids}
    ordinary = torch.tensor(sorted(set(tokenizer.get_vocab().values()) - special))
    generator = torch.Generator().manual_seed(seed)
    return tuple(ordinary[torch.randint(len(ordinary), (length,), generator=generator)] for _ in range(num_prompts))


def _long_ids(chat: ChatFormat, name: str, length: int, num_prompts: int, path: str) -> tuple[torch.Tensor, ...]:
    def encoded(content: str) -> torch.Tensor:
        is_plain = chat.tokenizer.chat_template is None
        said = {"text": content} if is_plain else {"messages": ({"role": "user", "content": content},)}
        return encode_prompt(chat, Conversation(name, 1, **said))

    short = encoded(f"A\n\n---\n\n{QUESTION}")
    if length < 2 * len(short):
        raise ConfigError(f"task {name}: expected at least {2 * len(short)} tokens; the question has {len(short)}")
    rows = read_conversations((path,), "train")
    texts = (row.text or "\n\n".join(message["content"] for message in row.messages) for row in rows)
    text = "\n\n".join(texts)
    spans = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    if len(spans) < length:
        needed = f"found {len(spans)} tokens of text in {path}; expected at least {length}, for no text is repeated"
        raise PromptError(f"task {name}: {needed}; give more as long:{length}:FILE, a .jsonl or .parquet file")
    prompts = []
    for start in range(0, min(num_prompts, len(spans) // length) * length, length):
        window = text[spans[start][0] : spans[start + length - 1][1]]
        whole = encoded(f"{window}\n\n---\n\n{QUESTION}")
        assert len(whole) >= length
        is_end = whole.flip(0)[: len(short)] == short.flip(0)  # the question, and what the template writes after it
        num_end = int(is_end.long().cumprod(0).sum())
        prompts.append(torch.cat((whole[: length - num_end], whole[len(whole) - num_end :])))  # the text's last ids go
    return tuple(prompts)
