"""dspark eval on the verifier, alone and as two ranks: the reference path's rounds, and ways that only it has."""

import json
from pathlib import Path
from typing import Any

import pytest
from evaluating import arguments, write_tiny_draft
from rounds_file import read_rounds
from tiny import write_tiny_ling
from typer.testing import CliRunner

from dspark.cli.main import app
from dspark.eval.records import TextKey


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    write_tiny_ling(folder / "target")
    write_tiny_draft(folder / "draft", folder / "target")
    write_tiny_draft(folder / "other", folder / "target", target_layer_ids=(0, 2))
    (folder / "prompts.jsonl").write_text('{"prompt": "add"}\n{"text": "def add("}\n')
    return folder


def evaluated(place: Path, out: Path, **changes: str) -> tuple[str, dict[str, Any]]:
    given = {"out": str(out), "device": "cpu", "temperatures": "0,1", "max-new-tokens": "6"} | changes
    result = CliRunner().invoke(app, arguments(place, **given), catch_exceptions=False)
    assert result.exit_code == 0, result.stdout
    return result.stdout, json.loads((out / "report.json").read_text())


def keep_plain_texts(alone: Path, two: Path) -> bytes:
    """Begin a journal of two ranks with what one rank wrote plainly. Returns: what is in it."""
    header, *texts = (alone / "texts.jsonl").read_text().splitlines(keepends=True)
    tree = json.loads(header)
    tree["settings"]["settings"]["tp"] = 2
    kept = [text for text in texts if json.loads(text)["contender"] == "plain"]
    two.mkdir()
    (two / "texts.jsonl").write_text("".join([json.dumps(tree) + "\n", *kept]))
    return (two / "texts.jsonl").read_bytes()


@pytest.mark.usefixtures("ranks_of_a_server")
def test_one_rank_and_two_decode_as_the_reference_path_does(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The two go on where one rank stopped: both know the plain texts, meet, and decode all others."""
    ways = f"plain,ngram,drafts:2,{place / 'other'}"
    _, expected = evaluated(place, tmp_path / "reference", baselines=ways, temperatures="0")
    said, alone = evaluated(place, tmp_path / "alone", baselines=ways, engine="verifier")
    assert "verifier on CPU, 1 at a time" in " ".join(said.split())
    before = keep_plain_texts(tmp_path / "alone", tmp_path / "two")
    capfd.readouterr()
    _, two = evaluated(place, tmp_path / "two", baselines=ways, tp="2")
    assert "4 texts lie in" in capfd.readouterr().out, "the first rank, in a process of its own"
    after = (tmp_path / "two" / "texts.jsonl").read_bytes()
    assert after.startswith(before)
    assert (before.count(b"\n"), after.count(b"\n")) == (1 + 4, 1 + 20)
    for found, tp in ((alone, 1), (two, 2)):
        assert (found["settings"]["engine"], found["settings"]["tp"]) == ("verifier", tp)
        for name, (theirs, *_) in (expected["baselines"] | {"draft": expected["measurements"]}).items():
            ours = found["measurements"][0] if name == "draft" else found["baselines"][name][0]
            assert ours["new_tokens"] == theirs["new_tokens"]
            assert name == "plain" or ours["equality"]["mismatches"] == 0
            assert (ours["acceptance"] or {}).get("histogram") == (theirs["acceptance"] or {}).get("histogram"), name
        assert found["measurements"][0]["decoding_gap"]["difference"] == 0
    rounds = read_rounds(tmp_path / "two" / "rounds.parquet")
    assert TextKey(str(place / "prompts.jsonl"), 1.0, "draft", 1) in rounds


def test_the_targets_own_prediction_layer_drafts(place: Path, tmp_path: Path) -> None:
    said, tree = evaluated(place, tmp_path, baselines="plain,mtp:1,mtp:3", engine="verifier")
    for name, num_drafts in (("mtp:1", 1), ("mtp:3", 3)):
        greedy, drawn = tree["baselines"][name]
        assert greedy["equality"]["mismatches"] == 0
        assert len(greedy["acceptance"]["survival"]) == len(drawn["acceptance"]["survival"]) == num_drafts
        assert name in said
