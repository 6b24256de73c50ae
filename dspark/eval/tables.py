"""Tables for the terminal as a template writes them, and how numbers look there and on pages."""

import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from rich.box import SIMPLE
from rich.table import Column, Table


def read_template(path: Path, **words: Any) -> Template:
    """A template of ours, which may use these words; one that is missing is an error, not a blank. The filter ``plain``
    is for names, which may hold what a table of ``render`` means by tabs and lines.
    """
    environment = Environment(
        autoescape=".html" in path.suffixes, undefined=StrictUndefined, loader=FileSystemLoader(path.parent),
        trim_blocks=True,
    )  # fmt: skip
    environment.filters["plain"] = printable
    return environment.get_template(path.name, globals=words)


def render(template: Path, **facts: Any) -> list[Table | str]:
    """Tables and lines that a template makes of ``facts``. A form feed ends each. A table's first line is its title,
    the second one names the columns; tabs part cells, an empty line parts sections, the caption follows a line of ---.
    """
    text = read_template(template, number=number, interval=interval).render(facts)
    return [_table(part) if "\t" in part else part for part in map(str.strip, text.split("\f")) if part]


def _table(text: str) -> Table:
    """A column of names, which are folded where they are long, and others."""
    body, _, caption = text.partition("\n---\n")
    title, head, *lines = body.split("\n")
    first, *names = head.split("\t")
    columns = [Column(first, overflow="fold", min_width=14)]
    columns += [Column(name, justify="right", no_wrap=True) for name in names]
    table = Table(*columns, title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE)
    for line in lines:
        if line:
            table.add_row(*line.split("\t"))
        else:
            table.add_section()
    return table


def printable(name: str) -> str:
    """A name in one line; what cannot be shown in it is a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def number(value: float | None) -> str:
    """Two decimals, or a dash where there is nothing to say."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}"


def interval(bounds: tuple[float, float]) -> str:
    """An interval as text, two decimals."""
    return f"{bounds[0]:.2f} - {bounds[1]:.2f}"
