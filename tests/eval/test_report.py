"""What is written is what was measured: JSON that parses, and tables."""

import json
import re
from dataclasses import replace
from pathlib import Path

from contenders import CONTENDERS, measured
from rich.console import Console
from rich.table import Table

from dspark.eval.comparison import Contender
from dspark.eval.measure import Difference, GreedyEquality
from dspark.eval.report import EvalReport, comparison_tables, difference_lines, task_tables, write_json

REPORT = EvalReport(
    target={"name": "ling-3.0-nano", "fingerprint": "f" * 64},
    draft={"name": "data/nano/draft", "block_size": 4},
    settings={"max_new_tokens": 9},
    provenance={"commit": "unknown"},
    measurements=CONTENDERS[2].measurements,
)


def shown(*tables: Table) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 (a sink)
    console.print(*tables)
    return console.export_text()


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
    text = shown(*comparison_tables(CONTENDERS, "title"))
    assert re.search(r"demo draft +3\.00 \(3\.00 - 3\.00\) +\d", text), text
    assert re.search(r"plain decoding +1 +14\.0 +1 +14\.0", text), text
    assert "50% at T = 0" in text
    assert max(map(len, text.splitlines())) <= 80
    (table,) = task_tables(REPORT)
    text = shown(table)
    assert re.search(r"acceptance length, bonus included +3\.00 +3\.00", text), text
    assert re.search(r"slot 2: survival, conditional +0\.25  0\.33 ", text), text
    assert re.search(r"slot 3: survival, conditional +0\.00  0\.00 ", text), text
    assert re.search(r"rounds with 2 accepted drafts +0\.50 ", text), text
    assert max(map(len, text.splitlines())) <= 80


def test_more_temperatures_stand_in_more_tables_of_eighty_columns() -> None:
    four = tuple(measured(temperature, 5, 4, 5) for temperature in (0.0, 0.5, 1.0, 1.5))
    tables = task_tables(replace(REPORT, measurements=four))
    group = [replace(contender, measurements=four) for contender in CONTENDERS[1:]]
    for found in (tables, comparison_tables(group, "title")):
        assert len(found) == 2
        text = shown(*found)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= 80
        assert all(f"T = {temperature}" in text for temperature in ("0", "0.5", "1", "1.5"))
        assert len(re.findall(r"\d\.\d\d - \d\.\d\d", text)) >= 8


def test_synthetic_tasks_are_named_so_and_left_out_of_the_mean() -> None:
    measurements = (measured(0.0, 3, 3), replace(measured(0.0, 5, 5), task="random:64"))
    settings = {"prompts": {"random:64": {"is_synthetic": True}, "heldout": {"is_synthetic": False}}}
    report = replace(REPORT, measurements=measurements, settings=settings)
    assert report.mean_acceptance_lengths() == {"0": 3.0}
    assert "random:64 (synthetic): data/nano/draft" in shown(*task_tables(report))


def with_differences(contender: Contender, *differences: Difference) -> Contender:
    faults = sum(not difference.is_tie for difference in differences)
    equality = GreedyEquality(len(differences), faults, 1e-3, differences)
    greedy, sampled = contender.measurements
    return replace(contender, measurements=(replace(greedy, equality=equality), sampled))


def test_greedy_texts_unlike_plain_decoding_are_counted_and_named() -> None:
    tie, fault = Difference(1, 17, 4e-4, True), Difference(0, 3, 1.25, False)
    group = (CONTENDERS[0], with_differences(CONTENDERS[1]), with_differences(CONTENDERS[2], tie, fault))
    said = " ".join(shown(*comparison_tables(group, "title")).split())
    assert "untrained draft 0 of 2, demo draft 2 of 2 (1 by rounding, 1 faulty)" in said
    assert "unlike" not in shown(*comparison_tables(CONTENDERS, "title"))
    lines = difference_lines(group)
    assert lines == [
        "demo draft, heldout: prompt 0 leaves plain decoding at new token 3, "
        "by a logit 1.2 below the target's largest: A FAULT",
        "demo draft, heldout: prompt 1 leaves plain decoding at new token 17, "
        "by a logit 0.0004 below the target's largest: rounding",
    ]
    assert difference_lines(group, limit=1) == [lines[0], "and 1 more"]


def test_baselines_and_differences_are_in_the_json(tmp_path: Path) -> None:
    learner = with_differences(CONTENDERS[2], Difference(1, 17, 4e-4, True))
    plain = CONTENDERS[0].measurements
    write_json(replace(REPORT, measurements=learner.measurements, baselines={"plain": plain}), tmp_path / "out.json")
    tree = json.loads((tmp_path / "out.json").read_text())
    assert [m["tokens_per_second"] for m in tree["baselines"]["plain"]] == [m.tokens_per_second for m in plain]
    assert [m["acceptance"] for m in tree["baselines"]["plain"]] == [None, None]
    equality, nothing = (m["equality"] for m in tree["measurements"])
    assert (equality["mismatches"], equality["faults"], nothing) == (1, 0, None)
    assert equality["differences"] == [{"prompt": 1, "position": 17, "gap": 4e-4, "is_tie": True}]
