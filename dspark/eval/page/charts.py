"""Charts as inline SVG: lines, grouped bars and intervals, coloured by the page's style sheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 26, 12, 44


@dataclass(frozen=True)
class Series:
    """One named curve or set of bars; ``colour`` is the number of a colour in the page's style sheet."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int


@dataclass(frozen=True)
class Interval:
    """A mean with its interval, drawn as a dot with whiskers."""

    name: str
    low: float
    mean: float
    high: float
    colour: int


@dataclass(frozen=True)
class _Frame:
    """Maps values to the drawing area; y grows upwards."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover low..high with about ``count`` steps."""
    span = max(high - low, abs(high) * 1e-3, 1e-9)
    raw = span / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def line_chart(series: Sequence[Series], x_label: str, y_label: str) -> str:
    """Curves over a common x axis. Points that are not finite are left out."""
    curves = [Series(s.name, tuple(p for p in s.points if all(map(math.isfinite, p))), s.colour) for s in series]
    points = [point for curve in curves for point in curve.points]
    if not points:
        return _empty("no points were logged")
    x_ticks = ticks(min(p[0] for p in points), max(p[0] for p in points))
    y_ticks = ticks(min(p[1] for p in points), max(p[1] for p in points))
    frame = _Frame(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1])
    body = [_axes(frame, [(v, _number(v)) for v in x_ticks], y_ticks, x_label, y_label)]
    for curve in curves:
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in curve.points)
        body.append(f'<polyline class="line c{curve.colour}" points="{path}"/>')
        for x, y in curve.points[-1:]:
            text = f"{curve.name}: {y:.3g} at {_number(x)}"
            body.append(_dot(frame.x(x), frame.y(y), curve.colour, text))
    return _svg(body, f"{y_label} over {x_label}") + _legend(curves)


def bar_chart(series: Sequence[Series], num_places: int, x_label: str, y_label: str) -> str:
    """Bars side by side at x = 0, 1, ... below ``num_places``; the y axis is a share from 0 to 1."""
    if not num_places:
        return _empty("nothing was measured")
    frame = _Frame(-0.5, num_places - 0.5, 0.0, 1.0)
    body = [_axes(frame, [(x, str(x)) for x in range(num_places)], ticks(0.0, 1.0), x_label, y_label)]
    room = (frame.x(1) - frame.x(0)) * 0.8
    for index, bars in enumerate(series):
        for x, share in bars.points:
            left = frame.x(x) - room / 2 + index * room / len(series)
            top = frame.y(share)
            body.append(
                f'<rect class="bar c{bars.colour}" x="{left:.1f}" y="{top:.1f}" width="{room / len(series) - 1:.1f}" '
                f'height="{HEIGHT - BOTTOM - top:.1f}"><title>{escape(bars.name)}, {x_label} {_number(x)}: '
                f"{share:.3f}</title></rect>"
            )
    return _svg(body, f"{y_label} by {x_label}") + _legend(series)


def interval_chart(intervals: Sequence[Interval], x_label: str) -> str:
    """One row per name: a dot at the mean, whiskers over the interval. The axis begins at 1."""
    if not intervals:
        return _empty("nothing was measured")
    x_ticks = ticks(1.0, max(2.0, *(item.high for item in intervals)))
    frame = _Frame(x_ticks[0], x_ticks[-1], 0.0, float(len(intervals)))
    body = [_axes(frame, [(v, _number(v)) for v in x_ticks], [], x_label, "")]
    for row, item in enumerate(intervals):
        y = frame.y(len(intervals) - row - 0.66)
        low, high = frame.x(item.low), frame.x(item.high)
        text = f"{item.mean:.2f} ({item.low:.2f} to {item.high:.2f})"
        body.append(f'<text class="name" x="{LEFT}" y="{y - 10:.1f}">{escape(item.name)}: {text}</text>')
        body.append(f'<path class="line c{item.colour}" d="M{low:.1f} {y - 5:.1f}v10m0-5H{high:.1f}m0-5v10"/>')
        body.append(_dot(frame.x(item.mean), y, item.colour, f"{item.name}: {text}"))
    return _svg(body, x_label)


def _axes(
    frame: _Frame, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[float], x_label: str, y_label: str
) -> str:
    floor = HEIGHT - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>']
    for value, text in x_ticks:
        parts.append(f'<text class="tick" text-anchor="middle" x="{frame.x(value):.1f}" y="{floor + 16}">{text}</text>')
    for value in y_ticks:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">{_number(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" text-anchor="middle" x="{middle}" y="{HEIGHT - 8}">{escape(x_label)}</text>')
    if y_label:
        height = (TOP + floor) / 2
        turn = f'transform="rotate(-90 11 {height})"'
        parts.append(f'<text class="label" text-anchor="middle" x="11" y="{height}" {turn}>{escape(y_label)}</text>')
    return "".join(parts)


def _dot(x: float, y: float, colour: int, text: str) -> str:
    return f'<circle class="dot c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(text)}</title></circle>'


def _legend(series: Sequence[Series]) -> str:
    items = "".join(f'<li><i class="c{s.colour}"></i>{escape(s.name)}</li>' for s in series)
    return f'<ul class="legend">{items}</ul>'


def _svg(body: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'


def _empty(text: str) -> str:
    return f'<p class="empty">{escape(text)}</p>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
