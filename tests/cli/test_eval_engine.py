"""dspark eval on the verifier, alone and as two ranks: the reference path's rounds, and ways that only it has."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from evaluating import arguments, write_tiny_draft
from tiny import write_tiny_ling

from dspark.eval.records import TextKey, read_rounds

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    write_tiny_ling(folder / "target")
    write_tiny_draft(folder / "draft", folder / "target")
    write_tiny_draft(folder / "other", folder / "target", target_layer_ids=(0, 2))
    (folder / "prompts.jsonl").write_text('{"prompt": "add"}\n{"text": "def add("}\n{"prompt": "more"}\n')
    return folder


def evaluated(place: Path, out: Path, **changes: str) -> tuple[str, dict[str, Any]]:
    """In a process of its own, for ranks are started from a program."""
    words = arguments(place, out=str(out), device="cpu", **changes)
    done = subprocess.run([sys.executable, "-m", "dspark.cli.main", *words], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((out / "report.json").read_text())


def test_one_rank_and_two_decode_as_the_reference_path_does(place: Path, tmp_path: Path) -> None:
    ways = f"plain,ngram,drafts:2,{place / 'other'}"
    _, expected = evaluated(place, tmp_path / "reference", baselines=ways, temperatures="0")
    said, alone = evaluated(place, tmp_path / "alone", baselines=ways, temperatures="0", engine="verifier")
    _, two = evaluated(place, tmp_path / "two", baselines=ways, temperatures="0,1", tp="2")
    assert "verifier on CPU, 1 at a time" in said
    assert (alone["settings"]["engine"], alone["settings"]["tp"]) == ("verifier", 1)
    assert (two["settings"]["engine"], two["settings"]["tp"]) == ("verifier", 2)
    for found in (alone, two):
        for name, (theirs, *_) in (expected["baselines"] | {"draft": expected["measurements"]}).items():
            ours = found["measurements"][0] if name == "draft" else found["baselines"][name][0]
            assert (ours["equality"]["mismatches"], ours["new_tokens"]) == (0, theirs["new_tokens"])
            assert (ours["acceptance"] or {}).get("histogram") == (theirs["acceptance"] or {}).get("histogram"), name
        assert found["measurements"][0]["decoding_gap"]["difference"] == 0
    # All texts are there: the two ranks meet, know them, and decode none.
    rounds = read_rounds(tmp_path / "two" / "rounds.parquet")
    assert TextKey(str(place / "prompts.jsonl"), 1.0, "draft", 2) in rounds
    said, again = evaluated(place, tmp_path / "two", baselines=ways, temperatures="0,1", tp="2")
    assert "30 texts lie in" in said
    assert again["measurements"] == two["measurements"]


def test_the_targets_own_prediction_layer_drafts(place: Path, tmp_path: Path) -> None:
    said, tree = evaluated(place, tmp_path, baselines="plain,mtp:1,mtp:3", temperatures="0,1", engine="verifier")
    for name, num_drafts in (("mtp:1", 1), ("mtp:3", 3)):
        greedy, drawn = tree["baselines"][name]
        assert greedy["equality"]["mismatches"] == 0
        assert len(greedy["acceptance"]["survival"]) == len(drawn["acceptance"]["survival"]) == num_drafts
        assert name in said
