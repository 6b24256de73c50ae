"""dspark record: the very ids of the responses are recorded; what does not fit is refused before the target runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prompts_run import write_prompts_run
from recorded import assert_head_says_what_was_recorded, contents
from tiny import STOP_TOKEN_ID, write_tiny_ling
from training_run import TAPS
from typer.testing import CliRunner

from dspark.cli.main import app
from dspark.cli.prepare import prepare
from dspark.cli.record import job, record
from dspark.config import load_run
from dspark.errors import ConfigError, DraftMismatchError, PromptError, RecordError
from dspark.export.draft_config import FolderFields
from dspark.export.draft_folder import write_draft
from dspark.record.order import drawn_order
from dspark.record.reader import RecordReader
from dspark.target.loading import load_tables, load_target
from dspark.train.setup import fresh_draft

PROMPTS: list[dict[str, Any]] = [{"prompt": f"Add {number} and 2."} for number in range(6)]
TALKS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    {"text": "def add(a, b):\n    return a + b\n"},
    {"messages": [{"role": "user", "content": "Hi"}]},
    {"messages": []},
    {"text": "def add(a, b):\n" * 20},
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run.yaml of a folder with responses; tests record into copies of its settings, never into the folder."""
    config = write_prompts_run(tmp_path_factory.mktemp("prepared"), *PROMPTS)
    prepare(config)
    return config


@pytest.fixture
def config(prepared: Path, tmp_path: Path) -> Path:
    """A fresh record folder with those responses."""
    fields = yaml.safe_load(prepared.read_text())
    fields["record"]["folder"] = str(tmp_path / "record")
    (tmp_path / "record").mkdir()
    for path in (prepared.parent / "record").iterdir():
        (tmp_path / "record" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(fields))
    return tmp_path / "run.yaml"


def test_the_ids_of_the_responses_are_recorded_exactly_and_no_end_of_turn_is_invented(config: Path) -> None:
    record(config)
    folder = config.parent / "record"
    rows = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    reader = RecordReader(folder)
    rows = [row for row in rows if row["finish_reason"] != "loop"]
    assert len(reader) == len(rows)
    for index, number in enumerate(drawn_order(len(rows), 0)):
        sequence, row = reader[index], rows[number]
        assert sequence.ids_T.tolist() == row["prompt_ids"] + row["response_ids"]
        assert sequence.ids_T[sequence.loss_mask_T].tolist() == row["response_ids"]
        assert (sequence.ids_T[-1] == STOP_TOKEN_ID) == (row["finish_reason"] == "stop")
    manifest = reader.manifest
    assert (manifest.answers, manifest.temperatures, manifest.target_layer_ids) == ("target", (1.0,), TAPS)
    assert len(manifest.shards) > 1
    assert_head_says_what_was_recorded(reader, load_tables(manifest.target)[1])


def test_a_record_runs_again_only_for_what_is_missing(config: Path) -> None:
    record(config)
    folder = config.parent / "record"
    before = contents(folder)
    (folder / "shard-00001.safetensors").unlink()
    record(config)
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        (["data.temperatures=[0.5]"], RecordError, r"made with temperatures \(1.0,\) \(now \(0.5,\)\)"),
        (["data.thinking=[true]"], RecordError, r"responses.jsonl: made with thinking \(False,\) \(now \(True,\)\)"),
        (["seed=3"], RecordError, r"responses.jsonl: made with seed 0 \(now 3\)"),
        (
            ["draft.target_layer_ids=[0, 1, 4]"],
            RecordError,
            r"target_layer_ids \(0, 2, 4\) \(now \(0, 1, 4\)\)",
        ),
        (["target.dtype=float64"], RecordError, r"dtype 'float32' \(now 'float64'\)"),
        (["record.shard_tokens=99"], RecordError, r"shard_tokens 150 \(now 99\)"),
        (
            ["record.max_tokens=30"],
            PromptError,
            r"6 of 6 conversations .*\n.*responses.jsonl:1: \d+ tokens, at most 30",
        ),
        (["draft.hidden_size=64"], DraftMismatchError, "draft.hidden_size is 64, the target has 32"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_target_is_read_and_nothing_is_lost(
    config: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], error: type[Exception], words: str
) -> None:
    record(config)
    before = contents(config.parent / "record")
    monkeypatch.setattr(job, "load_target", None)
    with pytest.raises(error, match=words):
        record(config, overrides)
    assert contents(config.parent / "record") == before


def test_another_target_is_refused(config: Path, tmp_path: Path) -> None:
    other = write_tiny_ling(tmp_path / "other", seed=1)
    with pytest.raises(RecordError, match="made with target_fingerprint"):
        record(config, [f"target.path={other}"])


def test_missing_responses_say_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="run dspark prepare first"):
        record(write_prompts_run(tmp_path, *PROMPTS))


def test_given_answers_are_recorded_when_asked_and_unusable_ones_refused_together(tmp_path: Path) -> None:
    config = write_prompts_run(tmp_path, *TALKS)
    with pytest.raises(PromptError) as error:
        prepare(config, as_given=True)
    for words in ("3 of 5", "rows.jsonl:3: found messages of ['user']", "rows.jsonl:4: found messages of []"):
        assert words in str(error.value)
    assert "rows.jsonl:5: " in str(error.value)
    assert not list((tmp_path / "record").iterdir())
    prepare(config, as_given=True, leave_out_unusable=True)
    record(config)
    reader = RecordReader(tmp_path / "record")
    assert (reader.manifest.answers, reader.manifest.temperatures) == ("given", ())
    talk, text = (reader[int(place)] for place in drawn_order(2, 0).argsort())
    assert int(talk.loss_mask_T.sum()) == len("Hello.") + 1
    assert int(text.loss_mask_T.sum()) == len(text.ids_T) - 1
    assert_head_says_what_was_recorded(reader, load_tables(tmp_path / "target")[1])


def test_the_command_line_says_how_much_and_where(config: Path) -> None:
    result = CliRunner().invoke(app, ["record", "--config", str(config)])
    assert result.exit_code == 0, result.output
    assert "6 sequences" in result.output
    assert f"shards in {config.parent / 'record'}" in result.output


def test_a_record_is_checked_and_only_what_is_wrong_recorded_anew(config: Path) -> None:
    record(config)
    folder, run = config.parent / "record", ["record", "--config", str(config)]
    before = contents(folder)
    number = len(list(folder.glob("shard-*")))
    checked = CliRunner().invoke(app, [*run, "--check"])
    assert checked.exit_code == 0, checked.output
    assert f"{number} of {number} shards are what the target says" in checked.output
    path = folder / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    checked = CliRunner().invoke(app, [*run, "--check"])
    assert isinstance(checked.exception, RecordError)
    assert f"1 of {number} shards have a fault; dspark record --repair" in str(checked.exception)
    assert f"{path}: sequence " in checked.output
    assert checked.output.count(str(path)) == 1
    assert f"{number - 1} of {number} shards" in checked.output
    assert path.read_bytes() != before[path.name]
    told = CliRunner().invoke(app, [*run, "--stats"])
    assert isinstance(told.exception, RecordError)
    assert f"{number - 1} of {number} shards are whole" in told.output
    repaired = CliRunner().invoke(app, [*run, "--repair"])
    assert repaired.exit_code == 0, repaired.output
    assert contents(folder) == before


def test_several_ranks_record_what_one_does(config: Path) -> None:
    run = ["record", "--config", str(config), "--set", "target.dtype=float64", "--device", "cpu"]
    prepared = config.parent / "record"
    for path in prepared.iterdir():
        path.write_text(path.read_text().replace('"dtype":"float32"', '"dtype":"float64"'))
    for name, options in (("alone", []), ("together", ["--tp", "2"])):
        (config.parent / name).mkdir()
        for path in prepared.iterdir():
            (config.parent / name / path.name).write_bytes(path.read_bytes())
        folder = f"record.folder={config.parent / name}"
        result = CliRunner().invoke(app, [*run, "--set", folder, *options], catch_exceptions=False)
        assert result.exit_code == 0
    alone, together = (RecordReader(config.parent / name) for name in ("alone", "together"))
    for index in range(len(alone)):
        ours, theirs = together.fields(index), alone.fields(index)
        for name, values in theirs.items():
            torch.testing.assert_close(ours[name], values, atol=1e-9, rtol=1e-9)


def test_what_eight_bits_cost_a_draft_is_told_without_recording(config: Path) -> None:
    run = load_run(config)
    target, draft = load_target(run.target.path), fresh_draft(run.draft, 0)
    draft.bind(target.embedding_VD, target.head_VD)
    place = config.parent / "draft"
    write_draft(draft, place, FolderFields(STOP_TOKEN_ID))
    result = CliRunner().invoke(app, ["record", "--config", str(config), "--measure-fp8", str(place)])
    assert result.exit_code == 0, result.output
    assert re.search(
        r"float8 taps: expected acceptance length \d\.\d+, of exact ones \d\.\d+; difference", result.output
    )
    assert not list((config.parent / "record").glob("shard*"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--check", "--stats"], "give one of them"),
        (["--tp", "2", "--device", "cuda:1"], "give --device cuda"),
        (["--set", "record.ring_shards=16", "--repair"], "never lies there whole"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    config: Path, options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    result = CliRunner().invoke(app, ["record", "--config", str(config), *options])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)
