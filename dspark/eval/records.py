"""Decoded texts on disk: the rounds of an evaluation as one parquet file, and the journal from which it goes on."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import pyarrow
import torch
from pyarrow import parquet

from dspark.config import Section, read_back
from dspark.data.rows import TokenId
from dspark.decode.round import Round
from dspark.errors import RecordError
from dspark.eval.timing import DecodedText
from dspark.files import claim, differences, partial_of, put_in_place, write_whole

JOURNAL_FILE, ROUNDS_FILE = "texts.jsonl", "rounds.parquet"
CLOCKS = ("seconds", "is_looping", "first_token_seconds", "phase_seconds")
"""What a line says of a text beside its ids and rounds."""
COUNTS = ("prompt_index", "round_index", "num_proposed", "accepted_drafts", "acceptance_length")
COLUMNS = {"task": pyarrow.string(), "temperature": pyarrow.float64(), "contender": pyarrow.string()}
COLUMNS |= dict.fromkeys(COUNTS, pyarrow.int64())
COLUMNS |= {"is_cut": pyarrow.bool_(), "confidence_logits": pyarrow.list_(pyarrow.float64())}
SCHEMA = pyarrow.schema([pyarrow.field(name, kind, nullable=False) for name, kind in COLUMNS.items()])


class TextKey(NamedTuple):
    """Which text of an evaluation: the prompt's place in its task, decoded by a contender at a temperature."""

    task: str
    temperature: float
    contender: str
    prompt_index: int


def keys_of(task: str, temperature: float, contender: str, count: int) -> list[TextKey]:
    """Of the first prompts, in order."""
    return [TextKey(task, temperature, contender, index) for index in range(count)]


def write_rounds(texts: Mapping[TextKey, DecodedText], path: Path) -> None:
    """Write the rounds of all texts, a row each in the order of the texts, whole or not at all. A text without a round
    leaves no row. The folder of ``path`` exists.
    """
    pairs = ((key, *numbered) for key, text in texts.items() for numbered in enumerate(text.rounds))
    rows = [key._asdict() | {"round_index": index} | asdict(counts) for key, index, counts in pairs]
    beside = partial_of(path)
    parquet.write_table(pyarrow.Table.from_pylist(rows, SCHEMA), beside, compression="zstd")
    put_in_place(beside, path)


class _Header(Section):
    format: Literal["dspark-texts-2"] = "dspark-texts-2"
    settings: dict[str, Any]


class _Line(Section, strict=True):
    """One finished text."""

    task: str
    temperature: float
    contender: str
    prompt_index: int
    ids: list[TokenId]
    rounds: tuple[Round, ...]
    seconds: float
    is_looping: bool
    first_token_seconds: float
    phase_seconds: dict[str, float]


class Journal:
    """The finished texts of an evaluation (ids_T int64 on the CPU) in the order they were appended; without a file they
    are kept in memory alone.
    """

    def __init__(self, file: BinaryIO | None, texts: dict[TextKey, DecodedText]) -> None:
        self._file, self.texts = file, texts

    def append(self, key: TextKey, text: DecodedText) -> None:
        """Add a text; when this returns it is on the disk, and no kill takes it away."""
        assert key not in self.texts, f"{key} is done"
        self.texts[key] = text
        if self._file:
            line = key._asdict() | {"ids": text.ids_T.tolist(), "rounds": [asdict(counts) for counts in text.rounds]}
            line |= {name: getattr(text, name) for name in CLOCKS}
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())


@contextmanager
def open_journal(folder: Path, settings: Mapping[str, object]) -> Iterator[Journal]:
    """Begin the journal of an evaluation in the folder, or go on with it; nobody else can meanwhile.

    ``settings`` (JSON values) is everything that decides what the texts say; it is the first line. A last line that a
    kill cut short is dropped.
    Raises: RecordError for a journal of other settings (it names them) or a line that is no text; ConfigError when
    another process has it open.
    """
    path = folder / JOURNAL_FILE
    with claim(folder):
        if not path.exists():
            write_whole(path, json.dumps(_Header(settings=dict(settings)).model_dump()) + "\n")
        content = path.read_bytes()
        found, texts = _parse_texts(path, content)
        old, new = _flat(found), _flat(json.loads(json.dumps(dict(settings))))
        absent = dict.fromkeys(old | new, "absent")
        if differing := differences(absent | old, absent | new):
            hint = "choose another folder, or delete the file to start again"
            raise RecordError(f"{path}: made with {differing}; {hint}")
        os.truncate(path, content.rfind(b"\n") + 1)
        with path.open("ab") as file:
            yield Journal(file, texts)


def read_texts(path: Path) -> dict[TextKey, DecodedText]:
    """The texts of a journal, which stays as it is. Raises: RecordError when it is missing or holds what is no text."""
    if not path.is_file():
        raise RecordError(f"{path}: no such file; expected the texts of a dspark eval --out")
    return _parse_texts(path, path.read_bytes())[1]


def _parse_texts(path: Path, content: bytes) -> tuple[Mapping[str, Any], dict[TextKey, DecodedText]]:
    """The settings of a journal, and the texts in its whole lines."""
    header, *lines = content[: content.rfind(b"\n") + 1].split(b"\n")
    found = read_back(_Header, header, f"{path}:1", "delete it, or choose another folder", "not a journal ({})")
    texts: dict[TextKey, DecodedText] = {}
    for number, line in enumerate(lines[:-1], 2):
        row = read_back(_Line, line, f"{path}:{number}", "delete the lines from here on", "not a text ({})")
        key = TextKey(row.task, row.temperature, row.contender, row.prompt_index)
        if key in texts:
            raise RecordError(f"{path}:{number}: {key} stands there twice; delete the lines from here on")
        for counts in row.rounds:
            bonus = counts.acceptance_length - counts.accepted_drafts
            if not (0 <= counts.accepted_drafts <= counts.num_proposed and 0 <= bonus <= 1):
                raise RecordError(f"{path}:{number}: {counts} cannot be; delete the lines from here on")
        ids_T = torch.tensor(row.ids, dtype=torch.int64)
        texts[key] = DecodedText(ids_T, row.rounds, **{name: getattr(row, name) for name in CLOCKS})
    return found.settings, texts


def _flat(tree: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """A tree's leaves by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{place}{key}.") if isinstance(value, dict) and value else {f"{place}{key}": value}
    return flat
