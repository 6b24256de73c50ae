"""dspark eval --turns: later user turns follow the draft's own answers, the same for every contender."""

import json
from pathlib import Path

import pytest
import torch
from evaluating import arguments, failure, write_tiny_draft
from tiny import write_tiny_ling
from typer.testing import CliRunner

from dspark.cli.main import app
from dspark.data.chat import ChatFormat, encode_prompt
from dspark.data.conversations import Conversation
from dspark.decode.generation import generate
from dspark.decode.sampling import Sampling, row_uniforms
from dspark.target.loading import load_target
from dspark.target.tokenizer import load_tokenizer, stop_token_ids


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    write_tiny_ling(folder / "target")
    write_tiny_draft(folder / "draft", folder / "target")
    rows = [{"turns": ["add", "more", "less"]}, {"prompt": "def"}, {"turns": ["one", "two"]}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def test_later_turns_follow_the_answers_that_were_given(place: Path, tmp_path: Path) -> None:
    words = arguments(place, baselines="plain", turns="4", temperatures="0,1", out=str(tmp_path))
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.stdout
    task = str(place / "prompts.jsonl")
    tree = json.loads((tmp_path / "report.json").read_text())
    names = [task, f"{task}, turn 2", f"{task}, turn 3"]
    assert [(m["task"], m["temperature"], m["num_prompts"]) for m in tree["measurements"]] == [
        (name, temperature, count) for name, count in zip(names, (3, 2, 1), strict=True) for temperature in (0.0, 1.0)
    ]
    assert all(m["equality"]["mismatches"] == 0 for m in tree["measurements"] if m["temperature"] == 0)
    texts = {}
    for line in (tmp_path / "texts.jsonl").read_text().splitlines()[1:]:
        row = json.loads(line)
        texts[row["task"], row["temperature"], row["contender"], row["prompt_index"]] = row["ids"]
    tokenizer, stops = load_tokenizer(place / "target"), stop_token_ids(place / "target")
    chat, target = ChatFormat(tokenizer, stops, False), load_target(place / "target")
    messages = [{"role": "user", "content": "add"}]
    for name, turn in zip(names[1:], ("more", "less"), strict=True):
        before = texts[names[names.index(name) - 1], 1.0, "draft", 0]
        said = tokenizer.decode(before, skip_special_tokens=True)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": turn}]
        prompt_T = encode_prompt(chat, Conversation("", 1, tuple(messages)))
        uniforms = row_uniforms(980406 + 2**32 * names.index(name), 0)
        (expected_T,) = generate(target, [prompt_T], Sampling(1.0, 12, stops), [uniforms])
        assert texts[name, 1.0, "plain", 0] == expected_T.tolist()
    assert tree["macro_mean_acceptance_length"].keys() == {"0", "1"}
    counted = tree["measurements"][0]["mean_acceptance_length_without_loops"]
    assert tree["macro_mean_acceptance_length"]["0"] == counted


@pytest.mark.parametrize("changes", [{}, {"turns": "2", "tasks": "random:9"}], ids=str)
def test_one_turn_is_what_is_measured_unless_there_are_more(
    place: Path, tmp_path: Path, changes: dict[str, str]
) -> None:
    words = arguments(place, temperatures="0", out=str(tmp_path), **{"max-new-tokens": "4"} | changes)
    assert CliRunner().invoke(app, [*words, "--max-prompts", "1"], catch_exceptions=False).exit_code == 0
    assert len(json.loads((tmp_path / "report.json").read_text())["measurements"]) == 1


def test_thoughts_are_not_told_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = failure(monkeypatch, capsys, [*arguments(place, turns="2"), "--thinking"])
    assert "leave --thinking out" in line


def test_a_dialogue_that_grows_too_long_is_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_draft(tmp_path / "draft", place / "target", max_position_embeddings=90)
    torch.manual_seed(0)
    words = arguments(place, draft=str(tmp_path / "draft"), turns="3", temperatures="1", **{"max-new-tokens": "60"})
    line = failure(monkeypatch, capsys, words)
    assert "prompts.jsonl:1: " in line
    assert "tokens with the answers so far; the draft has positions for 90; give fewer --turns" in line


def test_rows_whose_turns_are_no_texts_are_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"turns": []}\n')
    line = failure(monkeypatch, capsys, arguments(place, tasks=str(tmp_path / "prompts.jsonl")))
    assert "turns is []; expected a list of texts" in line
