"""Conversations and plain text read from JSONL, parquet and hub data sets."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pyarrow import parquet

from dspark.errors import PromptError

RowT = TypeVar("RowT")
EncodedT = TypeVar("EncodedT")
_EXPECTED = "expected a row with 'messages', 'prompt', 'turns' or 'text'"
_KINDS = ("messages", "conversations", "prompt", "turns", "text")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_NUM_NAMED = 3


@dataclass(frozen=True)
class Conversation:
    """Either the messages of a chat or one plain text, and the row (``index``, from 1) of ``source`` that it came from.
    Each message holds at least ``role`` and ``content``, both text; other keys reach the chat template untouched.
    ``later_turns``: what the user says after the target's own answer, and after the next one.
    """

    source: str
    index: int
    messages: tuple[dict[str, Any], ...] = ()
    text: str | None = None
    later_turns: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where the user finds the row, as ``file:line``."""
        return f"{self.source}:{self.index}"


def read_conversations(sources: Sequence[str], split: str, limit: int | None = None) -> list[Conversation]:
    """The first ``limit`` conversations of ``sources``, in order.

    A source ending in ``.jsonl`` or ``.parquet`` is a file; any other is a hub data set, of which ``split`` is read. A
    row holds ``messages`` (or ``conversations`` with from and value), or a ``prompt`` (one user message), or ``turns``
    (several, each said after the target's answer to the one before), or plain ``text``; the first of these that is
    present counts.
    Raises: PromptError naming source and line for a missing file, a row that is not JSON, or a row without text.
    """
    rows = ((source, index, row) for source in sources for index, row in source_rows(source, split))
    found = [parse_conversation(source, index, row) for source, index, row in islice(rows, limit)]
    if not found:
        raise PromptError(f"{', '.join(sources) or 'data.sources'}: found no conversation; {_EXPECTED}")
    return found


def encode_each(
    rows: Sequence[RowT], encode: Callable[[RowT], EncodedT], *, is_leaving_out: bool = False
) -> list[EncodedT]:
    """``encode`` of every row; those it refuses with a PromptError are refused together, or left out when asked.
    Raises: PromptError naming the first unusable rows and their number; with ``is_leaving_out`` if nothing is left.
    """
    encoded, errors = [], []
    for row in rows:
        try:
            encoded.append(encode(row))
        except PromptError as error:
            errors.append(error)
    if errors and not (is_leaving_out and encoded):
        named = "\n  ".join(str(error) for error in errors[:_NUM_NAMED])
        more = f"\n  and {len(errors) - _NUM_NAMED} more" if len(errors) > _NUM_NAMED else ""
        raise PromptError(
            f"{len(errors)} of {len(rows)} conversations cannot be used:\n  {named}{more}\n"
            "Mend these rows, or run again with --leave-out-unusable to go on without them."
        )
    return encoded


def source_rows(source: str, split: str) -> Iterable[tuple[int, Any]]:
    """The rows of a file, or of a split of a hub data set, numbered from 1. Raises: PromptError, see above."""
    is_file = Path(source).suffix in {".jsonl", ".parquet"}
    if not is_file and Path(source).is_file():
        raise PromptError(f"{source}: prompts are read from files ending in .jsonl or .parquet; give it that name")
    return read_rows(source) if is_file else enumerate(_hub_rows(source, split), 1)


def count_rows(source: str, split: str) -> int:
    """How many rows ``source_rows`` gives of a source that can be read; those of a file are not parsed."""
    if Path(source).suffix == ".parquet":
        return int(parquet.read_metadata(source).num_rows)
    if Path(source).suffix == ".jsonl":
        with open(source, "rb") as file:
            return sum(1 for line in file if line.strip())
    rows: Any = _hub_rows(source, split)
    return len(rows)


def read_rows(path: str) -> Iterable[tuple[int, Any]]:
    """The rows of a .jsonl or .parquet file, numbered from 1 as its lines are. Raises: PromptError with the place."""
    if not Path(path).is_file():
        raise PromptError(f"{path}: no such file; give a .jsonl or .parquet file, or the name of a hub data set")
    return _json_rows(path) if Path(path).suffix == ".jsonl" else enumerate(_parquet_rows(path), 1)


def _json_rows(source: str) -> Iterator[tuple[int, Any]]:
    with open(source, "rb") as file:
        for index, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if b"\\ud" in line.lower():
                    json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
                yield index, row
            except (ValueError, RecursionError) as error:
                raise PromptError(f"{source}:{index}: not valid JSON ({error}); {_EXPECTED} on every line") from error


def _parquet_rows(source: str) -> Iterator[Any]:
    from datasets.load import load_dataset

    try:
        yield from load_dataset("parquet", data_files=source, split="train", streaming=True)
    except (OSError, ValueError, NotImplementedError) as error:
        raise PromptError(f"{source}: not a readable parquet file ({error}); copy or download it again") from error


def _hub_rows(source: str, split: str) -> Iterable[Any]:
    from datasets.load import load_dataset

    try:
        rows: Iterable[Any] = load_dataset(source, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise PromptError(
            f"{source}: found no such file and no hub data set with split {split!r} ({error}); "
            "check data.sources and data.split, or download the data set first"
        ) from error
    return rows


def parse_conversation(source: str, index: int, row: Any) -> Conversation:
    """A row as ``read_conversations`` takes it. Raises: PromptError naming source and line."""
    place = f"{source}:{index}"
    if not isinstance(row, dict):
        raise PromptError(f"{place}: found {type(row).__name__}; {_EXPECTED}")
    kind = next((kind for kind in _KINDS if row.get(kind) is not None), None)
    if kind is None:
        raise PromptError(f"{place}: found the keys {sorted(row)}; {_EXPECTED}")
    value, later = row[kind], list[str]()
    if kind == "turns":
        if not isinstance(value, list) or not value or not all(isinstance(turn, str) for turn in value):
            raise PromptError(f"{place}: turns is {value!r:.80}; expected a list of texts")
        value, *later = value
    if kind in {"prompt", "turns", "text"}:
        if not isinstance(value, str):
            raise PromptError(f"{place}: {kind} is {type(value).__name__}; expected text")
        if kind == "text":
            return Conversation(source, index, text=value)
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise PromptError(f"{place}: {kind} is {type(value).__name__}; expected a list of messages")
    messages = tuple(_message(place, turn, item) for turn, item in enumerate(value, 1))
    return Conversation(source, index, messages, later_turns=tuple(later))


def _message(place: str, turn: int, item: Any) -> dict[str, Any]:
    if isinstance(item, dict) and isinstance(item.get("from"), str):
        item = {"role": _SHAREGPT_ROLES.get(item["from"], item["from"]), "content": item.get("value")}
    if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("role", "content")):
        raise PromptError(f"{place}: message {turn} is {item!r:.80}; expected 'role' and 'content', both text")
    return {key: value for key, value in item.items() if value is not None}
