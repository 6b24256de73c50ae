"""The target's own responses: a journal in the order of their completion, then a JSONL file in that of the prompts."""

import hashlib
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from dspark.config import Section, read_back
from dspark.data.chat import ChatFormat, Encoded, add_to_digest, check_length
from dspark.data.conversations import encode_each
from dspark.data.loops import ends_in_loop
from dspark.data.rows import ASKED_FILE, Lines, Prompt, Prompts, Row, lines_of, parse_row, rows_of
from dspark.errors import RecordError
from dspark.files import differences, partial_of, put_in_place, write_whole

RESPONSES_FILE = "responses.jsonl"
UNUSABLE = ("failed", "loop")
"""Finish reasons of rows that are kept but not recorded."""
_SYNC_SECONDS = 1.0
"""A killed process loses no row that it kept; a machine without power loses those of so long at most."""

Generate = Callable[[Sequence[Prompt], Sequence[int]], list[torch.Tensor]]
"""The target's answers: prompts of one temperature and their row numbers -> new ids, the stop token included."""


@dataclass(frozen=True)
class Answer:
    """The ids of one response, the stop token included; none where no usable answer came and the user goes on without.
    ``is_retokenised``: they were made from a text, so they are perhaps not the very ids that the target drew.
    """

    ids: Sequence[int]
    is_retokenised: bool = False


Keep = Callable[[Mapping[int, Answer]], None]
"""Puts answers by row number on the disk; rows that are there already stay as they are."""
Ask = Callable[[NDArray[np.int64], Keep], None]
"""Has the prompts of these rows answered and hands every answer on as it comes.

A row's answer may depend only on the prompts and on its row number, so that a resumed file equals an uninterrupted one.
"""


class ResponsesHeader(Section):
    """What a responses file was made from and how; written beside it and compared when a run resumes."""

    format: Literal["dspark-responses-2"] = "dspark-responses-2"
    target: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    template_fingerprint: str | None
    asked_from: str
    """Checksum over sources and settings; where it is the same, the prompts are not made again."""
    prompts_sha256: str
    num_prompts: int
    """Rows of the file: conversations times temperatures times thinking."""
    num_left_out: int
    """Conversations."""
    answers: Literal["target", "given"]
    """Whether the target was asked, or the answers stood in the sources."""
    thinking: tuple[bool, ...]
    temperatures: tuple[float, ...]
    """None are there where the answers are given."""
    max_response_tokens: int
    generation_batch_size: int
    """1 where endpoints answer: no row depends on its neighbours."""
    served_as: str | None = None
    """Route and model of the endpoints that answer; None is in process."""
    stop_token_ids: tuple[int, ...]
    dtype: str
    seed: int
    versions: dict[str, str]


def header_path(path: Path) -> Path:
    """The sidecar of a responses file."""
    return path.with_suffix(".header.json")


def in_batches(generate: Generate, prompts: Prompts[Prompt], batch_size: int) -> Ask:
    """Ask a target in this process, batch by batch: of one temperature and like lengths, the longest prompts first. A
    torn batch is asked whole again.
    """

    def ask(rows_M: NDArray[np.int64], keep: Keep) -> None:
        is_missing_S = np.isin(np.arange(len(prompts)), rows_M)
        for temperature in np.unique(prompts.temperatures_S):
            rows_N = np.flatnonzero(prompts.temperatures_S == temperature)
            rows_N = rows_N[np.argsort(-prompts.num_tokens_S[rows_N], kind="stable")]
            for start in range(0, len(rows_N), batch_size):
                if is_missing_S[batch_B := rows_N[start : start + batch_size]].any():
                    rows = batch_B.tolist()
                    responses = generate([prompts[row] for row in rows], rows)
                    keep({row: Answer(ids_T.tolist()) for row, ids_T in zip(rows, responses, strict=True)})

    return ask


def write_responses(
    ask: Ask,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    header: ResponsesHeader,
    path: Path,
    on_rows: Callable[[int, int], None],
) -> Counter[str]:
    """Have every prompt answered; ``path`` then holds one JSON line each, in the order of the prompts.

    Until the last answer is there they stand in a journal beside ``path``, in the order of their completion, each line
    with its row number; a run that was killed goes on from there. Where answers are given, the prompts' file holds them
    and takes its place. ``on_rows`` is told how many rows are on the disk and how many new tokens they hold.
    Memory: 16 bytes a row beside the prompts'.
    Returns: how many ``rows`` there are, how many of each finish reason, and how many ``retokenised``.
    Raises: RecordError when the file was made from other prompts, another target or other settings; as ``ask``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    journal, asked = path.with_suffix(".journal"), path.with_name(ASKED_FILE)
    _open_header(header, path, journal)
    kinds, chat = Counter[str](), ChatFormat(tokenizer, header.stop_token_ids)
    if header.answers == "given" and not path.is_file():
        put_in_place(asked, path)
    if path.is_file():
        kinds.update(chain.from_iterable(map(_kinds, rows_of(path, Row))))
        _check_number(path, kinds["rows"], header.num_prompts)
        on_rows(kinds["rows"], 0)
    else:
        offsets_S = _read_journal(journal, header.num_prompts, kinds)
        on_rows(kinds["rows"], 0)
        synced = 0.0
        with open(journal, "ab") as file:

            def keep(answers: Mapping[int, Answer]) -> None:
                nonlocal synced
                new = {number: answer for number, answer in answers.items() if offsets_S[number] < 0}
                for number, answer in new.items():
                    row = _row(chat, prompts[number], answer)
                    offsets_S[number] = file.tell()
                    file.write(f"{number} {row.model_dump_json(exclude_none=True)}\n".encode())
                    kinds.update(_kinds(row))
                file.flush()
                if time.monotonic() >= synced + _SYNC_SECONDS:
                    os.fsync(file.fileno())
                    synced = time.monotonic()
                on_rows(len(new), sum(len(answer.ids) for answer in new.values()))

            if len(missing_M := np.flatnonzero(offsets_S < 0)):
                ask(missing_M, keep)
        with open(journal, "rb") as source, open(partial_of(path), "wb") as whole:
            for offset in offsets_S:
                source.seek(offset)
                whole.write(source.readline().partition(b" ")[2])
        put_in_place(partial_of(path), path)
    journal.unlink(missing_ok=True)
    asked.unlink(missing_ok=True)
    return kinds


def read_header(path: Path) -> ResponsesHeader:
    """The header of a responses file. Raises: RecordError when it is missing or not one."""
    sidecar = header_path(path)
    if not sidecar.is_file() or not path.is_file():
        missing = f"found no finished responses with their header {sidecar.name}"
        raise RecordError(f"{path}: {missing}; run dspark prepare first")
    return _parse_header(path)


class Responses(Lines[Encoded]):
    """The rows of a responses file that can be recorded: 40 bytes of memory a row, no text.
    Shapes: num_tokens_S and num_supervised_S int64. ``text_sha256``: of all ids and masks, as the file holds them.
    """

    def __init__(self, path: Path, columns_S5: NDArray[np.int64], text_sha256: str) -> None:
        super().__init__(path, columns_S5[:, :2])
        self._numbers_S, self.num_tokens_S, self.num_supervised_S = columns_S5[:, 2:].T
        self._columns_S5, self.text_sha256 = columns_S5, text_sha256

    def reordered(self, order_S: NDArray[np.int64]) -> "Responses":
        """The same rows, so that the first one is row ``order_S[0]`` of these."""
        return Responses(self.path, self._columns_S5[order_S], self.text_sha256)

    def _item(self, index: int, line: bytes) -> Encoded:
        place = f"{self.path}:{self._numbers_S[index]}"
        ids_T, loss_mask_T = parse_row(Row, place, line).arrays()
        return Encoded(torch.from_numpy(ids_T), torch.from_numpy(loss_mask_T), place)


def open_responses(
    path: Path, header: ResponsesHeader, *, max_tokens: int, vocab_size: int, is_leaving_out: bool = False
) -> Responses:
    """Every prompt with its response as one sequence; the response's ids, exactly as kept, are supervised. Prompts
    without an answer, and answers that end in a loop, are left out. The file is read once and every line checked.
    Raises: RecordError naming the line that is not a row, or a file that does not hold every response; PromptError for
    rows of more than ``max_tokens``, unless they are left out.
    """
    columns, counts = array("q"), Counter[str]()
    prompts_sha256, text_sha256 = hashlib.sha256(), hashlib.sha256()

    def take(numbered: tuple[int, int, bytes]) -> None:
        number, begin, line = numbered
        row = parse_row(Row, f"{path}:{number}", line)
        add_to_digest(prompts_sha256, np.array(row.prompt_ids, dtype=np.int64))
        if row.finish_reason in UNUSABLE:
            return
        if (row.finish_reason == "given") != (header.answers == "given"):
            raise RecordError(f"{path}:{number}: {row.finish_reason}, but answers are {header.answers} in its header")
        check_length(f"{path}:{number}", len(row.ids), max_tokens)
        ids_T, loss_mask_T = row.arrays()
        if (most := int(ids_T.max())) >= vocab_size:
            raise RecordError(f"{path}:{number}: found the token id {most}, expected at most {vocab_size - 1}")
        add_to_digest(text_sha256, ids_T)
        add_to_digest(text_sha256, loss_mask_T)
        columns.extend((begin, begin + len(line), number, len(ids_T), int(loss_mask_T.sum())))

    for _ in encode_each(lines_of(path), take, counts, is_leaving_out=is_leaving_out):
        pass
    _check_number(path, counts["rows"], header.num_prompts)
    if not columns:
        raise RecordError(f"{path}: no prompt has an answer; delete it and run dspark prepare again")
    if prompts_sha256.hexdigest() != header.prompts_sha256:
        raise RecordError(f"{path}: not the prompts of {header_path(path).name}; delete both, run dspark prepare again")
    return Responses(path, np.array(columns, dtype=np.int64).reshape(-1, 5), text_sha256.hexdigest())


def known_header(path: Path, asked_from: str) -> ResponsesHeader | None:
    """The header beside ``path``, finished or not, if its prompts were made from the same things."""
    header = _parse_header(path) if header_path(path).is_file() else None
    return header if header and header.asked_from == asked_from else None


def _parse_header(path: Path) -> ResponsesHeader:
    sidecar = header_path(path)
    return read_back(ResponsesHeader, sidecar.read_bytes(), sidecar, "delete it and the responses")


def _kinds(row: Row) -> list[str]:
    return ["rows", row.finish_reason] + ["retokenised"] * bool(row.is_retokenised)


def _row(chat: ChatFormat, prompt: Prompt, answer: Answer) -> Row:
    ids = list(answer.ids)
    spoken = ids[:-1] if ids and ids[-1] in chat.stop_token_ids else ids
    reason = "stop" if len(spoken) < len(ids) else "length"
    if ends_in_loop(spoken) or chat.special_ids.issuperset(ids):
        reason = "loop" if ids else "failed"
    text = chat.tokenizer.decode(spoken)
    assert isinstance(text, str)
    said: dict[str, Any] = {"response": text, "finish_reason": reason, "response_ids": ids}
    return Row.model_construct(**dict(prompt), **said, is_retokenised=answer.is_retokenised or None)


def _open_header(header: ResponsesHeader, path: Path, journal: Path) -> None:
    begun = next((file for file in (path, journal) if file.is_file()), None)
    if begun and not header_path(path).is_file():
        raise RecordError(f"{begun}: its header {header_path(path).name} is missing; move the file away or delete it")
    if not begun:
        write_whole(header_path(path), header.model_dump_json(indent=1))
        return
    settings = header.model_dump(exclude={"versions", "target", "asked_from"})
    if told := differences(_parse_header(path).model_dump(), settings):
        hint = f"or delete {begun.name} and {header_path(path).name} to start again"
        raise RecordError(f"{path}: made with {told}; give the run another record.folder, {hint}")


def _read_journal(journal: Path, num_prompts: int, kinds: Counter[str]) -> NDArray[np.int64]:
    """Where each row's line begins, in bytes (-1: not there); what a kill left of a last line is cut."""
    offsets_S = np.full(num_prompts, -1, dtype=np.int64)
    for number, begin, line in lines_of(journal) if journal.is_file() else ():
        if not line.endswith(b"\n"):
            os.truncate(journal, begin)
            break
        row, _, text = line.partition(b" ")
        kinds.update(_kinds(parse_row(Row, f"{journal}:{number}", text)))
        if not row.isdigit() or len(row) > 18 or int(row) >= num_prompts or offsets_S[int(row)] >= 0:
            found = f"{row!r:.40} is no row, or one that was there before"
            raise RecordError(f"{journal}:{number}: {found}; delete this line")
        offsets_S[int(row)] = begin
    return offsets_S


def _check_number(path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise RecordError(f"{path}: found {found} responses, expected {expected}; delete it, run dspark prepare again")
