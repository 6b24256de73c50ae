"""What is written is what was measured: JSON that parses, tables and a page that fetches nothing from elsewhere."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table

from dspark.decode.round import Round
from dspark.eval.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Interval,
    Series,
    bar_chart,
    interval_chart,
    line_chart,
    ticks,
)
from dspark.eval.comparison import Contender, summary
from dspark.eval.excerpt import Piece
from dspark.eval.measure import DecodedText, Measurement, summarise
from dspark.eval.page import Page, render
from dspark.eval.report import EvalReport, comparison_table, task_tables, write_json


def measured(temperature: float, *lengths: int) -> Measurement:
    """Two texts of the same rounds, the second one looping."""
    rounds = tuple(Round(4, length - 1, length, index == 0, ()) for index, length in enumerate(lengths))
    ids_T = torch.arange(sum(lengths) + 1 if lengths else 7)
    texts = [DecodedText(ids_T, rounds, 0.5, False), DecodedText(ids_T, rounds[:1], 0.5, True)]
    return summarise("heldout", temperature, texts)


CONTENDERS = tuple(
    Contender(name, tuple(measured(temperature, *lengths) for temperature in (0.0, 1.0)), ())
    for name, lengths in {
        "plain decoding": (),
        "untrained draft": (1, 1, 2),
        "demo draft": (3, 2, 4),
        "shipped draft": (5, 4, 5),
    }.items()
)
REPORT = EvalReport(
    target={"name": "ling-3.0-nano", "fingerprint": "f" * 64},
    draft={"name": "data/nano/draft", "block_size": 4},
    settings={"max_new_tokens": 9},
    provenance={"commit": "unknown"},
    measurements=CONTENDERS[2].measurements,
)
PAGE = Page(
    title="DSpark on <nano>",
    contenders=CONTENDERS,
    learner="demo draft",
    training=({"step": 5, "loss": 2.0, "acceptance_length": 1.5}, {"step": 10, "loss": 1.0, "acceptance_length": 2.5}),
    prompt="if a < b:",
    excerpt=(Piece("x", 0, False), Piece(" = <b>", 1, True)),
    provenance={"commit": "abc", "versions": {"torch": "2"}, "gpus": []},
)


def shown(table: Table) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 (a sink)
    console.print(table)
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
    text = shown(comparison_table(CONTENDERS, "title"))
    assert re.search(r"demo draft +3\.00 \(3\.00 - 3\.00\) +\d", text), text
    assert re.search(r"plain decoding +1 +14\.0 +1 +14\.0", text), text
    assert "50% at T = 0" in text
    assert max(map(len, text.splitlines())) <= 80
    (table,) = task_tables(REPORT)
    text = shown(table)
    assert re.search(r"acceptance length, bonus token included +3\.00 +3\.00", text), text
    assert re.search(r"slot 2: survival, conditional acceptance +0\.25  0\.33 ", text), text
    assert re.search(r"slot 3: survival, conditional acceptance +0\.00  0\.00 ", text), text
    assert re.search(r"share of rounds with 2 accepted drafts +0\.50 ", text), text
    assert max(map(len, text.splitlines())) <= 80


def test_the_summary_names_every_draft() -> None:
    assert summary(CONTENDERS).endswith("untrained draft 1.25, demo draft 3.00, shipped draft 4.75.")


def test_the_page_is_whole_and_fetches_nothing() -> None:
    html = render(PAGE)
    assert "<script" not in html
    assert not re.search(r"(src|href)=|url\(|@import", html)
    assert "DSpark on &lt;nano&gt;" in html
    assert '<mark title="round 1: drafted"> = &lt;b&gt;</mark>' in html
    assert "if a &lt; b:" in html
    assert "<b>3.00</b>" in html
    assert "<dt>versions</dt><dd>torch 2</dd>" in html
    for part in ("viewport", "prefers-color-scheme: dark", "50% at T = 0"):
        assert part in html
    charts = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(charts) == 8
    for chart in charts:
        ElementTree.fromstring(chart)


def test_a_page_without_shipped_draft_or_training_rows_is_still_a_page() -> None:
    html = render(replace(PAGE, contenders=CONTENDERS[:3], training=()))
    assert html.count("no points were logged") == 2
    assert "shipped draft" not in html


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 9.4), (0.0012, 0.0019), (5, 10), (3.0, 3.0), (-2.5, 7.0)])
def test_ticks_are_round_and_cover_the_values(low: float, high: float) -> None:
    found = ticks(low, high)
    step = found[1] - found[0]
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8
    assert float(f"{step:.0e}") == pytest.approx(step), "one digit"
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9)) in {1, 2, 5}


def test_a_line_runs_from_corner_to_corner_and_leaves_out_what_is_not_finite() -> None:
    chart = line_chart([Series("loss", ((0, 0.0), (5, math.nan), (10, 1.0)), 1)], "step", "loss")
    points = re.search(r'points="([^"]*)"', chart)
    assert points
    assert points.group(1) == f"{LEFT:.1f},{HEIGHT - BOTTOM:.1f} {WIDTH - RIGHT:.1f},{TOP:.1f}", (
        "left foot to right top"
    )


def test_a_bar_is_as_high_as_its_share() -> None:
    chart = bar_chart([Series("a", ((0, 0.5), (1, 0.25)), 1)], 2, "slot", "share")
    heights = [float(h) for h in re.findall(r'<rect[^>]* height="([\d.]+)"', chart)]
    assert heights == [87.0, 43.5]


def test_an_interval_spans_its_bounds() -> None:
    chart = interval_chart([Interval("a", 1.0, 1.5, 2.0, 1)], "length")
    assert f'd="M{LEFT:.1f} ' in chart
    assert f"H{WIDTH - RIGHT:.1f}" in chart
    assert f'cx="{(LEFT + WIDTH - RIGHT) / 2:.1f}"' in chart
