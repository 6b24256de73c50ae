"""What a page shows of the contenders on one task at one temperature, as plots."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from dspark.eval.confidence import Calibration
from dspark.eval.measure import Measurement
from dspark.eval.page.along import Bucket, by_length, by_start, step_width
from dspark.eval.page.plots import GUIDE, Interval, bar_plot, draw_dot, draw_line, empty_plot, interval_plot, stack_plot
from dspark.eval.report import phase_columns
from dspark.eval.statistics import AcceptanceStatistics
from dspark.eval.tables import number
from dspark.eval.timing import DecodedText

PER_ROUND = "tokens a round"
LENGTH = f"acceptance length ({PER_ROUND})"


@dataclass(frozen=True)
class Row:
    """A contender: its name, the number of its colour, what was measured, and the texts."""

    name: str
    colour: int
    m: Measurement
    texts: Sequence[DecodedText]


@dataclass(frozen=True)
class Panel:
    """The contenders on one task at one temperature, the draft first; how far axes of lengths go on the page; and the
    task's label where there are several.
    """

    rows: Sequence[Row]
    longest: float
    label: str = ""

    @property
    def at(self) -> str:
        """The temperature in words."""
        return f"T = {self.rows[0].m.temperature:g}"

    def drafted(self) -> list[tuple[Row, AcceptanceStatistics]]:
        """Those that draft."""
        return [(row, row.m.acceptance) for row in self.rows if row.m.acceptance]


Titled = tuple[str, Figure]
Draw = Callable[[Panel], Iterable[Titled]]
"""Titles are what comes before task and temperature."""


def titled(draw: Draw, panels: Sequence[Panel]) -> list[Titled]:
    """What ``draw`` makes of every panel in which something was drafted."""
    drawn = [(panel, *found) for panel in panels if panel.drafted() for found in draw(panel)]
    return [(", ".join(filter(None, (what, panel.label, panel.at))), figure) for panel, what, figure in drawn]


def lengths(panel: Panel) -> Iterator[Titled]:
    """Acceptance lengths with their intervals."""
    found = [whiskers(row.name, a, row.colour) for row, a in panel.drafted()]
    yield "", interval_plot(found, LENGTH, (1, panel.longest))


def positions(panel: Panel) -> Iterator[Titled]:
    """Both acceptances of every slot."""
    for what, name in (("Survival", "survival"), ("Conditional", "conditional")):
        bars = [(row.name, row.colour, getattr(a, name)) for row, a in panel.drafted()]
        yield what, bar_plot(bars, "slot", "share of rounds")


def histograms(panel: Panel) -> Iterator[Titled]:
    """Shares of rounds with 0, 1, ... accepted drafts."""
    bars = [(row.name, row.colour, [n / a.num_rounds for n in a.histogram]) for row, a in panel.drafted()]
    yield "", bar_plot(bars, "accepted drafts", "share of rounds", 0.2)


def reliability(panel: Panel) -> Iterator[Titled]:
    """Confidence against acceptance, where a draft says how sure it is."""
    sure = [(row.name, row.colour, row.m.confidence.overall) for row in panel.rows if row.m.confidence]
    yield from [("", reliability_plot(sure, "confidence"))] if sure else []


def reliability_plot(sure: Sequence[tuple[str, int, Calibration]], x_label: str) -> Figure:
    """Dots of names and colours: the bins of their calibrations."""
    scores = [f"ECE {c.ece:.3f}, AUROC {number(c.auroc)}, Brier {c.brier:.3f}" for *_, c in sure]
    legend = [(f"{name}: {score}", colour) for (name, colour, _), score in zip(sure, scores, strict=True)]
    figure, axes = empty_plot(x_label, "share accepted", legend)
    axes.plot((0, 1), (0, 1), **GUIDE)
    for name, colour, calibration in sure:
        most = max(b.num_slots for b in calibration.bins)
        for b in calibration.bins:
            if b.mean_confidence is not None and b.acceptance is not None:
                said = f"{b.num_slots} tokens, confidence {number(b.mean_confidence)}, accepted {number(b.acceptance)}"
                size = 5 + 9 * (b.num_slots / most) ** 0.5
                draw_dot(axes, (b.mean_confidence, b.acceptance), colour, f"{name}: {said}", size)
    return figure


def by_place(panel: Panel) -> Iterator[Titled]:
    """Acceptance by the place in the answer."""
    rows = [row for row, _ in panel.drafted()]
    width = step_width([text for row in rows for text in row.texts])
    figure, axes = empty_plot("new token", PER_ROUND, [(row.name, row.colour) for row in rows])
    axes.axhline(1, **GUIDE)
    for row in rows:
        found = {((b.low + b.high) / 2, b.mean_acceptance_length): b for b in by_start(row.texts, width)}
        axes.update_datalim([(end, 1) for end in (0, *(b.high for b in found.values()))])
        draw_line(axes, row.colour, row.name, list(found))
        for point, b in found.items():
            said = f"{many(b.count, 'round')} from token {b.low} to {b.high - 1}: {b.mean_acceptance_length:.2f}"
            draw_dot(axes, point, row.colour, f"{row.name}: {said}")
    yield "By place", figure


def by_answer(panel: Panel) -> Iterator[Titled]:
    """The draft's acceptance by the length of the answer."""
    own = panel.rows[0]
    found = [(f"{b.low} to {b.high - 1} tokens, {many(b.count, 'text')}", b) for b in by_length(own.texts)]
    rows = [whiskers(name, b, own.colour) for name, b in found]
    yield "By length of the answer", interval_plot(rows, LENGTH, (1, panel.longest))


def costs(panel: Panel) -> Iterator[Titled]:
    """What a round's time goes into, in milliseconds."""
    bars = []
    for row in panel.rows:
        num_rounds = row.m.acceptance.num_rounds if row.m.acceptance else row.m.new_tokens - row.m.num_prompts
        if num_rounds > 0:
            phases = {name: seconds * 1e3 for name, seconds in phase_columns(row.m.timing.phase_seconds).items()}
            prefill = phases.pop("prefill") / row.m.num_prompts
            parts = [(name, milliseconds / num_rounds) for name, milliseconds in phases.items() if milliseconds]
            total = sum(milliseconds for _, milliseconds in parts)
            bars.append((f"{row.name}: {total:.3g} ms, prefill {prefill:.3g} ms a prompt", parts))
    yield "", stack_plot(bars, "milliseconds a round")


def forced(panel: Panel) -> Iterator[Titled]:
    """What was estimated on given text beside what decoding gave."""
    rivals: list[Interval] = []
    bars: list[tuple[str, int, Sequence[float]]] = []
    for row, a in panel.drafted():
        if f := row.m.teacher_forced:
            decoded = ("decoded", a.interval, a.mean_acceptance_length, a.survival)
            estimated = ("teacher-forced", f.interval, f.expected_acceptance_length, f.survival)
            for kind, (low, high), mean, survival in (decoded, estimated):
                name, colour = f"{row.name}, {kind}", len(bars)
                rivals.append(Interval(name, low, mean, high, colour))
                bars.append((name, colour, survival))
    if rivals:
        yield "Length", interval_plot(rivals, LENGTH, (1, panel.longest))
        yield "Survival", bar_plot(bars, "slot", "share of blocks")


def whiskers(name: str, found: AcceptanceStatistics | Bucket, colour: int) -> Interval:
    """A mean acceptance length with its interval."""
    return Interval(name, found.interval[0], found.mean_acceptance_length, found.interval[1], colour)


def many(count: int, noun: str) -> str:
    """So many of them."""
    return f"{count} {noun}{'s' * (count != 1)}"
