"""Responses are kept as the very ids that were generated, in order, and a stopped run goes on where it was."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny import STOP_TOKEN_ID, write_tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from dspark.data.chat import digest
from dspark.data.conversations import Conversation
from dspark.data.responses import (
    Prompt,
    ResponsesHeader,
    header_path,
    in_batches,
    read_header,
    read_responses,
    write_responses,
)
from dspark.errors import RecordError

HEADER = ResponsesHeader(
    target="tiny",
    target_fingerprint="a" * 64,
    tokenizer_fingerprint="b" * 64,
    template_fingerprint=None,
    prompts_sha256=digest(torch.tensor([row, 20, 21]) for row in range(1, 9)),
    num_prompts=8,
    num_left_out=0,
    is_thinking=False,
    temperature=1.0,
    max_response_tokens=6,
    generation_batch_size=3,
    stop_token_ids=(STOP_TOKEN_ID,),
    dtype="float32",
    seed=0,
    versions={"torch": "2"},
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    write_tiny_tokenizer(tmp_path / "tokenizer")
    return PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")


def prompts() -> list[Prompt]:
    """Three plain texts, then five questions."""
    rows = [Conversation("p.jsonl", row, text=f"x{row}") for row in range(1, 4)]
    rows += [Conversation("p.jsonl", row, ({"role": "user", "content": f"é{row}"},)) for row in range(4, 9)]
    return [Prompt(row, torch.tensor([row.index, 20, 21])) for row in rows]


def answer(ids: Sequence[torch.Tensor], first_row: int) -> list[torch.Tensor]:
    """Rows with an even number stop after two tokens, the others are cut after three; the ids tell the row."""
    for row, prompt_ids_T in enumerate(ids, first_row):
        assert prompt_ids_T[0] == row + 1
    tails = [[30 + row, STOP_TOKEN_ID] if row % 2 == 0 else [30 + row, 31, 32] for row in range(first_row, 8)]
    return [torch.tensor(tail) for tail in tails[: len(ids)]]


def write(
    path: Path, tokenizer: PreTrainedTokenizerFast, header: ResponsesHeader = HEADER, most_batches: int = 9
) -> list[int]:
    """Write or continue; returns the first rows of the batches that had to be generated. Ends at ``most_batches``."""
    heard: list[int] = []
    generated: list[int] = []

    def generate(ids: Sequence[torch.Tensor], first_row: int) -> list[torch.Tensor]:
        assert path.with_suffix(".journal").read_bytes().count(b"\n") == sum(heard)
        assert first_row % HEADER.generation_batch_size == 0
        if len(generated) == most_batches:
            raise KeyboardInterrupt
        generated.append(first_row)
        return answer(ids, first_row)

    ask = in_batches(generate, prompts(), HEADER.generation_batch_size)
    kinds = write_responses(ask, tokenizer, prompts(), header, path, lambda rows, _: heard.append(rows))
    assert sum(heard) == kinds["rows"] == 8
    assert not path.with_suffix(".journal").exists()
    return generated


def test_the_ids_come_back_exactly_and_only_the_response_is_supervised(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "responses.jsonl"
    assert write(path, tokenizer) == [0, 3, 6]
    assert read_header(path) == HEADER
    for row, encoded in enumerate(read_responses(path, HEADER)):
        response_ids_T = answer([torch.tensor([row + 1])], row)[0]
        assert encoded.ids_T.tolist() == [row + 1, 20, 21, *response_ids_T.tolist()]
        assert encoded.loss_mask_T.tolist() == [False] * 3 + [True] * len(response_ids_T)
        assert encoded.place == f"{path}:{row + 1}"


def test_a_cut_response_has_no_end_of_turn_that_the_target_did_not_write(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "responses.jsonl"
    write(path, tokenizer)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["finish_reason"] for row in rows] == ["stop", "length"] * 4
    assert [row["response_ids"][-1] == STOP_TOKEN_ID for row in rows] == [True, False] * 4
    assert [row["response"] for row in rows[:2]] == [tokenizer.decode([30]), tokenizer.decode([31, 31, 32])]
    assert (rows[0]["text"], rows[4]["messages"]) == ("x1", [{"role": "user", "content": "é5"}])
    for row, encoded in zip(rows, read_responses(path, HEADER), strict=True):
        assert (encoded.ids_T == STOP_TOKEN_ID).sum() == (row["finish_reason"] == "stop")


def as_journal(path: Path, order: Sequence[int]) -> bytes:
    """A finished file as the journal that it came from, had the rows been completed in this order."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.unlink()
    journal = b"".join(b"%d %s" % (row, lines[row]) for row in order)
    path.with_suffix(".journal").write_bytes(journal)
    return journal


@pytest.mark.parametrize("num_bytes_lost", [1, 40, 200, 500, 900, 1100])
@pytest.mark.parametrize("order", [range(8), (5, 0, 7, 2, 4, 3, 1, 6)])
def test_a_torn_journal_is_continued_to_the_same_bytes(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, num_bytes_lost: int, order: Sequence[int]
) -> None:
    path = tmp_path / "responses.jsonl"
    write(path, tokenizer)
    whole = path.read_bytes()
    journal = as_journal(path, order)
    os.truncate(path.with_suffix(".journal"), len(journal) - num_bytes_lost)
    kept = order[: journal[:-num_bytes_lost].count(b"\n")]
    missing = sorted({row // 3 * 3 for row in range(8) if row not in kept})
    if len(missing) > 1:
        with pytest.raises(KeyboardInterrupt):
            write(path, tokenizer, most_batches=1)
        del missing[0]
    assert write(path, tokenizer) == missing
    assert path.read_bytes() == whole
    assert write(path, tokenizer) == []


def test_a_kill_while_the_file_takes_its_place_costs_nothing(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "responses.jsonl"
    write(path, tokenizer)
    whole = path.read_bytes()
    as_journal(path, range(8))
    (tmp_path / ".responses.jsonl.partial").write_bytes(whole[:99])
    assert write(path, tokenizer) == []
    assert path.read_bytes() == whole
    path.with_suffix(".journal").write_bytes(b"left over")
    assert write(path, tokenizer) == []
    assert path.read_bytes() == whole


@pytest.mark.parametrize("row", [b"8", b"2", b"-1", b"x", b"", b"9" * 5000])
def test_a_journal_with_a_row_that_is_none_or_comes_twice_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: bytes
) -> None:
    path = tmp_path / "responses.jsonl"
    write(path, tokenizer)
    journal = as_journal(path, range(3))
    path.with_suffix(".journal").write_bytes(journal + row + journal[1:].splitlines(keepends=True)[0])
    with pytest.raises(RecordError, match=r"responses.journal:4: .* is no row, or one that was there before"):
        write(path, tokenizer)


CHILD = """
import sys, time
from pathlib import Path
import torch
from transformers import PreTrainedTokenizerFast
from test_responses import HEADER, answer, prompts
from dspark.data.responses import in_batches, write_responses

def slow(ids, first_row):
    if first_row == 6:
        print("in the last batch", flush=True)
        time.sleep(60)
    return answer(ids, first_row)

tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
write_responses(in_batches(slow, prompts(), 3), tokenizer, prompts(), HEADER, Path(sys.argv[2]), lambda *_: None)
"""


def test_a_killed_run_is_continued_to_the_same_bytes(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path, whole = tmp_path / "responses.jsonl", tmp_path / "whole" / "responses.jsonl"
    folders = [str(Path(__file__).parent), str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]
    command = [sys.executable, "-c", CHILD, str(tmp_path / "tokenizer"), str(path)]
    child = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": ":".join(folders)}, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"in the last batch\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert len(path.with_suffix(".journal").read_bytes().splitlines()) == 6
    with open(path.with_suffix(".journal"), "ab") as file:
        file.write(b'6 {"source": "p.jsonl", "ind')
    with pytest.raises(RecordError, match=r"found no finished responses"):
        read_header(path)
    assert write(path, tokenizer) == [6]
    write(whole, tokenizer)
    assert path.read_bytes() == whole.read_bytes()
    assert header_path(path).read_bytes() == header_path(whole).read_bytes()


@pytest.mark.parametrize(
    ("key", "value"),
    [("target_fingerprint", "d" * 64), ("prompts_sha256", "e" * 64), ("temperature", 0.5), ("seed", 3)],
)
def test_another_target_or_text_or_setting_is_refused_and_nothing_is_lost(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, key: str, value: object
) -> None:
    path = tmp_path / "responses.jsonl"
    write(path, tokenizer)
    before = path.read_bytes()
    with pytest.raises(RecordError) as error:
        write(path, tokenizer, HEADER.model_copy(update={key: value}))
    assert f"{key} {getattr(HEADER, key)!r} (now {value!r})" in str(error.value)
    assert "another record.folder" in str(error.value)
    assert path.read_bytes() == before


def test_newer_packages_may_go_on(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "responses.jsonl"
    write(path, tokenizer)
    assert write(path, tokenizer, HEADER.model_copy(update={"versions": {"torch": "3"}})) == []


def test_an_unfinished_or_damaged_file_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "responses.jsonl"
    with pytest.raises(RecordError, match="run dspark prepare first"):
        read_header(path)
    write(path, tokenizer)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:6]))
    with pytest.raises(RecordError, match="found 6 responses, expected 8; delete it"):
        read_responses(path, HEADER)
    path.write_text("".join([*lines[:2], lines[2].replace("stop", "tired"), *lines[3:]]))
    with pytest.raises(RecordError, match=r"responses.jsonl:3: not a response \(finish_reason"):
        read_responses(path, HEADER)
    path.write_text("".join([*lines, lines[-1]]))
    with pytest.raises(RecordError, match="found 9 responses, expected 8"):
        write(path, tokenizer)
    header_path(path).write_text("{}")
    with pytest.raises(RecordError, match="target is missing"):
        read_header(path)
    header_path(path).unlink()
    with pytest.raises(RecordError, match=r"its header responses.header.json is missing"):
        write(path, tokenizer)
    assert len(path.read_text().splitlines()) == 9
