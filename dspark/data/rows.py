"""Prompts, and answers to them, as JSON lines of a file: each is read when it is wanted; memory holds numbers only."""

import hashlib
import os
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from dspark.config import Section, read_back
from dspark.data.chat import ChatFormat, add_to_digest, encode_conversation
from dspark.data.conversations import Conversation
from dspark.files import partial_of, put_in_place

ASKED_FILE = "asked.jsonl"

ItemT = TypeVar("ItemT")
RowT = TypeVar("RowT", bound="Prompt")
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Prompt(Section, strict=True):
    """Where a prompt came from, how it is asked, and its ids up to where the target goes on."""

    source: str
    index: int
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    is_thinking: bool = False
    temperature: float | None = None
    """None where the answer is given."""
    prompt_ids: Annotated[list[TokenId], Field(min_length=1)]

    @classmethod
    def of(cls, conversation: Conversation, prompt_ids: Sequence[int], **others: Any) -> Self:
        """The row of a conversation."""
        messages, tools = list(conversation.messages) or None, list(conversation.tools) or None
        others |= {"source": conversation.source, "index": conversation.index, "prompt_ids": prompt_ids}
        return cls(messages=messages, text=conversation.text, tools=tools, **others)

    @property
    def conversation(self) -> Conversation:
        """What ``of`` was given, but for later turns."""
        messages, tools = tuple(self.messages or ()), tuple(self.tools or ())
        return Conversation(self.source, self.index, messages, self.text, tools=tools)

    @property
    def ids(self) -> list[int]:
        """All that is there."""
        return self.prompt_ids

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Half-open ranges of ``ids`` that are supervised."""
        return []


class Row(Prompt, strict=True):
    """An answered prompt: what was said, and the very ids, so that nothing is tokenised twice."""

    response: str
    finish_reason: Literal["stop", "length", "loop", "failed", "given"]
    """``loop``: it ends in one, or holds special tokens only; such rows and ``failed`` ones are never recorded."""
    response_ids: list[TokenId]
    supervised: list[tuple[TokenId, TokenId]] | None = None
    """``spans`` where they are not the response."""
    is_retokenised: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        edges = [0, *chain.from_iterable(self.spans), len(self.ids) + 1]
        if self.finish_reason != "failed" and (len(edges) < 4 or edges != sorted(set(edges))):
            raise ValueError(f"supervised must be ranges of tokens behind the first, in order, got {edges[1:-1]}")
        return self

    @property
    def ids(self) -> list[int]:
        """Of prompt and response."""
        return self.prompt_ids + self.response_ids

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The response, unless the row says otherwise."""
        return [(len(self.prompt_ids), len(self.ids))] if self.supervised is None else self.supervised

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """ids_T and loss_mask_T."""
        ids_T = np.array(self.ids, dtype=np.int64)
        loss_mask_T = np.zeros(len(ids_T), dtype=np.bool_)
        for begin, end in self.spans:
            loss_mask_T[begin:end] = True
        return ids_T, loss_mask_T


def given_row(chat: ChatFormat, conversation: Conversation) -> Row:
    """A conversation with the answers that it holds. Raises: PromptError as ``encode_conversation``."""
    encoded = encode_conversation(chat, conversation)
    ids, edges_E = encoded.ids_T.tolist(), np.flatnonzero(np.diff(encoded.loss_mask_T.numpy(), append=False)) + 1
    prompt_ids, response_ids = ids[: edges_E[0]], ids[edges_E[0] :]
    said = {"response_ids": response_ids, "response": chat.tokenizer.decode(response_ids)}
    said |= {"supervised": [(begin, end) for begin, end in edges_E.reshape(-1, 2).tolist()]}
    return Row.of(conversation, prompt_ids, is_thinking=chat.is_thinking, finish_reason="given", **said)


def parse_row(model: type[RowT], place: str, line: bytes) -> RowT:
    """Raises: RecordError naming the place of a line that is no such row."""
    hint = "restore it, or delete the file and run dspark prepare again"
    return read_back(model, line, place, hint, "not a response ({})")


def lines_of(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Every line of a file with its number, from 1, and where it begins, in bytes."""
    begin = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            yield number, begin, line
            begin += len(line)


def rows_of(path: Path, model: type[RowT]) -> Iterator[RowT]:
    """Every row of a file, in order. Raises: as ``parse_row``."""
    return (parse_row(model, f"{path}:{number}", line) for number, _, line in lines_of(path))


class Lines(Sequence[ItemT]):
    """Lines of a file that stay there; each is read when it is asked for, by any thread.
    Shapes: places_S2 int64, where each begins and ends, in bytes.
    """

    def __init__(self, path: Path, places_S2: NDArray[np.int64]) -> None:
        self.path, self.places_S2 = path, places_S2

    @cached_property
    def _file(self) -> BinaryIO:
        return open(self.path, "rb")

    def __len__(self) -> int:
        return len(self.places_S2)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        begin, end = self.places_S2[index].tolist()
        return self._item(index, os.pread(self._file.fileno(), end - begin, begin))

    @abstractmethod
    def _item(self, index: int, line: bytes) -> ItemT:
        """What line ``index`` says."""


class Prompts(Lines[RowT]):
    """The rows of a file in order, with what tells them apart without reading them: 28 bytes of memory a row.
    Shapes: num_tokens_S int32 (of the prompts), temperatures_S float64 (NaN: given). ``sha256`` is that of the prompts.
    """

    def __init__(self, path: Path, model: type[RowT]) -> None:
        num_tokens, temperatures, places, sha256 = array("i"), array("d"), array("q"), hashlib.sha256()
        for number, begin, line in lines_of(path):
            row = parse_row(model, f"{path}:{number}", line)
            add_to_digest(sha256, np.array(row.prompt_ids, dtype=np.int64))
            num_tokens.append(len(row.prompt_ids))
            temperatures.append(np.nan if row.temperature is None else row.temperature)
            places.extend((begin, begin + len(line)))
        super().__init__(path, np.frombuffer(places, dtype=np.int64).reshape(-1, 2))
        self.model, self.sha256 = model, sha256.hexdigest()
        self.num_tokens_S, self.temperatures_S = np.array(num_tokens, dtype=np.int32), np.array(temperatures)

    def _item(self, index: int, line: bytes) -> RowT:
        return parse_row(self.model, f"{self.path}:{index + 1}", line)


def open_prompts(path: Path, rows: Iterable[Iterable[RowT]], model: type[RowT], known: str | None) -> Prompts[RowT]:
    """The prompts in ``path`` if they have the checksum ``known``; else those of ``rows``, written whole.
    Raises: as ``rows``, and nothing is left then.
    """
    if known and path.is_file() and (found := Prompts(path, model)).sha256 == known:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(partial_of(path), "wb") as file:
            for row in chain.from_iterable(rows):
                file.write(row.model_dump_json(exclude_none=True).encode() + b"\n")
        put_in_place(partial_of(path), path)
    finally:
        partial_of(path).unlink(missing_ok=True)
    return Prompts(path, model)
