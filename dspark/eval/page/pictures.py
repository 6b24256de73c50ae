"""SVG files to PNG files."""

from collections.abc import Mapping

from resvg_py import svg_to_bytes

from dspark.eval.page.charts import Chart

SCALE = 2.0
"""Pixels of the picture a unit of the drawing."""


def has_font() -> bool:
    """Whether this machine has one of ``FONTS``; without, text would be missing without a word."""
    svgs = (Chart(f'<text y="20">{text}</text>', "", height=20).picture("", "") for text in ("x", ""))
    return len({bytes(svg_to_bytes(svg_string=svg)) for svg in svgs}) > 1


def draw(pictures: Mapping[str, str]) -> dict[str, bytes]:
    """Every SVG as a PNG, ``SCALE`` times as large."""
    return {name: bytes(svg_to_bytes(svg_string=svg, zoom=SCALE)) for name, svg in pictures.items()}
