"""Every section draws what was measured: as many marks as numbers."""

import re
from dataclasses import replace
from typing import Any

from contenders import CONTENDERS

from dspark.eval.confidence import Bin, Calibration, ConfidenceStatistics
from dspark.eval.measure import Difference, GreedyEquality
from dspark.eval.page import sections as of
from dspark.eval.statistics import DecodingGap, TeacherForcedStatistics
from dspark.eval.timing import Speedup, Spread, Timing

TIMING = Timing(
    Spread(0.1, 0.1, 0.1),
    Spread(0.02, 0.0123, 0.1),
    50.0,
    {"prefill": 1.0, "draft": 0.5, "verify": 0.25, "commit": 0.125, "other": 0.125},
)
FORCED = TeacherForcedStatistics(2.5, (2.0, 3.0), (0.7, 0.5, 0.25, 0.125), 99)
BINS = (Bin(0.0, 0.5, 0, None, None), Bin(0.5, 0.6, 4, 0.55, 0.5), Bin(0.9, 1.0, 1, 0.95, 1.0))
SURE = ConfidenceStatistics(Calibration(5, 0.6, 0.6, 0.0512, 0.204, 0.75, BINS), ())
PALETTE = {contender.name: place for place, contender in enumerate(CONTENDERS)}


def group(**fields: Any) -> of.Group:
    """The contenders; fields are the demo draft's at the first temperature."""
    plain, untrained, learner, shipped = CONTENDERS
    first, second = learner.measurements
    changed = replace(learner, measurements=(replace(first, **fields), second))
    return of.Group((plain, untrained, changed, shipped), PALETTE, 5.0, "heldout")


def count(chart: str, mark: str) -> int:
    return len(re.findall(f"<{mark} class=", chart))


def test_the_table_holds_length_speed_the_median_and_the_gain() -> None:
    html = of.result_table(group())
    a = CONTENDERS[2].measurements[0].acceptance
    assert a
    low, high = a.interval
    assert f"<b>{a.mean_acceptance_length:.2f}</b><small>{low:.2f} - {high:.2f}</small>" in html
    assert f"<td>{a.mean_accepted_drafts:.2f}</td>" in html
    timed = of.result_table(group(timing=TIMING, speedup=Speedup(2.5, 2.25, 0.95, 0.95)))
    assert "<td>12.3</td><td>2.25</td>" in timed
    assert timed.count("<td>-</td>") == 7


def test_every_contender_that_drafts_is_a_dot_and_every_share_a_bar() -> None:
    lengths, positions, histograms = (group().figures(draw) for draw in (of.lengths, of.positions, of.histograms))
    assert [figure.title for figure in lengths] == ["heldout, T = 0", "heldout, T = 1"]
    assert [count(figure.chart.body, "circle") for figure in lengths] == [3, 3]
    drafted = [c.measurements[0].acceptance for c in CONTENDERS[1:]]
    assert [f.title for f in positions[:2]] == ["Survival, heldout, T = 0", "Conditional, heldout, T = 0"]
    assert count(positions[0].chart.body, "rect") == sum(len(a.survival) for a in drafted if a)
    conditional = [share for a in drafted if a for share in a.conditional if share is not None]
    assert count(positions[1].chart.body, "rect") == len(conditional) < 12
    assert count(histograms[0].chart.body, "rect") == sum(len(a.histogram) for a in drafted if a)
    shares = [float(x) for x in re.findall(r"<title>demo draft, accepted.*?: ([\d.]+)<", histograms[0].chart.body)]
    assert sum(shares) == 1.0


def test_confidence_is_a_dot_a_bin_that_holds_any() -> None:
    assert group().figures(of.reliability) == []
    sure = replace(CONTENDERS[2], measurements=(replace(CONTENDERS[2].measurements[0], confidence=SURE),))
    (figure,) = of.Group((sure,), PALETTE, 5.0).figures(of.reliability)
    assert count(figure.chart.body, "circle") == 2
    assert "4 tokens, confidence 0.55, accepted 0.50" in figure.chart.body
    assert figure.chart.legend == (("demo draft: ECE 0.051, AUROC 0.75, Brier 0.204", 2),)


def test_a_round_costs_its_phases_without_prefill() -> None:
    figure, _ = group(timing=TIMING).figures(of.costs)
    a = CONTENDERS[2].measurements[0].acceptance
    assert a
    assert count(figure.chart.body, "rect") == 3 * 3 + 4
    assert f"demo draft: {1000 / a.num_rounds:.3g} ms, prefill 500 ms a prompt" in figure.chart.body
    assert f"<title>draft: {500 / a.num_rounds:.3g}</title>" in figure.chart.body


def test_phases_have_the_names_and_colours_of_the_reports_columns() -> None:
    """However many phases there are: those of one column are one part, and what took no time is none."""
    phases = {"prefill": 1.0, "other": 0.5, "cycle": 0.25, "verify": 0.25, "update": 0.25, "commit": 0.5}
    engine = Timing(TIMING.first_token, TIMING.time_per_token, 50.0, phases)
    figure, _ = of.Group((group(timing=engine).contenders[2],), PALETTE, 5.0).figures(of.costs)
    assert figure.chart.legend == (("verify", 0), ("commit", 1), ("other", 2))
    a = CONTENDERS[2].measurements[0].acceptance
    assert a
    assert f"<title>commit: {750 / a.num_rounds:.3g}</title>" in figure.chart.body


def test_a_predicted_gain_becomes_the_measured_one() -> None:
    assert of.speed_table(group()) == ""
    html = of.speed_table(group(speedup=Speedup(2.5, 1.8, 0.9, 0.8)))
    assert "demo draft</th><td>2.50</td><td>90.0%</td><td>80.0%</td><td><b>1.80</b></td>" in html
    assert html.count("<tr>") == 3, "the head, the temperature, the one that has a gain"


def test_what_teacher_forcing_missed_has_its_interval() -> None:
    assert of.gap_table(group()) == ""
    html = of.gap_table(group(decoding_gap=DecodingGap(57, 3.5, 3.75, -0.25, (-0.5, 0.125))))
    cells = "<td>3.50</td><td>3.75</td><td><b>-0.25</b><small>-0.50 to +0.12</small></td><td>57</td>"
    assert f"demo draft</th>{cells}" in html
    assert html.count("<tr>") == 3


def test_axes_hold_what_was_teacher_forced_too() -> None:
    far = replace(FORCED, interval=(2.0, 7.5))
    assert of.longest(m for c in group(teacher_forced=far).contenders for m in c.measurements) == 7.5


def test_what_was_teacher_forced_stands_beside_what_was_decoded() -> None:
    assert group().figures(of.forced) == []
    lengths, survival = group(teacher_forced=FORCED).figures(of.forced)
    assert count(lengths.chart.body, "circle") == 2
    assert "demo draft, teacher-forced: 2.50 (2.00 to 3.00)" in lengths.chart.body
    assert count(survival.chart.body, "rect") == 8


def test_what_speaks_against_a_number_is_bold() -> None:
    first = CONTENDERS[2].measurements[0]
    differing = GreedyEquality(2, 1, 1e-3, (Difference(0, 3, 0.5, False), Difference(1, 2, 0.0, True)))
    html = of.checks_table(
        of.Group((replace(CONTENDERS[2], measurements=(replace(first, equality=differing),)),), PALETTE, 5.0)
    )
    assert "<td><b>1 of 2</b></td><td>3.00</td><td>2 of 2</td><td>1</td><td><b>1</b></td>" in html
    assert "<td>-</td><td>-</td><td>-</td>" in of.checks_table(group())
