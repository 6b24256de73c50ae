"""The demo's report as one self-contained HTML page: table, charts as inline SVG, a text, provenance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dspark.eval.comparison import Contender, summary
from dspark.eval.measure import Measurement
from dspark.eval.page.charts import Interval, Series, bar_chart, interval_chart, line_chart
from dspark.eval.page.excerpt import Piece
from dspark.eval.page.style import STYLE
from dspark.eval.report import interval, loops, number

TrainingRow = Mapping[str, float]


@dataclass(frozen=True)
class Page:
    """What the page shows. ``learner`` names the contender whose ``training`` (the rows of metrics.jsonl) is drawn;
    ``excerpt`` is its answer to ``prompt``. A contender's place in the list is its colour.
    """

    title: str
    contenders: tuple[Contender, ...]
    learner: str
    training: tuple[TrainingRow, ...]
    prompt: str
    excerpt: tuple[Piece, ...]
    provenance: Mapping[str, object]


def render(page: Page) -> str:
    """The whole page; nothing in it is fetched from elsewhere and nothing in it is a script."""
    sections = [
        f"<header><h1>{escape(page.title)}</h1><p>{escape(summary(page.contenders))}</p></header>",
        _section("Result", _table(page.contenders), RESULT_NOTE + loops(page.contenders)),
        _section("Tokens a round", _charts(_lengths(page.contenders)), LENGTH_NOTE),
        _section("Where a round ends", _charts(_positions(page.contenders)), POSITION_NOTE),
        _section(f"How the {page.learner} learned", _charts(_curves(page)), CURVE_NOTE),
        _section("Who wrote what", _excerpt(page.prompt, page.excerpt), EXCERPT_NOTE),
        _section("Where this comes from", _facts(page.provenance)),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(page.title)}</title><style>{STYLE}</style>'
    )
    body = "\n".join(sections)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>\n{body}\n</main></body></html>\n'


RESULT_NOTE = (
    "Acceptance length: tokens one round commits, the bonus token included, with its 95 % bootstrap interval over "
    "prompts; plain decoding commits one token a pass. tokens/s: one prompt at a time, prefill included. Texts that "
    "end in a loop flatter a draft; here: "
)
LENGTH_NOTE = (
    "The dot is the mean over all rounds, the line its 95 % interval over prompts. 1 means that no draft helped."
)
POSITION_NOTE = (
    "Survival: share of rounds in which the slot's token was accepted. Conditional: the same among the rounds that "
    "accepted every slot before it. Slot 0 drafts the token after the anchor."
)
CURVE_NOTE = (
    "From metrics.jsonl of the run. The acceptance length while training is estimated on the recorded text at "
    "temperature 1; the level line is what decoding held-out prompts at temperature 1 then gave."
)
EXCERPT_NOTE = "Marked: drafted and accepted. Plain: the target's own token, one a round. Hover for the round."


def _table(contenders: Sequence[Contender]) -> str:
    temperatures = [m.temperature for m in contenders[0].measurements]
    top = "".join(f'<th colspan="2" scope="colgroup">T = {t:g}</th>' for t in temperatures)
    second = '<th scope="col">acceptance length</th><th scope="col">tokens/s</th>'
    rows = []
    for colour, item in enumerate(contenders):
        swatch = f'<i class="c{colour}"></i>' if item.measurements[0].acceptance else ""
        cells = "".join(map(_cells, item.measurements))
        rows.append(f'<tr><th scope="row">{swatch}{escape(item.name)}</th>{cells}</tr>')
    head = f'<tr><td rowspan="2"></td>{top}</tr><tr>{second * len(temperatures)}</tr>'
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _cells(m: Measurement) -> str:
    if not m.acceptance:
        return f"<td>1</td><td>{m.tokens_per_second:.1f}</td>"
    mean, bounds = number(m.acceptance.mean_acceptance_length), interval(m.acceptance.interval)
    return f"<td><b>{mean}</b><small>{bounds}</small></td><td>{m.tokens_per_second:.1f}</td>"


def _lengths(contenders: Sequence[Contender]) -> list[tuple[str, str]]:
    charts = []
    for index, m in enumerate(contenders[0].measurements):
        rows = [
            Interval(item.name, a.interval[0], a.mean_acceptance_length, a.interval[1], colour)
            for colour, item in enumerate(contenders)
            if (a := item.measurements[index].acceptance)
        ]
        charts.append((f"T = {m.temperature:g}", interval_chart(rows, "acceptance length (tokens a round)")))
    return charts


def _positions(contenders: Sequence[Contender]) -> list[tuple[str, str]]:
    charts = []
    for index, m in enumerate(contenders[0].measurements):
        for name in ("survival", "conditional"):
            drafted = [(c, a) for c, item in enumerate(contenders) if (a := item.measurements[index].acceptance)]
            bars = []
            for colour, a in drafted:
                shares = tuple((float(k), share) for k, share in enumerate(getattr(a, name)) if share is not None)
                bars.append(Series(contenders[colour].name, shares, colour))
            num_slots = max((len(a.survival) for _, a in drafted), default=0)
            chart = bar_chart(bars, num_slots, "slot", "share of rounds")
            charts.append((f"{name.capitalize()}, T = {m.temperature:g}", chart))
    return charts


def _curves(page: Page) -> list[tuple[str, str]]:
    colour, learner = next((i, c) for i, c in enumerate(page.contenders) if c.name == page.learner)
    steps = [row["step"] for row in page.training]
    curves = [Series("estimated while training", _points(page.training, "acceptance_length"), colour)]
    for m in learner.measurements:
        if steps and m.acceptance and m.temperature == 1:
            level = m.acceptance.mean_acceptance_length
            curves.append(Series("decoded", ((steps[0], level), (steps[-1], level)), 0))
    return [
        ("Loss", line_chart([Series("loss", _points(page.training, "loss"), colour)], "step", "loss")),
        ("Acceptance length", line_chart(curves, "step", "tokens a round")),
    ]


def _points(rows: Sequence[TrainingRow], key: str) -> tuple[tuple[float, float], ...]:
    return tuple((row["step"], row[key]) for row in rows if key in row)


def _charts(charts: Sequence[tuple[str, str]]) -> str:
    figures = "".join(f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>" for title, chart in charts)
    return f'<div class="charts">{figures}</div>'


def _excerpt(prompt: str, excerpt: Sequence[Piece]) -> str:
    said = "".join(
        f'<mark title="round {p.round_index}: drafted">{escape(p.text)}</mark>'
        if p.is_drafted
        else f'<span title="round {p.round_index}: the target">{escape(p.text)}</span>'
        for p in excerpt
    )
    return f"<pre><s>{escape(prompt)}</s>{said}</pre>"


def _facts(facts: Mapping[str, object]) -> str:
    rows = (f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(_text(value))}</dd>" for key, value in facts.items())
    return f"<dl>{''.join(rows)}</dl>"


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def _section(title: str, body: str, note: str = "") -> str:
    noted = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{body}{noted}</section>"
