"""dspark report: a page and pictures of evaluations; every mistake is one line, and then nothing is written."""

import json
import re
import shutil
import struct
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from evaluating import failure, write_evaluations
from typer.testing import CliRunner

from dspark.cli.main import app
from dspark.eval.records import TextKey, read_texts
from dspark.target.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_evaluations(folder)
    return folder


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["report", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.stdout
    return result.stdout


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tree = json.loads((folder / "report.json").read_text())
    edit(tree)
    (folder / "report.json").write_text(json.dumps(tree))


@pytest.fixture(scope="module")
def said(place: Path) -> str:
    """What is printed when the first evaluation gets its page."""
    return run(str(place / "first"))


def test_a_page_and_its_pictures_lie_beside_the_evaluation(place: Path, said: str) -> None:
    html, folder = (place / "first" / "report.html").read_text(), place / "first" / "report_png"
    figures = html.count("<figure>")
    assert f"{figures} pictures in {folder}" in said
    assert re.findall(r"<h2>(.*?)</h2>", html) == [
        "Result",
        "Tokens a round",
        "Where a round ends",
        "Accepted drafts a round",
        "How far confidence can be believed",
        "Along the answer",
        "What a round costs",
        "Teacher-forced and decoded",
        "Checks",
        "Who wrote what",
        "Left out",
        "Where this comes from",
    ]
    assert "<li>Paired differences: the evaluation was not run --against another.</li>" in html
    found = [path.read_bytes() for path in folder.glob("*.png")]
    assert len(found) == figures == 20
    for picture in found:
        assert picture.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", picture[16:24])
        assert width == 720
        assert height >= 250
    assert not list((place / "first").rglob(".*")), "nothing half written is left"


@pytest.mark.usefixtures("said")
def test_the_answer_is_the_one_nearest_to_the_mean_and_is_whole(place: Path) -> None:
    html = (place / "first" / "report.html").read_text()
    where = re.search(r"<h3>(\S+), prompt (\d), T\u00a0=\u00a00</h3><pre>(.*?)</pre>", html, re.DOTALL)
    assert where
    texts = read_texts(place / "first" / "texts.jsonl")
    tokenizer, task = load_tokenizer(place / "target"), str(place / "prompts.jsonl")
    ids = texts[TextKey(task, 0.0, "draft", int(where[2]))].ids_T.tolist()
    assert unescape(re.sub(r"<[^>]*>", "", where[3])) == tokenizer.decode(ids)
    means = {}
    for index in range(3):
        rounds = texts[TextKey(task, 0.0, "draft", index)].rounds
        means[index] = sum(counts.acceptance_length for counts in rounds) / len(rounds)
    measured = json.loads((place / "first" / "report.json").read_text())["measurements"][0]
    mean = measured["acceptance"]["mean_acceptance_length"]
    best = min(abs(value - mean) for value in means.values())
    assert abs(means[int(where[2])] - mean) == best


def test_two_runs_stand_side_by_side_and_are_compared(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    run("--compare", str(place / "second"), str(place / "first"), "--out", str(out))
    html = out.read_text()
    assert html.count('<div class="run"><h3>second</h3>') == html.count('<div class="run"><h3>first</h3>') == 13
    assert '<p class="missing">The evaluation was not run --against another.</p>' in html
    compared = html[html.index("<h2>Compared</h2>") :]
    (theirs, ours) = json.loads((place / "second" / "report.json").read_text())["pairings"]
    for pairing in (theirs, ours):
        c = pairing["comparison"]
        low, high = c["interval"]
        line = (
            f"T = {pairing['temperature']:g}, p = {c['p_value']:.3f}: {c['difference']:.2f} ({low:.2f} to {high:.2f})"
        )
        assert line in compared
    assert len(list((tmp_path / "new" / "page_png").glob("compared-*.png"))) == 3
    assert not (place / "second" / "report_png").exists()


def test_names_are_escaped_and_a_target_that_is_not_here_leaves_one_section_out(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "<script>a&b"
    shutil.copytree(place / "second", folder)
    change(folder, lambda tree: tree["target"].update(name=str(tmp_path / "<img>")))
    run(str(folder), str(place / "second"))
    html = (folder / "report.html").read_text()
    assert "<h3>&lt;script&gt;a&amp;b</h3>" in html
    assert "<script>" not in html
    assert "<img>" not in html
    assert '<p class="missing">The target ' in html
    assert "is not on this machine" in html
    assert html.count("<h2>Paired differences</h2>") == 1


@pytest.mark.usefixtures("said")
def test_the_same_evaluation_makes_the_same_bytes(place: Path, tmp_path: Path) -> None:
    run(str(place / "first"), "--out", str(tmp_path / "report.html"))
    again = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert len(again) > 10
    assert all(path.read_bytes() == (place / "first" / path.relative_to(tmp_path)).read_bytes() for path in again)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def cut_journal(folder: Path) -> None:
    path = folder / "texts.jsonl"
    path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[:-2]) + b"\n")


MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no report": (
        lambda f: (f / "report.json").unlink(),
        "report.json: no such file; expected the folder of a finished",
    ),
    "half a report": (lambda f: truncate(f / "report.json"), "report.json: not the report of an evaluation"),
    "deep report": (lambda f: (f / "report.json").write_text("[" * 99999), "report.json: not the report of an"),
    "not a number": (
        lambda f: change(f, lambda t: t["measurements"][0].update(seconds=float("inf"))),
        "report.json: not the report of an evaluation",
    ),
    "a text for a number": (
        lambda f: change(f, lambda t: t["measurements"][1]["acceptance"].update(survival=["x"])),
        "measurements.1.acceptance.survival.0: Input should be a valid number",
    ),
    "no name": (lambda f: change(f, lambda t: t["draft"].pop("name")), "draft.name is missing"),
    "no phases": (
        lambda f: change(f, lambda t: t["measurements"][0].update(timing={})),
        "timing.time_per_token is missing",
    ),
    "nothing measured": (lambda f: change(f, lambda t: t.update(measurements=[])), "report.json: nothing was measured"),
    "no journal": (lambda f: (f / "texts.jsonl").unlink(), "texts.jsonl: no such file"),
    "odd bytes": (lambda f: (f / "texts.jsonl").write_bytes(b"\xff\xfe\n" * 3), "texts.jsonl:1: not a journal"),
    "a damaged log": (
        lambda f: (
            change(f, lambda t: t["draft"].update(name=str(f / "draft"))),
            (f / "metrics.jsonl").write_text('{"step": 1.0}\n{"st\n'),
        ),
        "metrics.jsonl: not the log of a training",
    ),
    "a text less": (cut_journal, "has other texts than report.json counts"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_folder_that_is_damaged_is_refused_and_nothing_is_written(
    name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, expected = MISTAKES[name]
    folder = tmp_path / "run"
    shutil.copytree(place / "second", folder)
    spoil(folder)
    before = sorted(tmp_path.rglob("*"))
    line = failure(monkeypatch, capsys, ["report", str(folder)])
    assert expected in line
    assert line.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_compared_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = str(place / "first"), tmp_path / "other"
    shutil.copytree(place / "second", other)
    change(other, lambda tree: tree["target"].update(fingerprint="another"))
    before = sorted(tmp_path.rglob("*"))
    out = ["--out", str(tmp_path / "page.html")]
    assert "target had fingerprint 'another'" in failure(
        monkeypatch, capsys, ["report", "--compare", first, str(other), *out]
    )
    again = str(place / "second" / ".." / "first")
    assert "given twice" in failure(monkeypatch, capsys, ["report", first, again, *out])
    assert "--compare: give two RUNs or more" in failure(monkeypatch, capsys, ["report", "--compare", first, *out])
    assert sorted(tmp_path.rglob("*")) == before
