"""Responses are kept as the very ids that were generated, in order, and a stopped run goes on where it was."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded import digest
from tiny import STOP_TOKEN_ID, VOCAB_SIZE, write_tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from dspark.data.conversations import Conversation
from dspark.data.responses import (
    Responses,
    ResponsesHeader,
    header_path,
    in_batches,
    open_responses,
    read_header,
    write_responses,
)
from dspark.data.rows import ASKED_FILE, Prompt, Prompts, open_prompts
from dspark.errors import PromptError, RecordError

HEADER = ResponsesHeader(
    target="tiny",
    target_fingerprint="a" * 64,
    tokenizer_fingerprint="b" * 64,
    template_fingerprint=None,
    prompts_sha256=digest(torch.tensor([row, *range(20, 20 + row)]) for row in range(1, 9)),
    num_prompts=8,
    num_left_out=0,
    asked_from="0" * 64,
    answers="target",
    thinking=(False,),
    temperatures=(1.0,),
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


def asked(folder: Path) -> Prompts[Prompt]:
    """Three plain texts, then five questions; the later, the longer."""
    rows = [Conversation("p.jsonl", row, text=f"x{row}") for row in range(1, 4)]
    rows += [Conversation("p.jsonl", row, ({"role": "user", "content": f"é{row}"},)) for row in range(4, 9)]
    found = [[Prompt.of(row, [row.index, *range(20, 20 + row.index)], temperature=1.0)] for row in rows]
    return open_prompts(folder / ASKED_FILE, found, Prompt, HEADER.prompts_sha256)


BATCHES = ([7, 6, 5], [4, 3, 2], [1, 0])
"""The longest prompts first."""


def answer(asked: Sequence[Prompt], rows: Sequence[int]) -> list[torch.Tensor]:
    """Rows with an even number stop after two tokens, the others are cut after three; the ids tell the row."""
    for row, prompt in zip(rows, asked, strict=True):
        assert prompt.prompt_ids[0] == row + 1
    return [torch.tensor([30 + row, STOP_TOKEN_ID] if row % 2 == 0 else [30 + row, 31, 32]) for row in rows]


def write(
    path: Path, tokenizer: PreTrainedTokenizerFast, header: ResponsesHeader = HEADER, most_batches: int = 9
) -> list[list[int]]:
    """Write or continue; returns the batches that had to be generated. Ends at ``most_batches``."""
    heard: list[int] = []
    generated: list[list[int]] = []

    def generate(prompts: Sequence[Prompt], rows: Sequence[int]) -> list[torch.Tensor]:
        assert path.with_suffix(".journal").read_bytes().count(b"\n") == sum(heard)
        assert rows in BATCHES
        if len(generated) == most_batches:
            raise KeyboardInterrupt
        generated.append(list(rows))
        return answer(prompts, rows)

    prompts = asked(path.parent)
    ask = in_batches(generate, prompts, HEADER.generation_batch_size)
    kinds = write_responses(ask, tokenizer, prompts, header, path, lambda rows, _: heard.append(rows))
    assert sum(heard) == kinds["rows"] == 8
    assert sorted(file.name for file in path.parent.glob("*.j*")) == ["responses.header.json", "responses.jsonl"]
    return generated


def opened(path: Path, header: ResponsesHeader = HEADER, **limits: int) -> Responses:
    return open_responses(path, header, **{"max_tokens": 99, "vocab_size": VOCAB_SIZE} | limits)


def test_the_ids_come_back_exactly_and_only_the_response_is_supervised(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "responses.jsonl"
    assert write(path, tokenizer) == list(BATCHES)
    assert read_header(path) == HEADER
    for row, encoded in enumerate(opened(path)):
        response_ids = [30 + row, STOP_TOKEN_ID] if row % 2 == 0 else [30 + row, 31, 32]
        prompt_ids = [row + 1, *range(20, 21 + row)]
        assert encoded.ids_T.tolist() == prompt_ids + response_ids
        assert encoded.loss_mask_T.tolist() == [False] * len(prompt_ids) + [True] * len(response_ids)
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
    for row, encoded in zip(rows, opened(path), strict=True):
        assert (encoded.ids_T == STOP_TOKEN_ID).sum() == (row["finish_reason"] == "stop")


def as_journal(path: Path, order: Sequence[int]) -> bytes:
    """A finished file as the journal that it came from, had the rows been completed in this order."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.unlink()
    journal = b"".join(b"%d %s" % (row, lines[row]) for row in order)
    path.with_suffix(".journal").write_bytes(journal)
    return journal


@pytest.mark.parametrize("num_bytes_lost", [1, 40, 200, 500, 900, 1500])
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
    missing = [batch for batch in BATCHES if not {*batch} <= {*kept}]
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
from test_responses import HEADER, answer, asked
from dspark.data.responses import in_batches, write_responses

def slow(prompts, rows):
    if rows == [1, 0]:
        print("in the last batch", flush=True)
        time.sleep(60)
    return answer(prompts, rows)

tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
path = Path(sys.argv[2])
prompts = asked(path.parent)
write_responses(in_batches(slow, prompts, 3), tokenizer, prompts, HEADER, path, lambda *_: None)
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
        file.write(b'1 {"source": "p.jsonl", "ind')
    with pytest.raises(RecordError, match=r"found no finished responses"):
        read_header(path)
    assert write(path, tokenizer) == [[1, 0]]
    write(whole, tokenizer)
    assert path.read_bytes() == whole.read_bytes()
    assert header_path(path).read_bytes() == header_path(whole).read_bytes()


@pytest.mark.parametrize(
    ("key", "value"),
    [("target_fingerprint", "d" * 64), ("prompts_sha256", "e" * 64), ("temperatures", (0.5,)), ("seed", 3)],
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


def rewrite(path: Path, row: int, **changes: object) -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines[row] = json.dumps(json.loads(lines[row]) | changes) + "\n"
    path.write_text("".join(lines))


def test_what_is_not_recorded_is_left_out_of_arrays_digest_and_rows(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "responses.jsonl"
    write(path, tokenizer)
    whole = opened(path)
    parts = [part for each in whole for part in (each.ids_T, each.loss_mask_T)]
    assert whole.text_sha256 == digest(parts)
    assert whole.num_tokens_S.tolist() == [len(part) for part in parts[::2]]
    assert whole.num_supervised_S.tolist() == [int(part.sum()) for part in parts[1::2]]
    backwards = whole.reordered(np.arange(8)[::-1])
    assert [each.place for each in backwards] == [each.place for each in whole][::-1]
    assert backwards.num_tokens_S.tolist() == whole.num_tokens_S.tolist()[::-1]
    assert backwards.text_sha256 == whole.text_sha256
    rewrite(path, 2, finish_reason="loop")
    rewrite(path, 5, finish_reason="failed", response_ids=[])
    found = opened(path)
    assert [each.place.rpartition(":")[2] for each in found] == ["1", "2", "4", "5", "7", "8"]
    assert found.text_sha256 == digest(
        part for index in (0, 1, 3, 4, 6, 7) for part in parts[2 * index : 2 * index + 2]
    )
    assert found[-1].ids_T.equal(parts[-2])
    assert len(found[1:3]) == 2
    with pytest.raises(
        PromptError, match=r"4 of 8 conversations .*\n.*responses.jsonl:4: 8 tokens, at most 7 \(record.max"
    ):
        opened(path, max_tokens=7)
    assert len(open_responses(path, HEADER, max_tokens=7, vocab_size=VOCAB_SIZE, is_leaving_out=True)) == 2
    with pytest.raises(RecordError, match=r"responses.jsonl:1: found the token id 302, expected at most 299"):
        opened(path, vocab_size=300)


@pytest.mark.parametrize(
    "spans", [[], [[0, 2]], [[2, 2]], [[3, 4], [1, 2]], [[2, 4], [4, 5]], [[2, 99]], [[-1, 2]], [[2]]]
)
def test_ranges_that_supervise_nothing_or_what_is_not_there_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, spans: list[list[int]]
) -> None:
    path = tmp_path / "responses.jsonl"
    write(path, tokenizer)
    rewrite(path, 1, supervised=[[1, 2], [3, 5]])
    assert opened(path)[1].loss_mask_T.tolist() == [False, True, False, True, True, False]
    rewrite(path, 1, supervised=spans)
    with pytest.raises(RecordError, match=r"responses.jsonl:2: not a response \(.*supervised"):
        opened(path)


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
        opened(path)
    path.write_text("".join([*lines[:2], lines[2].replace("stop", "tired"), *lines[3:]]))
    with pytest.raises(RecordError, match=r"responses.jsonl:3: not a response \(finish_reason"):
        opened(path)
    path.write_text("".join([*lines[:2], lines[2].replace("stop", "given"), *lines[3:]]))
    with pytest.raises(RecordError, match=r"responses.jsonl:3: given, but answers are target in its header"):
        opened(path)
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
