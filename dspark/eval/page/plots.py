"""Plots by matplotlib: as SVG in the colours of the page's style sheet, as PNG in the light ones."""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from typing import NamedTuple

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from dspark.eval.tables import printable

PLACE = Path(__file__).parent
COLOURS = dict(re.findall(r"--(\w+): (#\w{6});", (PLACE / "page.css").read_text().split("@media")[0]))
"""The light ones by name; those of contenders and parts are a "c" and a number."""
NUM_COLOURS = sum(name[1:].isdigit() for name in COLOURS)
GUIDE = {"color": COLOURS["soft"], "linestyle": "--", "linewidth": 1}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 240, 50, 26, 28, 44
ROW_LEFT, ROW, LINE, TITLES = 20, 42, 16, 50
"""Points of a drawing and its margins, of a row with a name, of a line of the legend, and of the titles of a PNG."""
LONGEST_NAME = 48
"""Characters that a plot has room for."""
styled = style.context(PLACE / "page.mplstyle", after_reset=True)
"""Decorates what draws a page or a picture: the user's own settings of matplotlib do not matter."""


class Interval(NamedTuple):
    """A mean with its interval, and the number of a colour."""

    name: str
    low: float
    mean: float
    high: float
    colour: int


def shorten(name: str, longest: int = LONGEST_NAME) -> str:
    """A name that fits, of a long one its end."""
    name = printable(name)
    return name if len(name) <= longest else "…" + name[1 - longest :]


def empty_plot(
    x_label: str, y_label: str = "", legend: Sequence[tuple[str, int]] = (), rows: Sequence[str] = ()
) -> tuple[Figure, Axes]:
    """Axes over a legend of names and colours. ``rows`` are names of what lies at y = 0, 1, ... from the top."""
    foot = BOTTOM + LINE * len(legend)
    height = foot + (TOP + ROW * (len(rows) - 0.5) if rows else HEIGHT - BOTTOM)
    figure = Figure((WIDTH / 72, height / 72))
    left, right = (ROW_LEFT if rows else LEFT) / WIDTH, 1 - RIGHT / WIDTH
    axes = figure.subplots(gridspec_kw={"left": left, "right": right, "bottom": foot / height, "top": 1 - TOP / height})
    axes.set(xlabel=x_label, title=y_label)
    axes.locator_params(nbins=8, steps=[1, 2, 5, 10])
    if rows:
        axes.grid(visible=False)
        axes.set(yticks=[], ylim=(len(rows) - 0.6, -0.1))
    for row, name in enumerate(rows):
        axes.text(0, row - 0.25, shorten(name), transform=axes.get_yaxis_transform())
    patches = [Patch(color=f"C{colour}", label=shorten(name)) for name, colour in legend]
    if legend:
        figure.legend(handles=patches, loc="lower left", bbox_to_anchor=(ROW_LEFT / WIDTH, 2 / height))
    return figure, axes


def draw_line(axes: Axes, colour: int, name: str, points: Sequence[tuple[float, float]]) -> None:
    """From point to point."""
    label(axes.plot(*zip(*points, strict=True), color=f"C{colour}"), "curve", name)


def draw_dot(axes: Axes, point: tuple[float, float], colour: int, text: str, size: float | None = None) -> None:
    """Points across."""
    label(axes.plot(*point, "o", color=f"C{colour}", markersize=size, clip_on=False), "dot", text)


def bar_plot(
    bars: Sequence[tuple[str, int, Sequence[float | None]]], x_label: str, y_label: str, top: float = 1.0
) -> Figure:
    """Named and coloured bars side by side at x = 0, 1, ...; the y axis is a share from 0 to at least ``top``."""
    figure, axes = empty_plot(x_label, y_label, [bar[:2] for bar in bars])
    axes.update_datalim([(0, 0), (0, top)])
    width = 0.8 / len(bars)
    for place, (name, colour, shares) in enumerate(bars):
        for x, share in enumerate(shares):
            if share is not None:
                bar = axes.bar(x - 0.4 + place * width, share, width * 0.9, align="edge", color=f"C{colour}")
                label(bar, "bar", f"{name}, {x_label} {x}: {share:.3f}")
    axes.set_xlim(-0.5, max(len(shares) for *_, shares in bars) - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    return figure


def interval_plot(intervals: Sequence[Interval], x_label: str, reach: tuple[float, float]) -> Figure:
    """A row a name: a dot at the mean, whiskers over the interval. The axis holds them and ``reach``."""
    texts = [f"{i.mean:.2f} ({i.low:.2f} to {i.high:.2f})" for i in intervals]
    rows = [f"{shorten(i.name, LONGEST_NAME - len(t))}: {t}" for i, t in zip(intervals, texts, strict=True)]
    figure, axes = empty_plot(x_label, rows=rows)
    axes.update_datalim([(end, 0) for end in reach])
    for row, (item, text) in enumerate(zip(intervals, texts, strict=True)):
        ends, colour = (item.low, item.high), f"C{item.colour}"
        label(axes.plot(ends, (row, row), "|-", color=colour, ms=10, mew=2, clip_on=False), "whisker", item.name)
        draw_dot(axes, (item.mean, row), item.colour, f"{item.name}: {text}")
    return figure


def stack_plot(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], x_label: str) -> Figure:
    """A row a name: its named parts one behind the other, so that the row is as long as their sum."""
    colours = {name: place for place, name in enumerate(dict.fromkeys(name for _, parts in rows for name, _ in parts))}
    figure, axes = empty_plot(x_label, "", list(colours.items()), [name for name, _ in rows])
    for row, (_, parts) in enumerate(rows):
        start = 0.0
        for part, value in parts:
            label(axes.barh(row, value, 0.33, start, color=f"C{colours[part]}"), "bar", f"{part}: {value:.3g}")
            start += value
    return figure


def label(marks: Iterable[Artist], kind: str, text: str) -> None:
    """What ``svg`` makes the class and the title of the marks."""
    for mark in marks:
        mark.set_gid(f"label {kind} {shorten(text, 999)}")


def svg(figure: Figure) -> str:
    """The drawing for a page that has the style sheet; what a mark says is shown where the pointer rests on it."""
    file, names = StringIO(), {colour: name for name, colour in COLOURS.items()}
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = re.sub(r"(fill|stroke): (#\w{6})", lambda m: f"{m[1]}: var(--{names[m[2]]})", file.getvalue())
    text = re.sub(r'<g id="label (\w+) ([^"]*)">', r'<g class="\1"><title>\2</title>', text[text.index("<svg") :])
    return re.sub(r' id="[\w.]+_\d+"', "", text)


@styled
def png(figure: Figure, title: str, subtitle: str) -> bytes:
    """The drawing below two titles, as a file that is twice as large."""
    file, (width, height) = BytesIO(), figure.get_size_inches()
    above = partial(figure.text, ROW_LEFT / WIDTH)
    texts = [
        above(1 + 32 / 72 / height, shorten(title), fontsize=13, fontweight="bold"),
        above(1 + 13 / 72 / height, shorten(subtitle)),
    ]
    whole = Bbox([[0, 0], [width, height + TITLES / 72]])
    figure.savefig(file, format="png", dpi=144, facecolor=COLOURS["paper"], bbox_inches=whole)
    for text in texts:
        text.remove()
    return file.getvalue()
