"""The skeleton of a page: sections of figures, tables and text, side by side where several runs are shown."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dspark.eval.page.charts import Chart
from dspark.eval.page.style import STYLE

Row = tuple[str, int | None, Sequence[str]]
"""Of a table: its name, the number of a colour, its cells as HTML."""


@dataclass(frozen=True)
class Figure:
    """A chart with its title."""

    title: str
    chart: Chart


@dataclass(frozen=True)
class Part:
    """What one run (or the page as a whole) says in a section. Without figures and HTML, ``missing`` says why."""

    figures: tuple[Figure, ...] = ()
    html: str = ""
    missing: str = ""

    @property
    def is_missing(self) -> bool:
        """Whether there is nothing to show."""
        return not self.figures and not self.html


@dataclass(frozen=True)
class Section:
    """A part a run, or a single one."""

    title: str
    parts: tuple[Part, ...]
    note: str = ""


def document(title: str, header: str, sections: Sequence[Section], runs: Sequence[str] = ("",)) -> str:
    """The whole page; nothing in it is fetched from elsewhere and nothing in it is a script. ``header`` is HTML.

    A section in which no run has anything to show becomes a sentence in the last but one.
    """
    shown = [section for section in sections if not all(part.is_missing for part in section.parts)]
    lines = [f"<li>{escape(s.title)}: {escape(s.parts[0].missing)}.</li>" for s in sections if s not in shown]
    if lines:
        shown.insert(len(shown) - 1, Section("Left out", (Part(html=f'<ul class="note">{"".join(lines)}</ul>'),)))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join([f"<header><h1>{escape(title)}</h1>{header}</header>", *(_section(s, runs) for s in shown)])
    wide = ' class="wide"' if len(runs) > 1 else ""
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main{wide}>\n{body}\n</main></body></html>\n'


def pictures(sections: Sequence[Section], runs: Sequence[str] = ("",)) -> dict[str, str]:
    """Every figure as an SVG file that stands alone, by a name that is good for a file."""
    found: dict[str, str] = {}
    for section in sections:
        for run, part in zip(runs if len(section.parts) > 1 else [""], section.parts, strict=True):
            for figure in (figure for figure in part.figures if figure.chart.body):
                title = f"{run}: {figure.title}" if run else figure.title
                stem = f"{_words(section.title)}-{_words(title)[-80:]}"
                names = (stem, *(f"{stem}-{number}" for number in range(2, len(found) + 2)))
                name = next(name for name in names if name not in found)
                found[name] = figure.chart.picture(section.title, title)
    return found


def text(words: str) -> str:
    """Words as HTML; a temperature is not torn apart at the end of a line."""
    return escape(words).replace("T = ", "T&nbsp;=&nbsp;")


def table(caption: str, head: Sequence[str], bodies: Mapping[str, Sequence[Row]]) -> str:
    """Rows in named groups below one head; a wide table scrolls by itself."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    groups = ""
    for name, rows in bodies.items():
        over = f'<tr><th colspan="{len(head) + 1}" scope="rowgroup">{escape(name)}</th></tr>' if name else ""
        groups += f"<tbody>{over}{''.join(map(_row, rows))}</tbody>"
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{above}<thead><tr><td></td>{top}</tr></thead>{groups}</table></div>'


def facts(values: Mapping[str, object]) -> str:
    """Names and values, one below the other."""
    rows = (f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(_text(value))}</dd>" for key, value in values.items())
    return f"<dl>{''.join(rows)}</dl>"


def _words(text: str) -> str:
    """What is good for the name of a file."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower()))


def _row(row: Row) -> str:
    name, colour, cells = row
    swatch = "<i></i>" if colour is None else f'<i class="c{colour}"></i>'
    return f'<tr><th scope="row">{swatch}{escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _section(section: Section, runs: Sequence[str]) -> str:
    if len(section.parts) > 1:
        named = zip(runs, map(_part, section.parts), strict=True)
        columns = "".join(f'<div class="run"><h3>{escape(run)}</h3>{part}</div>' for run, part in named)
        body = f'<div class="runs">{columns}</div>'
    else:
        body = _part(section.parts[0])
    note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
    return f"<section><h2>{escape(section.title)}</h2>{body}{note}</section>"


def _part(part: Part) -> str:
    if part.is_missing:
        return f'<p class="missing">{escape(part.missing[:1].upper() + part.missing[1:])}.</p>'
    figures = "".join(
        f"<figure><figcaption>{text(figure.title)}</figcaption>{figure.chart.html()}</figure>"
        for figure in part.figures
    )
    return (f'<div class="charts">{figures}</div>' if figures else "") + part.html


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
