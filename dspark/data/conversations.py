"""Conversations and plain text read from JSONL, parquet and hub data sets."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

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
    Each message holds at least ``role`` and ``content``, both text; other keys reach the chat template untouched, as
    ``tools`` do. ``later_turns``: what the user says after the target's own answer, and after the next one.
    """

    source: str
    index: int
    messages: tuple[dict[str, Any], ...] = ()
    text: str | None = None
    later_turns: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def place(self) -> str:
        """Where the user finds the row, as ``file:line``."""
        return f"{self.source}:{self.index}"


def read_conversations(sources: Sequence[str], split: str, limit: int | None = None) -> list[Conversation]:
    """The first ``limit`` conversations of ``sources``, in order.

    A source ending in ``.jsonl`` or ``.parquet`` is a file; any other is a hub data set, of which ``split`` is read. A
    row holds ``messages`` (or ``conversations`` with from and value), or a ``prompt`` (one user message), or ``turns``
    (several, each said after the target's answer to the one before), or plain ``text``; the first of these that is
    present counts. Beside them a list of ``tools`` may stand.
    Raises: PromptError naming source and line for a missing file, a row that is not JSON, or a row without text.
    """
    return [parse_conversation(*row) for row in stream_rows(sources, split, limit)]


def stream_rows(sources: Sequence[str], split: str, limit: int | None = None) -> Iterator[tuple[str, int, Any]]:
    """The same rows one by one, as ``parse_conversation`` takes them. Raises: PromptError for a source that cannot be
    read, or when there is no row.
    """
    rows = ((source, index, row) for source in sources for index, row in source_rows(source, split))
    row = None
    for row in islice(rows, limit):
        yield row
    if row is None:
        raise PromptError(f"{', '.join(sources) or 'data.sources'}: found no conversation; {_EXPECTED}")


def encode_each(
    rows: Iterable[RowT], encode: Callable[[RowT], EncodedT], counts: Counter[str], *, is_leaving_out: bool = False
) -> Iterator[EncodedT]:
    """``encode`` of every row; those it refuses with a PromptError are refused together, or left out when asked, and
    ``counts`` (rows, left out) tells how many.
    Raises: PromptError naming the first unusable rows and their number; with ``is_leaving_out`` if nothing is left.
    """
    errors = list[PromptError]()
    for row in rows:
        counts["rows"] += 1
        try:
            encoded = encode(row)
        except PromptError as error:
            errors += [error][: _NUM_NAMED - len(errors)]
            counts["left out"] += 1
            continue
        if is_leaving_out or not errors:
            yield encoded
    if errors and not (is_leaving_out and counts["rows"] > counts["left out"]):
        number, named = counts["left out"], "\n  ".join(str(error) for error in errors)
        more = f"\n  and {number - _NUM_NAMED} more" if number > _NUM_NAMED else ""
        hint = "Mend these rows, or run again with --leave-out-unusable to go on without them."
        raise PromptError(f"{number} of {counts['rows']} conversations cannot be used:\n  {named}{more}\n{hint}")


def source_rows(source: str, split: str) -> Iterable[tuple[int, Any]]:
    """The rows of a file, or of a split of a hub data set, numbered from 1 as lines are. A line that is not JSON is a
    PromptError, which ``parse_conversation`` raises. Raises: PromptError for a source that cannot be read.
    """
    path = Path(source)
    if path.suffix not in {".jsonl", ".parquet"}:
        if path.is_file():
            raise PromptError(f"{source}: prompts are read from files ending in .jsonl or .parquet; give it that name")
        fault = f"found no such file and no hub data set with split {split!r}"
        hint = "check data.sources and data.split, or download the data set first"
        return enumerate(_data_set_rows(source, fault, hint, source, split=split), 1)
    if not path.is_file():
        raise PromptError(f"{source}: no such file; give a .jsonl or .parquet file, or the name of a hub data set")
    if path.suffix == ".jsonl":
        return _json_rows(source)
    told = (source, "not a readable parquet file", "copy or download it again")
    return enumerate(_data_set_rows(*told, "parquet", data_files=source, split="train", streaming=True), 1)


def read_rows(path: str) -> Iterator[tuple[int, Any]]:
    """The rows of a .jsonl or .parquet file. Raises: PromptError with the place, also for a line that is not JSON."""
    for index, row in source_rows(path, ""):
        if isinstance(row, PromptError):
            raise row
        yield index, row


def _json_rows(source: str) -> Iterator[tuple[int, Any]]:
    with open(source, "rb") as file:
        for index, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if b"\\ud" in line.lower():
                    json.dumps(row, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = str(error.object)[error.start : error.end]
                row = PromptError(f"{source}:{index}: holds half a surrogate pair, {half!a}, which is no text; mend it")
            except (ValueError, RecursionError) as error:
                row = PromptError(f"{source}:{index}: not valid JSON ({error}); {_EXPECTED} on every line")
            yield index, row


def _data_set_rows(source: str, fault: str, hint: str, name: str, **options: Any) -> Iterator[Any]:
    from datasets.load import load_dataset

    try:
        yield from load_dataset(name, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise PromptError(f"{source}: {fault} ({' '.join(str(error).split())}); {hint}") from error


def parse_conversation(source: str, index: int, row: Any) -> Conversation:
    """A row as ``read_conversations`` takes it. Raises: PromptError naming source and line."""
    place = f"{source}:{index}"
    if isinstance(row, PromptError):
        raise row
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
    messages, tools = tuple(_message(place, turn, item) for turn, item in enumerate(value, 1)), row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PromptError(f"{place}: tools is {tools!r:.80}; expected a list of objects")
    return Conversation(source, index, messages, later_turns=tuple(later), tools=tuple(tools))


def _message(place: str, turn: int, item: Any) -> dict[str, Any]:
    if isinstance(item, dict) and isinstance(item.get("from"), str):
        item = {"role": _SHAREGPT_ROLES.get(item["from"], item["from"]), "content": item.get("value")}
    if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("role", "content")):
        raise PromptError(f"{place}: message {turn} is {item!r:.80}; expected 'role' and 'content', both text")
    return {key: value for key, value in item.items() if value is not None}
