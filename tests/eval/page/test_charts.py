"""Charts are to scale: round ticks, lines from corner to corner, bars as high as their shares."""

import math
import re

import pytest

from dspark.eval.page.charts import (
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
