"""dspark prepare: the target's own answers, whole, in the order of the prompts, resumable; bad prompts are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prompts_run import write_prompts_run
from rich.control import strip_control_codes
from tiny import STOP_TOKEN_ID, VOCAB_SIZE
from typer.testing import CliRunner

from dspark.cli import prepare as door
from dspark.cli.main import app
from dspark.cli.prepare import prepare
from dspark.data import responses, rows
from dspark.data.chat import ChatFormat, encode_conversation
from dspark.data.conversations import parse_conversation
from dspark.data.responses import open_responses, read_header
from dspark.data.rows import Row
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


def test_every_prompt_is_asked_at_every_temperature_with_and_without_thinking(tmp_path: Path) -> None:
    settings = ["data.temperatures=[1.0, 0]", "data.thinking=[true, false]", "data.max_response_tokens=12"]
    prepare(write_prompts_run(tmp_path, *ROWS[:3]), settings)
    target, path = load_target(tmp_path / "target"), tmp_path / "record" / "responses.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = [(True, 1.0), (True, 0.0), (False, 1.0), (False, 0.0)]
    assert [(row["index"], row["is_thinking"], row["temperature"]) for row in rows] == [
        (index, *kind) for index in (1, 2, 3) for kind in kinds
    ]
    for number, row in enumerate(rows):
        sampling = Sampling(row["temperature"], 12, (STOP_TOKEN_ID,))
        expected = generate(target, [torch.tensor(row["prompt_ids"])], sampling, [row_uniforms(0, number)])[0]
        assert row["response_ids"] == expected.tolist()
    texts = load_tokenizer(tmp_path / "target").batch_decode([rows[0]["prompt_ids"], rows[2]["prompt_ids"]])
    assert ["detailed thinking on" in text for text in texts] == [True, False]
    assert [text.endswith("<think></think>") for text in texts] == [False, True]
    header = read_header(path)
    assert (header.thinking, header.temperatures, header.num_prompts) == ((True, False), (1.0, 0.0), 12)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.temperatures=[]", "data: temperatures and thinking must each hold a value"),
        ("data.thinking=[]", "data: temperatures and thinking must each hold a value"),
        ("data.temperatures=[1, 1.0]", "data: temperatures must differ from each other"),
        ("data.thinking=[true, true]", "data: thinking must differ from each other"),
        ("data.temperatures=[-1]", "data.temperatures.0"),
        ("data.temperature=1", "data.temperature is not a known key"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path: Path, setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(write_prompts_run(tmp_path, *ROWS), [setting])


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


TALKS: list[dict[str, Any]] = [
    {"messages": [*ROWS[2]["messages"], {"role": "assistant", "content": "Hello."}, *ROWS[3]["messages"]]},
    {"text": "def add(a, b):\n"},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "</think>"}]},
]


def test_given_answers_are_written_as_the_targets_own_are_and_the_target_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "load_target", None)
    config, path = write_prompts_run(tmp_path, *TALKS), tmp_path / "record" / "responses.jsonl"
    with pytest.raises(
        PromptError, match=r"1 of 3 conversations .*\n.*rows.jsonl:3: nothing is supervised but special"
    ):
        prepare(config, as_given=True)
    assert not list((tmp_path / "record").iterdir())
    prepare(config, as_given=True, leave_out_unusable=True)
    whole = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert sorted(whole) == ["responses.header.json", "responses.jsonl"]
    talk, text = [json.loads(line) for line in path.read_text().splitlines()]
    chat = ChatFormat(load_tokenizer(tmp_path / "target"), (STOP_TOKEN_ID,))
    for row, source in ((talk, TALKS[0]), (text, TALKS[1])):
        encoded = encode_conversation(chat, parse_conversation("rows.jsonl", 1, source))
        ids = row["prompt_ids"] + row["response_ids"]
        assert ids == encoded.ids_T.tolist()
        mask_T = torch.zeros(len(ids), dtype=torch.bool)
        for begin, end in row["supervised"]:
            mask_T[begin:end] = True
        assert mask_T.equal(encoded.loss_mask_T)
        assert (row["finish_reason"], row.get("temperature")) == ("given", None)
    assert (len(talk["supervised"]), text["supervised"]) == (2, [[1, len(encoded.ids_T)]])
    header = read_header(path)
    assert (header.answers, header.temperatures, header.num_left_out) == ("given", (), 1)
    opened = open_responses(path, header, max_tokens=120, vocab_size=VOCAB_SIZE)
    assert opened.num_supervised_S.tolist() == [int(opened[0].loss_mask_T.sum()), len(encoded.ids_T) - 1]
    with pytest.raises(RecordError, match=r"answers 'given' \(now 'target'\)"):
        prepare(config, leave_out_unusable=True)
    prepare(config, as_given=True, leave_out_unusable=True)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == whole


STEPS = ((door, "open_prompts"), (rows, "put_in_place"), (responses, "put_in_place"), (Path, "unlink"))


@pytest.mark.parametrize("as_given", [False, True])
def test_ended_between_any_two_files_it_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_given: bool
) -> None:
    """Where a step begins and where it is done; the next run finds what the last has left."""
    config = write_prompts_run(tmp_path, *(TALKS[:2] if as_given else ROWS[:2]))
    short = "data.max_response_tokens=2"
    prepare(config, [short, f"record.folder={tmp_path / 'calm'}"], as_given=as_given)
    for place, name in STEPS:
        folder = tmp_path / f"{place.__name__} {name}"
        folder.mkdir()
        (folder / ".asked.jsonl.partial").write_text('{"sou')
        step = getattr(place, name)
        for then in (lambda *_, **__: None, step):

            def ended(*args: Any, then: Any = then, **options: Any) -> None:
                then(*args, **options)
                raise KeyboardInterrupt

            monkeypatch.setattr(place, name, ended)
            with pytest.raises(KeyboardInterrupt):
                prepare(config, [short, f"record.folder={folder}"], as_given=as_given)
            monkeypatch.setattr(place, name, step)
        prepare(config, [short, f"record.folder={folder}"], as_given=as_given)
        found, calm = (
            {file.name: file.read_bytes() for file in each.iterdir()} for each in (folder, tmp_path / "calm")
        )
        assert found == calm


def test_prompts_are_encoded_once_unless_something_they_are_made_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, calls = write_prompts_run(tmp_path, *ROWS), list[str]()
    path, asked = tmp_path / "record" / "responses.jsonl", tmp_path / "record" / "asked.jsonl"
    encode = door.encode_prompt
    monkeypatch.setattr(door, "encode_prompt", lambda chat, row: calls.append(row.place) or encode(chat, row))
    load = door.load_target
    monkeypatch.setattr(door, "load_target", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(config)
    before, calls[:] = asked.read_bytes(), []
    with pytest.raises(KeyboardInterrupt):
        prepare(config)
    assert not calls
    monkeypatch.setattr(door, "load_target", load)
    asked.write_bytes(b"".join(before.splitlines(keepends=True)[:4]))
    prepare(config)
    assert len(calls) == 5
    assert not asked.exists()
    calls.clear()
    prepare(config)
    assert not calls
    rows = json.dumps(ROWS[0] | {"more": 1}) + "\n"
    (tmp_path / "rows.jsonl").write_text(rows + "".join(json.dumps(row) + "\n" for row in ROWS[1:]))
    prepare(config)
    assert len(calls) == 5
    assert len(path.read_text().splitlines()) == 5


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_the_first_conversations_are_shown_before_and_after_and_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_prompts_run(tmp_path, *ROWS)
    command = ["prepare", "--config", str(config), "--show", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(door, "load_target", None)
        before = CliRunner().invoke(app, command)
    assert before.exit_code == 0, before.output
    assert not (tmp_path / "record").exists()
    assert before.output.count("thinking off, temperature 1: not answered yet\n") == 2
    assert prompt_text(ROWS[0]) + "\n" in before.output
    prepare(config)
    row = json.loads((tmp_path / "record" / "responses.jsonl").read_text().splitlines()[0])
    monkeypatch.setattr(door, "load_target", None)
    after = CliRunner().invoke(app, command)
    assert after.exit_code == 0, after.output
    assert f"rows.jsonl:1, thinking off, temperature 1: {row['finish_reason']}\n" in after.output
    shown = door.describe_row(load_tokenizer(tmp_path / "target"), Row.model_validate(row))
    colder = CliRunner().invoke(app, [*command, "--set", "data.temperatures=[0.5]"])
    assert "temperature 0.5: not answered yet\n" in colder.output  # and not what another setting's answer was
    green = [shown.plain[span.start : span.end] for span in shown.spans if span.style == "bold green"]
    assert green == [strip_control_codes(load_tokenizer(tmp_path / "target").decode(row["response_ids"]))]


def test_the_end_tells_what_became_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers end in loops, of which none is recorded; one is cut; one is nothing but an end of turn."""
    said = [
        [65] * 99,
        [*range(30, 40), *[65, 66, 67] * 40, STOP_TOKEN_ID],
        [65] * 40,
        [65, STOP_TOKEN_ID],
        [STOP_TOKEN_ID],
    ]
    monkeypatch.setattr(door, "load_target", lambda *_, **__: None)
    write_prompts_run(tmp_path, *ROWS)
    answers = iter(said)
    monkeypatch.setattr(door, "generate", lambda _, ids, *__: [torch.tensor(next(answers)) for _ in ids])
    options = ["prepare", "--config", str(tmp_path / "run.yaml"), "--set", "data.max_response_tokens=1"]
    result = CliRunner().invoke(app, [*options, "--set", "data.generation_batch_size=1"])
    assert result.exit_code == 0, result.output
    path = tmp_path / "record" / "responses.jsonl"
    assert f"5 responses in {path}: 1 stop, 1 length, 3 loop, 0 failed, 0 retokenised\n" in result.output
    reasons = [json.loads(line)["finish_reason"] for line in path.read_text().splitlines()]
    assert sorted(reasons) == ["length", "loop", "loop", "loop", "stop"]
    opened = open_responses(path, read_header(path), max_tokens=120, vocab_size=VOCAB_SIZE)
    assert sorted(int(number) for number in opened.num_supervised_S) == [2, 40]


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
    Path(rows[0]).write_text(Path(rows[0]).read_text() + '{"prompt": "torn\n')
    torn = [
        f"data.sources=[{tmp_path / 'mixture.yaml'}]",
        f"record.folder={tmp_path / 'torn'}",
        "data.max_response_tokens=2",
    ]
    with pytest.raises(
        PromptError, match=r"rows.jsonl:7: not valid JSON .*; mend it, or run again with --leave-out-un"
    ):
        prepare(config, torn)
    prepare(config, torn, leave_out_unusable=True)
    with pytest.raises(ConfigError, match=r"data.sources holds a mixture and 1 more"):
        prepare(config, [f"data.sources=[{tmp_path / 'mixture.yaml'}, {rows[0]}]"])
