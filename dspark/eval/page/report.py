"""The report of one or several evaluations as one self-contained page."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dspark.decode.round import Round
from dspark.eval.evaluation import Evaluation, find_shared, pair_up
from dspark.eval.measure import DRAFT
from dspark.eval.page import plots as by
from dspark.eval.page import sections as of
from dspark.eval.page.excerpt import Piece, pieces
from dspark.eval.page.plots import GUIDE, Interval, shorten
from dspark.eval.page.sections import PER_ROUND, Panel, Row, Titled
from dspark.eval.records import TextKey
from dspark.eval.report import EvalReport, Pairing, difference_lines
from dspark.eval.tables import interval, number, read_template

LONGEST_TOKENS = 1000
"""Of an answer that is shown."""
LONGEST_LIST = 30
"""Greedy texts unlike plain decoding's that are named."""


@by.styled
def render_report(
    evaluations: Sequence[Evaluation], decoders: Sequence[Callable[[Sequence[int]], str] | str], is_compared: bool
) -> tuple[str, dict[str, Callable[[], bytes]]]:
    """The page, and what draws its plots as PNG files, by name. Of every evaluation ``decoders`` makes ids into words,
    or says why nothing can. ``is_compared``: the first draft also with the others, prompt by prompt.
    Raises: as ``find_shared`` when they cannot be compared.
    """
    names = [evaluation.folder.resolve().name for evaluation in evaluations]
    if len(set(names)) < len(names):
        names = [str(evaluation.folder) for evaluation in evaluations]
    contenders = dict.fromkeys(name for evaluation in evaluations for name in evaluation.report.baselines)
    order = [DRAFT, *(name for name in contenders if name != "plain"), "plain"]
    palette = {name: place % by.NUM_COLOURS for place, name in enumerate(order)}
    measured = [m for evaluation in evaluations for ms in evaluation.everyone().values() for m in ms]
    longest = max([2.0, *(s.interval[1] for m in measured for s in (m.acceptance, m.teacher_forced) if s)])
    runs = [
        {"name": name, "answer": _answer(evaluation, decode)} | _run(evaluation, _panels(evaluation, palette, longest))
        for name, evaluation, decode in zip(names, evaluations, decoders, strict=True)
    ]
    versus = [plot for other in evaluations[1:] for plot in _versus(evaluations[0], other)] if is_compared else []
    targets = ", ".join(dict.fromkeys(Path(str(e.report.target["name"])).name for e in evaluations))
    template = read_template(by.PLACE / "page.html.j2", svg=by.svg, number=number, interval=interval)
    page = template.render(title=f"DSpark on {targets}", runs=runs, versus=versus)
    shown = [(title, run["name"] * (len(runs) > 1), run["plots"][title]) for title in DRAWN for run in runs]
    return page, _pictures([*shown, ("Compared", "", versus)])


def _pictures(shown: Sequence[tuple[str, str, Sequence[Titled]]]) -> dict[str, Callable[[], bytes]]:
    """Of sections, runs and plots, by names that are good for files and that no two have."""
    found: dict[str, Callable[[], bytes]] = {}
    for section, run, plots in shown:
        for what, figure in plots:
            title = f"{run}: {what}" if run else what
            words = ["-".join(re.findall(r"[a-z0-9]+", text.lower())) for text in (section, title)]
            stem = f"{words[0]}-{words[1][-80:]}"
            names = (stem, *(f"{stem}-{count}" for count in range(2, len(found) + 2)))
            found[next(name for name in names if name not in found)] = partial(by.png, figure, section, title)
    return found


def _panels(evaluation: Evaluation, palette: Mapping[str, int], longest: float) -> list[Panel]:
    """One a task and temperature."""
    report, everyone = evaluation.report, evaluation.everyone().items()
    is_one = len({m.task for m in report.measurements}) == 1
    panels = []
    for place, m in enumerate(report.measurements):
        rows = [Row(name, palette[name], ms[place], evaluation.texts_of(name, ms[place])) for name, ms in everyone]
        panels.append(Panel(rows, longest, "" if is_one else report.label(m.task)))
    return panels


def _run(evaluation: Evaluation, panels: Sequence[Panel]) -> dict[str, Any]:
    """What the template shows of an evaluation."""
    report, everyone, ms = evaluation.report, evaluation.everyone(), _counted(evaluation.report).measurements
    means = {}
    for name, some in everyone.items():
        found = _counted(replace(report, measurements=some)).mean_acceptance_lengths()
        means[name] = {f"T = {temperature}": mean for temperature, mean in found.items()}
    parts = {"folder": str(evaluation.folder), "target": report.target, "draft": report.draft}
    return {
        "report": report,
        "means": means,
        "counted": ms,
        "tasks": list(dict.fromkeys(report.label(m.task) for m in ms)),
        "panels": [list(found) for _, found in groupby(panels, key=lambda panel: panel.label)],
        "plots": {title: list(draw(evaluation, panels)) for title, draw in DRAWN.items()},
        "differences": difference_lines(everyone, LONGEST_LIST),
        "facts": parts | {"settings": report.settings} | dict(report.provenance),
    }


def _counted(report: EvalReport) -> EvalReport:
    """The real tasks alone, their first turns; where all are synthetic, all of them."""
    prompts = report.settings.get("prompts")
    first = [m for m in report.measurements if prompts is None or m.task in prompts]
    real = tuple(m for m in first if report.label(m.task) == m.task)
    return replace(report, measurements=real) if real else replace(report, settings={})


def _each(draw: of.Draw) -> Callable[[Evaluation, Sequence[Panel]], list[Titled]]:
    return lambda _, panels: of.titled(draw, panels)


def _along(evaluation: Evaluation, panels: Sequence[Panel]) -> list[Titled]:
    """Acceptance by the place in the answer, then by its length, or the prompt's where tasks say it."""
    found: dict[str, list[Interval]] = {}
    for m in evaluation.report.measurements:
        if m.task.startswith("long:") and m.acceptance:
            found.setdefault(f"T = {m.temperature:g}", []).append(of.whiskers(m.task, m.acceptance, 0))
    plots = {at: by.interval_plot(rows, of.LENGTH, (1, 2)) for at, rows in found.items()}
    prompts = [(f"By length of the prompt, {at}", figure) for at, figure in plots.items()]
    return of.titled(of.by_place, panels) + (prompts or of.titled(of.by_answer, panels))


def _learned(evaluation: Evaluation, _: Sequence[Panel]) -> Iterator[Titled]:
    """The draft's loss, and its estimated acceptance length beside the decoded one."""
    level = _counted(evaluation.report).mean_acceptance_lengths().get("1")
    shown = ("Loss", "loss", "loss", "loss"), ("Acceptance length", "acceptance_length", "estimated", PER_ROUND)
    for title, key, name, y_label in shown:
        points = [(row["step"], row[key]) for row in evaluation.training if row.keys() >= {"step", key}]
        if points:
            curves = [(name, 0, points)]
            if level and name == "estimated":
                curves.append(("decoded", 4, [(points[place][0], level) for place in (0, -1)]))
            figure, axes = by.empty_plot("step", y_label, [curve[:2] for curve in curves])
            for name, colour, marks in curves:
                by.draw_line(axes, colour, name, marks)
                by.draw_dot(axes, marks[-1], colour, f"{name}: {marks[-1][1]:.3g} at {marks[-1][0]:g}")
            yield title, figure


def _paired(evaluation: Evaluation, _: Sequence[Panel]) -> Iterator[Titled]:
    """What the evaluation itself compared."""
    if pairings := evaluation.report.pairings:
        yield f"minus {pairings[0].folder}", _forest(pairings)


def _versus(first: Evaluation, second: Evaluation) -> Iterator[Titled]:
    """The drafts of two evaluations on the same prompts: every task at every temperature, then every prompt."""
    shared, _ = find_shared(second, first.report.target, first.report.settings)
    pairings = pair_up(first.texts, second, shared)
    yield f"{first.folder} minus {second.folder}", _forest(pairings)
    for keys, pairing in zip(shared, pairings, strict=True):
        pairs = [(_mean(first.texts[key].rounds), _mean(second.texts[key].rounds)) for key in keys]
        figure, axes = by.empty_plot("prompts, sorted", f"difference, {PER_ROUND}", [("a prompt", 0)])
        axes.axhline(0, **GUIDE)
        axes.locator_params("x", integer=True)
        for point in enumerate(sorted(a - b for a, b in pairs if a and b)):
            by.draw_dot(axes, point, 0, f"a prompt: {point[1]:+.2f}")
        yield f"Each prompt, {pairing.task}, T = {pairing.temperature:g}", figure


def _forest(pairings: Sequence[Pairing]) -> Figure:
    rows, reach = [], 0.1
    for p in pairings:
        name, (low, high) = f"{shorten(p.task, 12)}, T = {p.temperature:g}", p.comparison.interval
        rows.append(Interval(f"{name}, p = {p.comparison.p_value:.3f}", low, p.comparison.difference, high, 0))
        reach = max(reach, abs(low), abs(high))
    figure = by.interval_plot(rows, f"difference ({PER_ROUND})", (-reach, reach))
    figure.axes[0].axvline(0, **GUIDE)
    return figure


def typical_text(evaluation: Evaluation) -> TextKey | None:
    """Of the first task at its first temperature, the draft's answer whose acceptance length is nearest to the mean
    (of equals the first), looping ones last. None when nothing was drafted.
    """
    m = evaluation.report.measurements[0]
    texts = [(index, text) for index, text in enumerate(evaluation.texts_of(DRAFT, m)) if text.rounds]
    if m.acceptance is None or not texts:
        return None
    mean = m.acceptance.mean_acceptance_length
    index, _ = min(texts, key=lambda item: (item[1].is_looping, abs(_mean(item[1].rounds) - mean)))
    return TextKey(m.task, m.temperature, DRAFT, index)


def _answer(evaluation: Evaluation, decode: Callable[[Sequence[int]], str] | str) -> tuple[str, Sequence[Piece]]:
    """Which answer is typical and its first ``LONGEST_TOKENS``, or why it is not shown."""
    key = typical_text(evaluation)
    if key is None or isinstance(decode, str):
        return "nothing was drafted" if key is None else str(decode), ()
    whole = evaluation.texts[key]
    where = f"{key.task}, prompt {key.prompt_index}, T = {key.temperature:g}"
    where += f", the first {LONGEST_TOKENS} tokens" if whole.num_tokens > LONGEST_TOKENS else ""
    return where, pieces(replace(whole, ids_T=whole.ids_T[:LONGEST_TOKENS]), decode)


def _mean(rounds: Sequence[Round]) -> float:
    """A text's own mean acceptance length, 0 without a round."""
    return sum(counts.acceptance_length for counts in rounds) / len(rounds) if rounds else 0.0


DRAWN: Mapping[str, Callable[[Evaluation, Sequence[Panel]], Iterable[Titled]]] = {
    "Tokens a round": _each(of.lengths),
    "Where a round ends": _each(of.positions),
    "Accepted drafts a round": _each(of.histograms),
    "How far confidence can be believed": _each(of.reliability),
    "Along the answer": _along,
    "What a round costs": _each(of.costs),
    "Teacher-forced and decoded": _each(of.forced),
    "How the draft learned": _learned,
    "Paired differences": _paired,
}
"""Draws a run's plots of a section."""
