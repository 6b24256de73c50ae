"""Plots are to scale, say what their marks are, and look the same whatever the machine's settings are."""

import re
import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from xml.sax.saxutils import escape

import matplotlib
import pytest
from drawings import marks, said
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dspark.eval.page.plots import (
    COLOURS,
    NUM_COLOURS,
    PLACE,
    Interval,
    bar_plot,
    draw_dot,
    draw_line,
    empty_plot,
    interval_plot,
    png,
    shorten,
    stack_plot,
    styled,
    svg,
)


@pytest.fixture(autouse=True)
def _styled() -> Iterator[None]:
    with style.context(PLACE / "page.mplstyle", after_reset=True):
        yield


def boxes(figure: Figure) -> list[tuple[float, float, float]]:
    """Left edge, width and height of every bar."""
    found = marks(figure, "bar")
    assert all(isinstance(bar, Rectangle) for bar in found)
    return [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in found]


def ends(figure: Figure, kind: str) -> list[list[float]]:
    """Where marks lie along the x axis."""
    return [list(mark.get_xdata()) for mark in marks(figure, kind)]


def axis(figure: Figure) -> tuple[tuple[float, float], tuple[float, float]]:
    (axes,) = figure.axes
    figure.draw_without_rendering()
    return axes.get_xlim(), axes.get_ylim()


def test_lines_and_dots_lie_where_their_points_are_and_axes_end_at_round_numbers() -> None:
    figure, axes = empty_plot("step", "loss", [("a", 0)])
    draw_line(axes, 0, "a", [(0, 0.03), (9.7, 0.97)])
    draw_dot(axes, (9.7, 0.97), 0, "a: <last>", 14)
    (line,), (dot,) = marks(figure, "curve"), marks(figure, "dot")
    assert [tuple(point) for point in line.get_xydata()] == [(0, 0.03), (9.7, 0.97)]
    assert (list(dot.get_xydata()[0]), dot.get_markersize()) == ([9.7, 0.97], 14)
    assert said(figure, "dot") == ["a: <last>"]
    assert axis(figure) == ((0, 10), (0, 1))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a"]


def test_a_bar_is_as_high_as_its_share_and_none_is_no_bar() -> None:
    figure = bar_plot([("a", 1, (0.5, None, 0.25))], "slot", "share")
    assert [height for *_, height in boxes(figure)] == [0.5, 0.25]
    assert [left + width / 2 for left, width, _ in boxes(figure)] == pytest.approx([-0.04, 1.96])
    assert said(figure, "bar") == ["a, slot 0: 0.500", "a, slot 2: 0.250"]
    assert axis(figure) == ((-0.5, 2.5), (0, 1))
    _, (low, high) = axis(bar_plot([("a", 1, (0.5, 0.25))], "slot", "share", top=0.2))
    assert (low, high) == (0, 0.5), "the axis ends at the highest bar"


def test_bars_beside_each_other_do_not_touch_however_many_they_are() -> None:
    found = sorted(boxes(bar_plot([(str(n), n, [0.5] * 64) for n in range(3)], "slot", "share")))
    assert len(found) == 192
    assert all(width > 0 for _, width, _ in found)
    assert all(x + width < after for (x, width, _), (after, *_) in pairwise(found))


def test_an_interval_spans_its_bounds() -> None:
    figure = interval_plot([Interval("a", 1.1, 1.5, 1.9, 1), Interval("b", 1.0, 1.0, 1.0, 2)], "length", (1, 2))
    assert ends(figure, "whisker") == [[1.1, 1.9], [1.0, 1.0]]
    assert ends(figure, "dot") == [[1.5], [1.0]]
    assert said(figure, "dot") == ["a: 1.50 (1.10 to 1.90)", "b: 1.00 (1.00 to 1.00)"]
    assert [text.get_text() for text in figure.axes[0].texts] == said(figure, "dot")
    (left, right), (bottom, top) = axis(figure)
    assert (left, right) == (1, 2)
    assert bottom > 1 > 0 > top, "from the top"
    wider = interval_plot([Interval("a", 1.1, 1.5, 7.9, 1)], "length", (1, 3))
    assert axis(wider)[0] == (1, 8)
    assert figure.get_figheight() > wider.get_figheight()


def test_a_stack_is_as_long_as_its_sum_and_its_parts_follow_each_other() -> None:
    figure = stack_plot([("a", [("draft", 1.0), ("verify", 2.0), ("commit", 1.0)]), ("b", [("verify", 2.0)])], "ms")
    assert [(left, width) for left, width, _ in boxes(figure)] == [(0, 1), (1, 2), (3, 1), (0, 2)]
    assert said(figure, "bar") == ["draft: 1", "verify: 2", "commit: 1", "verify: 2"]
    colours = [bar.get_facecolor() for bar in marks(figure, "bar")]
    assert colours[1] == colours[3] not in (colours[0], colours[2]), "a part keeps its colour"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["draft", "verify", "commit"]


def example(name: str = "<a>") -> Figure:
    return bar_plot([(name, 1, (0.5,)), ("b", 2, (0.25,))], "slot", "share")


def test_on_a_page_colours_are_the_style_sheets_and_marks_say_what_they_are() -> None:
    drawing = svg(example())
    assert drawing.startswith("<svg")
    assert not re.search(r"#[0-9a-f]{6}\b", re.sub(r"url\(#\w+\)|href=\"#\w+\"|id=\"\w+\"", "", drawing))
    assert set(re.findall(r"var\(--(\w+)\)", drawing)) == {"c1", "c2", "soft", "ink", "rule"}
    assert re.findall(r'<g class="bar"><title>(.*?)</title>', drawing) == [
        "&lt;a&gt;, slot 0: 0.500",
        "b, slot 0: 0.250",
    ]
    assert {"&lt;a&gt;", "b", "slot", "share"} <= set(re.findall(r"<text[^>]*>(.*?)</text>", drawing))


def test_the_style_has_the_light_colours_of_the_page_and_there_are_as_many_dark_ones() -> None:
    cycle = matplotlib.rc_params_from_file(PLACE / "page.mplstyle", use_default_template=False)["axes.prop_cycle"]
    assert ["#" + found.strip("#") for found in cycle.by_key()["color"]] == [
        COLOURS[f"c{n}"] for n in range(NUM_COLOURS)
    ]
    assert NUM_COLOURS == 8
    _, dark = (PLACE / "page.css").read_text().split("@media (prefers-color-scheme: dark)")
    found = dict(re.findall(r"--(\w+): (#\w{6});", dark))
    assert found.keys() == COLOURS.keys()
    assert all(found[name] != light for name, light in COLOURS.items())


def test_a_picture_stands_alone_below_its_titles() -> None:
    figure = example()
    before = svg(figure)
    picture = png(figure, "Where <a> round ends", "T = 0")
    width, height = struct.unpack(">II", picture[16:24])
    assert (width, height) == (720, round(figure.get_figheight() * 144) + 100)
    assert len({picture, png(figure, "Where", "T = 0"), png(figure, "Where <a> round ends", "T = 1")}) == 3
    assert svg(figure) == before, "the titles are the picture's alone"


def test_the_same_numbers_make_the_same_bytes_whatever_the_users_settings_are() -> None:
    @styled
    def drawn() -> tuple[str, bytes]:
        return svg(example()), png(example(), "a", "b")

    first = drawn()
    before: dict[str, Any] = dict(matplotlib.rcParams)
    with matplotlib.rc_context(
        {"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red", "xtick.labelsize": 30}
    ):
        assert drawn() == first
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", ["_a$b$c_d^e", "a\\b", "folder\udcff", "line\nbreak", "\x00\x1b", "&<>\"'"])
@pytest.mark.filterwarnings("error")
def test_a_name_is_no_formula_no_order_and_no_markup(name: str) -> None:
    """matplotlib would read dollars as mathematics and leave names with a line in front out of the legend."""
    figure = example(name)
    assert shorten(name) in [text.get_text() for text in figure.legends[0].get_texts()]
    assert png(figure, name, name).startswith(b"\x89PNG")
    assert escape(shorten(name)) in re.findall(r"<text[^>]*>(.*?)</text>", svg(figure))


def test_a_long_name_keeps_its_end() -> None:
    assert shorten("a/b", 3) == "a/b"
    assert shorten("folder/name", 5) == "…name"
    assert shorten("\udcff", 5) == "?"
