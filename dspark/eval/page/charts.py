"""Charts as inline SVG: lines, grouped and stacked bars, and intervals, coloured by the page's style sheet."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

from dspark.eval.page.style import LIGHT, PICTURE_STYLE

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 26, 12, 44
ROW_LEFT, ROW_HEIGHT = 14, 42
"""Of a chart whose rows are named."""
LONGEST_NAME = 45
"""Characters that a chart has room for."""


@dataclass(frozen=True)
class Series:
    """One named curve or set of bars; ``colour`` is the number of a colour in the page's style sheet.

    Of a curve, ``notes`` (with ``radii``, in pixels) make every point a dot that says its note; without them the last
    point is the only dot. One that is not ``is_joined`` is dots alone.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int
    notes: tuple[str, ...] = ()
    radii: tuple[float, ...] = ()
    is_joined: bool = True


@dataclass(frozen=True)
class Interval:
    """A mean with its interval, drawn as a dot with whiskers."""

    name: str
    low: float
    mean: float
    high: float
    colour: int


@dataclass(frozen=True)
class Chart:
    """A drawing ``WIDTH`` wide, what is said of it, and its legend: names and colours. Without a body there was
    nothing to draw, and the label says so.
    """

    body: str
    label: str
    legend: tuple[tuple[str, int], ...] = ()
    height: int = HEIGHT

    def html(self) -> str:
        """The drawing and its legend, for a page that has the style sheet."""
        if not self.body:
            return f'<p class="missing">{escape(self.label)}</p>'
        items = "".join(f'<li><i class="c{colour}"></i>{escape(name)}</li>' for name, colour in self.legend)
        legend = f'<ul class="legend">{items}</ul>' if items else ""
        box = f'viewBox="0 0 {WIDTH} {self.height}"'
        return f'<svg {box} role="img" aria-label="{escape(self.label)}">{self.body}</svg>{legend}'

    def picture(self, title: str, subtitle: str) -> str:
        """An SVG file that stands alone: titles, drawing and legend on paper, in the light colours."""
        above, line = 50, 20
        height = above + self.height + line * len(self.legend) + 6
        rows = "".join(
            f'<rect class="bar c{colour}" x="{ROW_LEFT}" y="{y}" width="10" height="10"/>'
            f'<text class="name" x="{ROW_LEFT + 18}" y="{y + 10}">{escape(shorten(name))}</text>'
            for y, (name, colour) in zip(range(above + self.height, height, line), self.legend, strict=False)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"><style>{PICTURE_STYLE}</style>'
            f'<rect width="{WIDTH}" height="{height}" fill="{LIGHT["paper"]}"/>'
            f'<text class="title" x="{ROW_LEFT}" y="24">{escape(shorten(title))}</text>'
            f'<text class="name" x="{ROW_LEFT}" y="43">{escape(shorten(subtitle))}</text>'
            f'<g transform="translate(0 {above})">{self.body}</g>{rows}</svg>'
        )


@dataclass(frozen=True)
class _Frame:
    """Maps values to the drawing area; y grows upwards."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    height: int = HEIGHT
    left: int = LEFT

    @property
    def floor(self) -> int:
        return self.height - BOTTOM

    def x(self, value: float) -> float:
        return self.left + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        return self.floor - (value - self.y_low) / (self.y_high - self.y_low) * (self.floor - TOP)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover low..high with about ``count`` steps."""
    span = max(high - low, abs(high) * 1e-3, 1e-9)
    raw = span / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def shorten(name: str, longest: int = LONGEST_NAME) -> str:
    """A name that fits: of a long one, its end."""
    return name if len(name) <= longest else "…" + name[1 - longest :]


def line_chart(
    series: Sequence[Series], x_label: str, y_label: str, guide: Sequence[tuple[float, float]] = ()
) -> Chart:
    """Curves over a common x axis, and a dashed line along ``guide``. Points that are not finite are left out."""
    curves = [(s, list(_finite(s))) for s in series]
    points = [(x, y) for _, marks in curves for x, y, *_ in marks]
    if not points:
        return Chart("", "no points were logged")
    points += guide
    x_ticks = ticks(min(p[0] for p in points), max(p[0] for p in points))
    y_ticks = ticks(min(p[1] for p in points), max(p[1] for p in points))
    frame = _Frame(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1])
    body = [_axes(frame, x_ticks, y_ticks, x_label, y_label)]
    if guide:
        body.append(f'<polyline class="guide" points="{_path(frame, guide)}"/>')
    for curve, marks in curves:
        if curve.is_joined:
            path = _path(frame, [(x, y) for x, y, *_ in marks])
            body.append(f'<polyline class="line c{curve.colour}" points="{path}"/>')
        for x, y, note, radius in marks if curve.notes else marks[-1:]:
            text = f"{curve.name}: {note or f'{y:.3g} at {_number(x)}'}"
            body.append(_dot(frame.x(x), frame.y(y), curve.colour, text, radius))
    return Chart("".join(body), f"{y_label} over {x_label}", _legend(series))


def bar_chart(series: Sequence[Series], num_places: int, x_label: str, y_label: str, top: float = 1.0) -> Chart:
    """Bars side by side at x = 0, 1, ... below ``num_places``; the y axis is a share from 0 to at least ``top``."""
    if not num_places:
        return Chart("", "nothing was measured")
    y_ticks = ticks(0.0, max([top, *(y for bars in series for _, y in bars.points)]))
    frame = _Frame(-0.5, num_places - 0.5, 0.0, y_ticks[-1])
    x_ticks = range(0, num_places, math.ceil(num_places / 12))
    body = [_axes(frame, x_ticks, y_ticks, x_label, y_label)]
    room = (frame.x(1) - frame.x(0)) * 0.8
    width = room / max(len(series), 1)
    for index, bars in enumerate(series):
        for x, share in bars.points:
            left = frame.x(x) - room / 2 + index * width
            text = f"{bars.name}, {x_label} {_number(x)}: {share:.3f}"
            body.append(_bar((left, max(width - 1, width / 2)), (frame.y(share), frame.floor), bars.colour, text))
    return Chart("".join(body), f"{y_label} by {x_label}", _legend(series))


def interval_chart(
    intervals: Sequence[Interval], x_label: str, longest: float = 2.0, is_difference: bool = False
) -> Chart:
    """One row per name: a dot at the mean, whiskers over the interval. The axis goes from 1 to at least ``longest``, or
    of differences is as wide on either side of 0.
    """
    if not intervals:
        return Chart("", "nothing was measured")
    reach = max(0.1, *(max(abs(item.low), abs(item.high)) for item in intervals)) if is_difference else 0.0
    x_ticks = ticks(-reach, reach, 6) if is_difference else ticks(1.0, max(longest, *(item.high for item in intervals)))
    frame, body = _rows(x_ticks, len(intervals), x_label)
    if is_difference:
        body.append(f'<path class="guide" d="M{frame.x(0):.1f} {TOP}V{frame.floor}"/>')
    for row, item in enumerate(intervals):
        y = TOP + ROW_HEIGHT * row + 28
        low, high = frame.x(item.low), frame.x(item.high)
        text = f"{item.mean:.2f} ({item.low:.2f} to {item.high:.2f})"
        body.append(_name(y - 11, f"{shorten(item.name, LONGEST_NAME - len(text))}: {text}"))
        body.append(f'<path class="line c{item.colour}" d="M{low:.1f} {y - 5:.1f}v10m0-5H{high:.1f}m0-5v10"/>')
        body.append(_dot(frame.x(item.mean), y, item.colour, f"{item.name}: {text}"))
    return Chart("".join(body), x_label, height=frame.height)


def stack_chart(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], x_label: str) -> Chart:
    """One row per name: its named parts one behind the other, so that the row is as long as their sum."""
    totals = [sum(value for _, value in parts) for _, parts in rows]
    if not totals or max(totals) <= 0:
        return Chart("", "nothing was measured")
    colours = {name: place for place, name in enumerate(dict.fromkeys(name for _, parts in rows for name, _ in parts))}
    frame, body = _rows(ticks(0.0, max(totals)), len(rows), x_label)
    for row, (name, parts) in enumerate(rows):
        y, start = TOP + ROW_HEIGHT * row + 20, 0.0
        body.append(_name(y - 4, shorten(name)))
        for part, value in parts:
            ends = (frame.x(start), frame.x(start + value) - frame.x(start))
            body.append(_bar(ends, (y, y + 14), colours[part], f"{part}: {value:.3g}"))
            start += value
    return Chart("".join(body), x_label, tuple(colours.items()), frame.height)


def _finite(series: Series) -> Iterator[tuple[float, float, str, float]]:
    """The points with what is said of them and their radii."""
    for point, note, radius in zip_longest(series.points, series.notes, series.radii):
        if all(map(math.isfinite, point)):
            yield *point, note or "", radius or 4.0


def _rows(x_ticks: Sequence[float], num_rows: int, x_label: str) -> tuple[_Frame, list[str]]:
    """The frame of named rows, and their axis to draw on."""
    frame = _Frame(x_ticks[0], x_ticks[-1], 0.0, 1.0, TOP + ROW_HEIGHT * num_rows + BOTTOM, ROW_LEFT)
    return frame, [_axes(frame, x_ticks, [], x_label, "")]


def _axes(frame: _Frame, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> str:
    floor = frame.floor
    parts = [f'<line class="axis" x1="{frame.left}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>']
    for value in x_ticks:
        place = f'x="{frame.x(value):.1f}" y="{floor + 16}"'
        parts.append(f'<text class="tick" text-anchor="middle" {place}>{_number(value)}</text>')
    for value in y_ticks:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        place = f'x="{frame.left - 6}" y="{y + 4:.1f}"'
        parts.append(f'<text class="tick" text-anchor="end" {place}>{_number(value)}</text>')
    middle = (frame.left + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" text-anchor="middle" x="{middle}" y="{floor + 36}">{escape(x_label)}</text>')
    if y_label:
        height = (TOP + floor) / 2
        turn = f'transform="rotate(-90 11 {height})"'
        parts.append(f'<text class="label" text-anchor="middle" x="11" y="{height}" {turn}>{escape(y_label)}</text>')
    return "".join(parts)


def _path(frame: _Frame, points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _dot(x: float, y: float, colour: int, text: str, radius: float = 4.0) -> str:
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:.3g}"'
    return f'<circle class="dot c{colour}" {place}><title>{escape(text)}</title></circle>'


def _bar(across: tuple[float, float], upright: tuple[float, float], colour: int, text: str) -> str:
    """From a left edge so wide, from a top to a foot."""
    (left, width), (top, foot) = across, upright
    place = f'x="{left:.1f}" y="{top:.1f}" width="{width:.2f}" height="{foot - top:.1f}"'
    return f'<rect class="bar c{colour}" {place}><title>{escape(text)}</title></rect>'


def _name(y: float, text: str) -> str:
    return f'<text class="name" x="{ROW_LEFT}" y="{y:.1f}">{escape(text)}</text>'


def _legend(series: Sequence[Series]) -> tuple[tuple[str, int], ...]:
    return tuple((item.name, item.colour) for item in series)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
