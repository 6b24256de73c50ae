"""The demo's report as one self-contained HTML page: table, charts as inline SVG, a text, provenance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dspark.eval.comparison import Contender, summary
from dspark.eval.page import sections as of
from dspark.eval.page.charts import Series, line_chart
from dspark.eval.page.document import Figure, Part, Section, document, facts
from dspark.eval.page.excerpt import Piece
from dspark.eval.report import loops

TrainingRow = Mapping[str, float]


@dataclass(frozen=True)
class Page:
    """What the page shows. ``learner`` names the contender whose ``training`` (the rows of metrics.jsonl) is drawn;
    ``excerpt`` is its answer to ``prompt``.
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
    palette = {contender.name: place for place, contender in enumerate(reversed(page.contenders))}
    group = of.Group(page.contenders, palette, of.longest(m for c in page.contenders for m in c.measurements))
    result = of.RESULT_NOTE + LOOPS_NOTE + loops(page.contenders)
    sections = [
        Section("Result", (Part(html=of.result_table(group)),), result),
        Section("Tokens a round", (Part(tuple(of.lengths(group))),), of.LENGTH_NOTE),
        Section("Where a round ends", (Part(tuple(of.positions(group))),), of.POSITION_NOTE),
        Section(f"How the {page.learner} learned", (Part(tuple(_curves(page, group))),), CURVE_NOTE),
        Section("Who wrote what", (Part(html=of.excerpt(page.prompt, page.excerpt)),), of.EXCERPT_NOTE),
        Section("Where this comes from", (Part(html=facts(page.provenance)),)),
    ]
    return document(page.title, f"<p>{escape(summary(page.contenders))}</p>", sections)


LOOPS_NOTE = " Texts that end in a loop flatter a draft; here: "
CURVE_NOTE = (
    "From metrics.jsonl of the run. The acceptance length while training is estimated on the recorded text at "
    "temperature 1; the level line is what decoding held-out prompts at temperature 1 then gave."
)


def _curves(page: Page, group: of.Group) -> list[Figure]:
    colour, learner = group.palette[page.learner], next(c for c in page.contenders if c.name == page.learner)
    steps = [row["step"] for row in page.training]
    curves = [Series("estimated while training", _points(page.training, "acceptance_length"), colour)]
    for m in learner.measurements:
        if steps and m.acceptance and m.temperature == 1:
            level = m.acceptance.mean_acceptance_length
            curves.append(Series("decoded", ((steps[0], level), (steps[-1], level)), 4))
    return [
        Figure("Loss", line_chart([Series("loss", _points(page.training, "loss"), colour)], "step", "loss")),
        Figure("Acceptance length", line_chart(curves, "step", "tokens a round")),
    ]


def _points(rows: Sequence[TrainingRow], key: str) -> tuple[tuple[float, float], ...]:
    return tuple((row["step"], row[key]) for row in rows if key in row)
