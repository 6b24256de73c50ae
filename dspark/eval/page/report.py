"""The report of one or several evaluations as one self-contained page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path

from dspark.decode.round import Round
from dspark.eval.comparison import DRAFT, Contender
from dspark.eval.evaluation import Evaluation, find_shared, pair_up
from dspark.eval.page import sections as of
from dspark.eval.page.along import Bucket, by_length, by_start, step_width
from dspark.eval.page.charts import Chart, Interval, Series, interval_chart, line_chart, shorten
from dspark.eval.page.document import Figure, Part, Section, document, facts, pictures, table, text
from dspark.eval.page.excerpt import pieces
from dspark.eval.page.style import NUM_COLOURS
from dspark.eval.records import TextKey
from dspark.eval.report import EvalReport, Pairing, difference_lines, interval, number

LONGEST_TOKENS = 1000
"""Of an answer that is shown."""
NOTHING = "nothing was drafted"
ALONG_NOTE = (
    "By place: the mean acceptance length of the rounds that start in a stretch of the answer, drawn at its middle. By "
    "length: the draft's texts by how many tokens the answer has, or the prompt where tasks say so."
)
PAIRED_NOTE = (
    "First draft minus second on the same prompts, with the 95 % interval over prompts; right of the dashed line the "
    "first is better. p: how often swapping the two in random prompts makes as large a difference. Dots: prompts."
)
LEARNED_NOTE = (
    "From the metrics.jsonl beside the draft. The acceptance length while training is estimated on the recorded text "
    "at temperature 1; the level line is what decoding at temperature 1 then gave."
)
HEADLINE_NOTE = " Texts that end in a loop flatter a draft: the headline leaves them out, the table does not."
CHECKS_NOTE = (
    "Texts that end in a loop flatter a draft. A greedy text must be plain decoding's own; where rounding makes two "
    "logits change places it may leave it, anything else is a fault."
)


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


def render_report(
    evaluations: Sequence[Evaluation], decoders: Sequence[Callable[[Sequence[int]], str] | str], is_compared: bool
) -> tuple[str, dict[str, str]]:
    """The page, and its figures as SVG files by name. Of every evaluation ``decoders`` makes ids into words, or says
    why nothing can. ``is_compared``: the first draft also with the others, prompt by prompt.
    Raises: as ``find_shared`` when they cannot be compared.
    """
    runs = [evaluation.folder.resolve().name for evaluation in evaluations]
    if len(set(runs)) < len(runs):
        runs = [str(evaluation.folder) for evaluation in evaluations]
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.report.baselines)
    order = [DRAFT, *(name for name in names if name != "plain"), "plain"]
    palette = {name: place % NUM_COLOURS for place, name in enumerate(order)}
    longest = of.longest(m for e in evaluations for ms in e.everyone().values() for m in ms)
    groups = [_groups(evaluation, palette, longest) for evaluation in evaluations]
    pairs = list(zip(evaluations, groups, strict=True))
    sections = [Section("Result", tuple(Part(html=_result(*pair)) for pair in pairs), of.RESULT_NOTE + HEADLINE_NOTE)]
    for title, draw, missing, note in DRAWN:
        tables = ["".join(map(TABLES[title], found)) if title in TABLES else "" for found in groups]
        parts = tuple(Part(tuple(draw(*pair)), html, missing) for pair, html in zip(pairs, tables, strict=True))
        sections.append(Section(title, parts, note))
    if is_compared:
        figures = tuple(figure for other in evaluations[1:] for figure in _versus(evaluations[0], other))
        sections.append(Section("Compared", (Part(figures),), PAIRED_NOTE))
    sections += [
        Section("Checks", tuple(Part(html="".join(map(_checks, found))) for found in groups), CHECKS_NOTE),
        Section("Who wrote what", tuple(map(_excerpt, evaluations, decoders)), of.EXCERPT_NOTE),
        Section("Where this comes from", tuple(Part(html=facts(_provenance(e))) for e in evaluations)),
    ]
    targets = ", ".join(dict.fromkeys(Path(str(e.report.target["name"])).name for e in evaluations))
    titles = [f"<h3>{escape(run)}</h3>" if len(runs) > 1 else "" for run in runs]
    headlines = (title + _headline(e) for title, e in zip(titles, evaluations, strict=True))
    header = "".join(f'<div class="run">{headline}</div>' for headline in headlines)
    page = document(f"DSpark on {targets}", f'<div class="runs">{header}</div>', sections, runs)
    return page, pictures(sections, runs)


def _groups(evaluation: Evaluation, palette: Mapping[str, int], longest: float) -> list[of.Group]:
    """A group a task."""
    report = evaluation.report
    tasks = list(dict.fromkeys(m.task for m in report.measurements))
    everyone = evaluation.everyone().items()
    return [
        of.Group(
            tuple(Contender(name, tuple(m for m in ms if m.task == task), ()) for name, ms in everyone),
            palette,
            longest,
            report.label(task) if len(tasks) > 1 else "",
        )
        for task in tasks
    ]


def _headline(evaluation: Evaluation) -> str:
    """The result in a sentence, and large: of several tasks the mean over them."""
    report = evaluation.report
    counted = _counted(report)
    num_looping = sum(map(of.num_looping, counted.measurements))
    num_texts = sum(m.num_prompts for m in counted.measurements)
    means = counted.mean_acceptance_lengths()
    tasks = dict.fromkeys(m.task for m in counted.measurements)
    bounds = {f"{m.temperature:g}": m.acceptance.interval for m in counted.measurements if m.acceptance}
    is_interval = len(tasks) == 1 and not num_looping
    cards = []
    for temperature, mean in means.items():
        within = f"<small>95 %: {interval(bounds[temperature])}</small>" if is_interval else ""
        cards.append(f"<li><b>{mean:.2f}</b><small>tokens a round, T = {temperature}</small>{within}</li>")
    lengths = " and ".join(f"{mean:.2f} tokens at T = {temperature}" for temperature, mean in means.items())
    prompts = _many(counted.measurements[0].num_prompts, "prompt")
    where = f"{prompts} of {report.label(next(iter(tasks)))}" if len(tasks) == 1 else f"mean over {len(tasks)} tasks"
    loops = f"without the {num_looping} of {_many(num_texts, 'text')} that end in a loop"
    loops = loops if num_looping else f"none of {_many(num_texts, 'text')} ends in a loop"
    said = (
        f"With {report.draft['name']}, a pass of {report.target['name']} yields {lengths or 'nothing that counts'}, "
        f"instead of 1 ({where}, {loops})."
    )
    return f'<p>{text(said)}</p><ul class="cards">{"".join(cards)}</ul>'


def _counted(report: EvalReport) -> EvalReport:
    """The real tasks alone, their first turns; where all are synthetic, all of them."""
    prompts = report.settings.get("prompts")
    first = [m for m in report.measurements if prompts is None or m.task in prompts]
    real = tuple(m for m in first if report.label(m.task) == m.task)
    return replace(report, measurements=real) if real else replace(report, settings={})


def _result(evaluation: Evaluation, groups: Sequence[of.Group]) -> str:
    tables = "".join(map(of.result_table, groups))
    counted = _counted(evaluation.report)
    if len({m.task for m in counted.measurements}) == 1:
        return tables
    everyone = {name: replace(evaluation.report, measurements=ms) for name, ms in evaluation.everyone().items()}
    means = {name: _counted(report).mean_acceptance_lengths() for name, report in everyone.items()}
    rows = [(name, None, [number(lengths.get(t)) for t in means[DRAFT]]) for name, lengths in means.items() if lengths]
    caption = "Mean over tasks, synthetic ones and texts that loop left out"
    return tables + table(caption, [f"T = {t}" for t in means[DRAFT]], {"": rows})


def _each(draw: of.Draw) -> Callable[[Evaluation, Sequence[of.Group]], list[Figure]]:
    return lambda _, groups: [figure for group in groups for figure in group.figures(draw)]


def _along(evaluation: Evaluation, groups: Sequence[of.Group]) -> list[Figure]:
    """Acceptance by the place in the answer, then by its length, or the prompt's where tasks say it."""
    figures = _each(partial(_by_place, evaluation))(evaluation, groups)
    is_long = any(m.task.startswith("long:") for m in evaluation.report.measurements)
    of_length = _by_prompt if is_long else _each(partial(_by_answer, evaluation))
    return figures + of_length(evaluation, groups)


def _by_place(evaluation: Evaluation, rows: Sequence[of.Row], _: float) -> list[tuple[str, Chart]]:
    texts = [(row, evaluation.texts_of(row.name, row.m)) for row in rows if row.m.acceptance]
    width = step_width([text for _, found in texts for text in found])
    buckets = [(row, by_start(found, width)) for row, found in texts]
    end = float(max((b.high for _, found in buckets for b in found), default=width))
    curves, guide = [_curve(*pair) for pair in buckets], ((0.0, 1.0), (end, 1.0))
    return [("By place", line_chart(curves, "new token", "tokens a round", guide))]


def _curve(row: of.Row, buckets: Sequence[Bucket]) -> Series:
    points = tuple(((b.low + b.high) / 2, b.mean_acceptance_length) for b in buckets)
    notes = (
        f"{_many(b.count, 'round')} from token {b.low} to {b.high - 1}: {b.mean_acceptance_length:.2f}" for b in buckets
    )
    return Series(row.name, points, row.colour, tuple(notes))


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _by_answer(evaluation: Evaluation, rows: Sequence[of.Row], longest: float) -> list[tuple[str, Chart]]:
    own, found = rows[0], by_length(evaluation.texts_of(rows[0].name, rows[0].m))
    intervals = [of.whiskers(f"{b.low} to {b.high - 1} tokens, {_many(b.count, 'text')}", b, own.colour) for b in found]
    return [("By length of the answer", interval_chart(intervals, of.LENGTH, longest))]


def _by_prompt(evaluation: Evaluation, _: Sequence[of.Group]) -> list[Figure]:
    found: dict[float, list[Interval]] = {}
    for m in evaluation.report.measurements:
        if m.task.startswith("long:") and (a := m.acceptance):
            found.setdefault(m.temperature, []).append(of.whiskers(m.task, a, 0))
    return [Figure(f"By length of the prompt, T = {t:g}", interval_chart(rows, of.LENGTH)) for t, rows in found.items()]


def _learned(evaluation: Evaluation, _: Sequence[of.Group]) -> list[Figure]:
    """The draft's loss, and its estimated acceptance length beside the decoded one."""
    loss, estimated = (
        tuple((row["step"], row[key]) for row in evaluation.training if row.keys() >= {"step", key})
        for key in ("loss", "acceptance_length")
    )
    curves, level = [Series("estimated", estimated, 0)], _counted(evaluation.report).mean_acceptance_lengths().get("1")
    if estimated and level:
        curves.append(Series("decoded", ((estimated[0][0], level), (estimated[-1][0], level)), 4))
    charts = (("Loss", [Series("loss", loss, 0)], "loss"), ("Acceptance length", curves, "tokens a round"))
    figures = [Figure(title, line_chart(series, "step", label)) for title, series, label in charts]
    return figures if evaluation.training else []


def _paired(evaluation: Evaluation, _: Sequence[of.Group]) -> list[Figure]:
    """What the evaluation itself compared."""
    pairings = evaluation.report.pairings
    return [Figure(f"minus {pairings[0].folder}", _forest(pairings))] if pairings else []


def _versus(first: Evaluation, second: Evaluation) -> list[Figure]:
    """The drafts of two evaluations on the same prompts: every task at every temperature, then every prompt."""
    shared, _ = find_shared(second, first.report.target, first.report.settings)
    pairings = pair_up(first.texts, second, shared)
    figures = [Figure(f"{first.folder} minus {second.folder}", _forest(pairings))]
    for keys, pairing in zip(shared, pairings, strict=True):
        pairs = [(_mean(first.texts[key].rounds), _mean(second.texts[key].rounds)) for key in keys]
        points = tuple(enumerate(sorted(a - b for a, b in pairs if a and b)))
        notes = tuple(f"{difference:+.2f}" for _, difference in points)
        dots = Series("a prompt", tuple((float(x), y) for x, y in points), 0, notes, is_joined=False)
        guide = ((0.0, 0.0), (float(max(1, len(points) - 1)), 0.0))
        chart = line_chart([dots], "prompts, sorted", "difference, tokens a round", guide)
        figures.append(Figure(f"Each prompt, {pairing.task}, T = {pairing.temperature:g}", chart))
    return figures


def _forest(pairings: Sequence[Pairing]) -> Chart:
    rows = []
    for p in pairings:
        name, (low, high) = f"{shorten(p.task, 12)}, T = {p.temperature:g}", p.comparison.interval
        rows.append(Interval(f"{name}, p = {p.comparison.p_value:.3f}", low, p.comparison.difference, high, 0))
    return interval_chart(rows, "difference (tokens a round)", is_difference=True)


def _checks(group: of.Group) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in difference_lines(group.contenders))
    return of.checks_table(group) + (f'<ul class="note">{lines}</ul>' if lines else "")


def _excerpt(evaluation: Evaluation, decode: Callable[[Sequence[int]], str] | str) -> Part:
    """The draft's typical answer, its first ``LONGEST_TOKENS``, or why it is not shown."""
    key = typical_text(evaluation)
    if key is None or isinstance(decode, str):
        return Part(missing=NOTHING if key is None else str(decode))
    whole = evaluation.texts[key]
    where = f"{key.task}, prompt {key.prompt_index}, T = {key.temperature:g}"
    where += f", the first {LONGEST_TOKENS} tokens" if whole.num_tokens > LONGEST_TOKENS else ""
    shown = replace(whole, ids_T=whole.ids_T[:LONGEST_TOKENS])
    return Part(html=f"<h3>{text(where)}</h3>{of.excerpt(pieces(shown, decode))}")


def _provenance(evaluation: Evaluation) -> dict[str, object]:
    report = evaluation.report
    parts = {"folder": str(evaluation.folder), "target": report.target, "draft": report.draft}
    return parts | {"settings": report.settings} | dict(report.provenance)


def _mean(rounds: Sequence[Round]) -> float:
    """A text's own mean acceptance length, 0 without a round."""
    return sum(counts.acceptance_length for counts in rounds) / len(rounds) if rounds else 0.0


DRAWN: Sequence[tuple[str, Callable[[Evaluation, Sequence[of.Group]], list[Figure]], str, str]] = (
    ("Tokens a round", _each(of.lengths), NOTHING, of.LENGTH_NOTE),
    ("Where a round ends", _each(of.positions), NOTHING, of.POSITION_NOTE),
    ("Accepted drafts a round", _each(of.histograms), NOTHING, of.HISTOGRAM_NOTE),
    ("How far confidence can be believed", _each(of.reliability), "no draft says how sure it is", of.CONFIDENCE_NOTE),
    ("Along the answer", _along, NOTHING, ALONG_NOTE),
    ("What a round costs", _each(of.costs), NOTHING, of.COST_NOTE),
    ("Teacher-forced and decoded", _each(of.forced), "no teacher-forced estimate was made", of.FORCED_NOTE),
    ("How the draft learned", _learned, "no metrics.jsonl lies beside the draft", LEARNED_NOTE),
    ("Paired differences", _paired, "the evaluation was not run --against another", PAIRED_NOTE),
)
"""Title, what draws a run's part, why it may be missing, and the note."""
TABLES = {"What a round costs": of.speed_table, "Teacher-forced and decoded": of.gap_table}
"""What of a group stands below the figures of a section."""
