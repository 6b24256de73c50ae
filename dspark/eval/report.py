"""What was measured, as JSON for machines and rich tables for people."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from dspark.eval.comparison import Contender
from dspark.eval.confidence import ConfidenceStatistics
from dspark.eval.measure import Measurement
from dspark.eval.statistics import PairedComparison
from dspark.files import write_whole


@dataclass(frozen=True)
class Pairing:
    """A task at a temperature: this evaluation's draft against that of ``folder``."""

    task: str
    temperature: float
    folder: str
    comparison: PairedComparison


@dataclass(frozen=True)
class EvalReport:
    """One draft measured on its target, with everything needed to measure it again.
    ``baselines``: the same tasks and temperatures in the same order, decoded otherwise; by name. ``pairings``: the
    draft against another evaluation's, prompt by prompt.
    """

    target: Mapping[str, object]
    draft: Mapping[str, object]
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    measurements: tuple[Measurement, ...]
    baselines: Mapping[str, tuple[Measurement, ...]] = field(default_factory=dict)
    pairings: tuple[Pairing, ...] = ()

    def label(self, task: str) -> str:
        """A task's name as it is shown: synthetic ones say so."""
        found = self.settings.get("prompts", {}).get(task, {})
        return f"{task} (synthetic)" if found.get("is_synthetic") else task

    def machine(self) -> str:
        """What decoded, in words."""
        settings, gpus = self.settings, self.provenance["hardware"]["gpus"]
        place = f"{settings['tp']} x {gpus[0]}" if gpus and settings["device"] != "cpu" else "CPU"
        return f"{settings['engine']} on {place}, {settings['batch_size']} at a time"

    def mean_acceptance_lengths(self) -> dict[str, float]:
        """Macro mean over real tasks (first turns) at each temperature, without the texts that loop, which flatter.
        Source: DeepSpec (dspark.md 7.1), which leaves no loops out.
        """
        lengths: dict[str, list[float]] = {}
        for m in self.measurements:
            is_first = m.task in self.settings.get("prompts", {m.task: None})
            if m.mean_acceptance_length_without_loops and is_first and self.label(m.task) == m.task:
                lengths.setdefault(f"{m.temperature:g}", []).append(m.mean_acceptance_length_without_loops)
        return {temperature: sum(found) / len(found) for temperature, found in lengths.items()}


def write_json(report: EvalReport, path: Path) -> None:
    """Write the report whole or not at all; numbers that are not finite are refused by an assertion."""
    tree = asdict(report) | {"macro_mean_acceptance_length": report.mean_acceptance_lengths()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(tree, indent=2, allow_nan=False) + "\n")


FORMULAS = (
    "acceptance length = tokens committed / rounds\n"
    "accepted drafts a round = (tokens committed - bonus tokens) / rounds\n"
    "a bonus token is the target's own behind the accepted drafts; the token after the prompt counts nowhere"
)


def task_tables(report: EvalReport) -> list[Table]:
    """Tables of every task, two temperatures each: lengths, counts, speed, and both acceptances of every slot."""
    names, groups = f"{report.draft['name']} on {report.target['name']}", groupby(report.measurements, lambda m: m.task)
    twos = ((task, some) for task, measurements in groups for some in _in_twos(list(measurements)))
    return [_task_table(f"{report.label(task)}: {names}", some) for task, some in twos]


def _in_twos(items: Sequence[Measurement]) -> list[Sequence[Measurement]]:
    """What a line of 80 characters has room for."""
    return [items[start : start + 2] for start in range(0, len(items), 2)]


def _task_table(title: str, measurements: Sequence[Measurement]) -> Table:
    table = _table(title, [f"T = {m.temperature:g}" for m in measurements], f"{measurements[0].num_prompts} prompts")
    drafted = [m.acceptance for m in measurements if m.acceptance]
    assert len(drafted) == len(measurements), "plain decoding has no acceptance; see comparison_tables"
    for name, cells in (
        ("acceptance length, bonus included", [number(a.mean_acceptance_length) for a in drafted]),
        ("  95 % interval over prompts", [interval(a.interval) for a in drafted]),
        ("  mean of the prompts' own means", [number(a.mean_acceptance_length_per_prompt) for a in drafted]),
        ("    95 % interval", [interval(a.interval_per_prompt) for a in drafted]),
        ("  without rounds cut by the end", [number(a.mean_acceptance_length_uncut) for a in drafted]),
        ("  without texts that loop", [number(m.mean_acceptance_length_without_loops) for m in measurements]),
        ("accepted drafts a round", [number(a.mean_accepted_drafts) for a in drafted]),
        ("rounds", [str(a.num_rounds) for a in drafted]),
        ("new tokens", [str(m.new_tokens) for m in measurements]),
        ("tokens/s", [f"{m.tokens_per_second:.1f}" for m in measurements]),
        ("texts that end in a loop", [f"{m.looping_share:.0%}" for m in measurements]),
    ):
        table.add_row(name, *cells)
    table.add_section()
    if any(sure := [m.confidence for m in measurements]):
        table.add_row("confidence: ECE, AUROC, Brier", *map(_calibration, sure))
        table.add_section()
    if any(gaps := [m.decoding_gap for m in measurements]):
        table.add_row("teacher forcing, of whole blocks", *[number(gap.forced) if gap else "-" for gap in gaps])
        table.add_row("  decoded less that, same rounds", *[f"{gap.difference:+.2f}" if gap else "-" for gap in gaps])
        table.add_row("    95 % interval", *[interval(gap.interval) if gap else "-" for gap in gaps])
        table.add_section()
    if any(m.equality for m in measurements):
        table.add_row("greedy texts unlike plain's", *map(_mismatches, measurements))
    table.add_section()
    for slot in range(max(len(a.survival) for a in drafted)):
        pairs = [f"{_at(a.survival, slot)}  {_at(a.conditional, slot)}" for a in drafted]
        table.add_row(f"slot {slot}: survival, conditional", *pairs)
    table.add_section()
    for accepted in range(max(len(a.histogram) for a in drafted)):
        shares = [_at([n / a.num_rounds for n in a.histogram], accepted) for a in drafted]
        table.add_row(f"rounds with {accepted} accepted drafts", *shares)
    table.caption = FORMULAS
    return table


def _mismatches(m: Measurement) -> str:
    if m.equality is None:
        return "-"
    ties, faults = m.equality.mismatches - m.equality.faults, m.equality.faults
    why = f" ({ties} by rounding, {faults} faulty)" if m.equality.mismatches else ""
    return f"{m.equality.mismatches} of {m.num_prompts}{why}"


def _calibration(found: ConfidenceStatistics | None) -> str:
    return f"{found.overall.ece:.3f}  {number(found.overall.auroc)}  {found.overall.brier:.3f}" if found else "-"


def pairing_table(pairings: Sequence[Pairing]) -> Table:
    """A row a task and temperature: both drafts' acceptance lengths on the same prompts, and their difference."""
    names = ("T", "prompts", "this", "that", "difference (95 % interval)", "p")
    table = _table(f"against {pairings[0].folder}", names, "task", min_width=None)
    for pairing in pairings:
        c = pairing.comparison
        gap = f"{c.difference:+.2f} ({c.interval[0]:+.2f} - {c.interval[1]:+.2f})"
        cells = (f"{pairing.temperature:g}", str(c.num_prompts), number(c.first), number(c.second), gap)
        table.add_row(pairing.task, *cells, f"{c.p_value:.4f}")
    table.caption = "p: how often swapping the two drafts in random prompts makes as large a difference"
    return table


def _at(values: Sequence[float | None], place: int) -> str:
    return number(values[place]) if place < len(values) else "-"


def comparison_tables(contenders: Sequence[Contender], title: str) -> list[Table]:
    """One row a contender: acceptance length with its interval, and speed; two temperatures a table."""
    return [
        _comparison_table([replace(c, measurements=tuple(m)) for c, m in zip(contenders, some, strict=True)], title)
        for some in zip(*(_in_twos(c.measurements) for c in contenders), strict=True)
    ]


def _comparison_table(contenders: Sequence[Contender], title: str) -> Table:
    at = [f"acceptance, T = {m.temperature:g}\n(95 % interval)" for m in contenders[0].measurements]
    table = _table(title, [name for acceptance in at for name in (acceptance, "tok/s")])
    for contender in contenders:
        cells: list[str] = []
        for m in contender.measurements:
            a = m.acceptance
            length = f"{number(a.mean_acceptance_length)} ({interval(a.interval)})" if a else "1"
            cells += [length, f"{m.tokens_per_second:.1f}"]
        table.add_row(contender.name, *cells)
    columns = zip(*(contender.measurements for contender in contenders), strict=True)
    loops = ", ".join(f"{max(m.looping_share for m in c):.0%} at T = {c[0].temperature:g}" for c in columns)
    table.caption = f"acceptance: mean acceptance length, bonus token included\ntexts that end in a loop: {loops}"
    if compared := [f"{c.name} {_mismatches(m)}" for c in contenders for m in c.measurements if m.equality]:
        table.caption += f"\ngreedy texts unlike plain decoding's: {', '.join(compared)}"
    return table


def speed_tables(contenders: Sequence[Contender], title: str) -> list[Table]:
    """A row a contender and temperature: first token, time per token and gain; then where the time went."""
    speeds = _table(title, ("T", "first", "mean", "median", "p99", "tok/s", "gain", "(pred.)"))
    phases = _table(f"{title}: where the time went", ("T", *(group[0] for group in PHASES)))
    phases.caption = "a round that the verifier runs as one, undivided, counts as verify"
    for contender in contenders:
        for m in contender.measurements:
            pace, gain = m.timing.time_per_token, m.speedup
            gained = [f"{gain.measured:.2f}", f"{gain.predicted:.2f}"] if gain else ["-", "-"]
            paces = [_milliseconds(v) for v in (pace.mean, pace.median, pace.p99)] if pace else ["-"] * 3
            first, speed = _milliseconds(m.timing.first_token.median), f"{m.tokens_per_second:.1f}"
            speeds.add_row(contender.name, f"{m.temperature:g}", first, *paces, speed, *gained)
            shares = phase_columns(m.timing.phase_seconds)
            whole = sum(shares.values())
            phases.add_row(contender.name, f"{m.temperature:g}", *(f"{s / whole:.1%}" for s in shares.values()))
    speeds.caption = (
        "milliseconds: to the first token (median of texts), then per token (of texts)\n"
        "gain: plain decoding's time per token over this one's, prefill left out\n"
        "(pred.): acceptance length / (a round's time in draft and target / a plain\n"
        "step's); what is missing of it: tokens cut off at the end, time elsewhere"
    )
    return [speeds, phases]


PHASES = (("prefill",), ("draft",), ("verify", "cycle"), ("commit", "update"), ("other",))
"""What one column counts: a draft's context update is with the commit, a round that is not divided with the verify."""


def _table(title: str, names: Sequence[str], first: str = "decoding", min_width: int | None = 14) -> Table:
    """Without rows yet: a column of names, which are folded where they are long, and one for each of ``names``."""
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE)
    table.add_column(first, overflow="fold", min_width=min_width)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def phase_columns(phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds of every column of ``PHASES``, in its order."""
    return {group[0]: sum(phases.get(name, 0.0) for name in group) for group in PHASES}


def difference_lines(contenders: Sequence[Contender], limit: int = 10) -> list[str]:
    """A line for each text that differs, faults first; after ``limit`` lines only how many more there are."""
    found = [(d, c.name, m) for c in contenders for m in c.measurements if m.equality for d in m.equality.differences]
    found.sort(key=lambda item: item[0].is_tie)
    lines = [
        f"{name}, {m.task}: prompt {d.prompt} leaves plain decoding at new token {d.position}, "
        f"by a logit {d.gap:.2g} below the target's largest: {'rounding' if d.is_tie else 'A FAULT'}"
        for d, name, m in found[:limit]
    ]
    return lines + [f"and {len(found) - limit} more"] * (len(found) > limit)


def number(value: float | None) -> str:
    """Two decimals, or a dash where there is nothing to say."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}"


def interval(bounds: tuple[float, float]) -> str:
    """An interval as text, two decimals."""
    return f"{bounds[0]:.2f} - {bounds[1]:.2f}"
