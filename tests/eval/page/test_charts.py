"""Charts are to scale: round ticks, lines from corner to corner, bars as high as their shares."""

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from dspark.eval.page.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    ROW_LEFT,
    TOP,
    WIDTH,
    Chart,
    Interval,
    Series,
    bar_chart,
    interval_chart,
    line_chart,
    shorten,
    stack_chart,
    ticks,
)


def numbers(chart: Chart, mark: str, name: str) -> list[float]:
    """An attribute of every mark of a kind."""
    return [float(value) for value in re.findall(rf'<{mark}[^>]* {name}="([-\d.]+)"', chart.body)]


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
    points = re.search(r'points="([^"]*)"', chart.body)
    assert points
    assert points.group(1) == f"{LEFT:.1f},{HEIGHT - BOTTOM:.1f} {WIDTH - RIGHT:.1f},{TOP:.1f}", (
        "left foot to right top"
    )


def test_a_point_with_a_note_is_a_dot_of_its_radius_and_dots_alone_have_no_line() -> None:
    dots = Series("a", ((0, 0.0), (1, math.inf), (2, 4.0)), 1, ("<low>", "out", "high"), (2.0, 3.0, 5.0), False)
    chart = line_chart([dots], "x", "y", guide=((0.0, 0.0), (4.0, 4.0)))
    assert numbers(chart, "circle", "cx") == [LEFT, (LEFT + WIDTH - RIGHT) / 2]
    assert numbers(chart, "circle", "cy") == [HEIGHT - BOTTOM, TOP]
    assert numbers(chart, "circle", "r") == [2.0, 5.0]
    assert re.findall(r"<title>(.*?)</title>", chart.body) == ["a: &lt;low&gt;", "a: high"]
    assert re.findall(r'<polyline class="(\w+)', chart.body) == ["guide"]


def test_a_bar_is_as_high_as_its_share() -> None:
    chart = bar_chart([Series("a", ((0, 0.5), (1, 0.25)), 1)], 2, "slot", "share")
    assert numbers(chart, "rect", "height") == [87.0, 43.5]
    lower = bar_chart([Series("a", ((0, 0.5), (1, 0.25)), 1)], 2, "slot", "share", top=0.2)
    assert numbers(lower, "rect", "height") == [174.0, 87.0], "the axis ends at the highest bar"


def test_bars_beside_each_other_do_not_touch_however_many_they_are() -> None:
    many = [Series(str(n), tuple((float(k), 0.5) for k in range(64)), 0) for n in range(3)]
    chart = bar_chart(many, 64, "slot", "share")
    ends = sorted(zip(numbers(chart, "rect", "x"), numbers(chart, "rect", "width"), strict=True))
    assert len(ends) == 192
    assert all(width > 0 for _, width in ends)
    assert all(x + width <= after + 0.06 for (x, width), (after, _) in pairwise(ends))


def test_an_interval_spans_its_bounds() -> None:
    chart = interval_chart([Interval("a", 1.0, 1.5, 2.0, 1)], "length")
    assert f'd="M{ROW_LEFT:.1f} ' in chart.body
    assert f"H{WIDTH - RIGHT:.1f}" in chart.body
    assert f'cx="{(ROW_LEFT + WIDTH - RIGHT) / 2:.1f}"' in chart.body
    wider = interval_chart([Interval("a", 1.0, 1.5, 2.0, 1)], "length", longest=3.0)
    assert f'cx="{ROW_LEFT + (WIDTH - RIGHT - ROW_LEFT) / 4:.1f}"' in wider.body


def test_differences_lie_about_zero_in_the_middle() -> None:
    rows = [Interval("a", -1.0, -0.5, 0.0, 1), Interval("b", 0.0, 0.5, 1.0, 1), Interval("c", 0.0, 0.0, 0.0, 1)]
    chart, middle = interval_chart(rows, "difference", is_difference=True), (ROW_LEFT + WIDTH - RIGHT) / 2
    assert f'class="guide" d="M{middle:.1f} ' in chart.body
    left, right, zero = numbers(chart, "circle", "cx")
    assert zero == middle
    assert middle - left == right - middle > 0
    nothing = interval_chart(rows[2:], "difference", is_difference=True)
    assert numbers(nothing, "circle", "cx") == [middle]
    assert chart.height > nothing.height


def test_a_stack_is_as_long_as_its_sum_and_its_parts_follow_each_other() -> None:
    rows = [("a", [("draft", 1.0), ("verify", 2.0), ("commit", 1.0)]), ("b", [("verify", 2.0)])]
    chart, room = stack_chart(rows, "ms"), WIDTH - RIGHT - ROW_LEFT
    assert numbers(chart, "rect", "x") == [ROW_LEFT, ROW_LEFT + room / 4, ROW_LEFT + room * 3 / 4, ROW_LEFT]
    assert numbers(chart, "rect", "width") == [room / 4, room / 2, room / 4, room / 2]
    assert re.findall(r'<rect class="bar c(\d)', chart.body) == ["0", "1", "2", "1"], "a part keeps its colour"
    assert chart.legend == (("draft", 0), ("verify", 1), ("commit", 2))
    assert not stack_chart([("a", [("draft", 0.0)])], "ms").body


def test_a_chart_without_data_says_so() -> None:
    for chart in (line_chart([], "x", "y"), bar_chart([], 0, "x", "y"), interval_chart([], "x"), stack_chart([], "x")):
        assert not chart.body
        assert chart.html() == f'<p class="missing">{chart.label}</p>'


def test_a_picture_stands_alone() -> None:
    chart = bar_chart([Series("<a>", ((0, 0.5),), 1), Series("b", ((0, 0.5),), 2)], 1, "slot", "share")
    picture = chart.picture("Where <a> round ends", "T = 0")
    assert "var(" not in picture
    assert "c1 { fill: #" in picture
    texts = [element.text for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"Where <a> round ends", "T = 0", "<a>", "b", "slot"} <= set(texts)


def test_a_long_name_keeps_its_end() -> None:
    assert shorten("a/b", 3) == "a/b"
    assert shorten("folder/name", 5) == "…name"
