"""dspark calibrate: temperatures, a picture and budgets from evaluations; every mistake is one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from evaluating import failure
from typer.testing import CliRunner

from dspark.cli.calibrate import SPLIT_SEED
from dspark.cli.main import app
from dspark.decode.round import Round
from dspark.eval.calibration.temperatures import (
    fit_temperatures,
    product_calibrations,
    read_temperatures,
    split_by_prompt,
)
from dspark.eval.measure import DRAFT, Measurement
from dspark.eval.records import TextKey, open_journal
from dspark.eval.report import EvalReport, write_json
from dspark.eval.statistics import acceptance_statistics
from dspark.eval.timing import DecodedText, Spread, Timing

SLOTS, PROMPTS = 3, 24


def texts(seed: int, temperature: float = 0.25) -> list[DecodedText]:
    """Of the first prompt 31 rounds, of the next one more, accepted as confidences at this temperature say."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(PROMPTS):
        logits_TK = torch.randn(31 + index, SLOTS, generator=generator)
        is_kept_TK = torch.rand(logits_TK.shape, generator=generator) < (logits_TK / temperature).sigmoid()
        kept = is_kept_TK.cumprod(1).sum(1).tolist()
        rounds = [Round(SLOTS, a, a + 1, False, tuple(row)) for a, row in zip(kept, logits_TK.tolist(), strict=True)]
        found.append(DecodedText(torch.tensor([1]), tuple(rounds), 1.0, False, 0.5, {"verify": 1.0}))
    return found


def write_evaluation(folder: Path, seed: int = 0, draft: str = "d", temperature: float = 1.0) -> None:
    """What dspark eval --out would have left, as far as it is read: the draft, and another contender to be left out."""
    ms, made = {}, {DRAFT: texts(seed), "drafts:1": texts(seed + 1, 4.0)}
    with open_journal(folder, {"seed": seed}) as journal:
        for name, of_prompts in made.items():
            for index, text in enumerate(of_prompts):
                journal.append(TextKey("heldout", temperature, name, index), text)
            acceptance = acceptance_statistics([text.rounds for text in of_prompts])
            timing = Timing(Spread(0.5, 0.5, 0.5), None, 1.0, {"verify": 1.0})
            fields = dict.fromkeys(Measurement.__dataclass_fields__) | {"task": "heldout", "temperature": temperature}
            fields |= {"num_prompts": PROMPTS, "new_tokens": PROMPTS, "seconds": 1.0, "looping_share": 0.0}
            ms[name] = (Measurement(**fields | {"tokens_per_second": 1.0, "acceptance": acceptance, "timing": timing}),)
    settings = {"prompts": {"heldout": {"count": PROMPTS, "sha256": "p"}}, "temperatures": [temperature]}
    of_target, of_draft = {"name": "t", "fingerprint": "t"}, {"name": draft, "fingerprint": draft}
    report = EvalReport(of_target, of_draft, settings, {}, ms.pop(DRAFT), ms)
    write_json(report, folder / "report.json")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    write_evaluation(folder / "first")
    write_evaluation(folder / "second", seed=2, temperature=0.7)
    write_evaluation(folder / "other", draft="another")
    (folder / "times.json").write_text('{"1": 1.0, "4": 1.3, "24": 5.0}')
    return folder


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["calibrate", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.stdout
    return result.stdout


def rows(said: str) -> list[list[str]]:
    """The cells of all rows of numbers."""
    return [line.split() for line in said.splitlines() if line.split() and line.split()[0].rstrip("-").isdigit()]


def test_the_temperatures_undo_what_is_wrong_with_the_confidences(place: Path, tmp_path: Path) -> None:
    said = run(place / "first", "--out", tmp_path / "new" / "temperatures.json")
    found = read_temperatures(tmp_path / "new" / "temperatures.json", SLOTS)
    drafted = [(("heldout", index), text.rounds) for index, text in enumerate(texts(0))]
    fitted, tested = ([counts for rounds in half for counts in rounds] for half in split_by_prompt(drafted, SPLIT_SEED))
    assert found.temperatures == fit_temperatures(fitted)
    assert found.temperatures[0] == pytest.approx(0.25, rel=0.3)
    for eces, temperatures in ((found.ece_before, (1.0,) * SLOTS), (found.ece_after, found.temperatures)):
        assert list(eces) == [c.ece for c in product_calibrations(tested, temperatures)[:-1]]
    assert all(after < before for before, after in zip(found.ece_before, found.ece_after, strict=True))
    assert found.dataset == "heldout at T = 1"
    assert found.num_samples == len(fitted), "of the draft alone, and half of the prompts"
    assert f"fitted on {len(fitted)} rounds, tested on {len(tested)} of other" in said
    slots = rows(said)
    assert [row[0] for row in slots] == ["0", "1", "2"]
    assert [float(row[1]) for row in slots] == pytest.approx(found.temperatures, abs=1e-3)
    assert [float(row[5]) for row in slots] == pytest.approx(found.ece_before, abs=1e-3)
    assert [float(row[6]) for row in slots] == pytest.approx(found.ece_after, abs=1e-3)


def test_prompts_of_several_evaluations_are_split_alike(place: Path, tmp_path: Path) -> None:
    found = []
    for folders in (["first"], ["first", "second"]):
        run(*(place / name for name in folders), "--out", tmp_path / "t.json")
        found.append(json.loads((tmp_path / "t.json").read_text()))
    assert found[1]["dataset"] == "heldout at T = 1, heldout at T = 0.7"
    assert found[1]["num_samples"] == 2 * found[0]["num_samples"], "a prompt's texts are as long in both"


def test_a_curve_of_times_gives_budgets_and_a_plot_is_a_picture(place: Path, tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "reliability.png"
    said = run(place / "first", "--out", tmp_path / "t.json", "--step-times", place / "times.json", "--plot", picture)
    table = rows(said.split("tokens a second")[1])
    assert [row[0] for row in table] == ["1", "2", "4", "8"], "12 texts are tested"
    for _, undrafted, whole, budget, budgeted, *_ in table:
        assert int(budget) > 0
        assert float(budgeted) > float(undrafted)
        assert whole == "-" or float(whole) <= float(budgeted)
    assert table[-1][2] == "-"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_used_is_one_line_and_nothing_is_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "t.json")]
    different = "dspark: EVAL_FOLDER: expected different folders, all of one draft on one target"
    (tmp_path / "late.json").write_text('{"2": 1.0, "4": 1.3}')
    bare = tmp_path / "bare"
    shutil.copytree(place / "first", bare)
    lines = [json.loads(line) for line in (bare / "texts.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line["rounds"] = [counts | {"confidence_logits": []} for counts in line["rounds"]]
    (bare / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for words, message in (
        ([place / "first", place / "other"], different),
        ([place / "first", place / "first"], different),
        ([tmp_path / "none"], "expected the folder of a finished dspark eval --out"),
        ([place / "first", "--step-times", tmp_path / "late.json"], f"dspark: {tmp_path}/late.json: measured from 2"),
        ([bare], f"dspark: {bare}: rounds with [0] confidences; expected those of a draft with a confidence head"),
        ([place / "first", "--step-times", place / "first" / "report.json"], "expected seconds by number of tokens"),
    ):
        assert message in failure(monkeypatch, capsys, ["calibrate", *map(str, words), *out])
    assert not (tmp_path / "t.json").exists()
