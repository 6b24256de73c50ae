"""dspark eval --out: what lies in the folder, how an evaluation goes on there, and two of them compared."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from evaluating import arguments, failure, write_tiny_draft
from rounds_file import read_rounds
from tiny import write_tiny_ling
from typer.testing import CliRunner

from dspark.cli.main import app
from dspark.eval.records import TextKey

ROOT = Path(__file__).parent.parent.parent
PROMPTS = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target, a draft for it and eight prompts; whole/ holds their evaluation."""
    folder = tmp_path_factory.mktemp("eval")
    write_tiny_ling(folder / "target")
    write_tiny_draft(folder / "draft", folder / "target")
    rows = [{"prompt": f"add {number}"} for number in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    run(place_arguments(folder, out=str(folder / "whole")))
    return folder


def place_arguments(place: Path, **changes: str) -> list[str]:
    return arguments(place, **{"max-new-tokens": "24", "temperatures": "1", "baselines": "ngram"} | changes)


def run(words: list[str]) -> str:
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.stdout
    return result.stdout


def report(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return tree


def without_times(tree: Any) -> Any:
    """A report but for clocks and places."""
    if isinstance(tree, dict):
        left_out = {"seconds", "tokens_per_second", "timing", "speedup", "provenance"}
        return {key: without_times(value) for key, value in tree.items() if key not in left_out}
    return [without_times(value) for value in tree] if isinstance(tree, list) else tree


def test_the_folder_holds_every_round_that_the_report_counts(place: Path) -> None:
    rounds = read_rounds(place / "whole" / "rounds.parquet")
    task = str(place / "prompts.jsonl")
    for name, found in (("draft", report(place / "whole")["measurements"]), ("ngram", None)):
        measured = found or report(place / "whole")["baselines"]["ngram"]
        of_texts = [rounds.get(TextKey(task, 1.0, name, index), ()) for index in range(PROMPTS)]
        counts = measured[0]["acceptance"]
        assert counts["num_rounds"] == sum(map(len, of_texts)) > 0
        assert counts["num_tokens"] == sum(each.acceptance_length for text in of_texts for each in text)
    calibration = report(place / "whole")["measurements"][0]["confidence"]["overall"]
    assert calibration["num_slots"] == sum(each["num_slots"] for each in calibration["bins"]) > 0
    assert report(place / "whole")["baselines"]["ngram"][0]["confidence"] is None


def test_an_evaluation_that_was_killed_goes_on_at_the_next_prompt(place: Path, tmp_path: Path) -> None:
    words = place_arguments(place, out=str(tmp_path))
    journal = tmp_path / "texts.jsonl"
    command = [sys.executable, "-m", "dspark.cli.main", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (journal.is_file() and journal.read_bytes().count(b"\n") > 4):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "report.json").exists(), "it was too fast to be killed"
    before = journal.read_bytes()
    lines = before[: before.rfind(b"\n") + 1]
    said, num_lines = run(words), lines.count(b"\n")
    assert f"{num_lines - 1} texts lie in" in said.replace("\n", " ")
    assert journal.read_bytes().startswith(lines)
    assert without_times(report(tmp_path)) == without_times(report(place / "whole"))
    assert read_rounds(tmp_path / "rounds.parquet") == read_rounds(place / "whole" / "rounds.parquet")
    assert f"{2 * PROMPTS} texts lie in" in run(words).replace(
        "\n", " "
    )  # and all of them are read, none decoded, when it is done


def test_the_folder_of_another_evaluation_is_refused_by_what_differs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = place_arguments(place, out=str(place / "whole"))
    assert "settings.top_p 1.0 (now 0.5)" in failure(monkeypatch, capsys, [*words, "--top-p", "0.5"])
    assert "settings.seed 980406 (now 4)" in failure(monkeypatch, capsys, [*words, "--seed", "4"])


def test_two_drafts_are_compared_prompt_by_prompt(place: Path, tmp_path: Path) -> None:
    against = str(place / "whole")
    run(place_arguments(place, out=str(tmp_path / "same"), against=against))
    (same,) = report(tmp_path / "same")["pairings"]
    assert (same["comparison"]["num_prompts"], same["comparison"]["difference"]) == (PROMPTS, 0.0)
    assert same["comparison"]["p_value"] == 1.0
    write_tiny_draft(tmp_path / "other", place / "target", markov_rank=4)
    said = run(place_arguments(place, draft=str(tmp_path / "other"), out=str(tmp_path / "out"), against=against))
    (found,) = report(tmp_path / "out")["pairings"]
    own = report(tmp_path / "out")["measurements"][0]["acceptance"]["mean_acceptance_length"]
    theirs = report(place / "whole")["measurements"][0]["acceptance"]["mean_acceptance_length"]
    assert (found["comparison"]["first"], found["comparison"]["second"]) == pytest.approx((own, theirs))
    assert "against" in said
    assert f"{found['comparison']['p_value']:.4f}" in said


def test_rounds_that_the_report_does_not_count_are_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = place_arguments(place, against=str(tmp_path))
    shutil.copy(place / "whole" / "report.json", tmp_path)
    *lines, last = (place / "whole" / "texts.jsonl").read_text().splitlines()
    rounds = json.loads(last)["rounds"]
    longer = rounds[0] | {
        name: rounds[0][name] + 1 for name in ("num_proposed", "accepted_drafts", "acceptance_length")
    }
    for other in (rounds[1:], [longer, *rounds[1:]]):
        changed = json.dumps(json.loads(last) | {"rounds": other})
        (tmp_path / "texts.jsonl").write_text("\n".join([*lines, changed]) + "\n")
        assert "has other texts than report.json counts" in failure(monkeypatch, capsys, words)


def test_what_the_other_evaluation_lacks_is_said(place: Path, tmp_path: Path) -> None:
    said = run(place_arguments(place, temperatures="0.5,1", against=str(place / "whole")))
    assert "prompts.jsonl at T = 0.5" in said.replace("\n", "")


def test_names_are_shown_as_they_are_given(place: Path, tmp_path: Path) -> None:
    odd = tmp_path / "[red]:smile:[/b]"
    odd.mkdir(parents=True)
    shutil.copy(place / "prompts.jsonl", odd / "[b]x.jsonl")
    said = run([*place_arguments(place, tasks=str(odd / "[b]x.jsonl"), out=str(odd / "out")), "--max-prompts", "2"])
    assert "[red]:smile:[/b]/[b]x.jsonl: " in said.replace("\n", "")
    assert f"written to {odd / 'out'}" in said.replace("\n", "")


def test_evaluations_that_cannot_be_compared_are_refused_before_anything_is_decoded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dspark.cli.identity.load_target", None)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "other"}\n')
    for changes, complaint in (
        ({"against": str(tmp_path)}, "report.json: no such file"),
        ({"temperatures": "0"}, "holds none of these tasks at these temperatures"),
        ({"seed": "3"}, "had seed 980406, this evaluation has 3"),
        ({"tasks": str(tmp_path / "prompts.jsonl")}, "holds none of these tasks"),
    ):
        words = place_arguments(place, **{"against": str(place / "whole")} | changes)
        assert complaint in failure(monkeypatch, capsys, words)
