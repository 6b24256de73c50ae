"""Every section shows what was measured: as many marks as numbers, and tables."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contenders import CONTENDERS
from drawings import marks, said

from dspark.decode.round import Round
from dspark.eval.confidence import Bin, Calibration, ConfidenceStatistics
from dspark.eval.evaluation import Evaluation
from dspark.eval.measure import Difference, GreedyEquality
from dspark.eval.page import sections as of
from dspark.eval.page.report import render_report
from dspark.eval.records import TextKey
from dspark.eval.report import EvalReport
from dspark.eval.statistics import DecodingGap, TeacherForcedStatistics
from dspark.eval.timing import DecodedText, Speedup, Spread, Timing

TIMING = Timing(
    Spread(0.1, 0.1, 0.1),
    Spread(0.02, 0.0123, 0.1),
    50.0,
    {"prefill": 1.0, "draft": 0.5, "verify": 0.25, "commit": 0.125, "other": 0.125},
)
FORCED = TeacherForcedStatistics(2.5, (2.0, 3.0), (0.7, 0.5, 0.25, 0.125), 99)
BINS = (Bin(0.0, 0.5, 0, None, None), Bin(0.5, 0.6, 4, 0.55, 0.5), Bin(0.9, 1.0, 1, 0.95, 1.0))
SURE = ConfidenceStatistics(Calibration(5, 0.6, 0.6, 0.0512, 0.204, 0.75, BINS), ())
PLAIN, UNTRAINED, LEARNER, SHIPPED = CONTENDERS
ORDER = (LEARNER, PLAIN, UNTRAINED, SHIPPED)
TEXT = DecodedText(torch.arange(7), (Round(4, 2, 3, False, ()),) * 2, 1.0, False, 0.5, {"prefill": 1.0})


def panels(**fields: Any) -> list[of.Panel]:
    """The contenders, the demo draft first; fields are its own at the first temperature."""
    found = []
    for place in (0, 1):
        rows = [of.Row(c.name, colour, c.measurements[place], (TEXT,)) for colour, c in enumerate(ORDER)]
        found.append(of.Panel(rows, 5.0, "heldout"))
    first = found[0].rows[0]
    rows = [replace(first, m=replace(first.m, **fields)), *found[0].rows[1:]]
    return [replace(found[0], rows=rows), found[1]]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the tables of a section of a page without its plots; fields are as of ``panels``."""
    monkeypatch.setattr("dspark.eval.page.plots.svg", lambda figure: "")

    def render(section: str, **fields: Any) -> str:
        first, second = LEARNER.measurements
        others = {contender.name: contender.measurements for contender in ORDER[1:]}
        report = EvalReport({"name": "t"}, {"name": "d"}, {}, {}, (replace(first, **fields), second), others)
        texts = {TextKey("heldout", t, n, i): TEXT for t in (0.0, 1.0) for n in ("draft", *others) for i in (0, 1)}
        page, _ = render_report([Evaluation(Path("run"), report, texts)], ["no words"], False)
        found = re.search(f"<h2>{section}</h2>(.*?)</section>", page, re.DOTALL)
        return re.sub(r"\n *", "", found[1]) if found else ""

    return render


def test_the_table_holds_length_speed_the_median_and_the_gain(tables: Any) -> None:
    html = tables("Result")
    a = LEARNER.measurements[0].acceptance
    assert a
    low, high = a.interval
    assert f"<b>{a.mean_acceptance_length:.2f}</b><small>{low:.2f} - {high:.2f}</small>" in html
    assert f"<td>{a.mean_accepted_drafts:.2f}</td>" in html
    assert '<th scope="row"><i></i>plain decoding</th><td>1</td><td>0</td>' in html
    assert html.count('style="background: var(--c0)"></i>draft<') == 2
    timed = tables("Result", timing=TIMING, speedup=Speedup(2.5, 2.25, 0.95, 0.95))
    assert "<td>12.3</td><td>2.25</td>" in timed
    assert timed.count("<td>-</td>") == 7


def test_every_contender_that_drafts_is_a_dot_and_every_share_a_bar() -> None:
    lengths, positions, histograms = (of.titled(draw, panels()) for draw in (of.lengths, of.positions, of.histograms))
    assert [title for title, _ in lengths] == ["heldout, T = 0", "heldout, T = 1"]
    assert [len(marks(figure, kind)) for _, figure in lengths for kind in ("dot", "whisker")] == [3] * 4
    drafted = [c.measurements[0].acceptance for c in CONTENDERS[1:]]
    assert [title for title, _ in positions[:2]] == ["Survival, heldout, T = 0", "Conditional, heldout, T = 0"]
    assert len(marks(positions[0][1], "bar")) == sum(len(a.survival) for a in drafted if a)
    conditional = [share for a in drafted if a for share in a.conditional if share is not None]
    assert len(marks(positions[1][1], "bar")) == len(conditional) < 12
    assert len(marks(histograms[0][1], "bar")) == sum(len(a.histogram) for a in drafted if a)
    shares = [text for text in said(histograms[0][1], "bar") if text.startswith("demo draft, accepted drafts ")]
    assert sum(float(text.split(": ")[1]) for text in shares) == 1.0


def test_where_nothing_was_drafted_there_is_no_plot() -> None:
    plain = replace(panels()[0], rows=[panels()[0].rows[1]])
    draws = (of.lengths, of.positions, of.histograms, of.reliability, of.by_place, of.by_answer, of.costs, of.forced)
    assert [of.titled(draw, [plain]) for draw in draws] == [[]] * len(draws)


def test_confidence_is_a_dot_a_bin_that_holds_any() -> None:
    assert of.titled(of.reliability, panels()) == []
    ((title, figure),) = of.titled(of.reliability, panels(confidence=SURE))
    assert title == "heldout, T = 0"
    assert said(figure, "dot") == [
        "demo draft: 4 tokens, confidence 0.55, accepted 0.50",
        "demo draft: 1 tokens, confidence 0.95, accepted 1.00",
    ]
    large, small = marks(figure, "dot")
    assert large.get_markersize() > small.get_markersize() > 5
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "demo draft: ECE 0.051, AUROC 0.75, Brier 0.204"
    ]


def test_a_round_costs_its_phases_without_prefill() -> None:
    (_, figure), _ = of.titled(of.costs, panels(timing=TIMING))
    a = LEARNER.measurements[0].acceptance
    assert a
    assert len(marks(figure, "bar")) == 3 * 3 + 4
    rows = [text.get_text() for text in figure.axes[0].texts]
    assert rows[0] == f"demo draft: {1000 / a.num_rounds:.3g} ms, prefill 500 ms a prompt"
    assert said(figure, "bar")[0] == f"draft: {500 / a.num_rounds:.3g}"


def test_phases_have_the_names_and_colours_of_the_reports_columns() -> None:
    """However many phases there are: those of one column are one part, and what took no time is none."""
    phases = {"prefill": 1.0, "other": 0.5, "cycle": 0.25, "verify": 0.25, "update": 0.25, "commit": 0.5}
    engine = Timing(TIMING.first_token, TIMING.time_per_token, 50.0, phases)
    first = panels(timing=engine)[0]
    ((_, figure),) = of.costs(replace(first, rows=first.rows[:1]))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["verify", "commit", "other"]
    a = LEARNER.measurements[0].acceptance
    assert a
    assert said(figure, "bar")[1] == f"commit: {750 / a.num_rounds:.3g}"


def test_a_predicted_gain_becomes_the_measured_one(tables: Any) -> None:
    assert "<table>" not in tables("What a round costs")
    html = tables("What a round costs", speedup=Speedup(2.5, 1.8, 0.9, 0.8))
    assert "draft</th><td>2.50</td><td>90.0%</td><td>80.0%</td><td><b>1.80</b></td>" in html
    assert html.count("<tr>") == 3, "the head, the temperature, the one that has a gain"


def test_what_teacher_forcing_missed_has_its_interval(tables: Any) -> None:
    section = "Teacher-forced and decoded"
    assert tables(section) == ""
    assert "<table>" not in tables(section, teacher_forced=FORCED)
    gap = DecodingGap(57, 3.75, 3.5, 0.25, (-0.5, 0.75))
    html = tables(section, teacher_forced=FORCED, decoding_gap=gap)
    cells = "<td>3.75</td><td>3.50</td><td><b>+0.25</b><small>-0.50 to +0.75</small></td><td>57</td>"
    assert f"draft</th>{cells}" in html
    assert html.count("<tr>") == 3


def test_what_was_teacher_forced_stands_beside_what_was_decoded() -> None:
    assert of.titled(of.forced, panels()) == []
    (_, lengths), (_, survival) = of.titled(of.forced, panels(teacher_forced=FORCED))
    assert said(lengths, "dot")[1] == "demo draft, teacher-forced: 2.50 (2.00 to 3.00)"
    assert len(marks(lengths, "dot")) == 2
    assert len(marks(survival, "bar")) == 8


def test_a_stretch_of_the_answer_is_drawn_at_its_middle() -> None:
    (_, figure), _ = of.titled(of.by_place, panels())
    assert said(figure, "dot")[:2] == [
        "demo draft: 1 round from token 0 to 1: 3.00",
        "demo draft: 1 round from token 4 to 5: 3.00",
    ]
    assert [dot.get_xdata()[0] for dot in marks(figure, "dot")[:2]] == [1, 5]
    assert len(marks(figure, "curve")) == 3


def test_what_speaks_against_a_number_is_bold(tables: Any) -> None:
    differing = GreedyEquality(2, 1, 1e-3, (Difference(0, 3, 0.5, False), Difference(1, 2, 0.0, True)))
    html = tables("Checks", equality=differing)
    assert "<td><b>1 of 2</b></td><td>3.00</td><td>2 of 2</td><td>1</td><td><b>1</b></td>" in html
    assert "<td>-</td><td>-</td><td>-</td>" in tables("Checks")
