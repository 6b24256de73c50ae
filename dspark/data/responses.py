"""The target's own responses: a JSONL file in the order of the prompts, appended batch by batch, resumable."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
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
from dspark.files import write_whole

RESPONSES_FILE = "responses.jsonl"

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Generate = Callable[[Sequence[torch.Tensor], int], list[torch.Tensor]]
"""The target's answers: prompts (int64 [T_b]) and the row number of the first -> new ids, the stop token included.

A row's answer may depend only on the prompts of its batch and on its row number, so that a resumed file equals an
uninterrupted one.
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
    finish_reason: Literal["stop", "length"]
    prompt_ids: Annotated[list[TokenId], Field(min_length=1)]
    response_ids: list[TokenId]


@dataclass(frozen=True)
class Prompt:
    """A conversation and its ids up to where the target goes on (int64 [T])."""

    conversation: Conversation
    ids_T: torch.Tensor


def header_path(path: Path) -> Path:
    """The sidecar of a responses file."""
    return path.with_suffix(".header.json")


def write_responses(
    generate: Generate,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    header: ResponsesHeader,
    path: Path,
    on_row: Callable[[], None],
) -> None:
    """Answer every prompt in order, ``header.generation_batch_size`` at a time, one JSON line each.

    A file that is already there is continued after its last whole batch. ``on_row`` is called for every row that is on
    disk. ``finish_reason`` is ``stop`` if the response ends with a stop token, else ``length``.
    Raises: RecordError when the file was made from other prompts, another target or other settings.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _open_header(header, path)
    batch_size = header.generation_batch_size
    num_done = _keep_whole_batches(path, batch_size, len(prompts))
    for _ in range(num_done):
        on_row()
    with open(path, "ab") as file:
        for start in range(num_done, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            responses = generate([prompt.ids_T for prompt in batch], start)
            rows = (_row(tokenizer, *pair, header.stop_token_ids) for pair in zip(batch, responses, strict=True))
            file.write("".join(row.model_dump_json(exclude_none=True) + "\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())
            for _ in batch:
                on_row()


def read_header(path: Path) -> ResponsesHeader:
    """The header of a responses file. Raises: RecordError when it is missing or not one."""
    sidecar = header_path(path)
    if not sidecar.is_file() or not path.is_file():
        raise RecordError(f"{path}: found no responses with their header {sidecar.name}; run dspark prepare first")
    try:
        return ResponsesHeader.model_validate_json(sidecar.read_bytes())
    except ValidationError as error:
        raise RecordError(f"{sidecar}: {describe_validation(error)}; delete it and the responses") from error


def read_responses(path: Path, header: ResponsesHeader) -> list[Encoded]:
    """Every prompt with its response as one sequence; the response's ids, exactly as generated, are supervised.
    Raises: RecordError naming the line that is not a row, or a file that does not hold every response.
    """
    encoded, prompts = [], []
    for number, line in enumerate(_lines(path), 1):
        row = _parse(path, number, line)
        ids_T = torch.tensor(row.prompt_ids + row.response_ids)
        loss_mask_T = torch.arange(len(ids_T)) >= len(row.prompt_ids)
        encoded.append(Encoded(ids_T, loss_mask_T, f"{path}:{number}"))
        prompts.append(torch.tensor(row.prompt_ids))
    num = header.num_prompts
    if len(encoded) != num:
        raise RecordError(f"{path}: found {len(encoded)} responses, expected {num}; run dspark prepare again to finish")
    if digest(prompts) != header.prompts_sha256:
        raise RecordError(f"{path}: not the prompts of {header_path(path).name}; delete both, run dspark prepare again")
    return encoded


def _parse(path: Path, number: int, line: bytes) -> _Row:
    try:
        return _Row.model_validate_json(line)
    except ValidationError as error:
        found = describe_validation(error)
        raise RecordError(f"{path}:{number}: not a response ({found}); delete the lines from here on") from error


def _row(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, response_ids_T: torch.Tensor, stop_token_ids: Collection[int]
) -> _Row:
    response_ids = response_ids_T.tolist()
    is_stopped = response_ids[-1] in stop_token_ids
    text = tokenizer.decode(response_ids[:-1] if is_stopped else response_ids)
    assert isinstance(text, str)
    conversation = prompt.conversation
    return _Row(
        source=conversation.source,
        index=conversation.index,
        messages=list(conversation.messages) or None,
        text=conversation.text,
        response=text,
        finish_reason="stop" if is_stopped else "length",
        prompt_ids=prompt.ids_T.tolist(),
        response_ids=response_ids,
    )


def _open_header(header: ResponsesHeader, path: Path) -> None:
    if header_path(path).is_file():
        found = read_header(path) if path.is_file() else None
        old, new = ((h or header).model_dump(exclude={"versions", "target"}) for h in (found, header))
        differing = [f"{key} {old[key]!r} (now {new[key]!r})" for key in old if old[key] != new[key]]
        if differing:
            raise RecordError(
                f"{path}: made with {', '.join(differing)}; give the run another record.folder, "
                f"or delete {path.name} and {header_path(path).name} to start again"
            )
        if found is not None:
            return
    elif path.is_file():
        raise RecordError(f"{path}: its header {header_path(path).name} is missing; move the file away or delete it")
    write_whole(header_path(path), header.model_dump_json(indent=1))


def _keep_whole_batches(path: Path, batch_size: int, num_prompts: int) -> int:
    """Cut the file after its last whole batch; returns the number of rows kept."""
    if not path.is_file():
        return 0
    whole = [line for line in _lines(path) if line.endswith(b"\n")]
    for number, line in enumerate(whole, 1):
        _parse(path, number, line)
    if len(whole) > num_prompts:
        raise RecordError(f"{path}: found {len(whole)} rows for {num_prompts} prompts; delete the file to start again")
    num_kept = num_prompts if len(whole) == num_prompts else len(whole) // batch_size * batch_size
    os.truncate(path, sum(map(len, whole[:num_kept])))
    return num_kept


def _lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file
