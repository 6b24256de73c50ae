"""What a page shows of the contenders on one task: tables, charts, and a text that shows who wrote what."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dspark.eval.comparison import Contender
from dspark.eval.confidence import Calibration
from dspark.eval.measure import Measurement
from dspark.eval.page.along import Bucket
from dspark.eval.page.charts import Chart, Interval, Series, bar_chart, interval_chart, line_chart, stack_chart
from dspark.eval.page.document import Figure, table
from dspark.eval.page.excerpt import Piece
from dspark.eval.page.style import NUM_COLOURS
from dspark.eval.report import interval, number, phase_columns
from dspark.eval.statistics import AcceptanceStatistics

LENGTH = "acceptance length (tokens a round)"
RESULT_NOTE = (
    "Acceptance length: tokens one round commits, the bonus token included, with its 95 % bootstrap interval over "
    "prompts; plain decoding commits one token a pass. Without bonus: accepted drafts a round. tokens/s: prefill "
    "included. Times plain: behind the first token."
)
LENGTH_NOTE = (
    "The dot is the mean over all rounds, the line its 95 % interval over prompts. 1 means that no draft helped."
)
POSITION_NOTE = (
    "Survival: of the rounds that proposed the slot, the share in which its token was accepted; ways that propose few "
    "tokens when they are unsure propose late slots in good rounds only. Conditional: the same among the rounds that "
    "accepted every slot before it. Slot 0 drafts the token after the anchor."
)
HISTOGRAM_NOTE = "How many drafted tokens the rounds accepted; the target's own token comes on top."
CONFIDENCE_NOTE = (
    "Each dot holds the drafted tokens whose confidence lies in one tenth, the larger the more; on the dashed line "
    "confidence equals acceptance. ECE: mean distance from that line. AUROC: how well confidence tells accepted tokens "
    "from rejected ones. Brier: mean squared error."
)
COST_NOTE = (
    "Wall time of all texts by what was done, divided by the rounds (plain decoding: by its passes, one a token). "
    "Prefill comes once a prompt and is left out. Predicted: how much faster than plain decoding, from the acceptance "
    "length and a round's time in draft and target alone. Some tokens are not kept, for they lie beyond the longest "
    "text allowed, and some time goes elsewhere: times both shares it is what was measured."
)
FORCED_NOTE = (
    "Teacher-forced: every block is anchored in text that is given, and its acceptance is computed rather than drawn. "
    "In the plot, over all blocks, from how far draft and target overlap; in the table, from the chance of the text's "
    "own tokens, over the rounds whose whole block lies in the text, beside what these rounds counted: the difference "
    "is 0 but for chance unless drafting sees something else than training showed."
)
EXCERPT_NOTE = "Marked: drafted and accepted. Plain: the target's own token, one a round. Hover for the round."


@dataclass(frozen=True)
class Row:
    """A contender at one temperature, its colour, and what was measured."""

    name: str
    colour: int
    m: Measurement


Draw = Callable[[Sequence[Row], float], Sequence[tuple[str, Chart]]]
"""Draws the contenders at one temperature: charts, each with its own part of the title; lengths go so far."""


@dataclass(frozen=True)
class Group:
    """Contenders on one task, the numbers of their colours, how far axes of lengths go on the page, and the task's
    label where there are several.
    """

    contenders: tuple[Contender, ...]
    palette: Mapping[str, int]
    longest: float
    label: str = ""

    def columns(self) -> Iterator[tuple[str, list[Row]]]:
        """Every temperature in words, and the contenders at it."""
        for index, first in enumerate(self.contenders[0].measurements):
            rows = [Row(c.name, self.palette[c.name], c.measurements[index]) for c in self.contenders]
            yield f"T = {first.temperature:g}", rows

    def figures(self, draw: Draw) -> list[Figure]:
        """What ``draw`` makes of every temperature."""
        return [
            Figure(", ".join(filter(None, (what, self.label, at))), chart)
            for at, rows in self.columns()
            for what, chart in draw(rows, self.longest)
        ]


def result_table(group: Group) -> str:
    """Lengths and speed of the contenders, temperature by temperature."""
    head = ["acceptance length", "without bonus", "tokens/s", "ms a token, median", "times plain"]
    return _table(group, head, _cells)


def checks_table(group: Group) -> str:
    """What speaks against a number: texts in circles, greedy texts that are not plain decoding's."""
    head = ["texts that end in a loop", "length without them", "greedy texts unlike plain", "by rounding", "faults"]
    return _table(group, head, _checks)


def speed_table(group: Group) -> str:
    """What a draft should have gained and what it did, as factors; empty without any."""
    return _table(group, ["predicted", "tokens kept", "time at work", "measured"], _gain)


def gap_table(group: Group) -> str:
    """Decoded lengths and teacher-forced ones of the same rounds; empty without any."""
    return _table(group, ["decoded", "teacher-forced", "decoded minus forced", "same rounds"], _gap)


def lengths(rows: Sequence[Row], longest: float) -> list[tuple[str, Chart]]:
    """Acceptance lengths with their intervals."""
    found = [whiskers(row.name, row.m.acceptance, row.colour) for row in rows if row.m.acceptance]
    return [("", interval_chart(found, LENGTH, longest))]


def whiskers(name: str, found: AcceptanceStatistics | Bucket, colour: int) -> Interval:
    """A mean acceptance length with its interval."""
    return Interval(name, found.interval[0], found.mean_acceptance_length, found.interval[1], colour)


def positions(rows: Sequence[Row], _: float) -> list[tuple[str, Chart]]:
    """Both acceptances of every slot."""
    return [("Survival", _bars(rows, lambda a: a.survival)), ("Conditional", _bars(rows, lambda a: a.conditional))]


def histograms(rows: Sequence[Row], _: float) -> list[tuple[str, Chart]]:
    """Shares of rounds with 0, 1, ... accepted drafts."""
    return [("", _bars(rows, lambda a: [n / a.num_rounds for n in a.histogram], "accepted drafts", 0.2))]


def reliability(rows: Sequence[Row], _: float) -> list[tuple[str, Chart]]:
    """Confidence against acceptance, where a draft says how sure it is."""
    curves = [_reliability(row, row.m.confidence.overall) for row in rows if row.m.confidence]
    return [("", line_chart(curves, "confidence", "share accepted", ((0.0, 0.0), (1.0, 1.0))))] if curves else []


def costs(rows: Sequence[Row], _: float) -> list[tuple[str, Chart]]:
    """What a round's time goes into."""
    return [("", stack_chart([bar for row in rows if (bar := _cost(row))], "milliseconds a round"))]


def forced(rows: Sequence[Row], longest: float) -> list[tuple[str, Chart]]:
    """What was estimated on given text beside what decoding gave."""
    rivals: list[Interval] = []
    bars: list[Series] = []
    for row in rows:
        a, f = row.m.acceptance, row.m.teacher_forced
        if a and f:
            decoded = ("decoded", a.interval, a.mean_acceptance_length, a.survival)
            estimated = ("teacher-forced", f.interval, f.expected_acceptance_length, f.survival)
            for kind, (low, high), mean, survival in (decoded, estimated):
                name, colour = f"{row.name}, {kind}", len(bars) % NUM_COLOURS
                rivals.append(Interval(name, low, mean, high, colour))
                bars.append(Series(name, tuple((float(k), share) for k, share in enumerate(survival)), colour))
    if not rivals:
        return []
    survivals = bar_chart(bars, max(len(series.points) for series in bars), "slot", "share of blocks")
    return [("Length", interval_chart(rivals, LENGTH, longest)), ("Survival", survivals)]


def longest(measurements: Iterable[Measurement]) -> float:
    """The largest acceptance length that an interval holds, at least 2."""
    return max([2.0, *(s.interval[1] for m in measurements for s in (m.acceptance, m.teacher_forced) if s)])


def num_looping(m: Measurement) -> int:
    """Texts that end in a loop."""
    return round(m.looping_share * m.num_prompts)


def excerpt(pieces: Sequence[Piece]) -> str:
    """A text whose drafted and accepted pieces are marked."""
    said = ""
    for p in pieces:
        tag, author = ("mark", "drafted") if p.is_drafted else ("span", "the target")
        said += f'<{tag} title="round {p.round_index}: {author}">{escape(p.text)}</{tag}>'
    return f"<pre>{said}</pre>"


def _table(group: Group, head: Sequence[str], cells: Callable[[Measurement], list[str]]) -> str:
    """A row for every contender that has cells, temperature by temperature; empty when none has."""
    bodies = {
        at: [(row.name, row.colour if row.m.acceptance else None, found) for row in rows if (found := cells(row.m))]
        for at, rows in group.columns()
    }
    some = {at: rows for at, rows in bodies.items() if rows}
    return table(group.label, head, some) if some else ""


def _cells(m: Measurement) -> list[str]:
    a, pace, gain = m.acceptance, m.timing.time_per_token, m.speedup
    found = ["1", "0"]
    if a:
        bounds = f"<small>{interval(a.interval)}</small>"
        found = [f"<b>{number(a.mean_acceptance_length)}</b>{bounds}", number(a.mean_accepted_drafts)]
    median = f"{pace.median * 1e3:.3g}" if pace else "-"
    return [*found, f"{m.tokens_per_second:.1f}", median, f"{gain.measured:.2f}" if gain else "-"]


def _gain(m: Measurement) -> list[str]:
    if m.speedup is None:
        return []
    s = m.speedup
    return [f"{s.predicted:.2f}", f"{s.kept_share:.1%}", f"{s.working_share:.1%}", f"<b>{s.measured:.2f}</b>"]


def _gap(m: Measurement) -> list[str]:
    if m.decoding_gap is None:
        return []
    g = m.decoding_gap
    difference = f"<b>{g.difference:+.2f}</b><small>{g.interval[0]:+.2f} to {g.interval[1]:+.2f}</small>"
    return [number(g.decoded), number(g.forced), difference, str(g.num_rounds)]


def _checks(m: Measurement) -> list[str]:
    counts = ["-"] * 3
    if m.equality:
        ties = m.equality.mismatches - m.equality.faults
        counts = [f"{m.equality.mismatches} of {m.num_prompts}", str(ties), _flagged(m.equality.faults, "")]
    sober = number(m.mean_acceptance_length_without_loops) if m.acceptance else "1"
    return [_flagged(num_looping(m), f" of {m.num_prompts}"), sober, *counts]


def _flagged(count: int, rest: str) -> str:
    """A count that should be 0, bold when it is not."""
    return f"<b>{count}{rest}</b>" if count else f"{count}{rest}"


def _bars(
    rows: Sequence[Row],
    shares: Callable[[AcceptanceStatistics], Sequence[float | None]],
    x_label: str = "slot",
    top: float = 1.0,
) -> Chart:
    """Shares of rounds of those that draft."""
    drafted = [(row, shares(row.m.acceptance)) for row in rows if row.m.acceptance]
    bars = [
        Series(row.name, tuple((float(k), share) for k, share in enumerate(found) if share is not None), row.colour)
        for row, found in drafted
    ]
    return bar_chart(bars, max((len(found) for _, found in drafted), default=0), x_label, "share of rounds", top)


def _reliability(row: Row, overall: Calibration) -> Series:
    bins = [(b.mean_confidence, b.acceptance, b.num_slots) for b in overall.bins if b.num_slots]
    most = max(count for *_, count in bins)
    return Series(
        f"{row.name}: ECE {overall.ece:.3f}, AUROC {number(overall.auroc)}, Brier {overall.brier:.3f}",
        tuple((x, y) for x, y, _ in bins if x is not None and y is not None),
        row.colour,
        tuple(f"{count} tokens, confidence {number(x)}, accepted {number(y)}" for x, y, count in bins),
        tuple(2.5 + 4.5 * (count / most) ** 0.5 for *_, count in bins),
        is_joined=False,
    )


def _cost(row: Row) -> tuple[str, list[tuple[str, float]]] | None:
    """A contender's bar: its phases in milliseconds a round."""
    num_rounds = row.m.acceptance.num_rounds if row.m.acceptance else row.m.new_tokens - row.m.num_prompts
    if num_rounds <= 0:
        return None
    phases = {name: seconds * 1e3 for name, seconds in phase_columns(row.m.timing.phase_seconds).items()}
    prefill = phases.pop("prefill") / row.m.num_prompts
    parts = [(name, milliseconds / num_rounds) for name, milliseconds in phases.items() if milliseconds]
    total = sum(milliseconds for _, milliseconds in parts)
    return f"{row.name}: {total:.3g} ms, prefill {prefill:.3g} ms a prompt", parts
