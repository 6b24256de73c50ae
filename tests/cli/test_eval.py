"""dspark eval: its JSON holds what was decoded, and every mistake of a user is one line with exit status 2."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from evaluating import arguments, failure, write_tiny_draft
from tiny import write_tiny_ling
from training_run import run_fields
from typer.testing import CliRunner

from dspark.cli.main import app
from dspark.decode.round import accept
from dspark.export.draft_folder import draft_fingerprint
from dspark.target.loading import target_fingerprint

COMMANDS = ("demo", "doctor", "plan", "prepare", "record", "eval", "report", "chat", "export", "import")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target, a draft for it and three prompts."""
    folder = tmp_path_factory.mktemp("eval")
    write_tiny_ling(folder / "target")
    write_tiny_draft(folder / "draft", folder / "target")
    (folder / "prompts.jsonl").write_text('{"prompt": "add"}\n{"text": "def add("}\n{"prompt": "more"}\n')
    return folder


def test_the_json_says_what_was_measured_and_on_what(place: Path, tmp_path: Path) -> None:
    words = [*arguments(place, temperatures="0,1", out=str(tmp_path)), "--max-prompts", "2"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    tree = json.loads((tmp_path / "report.json").read_text())
    assert tree["target"]["fingerprint"] == target_fingerprint(place / "target")
    assert tree["target"]["dtype"] == "float32"
    assert len(tree["target"]["template_fingerprint"]) == 64
    assert tree["draft"]["fingerprint"] == draft_fingerprint(place / "draft")
    assert (tree["draft"]["block_size"], tree["draft"]["verify_rows"]) == (4, 5)
    assert tree["settings"]["is_thinking"] is False
    assert tree["settings"]["temperatures"] == [0.0, 1.0]
    assert (tree["settings"]["top_k"], tree["settings"]["top_p"]) == (0, 1.0)
    assert {"commit", "versions", "hardware", "command", "time"} <= tree["provenance"].keys()
    assert [m["temperature"] for m in tree["measurements"]] == [0.0, 1.0]
    for m in tree["measurements"]:
        counts = m["acceptance"]
        assert m["num_prompts"] == 2
        assert counts["num_tokens"] == sum((n + 1) * rounds for n, rounds in enumerate(counts["histogram"]))
        assert len(counts["survival"]) == len(counts["conditional"]) == 4
        assert counts["interval"][0] <= counts["mean_acceptance_length"] <= counts["interval"][1]
    assert "acceptance" in result.stdout


def baseline_run(place: Path, path: Path, baselines: str) -> tuple[str, dict[str, Any]]:
    result = CliRunner().invoke(app, arguments(place, baselines=baselines, out=str(path)), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout, json.loads((path / "report.json").read_text())


def test_baselines_stand_in_one_table_and_the_draft_stays_what_it_is_alone(place: Path, tmp_path: Path) -> None:
    said, tree = baseline_run(place, tmp_path / "all", "untrained,plain,ngram")
    alone_said, alone = baseline_run(place, tmp_path / "alone", "")
    assert tree["settings"]["baselines"] == list(tree["baselines"]) == ["plain", "untrained", "ngram"]
    (table,) = re.findall(r"acceptance, T = 0.*?acceptance: mean", said, re.DOTALL)
    assert "acceptance, T = 0" not in alone_said
    for name in (*tree["baselines"], "draft"):
        assert re.search(rf"^ +{name} +[1-9]", table, re.MULTILINE), said
    assert "unlike plain decoding's: untrained 0 of 3, ngram 0 of 3" in " ".join(said.split())
    assert alone["baselines"] == {}
    pairs = list(zip(tree["measurements"], alone["measurements"], strict=True))
    assert all(together["acceptance"] == single["acceptance"] for together, single in pairs)
    for found in (tree, alone):  # without plain texts too
        assert [m["equality"] and m["equality"]["mismatches"] for m in found["measurements"]] == [0, None]
    assert [m["acceptance"] for m in tree["baselines"]["plain"]] == [None, None]
    assert all(m["acceptance"]["num_rounds"] > 0 for m in tree["baselines"]["ngram"])


def test_an_untrained_draft_is_the_seeds(place: Path, tmp_path: Path) -> None:
    counts = []
    for number, seed in enumerate(("1", "1", "2")):
        words = arguments(place, temperatures="1", baselines="untrained", seed=seed, out=str(tmp_path / str(number)))
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
        tree = json.loads((tmp_path / str(number) / "report.json").read_text())
        assert tree["settings"]["untrained_seed"] == int(seed)
        counts.append(tree["baselines"]["untrained"][0]["acceptance"])
    assert counts[0] == counts[1] != counts[2]


def test_a_run_says_what_is_measured_until_a_flag_says_otherwise(place: Path, tmp_path: Path) -> None:
    fields = run_fields(tmp_path / "run")
    fields["target"]["path"] = str(place / "target")
    fields["eval"] = {"tasks": [str(place / "prompts.jsonl")], "max_new_tokens": 6, "top_k": 7, "top_p": 0.5}
    fields["seed"] = 11
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(fields))
    given = {"config": str(tmp_path / "run.yaml"), "draft": str(place / "draft"), "baselines": "untrained"}
    words = ["eval", *(part for key, value in given.items() for part in (f"--{key}", value))]
    words += ["--top-p", "0.25", "--temperatures", "1", "--out", str(tmp_path / "out"), "--set", "eval.top_k=9"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    settings = json.loads((tmp_path / "out" / "report.json").read_text())["settings"]
    expected = {"max_new_tokens": 6, "top_k": 9, "top_p": 0.25, "seed": 980406, "untrained_seed": 11}
    assert {key: settings[key] for key in expected} == expected


def test_a_fault_of_decoding_ends_with_an_error_when_all_is_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def always(ids_K: torch.Tensor, draft: torch.Tensor, target: torch.Tensor, uniforms: Any) -> tuple[int, int]:
        return len(ids_K), accept(ids_K[:0], draft[:0], target[-1:], uniforms)[1]

    monkeypatch.setattr("dspark.decode.round.accept", always)
    line = failure(monkeypatch, capsys, arguments(place, baselines="plain", out=str(tmp_path)))
    assert "3 greedy texts are not the target's own" in line
    equality = json.loads((tmp_path / "report.json").read_text())["measurements"][0]["equality"]
    assert equality["mismatches"] == equality["faults"] == 3


def test_truncation_is_recorded_and_heeded(place: Path, tmp_path: Path) -> None:
    """Of the likeliest token alone, text at temperature 1 is greedy text."""
    greedy, truncated = tmp_path / "greedy", tmp_path / "truncated"
    for words in (
        arguments(place, temperatures="0", out=str(greedy)),
        [*arguments(place, temperatures="1", out=str(truncated)), "--top-k", "1", "--top-p", "0.9"],
    ):
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    expected, found = (json.loads((path / "report.json").read_text()) for path in (greedy, truncated))
    assert found["measurements"][0]["acceptance"] == expected["measurements"][0]["acceptance"]
    assert (found["settings"]["top_k"], found["settings"]["top_p"]) == (1, 0.9)


def test_the_same_command_counts_the_same_rounds(place: Path, tmp_path: Path) -> None:
    counts = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        words = arguments(place, temperatures="1", seed=seed, out=str(tmp_path / name))
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
        counts.append(json.loads((tmp_path / name / "report.json").read_text())["measurements"][0]["acceptance"])
    assert counts[0] == counts[1]
    assert counts[0] != counts[2]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"target": "nowhere"}, "nowhere: no folder with a config.json"),
        ({"target": ""}, "--target: missing"),
        ({"draft": ""}, "--draft: missing"),
        ({"target": "nowhere", "draft": ""}, "nowhere: no folder with a config.json"),
        ({"draft": "nowhere"}, "nowhere/config.json: no such file"),
        ({"tasks": "gsm9k"}, "task gsm9k: not known"),
        ({"tasks": "gone.jsonl"}, "gone.jsonl: no such file"),
        ({"temperatures": "hot"}, "temperatures.0: Input should be a valid number"),
        ({"temperatures": "-1"}, "temperatures.0: Input should be greater than or equal to 0"),
        ({"top-p": "0"}, "top_p: Input should be greater than 0, got 0.0"),
        ({"top-p": "1.5"}, "top_p: Input should be less than or equal to 1, got 1.5"),
        ({"top-k": "-1"}, "top_k: Input should be greater than or equal to 0, got -1"),
        ({"baselines": "plain,vanilla"}, "--baselines: 'vanilla' is not known; expected some of plain, ngram"),
        ({"baselines": "plain,draft"}, "'draft' is the draft's own name; write ./draft for that folder"),
        ({"temperatures": "0,0.0"}, "temperatures must differ from each other, got [0.0, 0.0]"),
        ({"baselines": "drafts:0"}, "--baselines: 'drafts:0' is not known"),
        ({"baselines": "confidence:1.5"}, "--baselines: 'confidence:1.5' is not known"),
        ({"baselines": "drafts:5"}, "num_drafts must be 1 to 4, the draft's block size, got 5"),
        ({"baselines": "mtp:3"}, "mtp is the verifier's; give --engine verifier"),
        ({"engine": "fast"}, "--engine: expected verifier or reference, got 'fast'"),
        ({"engine": "reference", "tp": "2"}, "--tp 2: ranks are the verifier's"),
        ({"engine": "verifier", "batch-size": "2"}, "the verifier decodes one text at a time; give --engine reference"),
        ({"engine": "verifier", "top-k": "2"}, "the verifier draws from the whole distribution"),
        ({"dtype": "float16"}, "dtype: Input should be 'bfloat16', 'float32' or 'float64', got 'float16'"),
        ({"config": "none.yaml"}, "none.yaml: no such file"),
        ({"set": "eval.top_k=9"}, "--set: changes a run; give its --config"),
    ],
    ids=str,
)
def test_a_mistake_is_one_clear_line(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    complaint: str,
) -> None:
    assert complaint in failure(monkeypatch, capsys, arguments(place, **changes))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vocab_size": 321}, "vocab_size is 321 in the draft and 320 in the target"),
        ({"hidden_size": 16}, "hidden_size is 16 in the draft and 32 in the target"),
        ({"num_target_layers": 7}, "num_target_layers is 7 in the draft and 6 in the target"),
    ],
    ids=str,
)
def test_a_draft_for_another_target_is_refused_before_the_target_is_read(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    complaint: str,
) -> None:
    write_tiny_draft(tmp_path / "draft", place / "target", **changes)
    monkeypatch.setattr("dspark.cli.identity.load_target", None)
    assert complaint in failure(monkeypatch, capsys, arguments(place, draft=str(tmp_path / "draft")))


def test_a_draft_of_another_target_of_the_same_shape_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "draft", tmp_path / "draft")
    path = tmp_path / "draft" / "provenance.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_fingerprint": "a" * 64}))
    text = failure(monkeypatch, capsys, arguments(place, draft=str(tmp_path / "draft")))
    assert f"trained for the target with fingerprint {'a' * 64}, this one has" in text


def test_a_tokenizer_of_another_vocabulary_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "target", tmp_path / "target")
    path = tmp_path / "target" / "tokenizer.json"
    tree = json.loads(path.read_text())
    last = tree["added_tokens"][-1]
    tree["added_tokens"] += [last | {"id": last["id"] + n, "content": f"<extra {n}>"} for n in range(1, 20)]
    path.write_text(json.dumps(tree))
    text = failure(monkeypatch, capsys, arguments(place, target=str(tmp_path / "target")))
    assert "its largest id is" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_shows_examples_as_typed(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert f"\n    dspark {command} " in result.stdout
    assert set(COMMANDS) == {info.name for info in app.registered_commands}
