"""What is written is what was measured: JSON that parses, and tables."""

import json
import re
from dataclasses import replace
from pathlib import Path

from contenders import CONTENDERS, measured
from rich.console import Console

from dspark.decode.round import Round
from dspark.eval.measure import Difference, GreedyEquality, Measurement
from dspark.eval.report import EvalReport, difference_lines, printed, write_json
from dspark.eval.statistics import acceptance_statistics

ONE_DRAFT = Round(1, 1, 2, False, ())
PLAIN, UNTRAINED, DRAFT, _ = (contender.measurements for contender in CONTENDERS)
REPORT = EvalReport(
    target={"name": "ling-3.0-nano", "fingerprint": "f" * 64},
    draft={"name": "data/nano/draft", "block_size": 4},
    settings={"max_new_tokens": 9, "engine": "reference", "device": "cpu", "batch_size": 1},
    provenance={"commit": "unknown", "hardware": {"gpus": []}},
    measurements=DRAFT,
)


BESIDE = replace(REPORT, baselines={"plain decoding": PLAIN, "untrained draft": UNTRAINED})


def shown(report: EvalReport) -> list[str]:
    """What is printed, part by part."""
    texts = []
    for part in printed(report):
        console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 (a sink)
        console.print(part)
        texts.append(console.export_text())
    return texts


def test_the_json_holds_every_count(tmp_path: Path) -> None:
    write_json(REPORT, tmp_path / "new" / "out.json")
    tree = json.loads((tmp_path / "new" / "out.json").read_text())
    first = tree["measurements"][0]
    assert (first["task"], first["temperature"], first["looping_share"]) == ("heldout", 0.0, 0.5)
    assert first["acceptance"]["mean_acceptance_length"] == (3 + 2 + 4 + 3) / 4
    assert first["acceptance"]["mean_accepted_drafts"] == (2 + 1 + 3 + 2) / 4
    assert first["acceptance"]["mean_acceptance_length_uncut"] == 3.0
    assert first["mean_acceptance_length_without_loops"] == 3.0
    assert first["acceptance"]["histogram"] == [0, 1, 2, 1, 0]
    assert tree["macro_mean_acceptance_length"] == {"0": 3.0, "1": 3.0}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["out.json"]


def test_the_macro_mean_is_over_tasks_and_never_over_temperatures() -> None:
    measurements = (measured(0.0, 3, 3), measured(1.0, 2, 2), replace(measured(0.0, 5, 5), task="gsm8k"))
    assert replace(REPORT, measurements=measurements).mean_acceptance_lengths() == {"0": 4.0, "1": 2.0}


def test_the_tables_show_the_numbers_in_eighty_columns() -> None:
    of_draft, comparison, speeds, phases = shown(BESIDE)
    assert re.search(r"acceptance length, bonus included +3\.00 +3\.00", of_draft), of_draft
    assert re.search(r"slot 2: survival, conditional +0\.25  0\.33 ", of_draft), of_draft
    assert re.search(r"slot 3: survival, conditional +0\.00  0\.00 ", of_draft), of_draft
    assert re.search(r"rounds with 2 accepted drafts +0\.50 ", of_draft), of_draft
    assert re.search(r"draft +3\.00 \(3\.00 - 3\.00\) +\d", comparison), comparison
    assert re.search(r"plain decoding +1 +14\.0 +1 +14\.0", comparison), comparison
    assert "50% at T = 0" in comparison
    assert re.search(r"plain decoding +0 +100 +66\.7 +66\.7 +66\.7 +14\.0 +- +-", speeds), speeds
    assert re.search(r"plain decoding +0 +20\.0% +20\.0% +40\.0% +0\.0% +20\.0%", phases), phases
    assert max(len(line) for text in shown(BESIDE) for line in text.splitlines()) <= 80


def test_a_draft_alone_is_compared_with_nothing() -> None:
    assert len(shown(REPORT)) == 3
    assert "acceptance, T = 0" not in "".join(shown(REPORT))


def test_more_temperatures_stand_in_more_tables_of_eighty_columns() -> None:
    four = tuple(measured(temperature, 5, 4, 5) for temperature in (0.0, 0.5, 1.0, 1.5))
    parts = shown(replace(REPORT, measurements=four, baselines={"untrained draft": four, "shipped draft": four}))
    assert len(parts) == 2 + 2 + 2
    for text in ("".join(parts[:2]), "".join(parts[2:4])):
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= 80
        assert all(f"T = {temperature}" in text for temperature in ("0", "0.5", "1", "1.5"))
        assert len(re.findall(r"\d\.\d\d - \d\.\d\d", text)) >= 8


def test_drafts_of_other_lengths_stand_in_one_table() -> None:
    mixed = (measured(0.0, 3, 3), replace(measured(1.0, 3, 3), acceptance=acceptance_statistics([[ONE_DRAFT]])))
    text = shown(replace(REPORT, measurements=mixed))[0]
    assert re.search(r"slot 0: survival, conditional +1\.00  1\.00 +1\.00  1\.00", text), text
    assert re.search(r"slot 2: survival, conditional +0\.00  0\.00 +-  - ", text), text
    assert re.search(r"rounds with 4 accepted drafts +0\.00 +- ", text), text


def test_names_cannot_break_a_table() -> None:
    strange = {"a\tb\nc\fd": with_differences(UNTRAINED, Difference(1, 17, 4e-4, True))}
    text = "".join(shown(replace(REPORT, draft={"name": "x\n---\ty"}, baselines=strange)))
    assert text.count("a?b?c?d") == 1 + 2 * 2 + 1 + 1  # tables of lengths and, T by T, of times; a caption; a line
    assert "x?---?y on ling-3.0-nano" in text


def test_synthetic_tasks_are_named_so_and_left_out_of_the_mean() -> None:
    measurements = (measured(0.0, 3, 3), replace(measured(0.0, 5, 5), task="random:64"))
    settings = {"prompts": {"random:64": {"is_synthetic": True}, "heldout": {"is_synthetic": False}}}
    report = replace(REPORT, measurements=measurements, settings={**REPORT.settings, **settings})
    assert report.mean_acceptance_lengths() == {"0": 3.0}
    assert "random:64 (synthetic): data/nano/draft" in "".join(shown(report))


def with_differences(measurements: tuple[Measurement, ...], *differences: Difference) -> tuple[Measurement, ...]:
    faults = sum(not difference.is_tie for difference in differences)
    equality = GreedyEquality(len(differences), faults, 1e-3, differences)
    greedy, sampled = measurements
    return replace(greedy, equality=equality), sampled


def test_greedy_texts_unlike_plain_decoding_are_counted_and_named() -> None:
    tie, fault = Difference(1, 17, 4e-4, True), Difference(0, 3, 1.25, False)
    draft, untrained = with_differences(DRAFT, tie, fault), with_differences(UNTRAINED)
    parts = shown(replace(BESIDE, measurements=draft, baselines={"plain": PLAIN, "untrained": untrained}))
    assert re.search(r"greedy texts unlike plain's +2 of 2 \(1 by rounding, 1 faulty\) +- ", parts[0]), parts[0]
    assert "untrained 0 of 2, draft 2 of 2 (1 by rounding, 1 faulty)" in " ".join(parts[1].split())
    assert "unlike" not in "".join(shown(BESIDE))
    lines = difference_lines({"plain": PLAIN, "untrained": untrained, "draft": draft})
    assert lines == [
        "draft, heldout: prompt 0 leaves plain decoding at new token 3, "
        "by a logit 1.2 below the target's largest: A FAULT",
        "draft, heldout: prompt 1 leaves plain decoding at new token 17, "
        "by a logit 0.0004 below the target's largest: rounding",
    ]
    assert [" ".join(part.split()) for part in parts[-2:]] == lines
    assert difference_lines({"draft": draft}, limit=1) == [lines[0], "and 1 more"]


def test_baselines_and_differences_are_in_the_json(tmp_path: Path) -> None:
    learner = with_differences(DRAFT, Difference(1, 17, 4e-4, True))
    write_json(replace(REPORT, measurements=learner, baselines={"plain": PLAIN}), tmp_path / "out.json")
    tree = json.loads((tmp_path / "out.json").read_text())
    assert [m["tokens_per_second"] for m in tree["baselines"]["plain"]] == [m.tokens_per_second for m in PLAIN]
    assert [m["acceptance"] for m in tree["baselines"]["plain"]] == [None, None]
    equality, nothing = (m["equality"] for m in tree["measurements"])
    assert (equality["mismatches"], equality["faults"], nothing) == (1, 0, None)
    assert equality["differences"] == [{"prompt": 1, "position": 17, "gap": 4e-4, "is_tie": True}]
