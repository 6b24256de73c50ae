"""dspark bench headline: what it measures on a CPU in a GPU's place, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluating import failure, write_tiny_draft
from tiny import write_tiny_ling

from dspark.cli.bench import config_folder, headline
from dspark.verifier.ranks import ALONE

Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Runs a job of 20 -> 10 tokens; returns its JSON."""
    monkeypatch.setattr(headline, "DEVICE", "cpu")
    monkeypatch.setattr(headline, "DTYPE", torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a CPU")

    def run(target: str, weights: str, draft: str, folder: Path, emulated: int, mtp: tuple[int, ...]) -> dict[str, Any]:
        path = tmp_path / "headline.json"
        headline.run(ALONE, headline.Job(target, weights, folder, emulated, draft, mtp, (20, 10), 2, path))
        tree: dict[str, Any] = json.loads(path.read_text())
        return tree

    return run


def test_real_weights_say_their_own_acceptance(
    tmp_path: Path, measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = write_tiny_ling(tmp_path / "target"), write_tiny_draft(tmp_path / "draft", tmp_path / "target")
    folder = tmp_path / "target"
    tree = measure(str(folder), str(folder), str(draft), folder, 1, (1, 3))
    assert [row["decoding"] for row in tree["rows"]] == ["plain", "NEXTN, 1", "NEXTN, 3", "DSpark, 4"]
    for row in tree["rows"]:
        m = row["measurement"]
        assert (m["num_prompts"], m["new_tokens"]) == (2, 20), target
        decoding = sum(v for name, v in m["timing"]["phase_seconds"].items() if name != "prefill")
        num_rounds = m["acceptance"]["num_rounds"] if m["acceptance"] else 18
        assert row["round_seconds"] == pytest.approx(decoding / num_rounds)
    assert "routing" not in tree
    said = capsys.readouterr().out
    assert "random" not in said
    assert "published by others, not measured here" in said
    length = tree["rows"][3]["measurement"]["acceptance"]["mean_acceptance_length"]
    assert f"{length:.2f}" in said


def test_random_weights_are_routed_evenly_and_read_at_published_lengths(
    measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = measure("nano", "random", "random", config_folder("ling-3.0-nano"), 2, ())
    assert "one rank of 2, communication left out" in tree["label"]
    assert all(found["least"] > 0.5 * found["uniform"] for found in tree["routing"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("DSpark, 8")]
    lengths = [float(row[row.index("at") + 1]) for row in rows if "at" in row]
    assert lengths == [3.25, 5.29, 9.0]
    found = tree["rows"][-1]
    first, pace = found["measurement"]["timing"]["first_token"]["median"], found["round_seconds"] / 9
    said = [float(cell) for cell in rows[-1][4:]]
    expected = [found["round_seconds"] * 1e3, first * 1e3, pace * 1e3, pace * 1e3, 10 / (first + 9 * pace)]
    assert said == pytest.approx([*expected, first + 4999 * pace], rel=0.02, abs=0.6)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--tp", "2", "--emulate-tp", "2"], "give only one"),
        (["--weights", "somewhere"], "give both as folders or both as random"),
        (["--mtp", "0"], "--mtp: expected numbers in 1..15"),
        (["--mtp", "3,x"], "--mtp: expected numbers in 1..15"),
        ([], "needs a CUDA GPU"),
    ],
    ids=str,
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="is not refused where a GPU is")
def test_a_mistake_is_one_clear_line(
    words: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = failure(monkeypatch, capsys, ["bench", "headline", "--target", "ling-3.0-flash", *words])
    assert complaint in line
