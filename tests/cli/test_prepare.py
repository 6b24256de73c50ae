"""dspark prepare: the target's own answers, whole, in the order of the prompts, resumable; bad prompts are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prompts_run import write_prompts_run
from tiny import STOP_TOKEN_ID
from typer.testing import CliRunner

from dspark.cli import prepare as door
from dspark.cli.main import app
from dspark.cli.prepare import prepare
from dspark.data.responses import read_header
from dspark.decode.generation import generate
from dspark.decode.sampling import Sampling, row_uniforms
from dspark.errors import ConfigError, PromptError, RecordError
from dspark.target.loading import load_target
from dspark.target.tokenizer import load_tokenizer

ROWS: list[dict[str, Any]] = [
    {"prompt": "Add 1 and 2."},
    {"text": "def add(a, b):"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "not the target's"}]},
    {"prompt": "é"},
]


def test_the_answers_are_the_targets_own_at_the_stated_temperature(tmp_path: Path) -> None:
    prepare(write_prompts_run(tmp_path, *ROWS), ["data.temperatures=[0.8]", "data.max_response_tokens=12"])
    target, tokenizer = load_target(tmp_path / "target"), load_tokenizer(tmp_path / "target")
    sampling = Sampling(0.8, 12, (STOP_TOKEN_ID,))
    rows = [json.loads(line) for line in (tmp_path / "record" / "responses.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [1, 2, 3, 4, 5]
    for number, row in enumerate(rows):
        prompt_ids_T = tokenizer(prompt_text(ROWS[row["index"] - 1]), return_tensors="pt")["input_ids"][0]
        assert row["prompt_ids"] == prompt_ids_T.tolist()
        expected = generate(target, [prompt_ids_T], sampling, [row_uniforms(0, number)])[0].tolist()
        assert row["response_ids"] == expected
        assert row["finish_reason"] == ("stop" if expected[-1] == STOP_TOKEN_ID else "length")
    header = read_header(tmp_path / "record" / "responses.jsonl")
    assert (header.temperatures, header.max_response_tokens, header.num_left_out) == ((0.8,), 12, 0)


def prompt_text(row: dict[str, Any]) -> str:
    if "text" in row:
        return str(row["text"])
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    system = messages[0]["content"] + "\n" if messages[0]["role"] == "system" else ""
    user = next(message["content"] for message in messages if message["role"] == "user")
    head = f"<role>SYSTEM</role>{system}detailed thinking off<|role_end|><role>HUMAN</role>{user}<|role_end|>"
    return head + "<role>ASSISTANT</role>\n<think></think>"


def test_a_stopped_run_goes_on_to_the_same_bytes_and_a_finished_one_loads_no_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, path = write_prompts_run(tmp_path, *ROWS), tmp_path / "record" / "responses.jsonl"
    prepare(config)
    whole = path.read_bytes()
    path.rename(path.with_suffix(".whole"))
    lines = path.with_suffix(".whole").read_bytes().splitlines(keepends=True)
    path.with_suffix(".journal").write_bytes(b"".join(b"%d %s" % pair for pair in enumerate(lines))[: len(whole) // 2])
    prepare(config)
    assert path.read_bytes() == whole
    monkeypatch.setattr(door, "load_target", None)
    prepare(config)
    with pytest.raises(RecordError, match=r"temperatures \(1.0,\) \(now \(0.0,\)\)"):
        prepare(config, ["data.temperatures=[0]"])
    write_prompts_run(tmp_path, *ROWS[:4])
    with pytest.raises(RecordError, match=r"prompts_sha256 .*num_prompts 5 \(now 4\)"):
        prepare(config)
    assert path.read_bytes() == whole


def test_unusable_prompts_are_refused_together_before_anything_is_written(tmp_path: Path) -> None:
    long, empty = {"text": "def add(a, b):\n" * 12}, {"messages": []}
    config = write_prompts_run(tmp_path, ROWS[0], long, empty, {"prompt": ""}, {"text": ""}, ROWS[1])
    with pytest.raises(PromptError) as error:
        prepare(config)
    message = str(error.value)
    for words in ("4 of 6", "rows.jsonl:2: ", "at most 120 (record.max_tokens)", "rows.jsonl:3: found messages of []"):
        assert words in message
    assert "rows.jsonl:4: found messages of ['user']; expected a user message with text" in message
    assert "and 1 more" in message
    assert not list((tmp_path / "record").iterdir())
    prepare(config, leave_out_unusable=True)
    path = tmp_path / "record" / "responses.jsonl"
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [1, 6]
    assert read_header(path).num_left_out == 4


def test_the_command_line_says_how_many_and_where(tmp_path: Path) -> None:
    config = write_prompts_run(tmp_path, *ROWS)
    result = CliRunner().invoke(app, ["prepare", "--config", str(config), "--set", "data.max_conversations=2"])
    assert result.exit_code == 0, result.output
    assert f"2 responses in {tmp_path / 'record' / 'responses.jsonl'}" in result.output


def test_a_mixture_takes_the_place_of_its_sources(tmp_path: Path) -> None:
    """Two rows repeat others, one is a task's, one is held out; what is answered is the rest, however often asked."""
    config = write_prompts_run(tmp_path, *ROWS[:4], {"prompt": "add 1 AND 2 ."}, {"prompt": "What is a heap?"})
    rows = yaml.safe_load(config.read_text())["data"]["sources"]
    (tmp_path / "task.jsonl").write_text(json.dumps({"prompt": "what is a heap?"}) + "\n")
    mixture = {"sources": [{"path": rows[0], "held_out": 1}], "apart_from": [str(tmp_path / "task.jsonl")]}
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(mixture))
    options = ["prepare", "--config", str(config), "--set", "data.max_response_tokens=4"]
    chosen = ["--set", f"data.sources=[{tmp_path / 'mixture.yaml'}]"]
    for _ in range(2):
        result = CliRunner().invoke(app, [*options, *chosen])
        assert result.exit_code == 0, result.output
        assert re.findall(r"^ .*[a-z] +(\d) *$", result.output, re.MULTILINE) == list("600120012"), result.output
    answered = [json.loads(line) for line in (tmp_path / "record" / "responses.jsonl").read_text().splitlines()]
    held_out = json.loads((tmp_path / "record" / "prompts" / "held_out.jsonl").read_text())
    assert len(answered) == 2
    assert held_out["index"] not in {row["index"] for row in answered}
    with pytest.raises(ConfigError, match=r"data.sources holds a mixture and 1 more"):
        prepare(config, [f"data.sources=[{tmp_path / 'mixture.yaml'}, {rows[0]}]"])
