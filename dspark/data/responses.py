"""The target's own responses: a journal in the order of their completion, then a JSONL file in that of the prompts."""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError
from transformers import PreTrainedTokenizerBase

from dspark.config import Section, describe_validation
from dspark.data.chat import Encoded, digest
from dspark.data.conversations import Conversation
from dspark.errors import RecordError
from dspark.files import partial_of, put_in_place, write_whole

RESPONSES_FILE = "responses.jsonl"
_SYNC_SECONDS = 1.0
"""A killed process loses no row that it kept; a machine without power loses those of so long at most."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Generate = Callable[[Sequence[torch.Tensor], int], list[torch.Tensor]]
"""The target's answers: prompts (int64 [T_b]) and the row number of the first -> new ids, the stop token included."""


@dataclass(frozen=True)
class Answer:
    """The ids of one response, the stop token included; none where no usable answer came and the user goes on without.
    ``is_retokenised``: they were made from a text, so they are perhaps not the very ids that the target drew.
    """

    ids: Sequence[int]
    is_retokenised: bool = False


Keep = Callable[[Mapping[int, Answer]], None]
"""Puts answers by row number on the disk; rows that are there already stay as they are."""
Ask = Callable[[Sequence[int], Keep], None]
"""Has the prompts of these rows answered and hands every answer on as it comes.

A row's answer may depend only on the prompts and on its row number, so that a resumed file equals an uninterrupted one.
"""


class ResponsesHeader(Section):
    """What a responses file was made from and how; written beside it and compared when a run resumes."""

    format: Literal["dspark-responses-1"] = "dspark-responses-1"
    target: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    template_fingerprint: str | None
    prompts_sha256: str
    num_prompts: int
    num_left_out: int
    is_thinking: bool
    temperature: float
    max_response_tokens: int
    generation_batch_size: int
    """1 where endpoints answer: no row depends on its neighbours."""
    served_as: str | None = None
    """Route and model of the endpoints that answer; None is in process."""
    stop_token_ids: tuple[int, ...]
    dtype: str
    seed: int
    versions: dict[str, str]


class _Row(Section, strict=True):
    """One line: where the prompt came from, what was said, and the very ids, so that nothing is tokenised twice."""

    source: str
    index: int
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    response: str
    finish_reason: Literal["stop", "length", "failed"]
    prompt_ids: Annotated[list[TokenId], Field(min_length=1)]
    response_ids: list[TokenId]
    is_retokenised: bool | None = None


@dataclass(frozen=True)
class Prompt:
    """A conversation and its ids up to where the target goes on (int64 [T])."""

    conversation: Conversation
    ids_T: torch.Tensor


def header_path(path: Path) -> Path:
    """The sidecar of a responses file."""
    return path.with_suffix(".header.json")


def in_batches(generate: Generate, prompts: Sequence[Prompt], batch_size: int) -> Ask:
    """Ask a target in this process, batch by batch in the order of the prompts; a torn batch is asked whole again."""

    def ask(rows: Sequence[int], keep: Keep) -> None:
        for start in sorted({row - row % batch_size for row in rows}):
            responses = generate([prompt.ids_T for prompt in prompts[start : start + batch_size]], start)
            keep({start + index: Answer(ids_T.tolist()) for index, ids_T in enumerate(responses)})

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
    with its row number; a run that was killed goes on from there. ``on_rows`` is told how many rows are on the disk and
    how many new tokens they hold. ``finish_reason`` is ``stop`` if the response ends with a stop token, ``failed`` if
    there is none, else ``length``.
    Returns: how many rows are ``retokenised`` and how many ``failed``.
    Raises: RecordError when the file was made from other prompts, another target or other settings; as ``ask``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    journal = path.with_suffix(".journal")
    _open_header(header, path, journal)
    kinds = Counter[str]()
    if path.is_file():
        journal.unlink(missing_ok=True)
        kinds.update(kind for number, line in enumerate(_lines(path), 1) for kind in _kinds(_parse(path, number, line)))
        _check_number(path, kinds["rows"], len(prompts))
        on_rows(kinds["rows"], 0)
        return kinds
    offsets = _read_journal(journal, len(prompts), kinds)
    on_rows(len(offsets), 0)
    synced = 0.0
    with open(journal, "ab") as file:

        def keep(answers: Mapping[int, Answer]) -> None:
            nonlocal synced
            new = {number: answer for number, answer in answers.items() if number not in offsets}
            for number, answer in new.items():
                row = _row(tokenizer, prompts[number], answer, header.stop_token_ids)
                offsets[number] = file.tell()
                file.write(f"{number} {row.model_dump_json(exclude_none=True)}\n".encode())
                kinds.update(_kinds(row))
            file.flush()
            if time.monotonic() >= synced + _SYNC_SECONDS:
                os.fsync(file.fileno())
                synced = time.monotonic()
            on_rows(len(new), sum(len(answer.ids) for answer in new.values()))

        missing = [number for number in range(len(prompts)) if number not in offsets]
        if missing:
            ask(missing, keep)
    with open(journal, "rb") as source, open(partial_of(path), "wb") as whole:
        for number in range(len(prompts)):
            source.seek(offsets[number])
            whole.write(source.readline().partition(b" ")[2])
    put_in_place(partial_of(path), path)
    journal.unlink()
    return kinds


def read_header(path: Path) -> ResponsesHeader:
    """The header of a responses file. Raises: RecordError when it is missing or not one."""
    sidecar = header_path(path)
    if not sidecar.is_file() or not path.is_file():
        raise RecordError(
            f"{path}: found no finished responses with their header {sidecar.name}; run dspark prepare first"
        )
    return _parse_header(path)


def read_responses(path: Path, header: ResponsesHeader) -> list[Encoded]:
    """Every prompt with its response as one sequence; the response's ids, exactly as kept, are supervised. Prompts
    without an answer are left out.
    Raises: RecordError naming the line that is not a row, or a file that does not hold every response.
    """
    encoded, prompts = [], []
    for number, line in enumerate(_lines(path), 1):
        row = _parse(path, number, line)
        prompts.append(torch.tensor(row.prompt_ids))
        if row.finish_reason != "failed":
            ids_T = torch.tensor(row.prompt_ids + row.response_ids)
            loss_mask_T = torch.arange(len(ids_T)) >= len(row.prompt_ids)
            encoded.append(Encoded(ids_T, loss_mask_T, f"{path}:{number}"))
    _check_number(path, len(prompts), header.num_prompts)
    if not encoded:
        raise RecordError(f"{path}: no prompt has an answer; delete it and run dspark prepare again")
    if digest(prompts) != header.prompts_sha256:
        raise RecordError(f"{path}: not the prompts of {header_path(path).name}; delete both, run dspark prepare again")
    return encoded


def _parse_header(path: Path) -> ResponsesHeader:
    try:
        return ResponsesHeader.model_validate_json(header_path(path).read_bytes())
    except ValidationError as error:
        raise RecordError(f"{header_path(path)}: {describe_validation(error)}; delete it and the responses") from error


def _parse(path: Path, number: int, line: bytes) -> _Row:
    try:
        return _Row.model_validate_json(line)
    except ValidationError as error:
        found = describe_validation(error)
        raise RecordError(
            f"{path}:{number}: not a response ({found}); restore or delete this line, run dspark prepare again"
        ) from error


def _kinds(row: _Row) -> list[str]:
    return ["rows"] + ["retokenised"] * bool(row.is_retokenised) + ["failed"] * (row.finish_reason == "failed")


def _row(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answer: Answer, stop_token_ids: Collection[int]) -> _Row:
    response_ids = list(answer.ids)
    is_stopped = bool(response_ids) and response_ids[-1] in stop_token_ids
    text = tokenizer.decode(response_ids[:-1] if is_stopped else response_ids)
    assert isinstance(text, str)
    conversation = prompt.conversation
    return _Row(
        source=conversation.source,
        index=conversation.index,
        messages=list(conversation.messages) or None,
        text=conversation.text,
        response=text,
        finish_reason="stop" if is_stopped else "length" if response_ids else "failed",
        prompt_ids=prompt.ids_T.tolist(),
        response_ids=response_ids,
        is_retokenised=answer.is_retokenised or None,
    )


def _open_header(header: ResponsesHeader, path: Path, journal: Path) -> None:
    begun = next((file for file in (path, journal) if file.is_file()), None)
    if begun and not header_path(path).is_file():
        raise RecordError(f"{begun}: its header {header_path(path).name} is missing; move the file away or delete it")
    if not begun:
        write_whole(header_path(path), header.model_dump_json(indent=1))
        return
    old, new = (each.model_dump(exclude={"versions", "target"}) for each in (_parse_header(path), header))
    differing = [f"{key} {old[key]!r} (now {new[key]!r})" for key in old if old[key] != new[key]]
    if differing:
        raise RecordError(
            f"{path}: made with {', '.join(differing)}; give the run another record.folder, "
            f"or delete {begun.name} and {header_path(path).name} to start again"
        )


def _read_journal(journal: Path, num_prompts: int, kinds: Counter[str]) -> dict[int, int]:
    """Where each row's line begins, in bytes; what a kill left of a last line is cut."""
    offsets: dict[int, int] = {}
    end = 0
    for number, line in enumerate(_lines(journal) if journal.is_file() else (), 1):
        if not line.endswith(b"\n"):
            os.truncate(journal, end)
            break
        row, _, text = line.partition(b" ")
        kinds.update(_kinds(_parse(journal, number, text)))
        if not row.isdigit() or len(row) > 18 or int(row) >= num_prompts or int(row) in offsets:
            raise RecordError(
                f"{journal}:{number}: {row!r:.40} is no row, or one that was there before; delete this line"
            )
        offsets[int(row)] = end
        end += len(line)
    return offsets


def _check_number(path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise RecordError(f"{path}: found {found} responses, expected {expected}; delete it, run dspark prepare again")


def _lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file
