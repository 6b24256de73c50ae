"""What was measured, as JSON for machines and rich tables for people."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from rich.box import SIMPLE
from rich.table import Table

from dspark.eval.comparison import Contender
from dspark.eval.confidence import Calibration
from dspark.eval.measure import Measurement
from dspark.eval.pairing import Pairing
from dspark.files import write_whole

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class EvalReport:
    """One draft measured on its target, with everything needed to measure it again.
    ``baselines``: the same tasks and temperatures in the same order, decoded otherwise; by name. ``pairings``: the
    draft against another evaluation's, prompt by prompt.
    """

    target: Mapping[str, object]
    draft: Mapping[str, object]
    settings: Mapping[str, Any]
    provenance: Mapping[str, object]
    measurements: tuple[Measurement, ...]
    baselines: Mapping[str, tuple[Measurement, ...]] = field(default_factory=dict)
    pairings: tuple[Pairing, ...] = ()

    def label(self, task: str) -> str:
        """A task's name as it is shown: synthetic ones say so."""
        found = self.settings.get("prompts", {}).get(task, {})
        return f"{task} (synthetic)" if found.get("is_synthetic") else task

    def mean_acceptance_lengths(self) -> dict[str, float]:
        """Macro mean over real tasks at each temperature; none for plain decoding. Source: DeepSpec (dspark.md 7.1)."""
        lengths: dict[str, list[float]] = {}
        for m in self.measurements:
            if m.acceptance and self.label(m.task) == m.task:
                lengths.setdefault(f"{m.temperature:g}", []).append(m.acceptance.mean_acceptance_length)
        return {temperature: sum(found) / len(found) for temperature, found in lengths.items()}


def write_json(report: EvalReport, path: Path) -> None:
    """Write the report whole or not at all; numbers that are not finite are refused by an assertion."""
    tree = asdict(report) | {"macro_mean_acceptance_length": report.mean_acceptance_lengths()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(tree, indent=2, allow_nan=False) + "\n")


def task_tables(report: EvalReport) -> list[Table]:
    """Tables of every task, two temperatures each: lengths, counts, speed, and both acceptances of every slot."""
    return [
        _task_table(f"{report.label(task)}: {report.draft['name']} on {report.target['name']}", some)
        for task, measurements in groupby(report.measurements, key=lambda m: m.task)
        for some in _in_twos(list(measurements))
    ]


def _in_twos(items: Sequence[ItemT]) -> list[Sequence[ItemT]]:
    """What a line of 80 characters has room for."""
    return [items[start : start + 2] for start in range(0, len(items), 2)]


def _task_table(title: str, measurements: Sequence[Measurement]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE)
    table.add_column(f"{measurements[0].num_prompts} prompts")
    for m in measurements:
        table.add_column(f"T = {m.temperature:g}", justify="right", no_wrap=True)
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
        ("tokens/s, one prompt at a time", [f"{m.tokens_per_second:.1f}" for m in measurements]),
        ("texts that end in a loop", [f"{m.looping_share:.0%}" for m in measurements]),
    ):
        table.add_row(name, *cells)
    table.add_section()
    sure = [m.confidence.overall if m.confidence else None for m in measurements]
    if any(sure):
        table.add_row("confidence: ECE, AUROC, Brier", *map(_calibration, sure))
        table.add_section()
    for slot in range(max(len(a.survival) for a in drafted)):
        pairs = [f"{_at(a.survival, slot)}  {_at(a.conditional, slot)}" for a in drafted]
        table.add_row(f"slot {slot}: survival, conditional", *pairs)
    table.add_section()
    for accepted in range(max(len(a.histogram) for a in drafted)):
        shares = [_at([n / a.num_rounds for n in a.histogram], accepted) for a in drafted]
        table.add_row(f"rounds with {accepted} accepted drafts", *shares)
    return table


def _calibration(found: Calibration | None) -> str:
    return "-" if found is None else f"{found.ece:.3f}  {number(found.auroc)}  {found.brier:.3f}"


def pairing_table(pairings: Sequence[Pairing]) -> Table:
    """A row a task and temperature: both drafts' acceptance lengths on the same prompts, and their difference."""
    table = Table(title=f"against {pairings[0].folder}", title_justify="left", caption_justify="left", box=SIMPLE)
    table.add_column("task", overflow="fold")
    for name in ("T", "prompts", "this", "that", "difference (95 % interval)", "p"):
        table.add_column(name, justify="right", no_wrap=True)
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
    columns = [_in_twos(contender.measurements) for contender in contenders]
    groups = zip(*columns, strict=True)
    return [
        _comparison_table([replace(c, measurements=tuple(m)) for c, m in zip(contenders, some, strict=True)], title)
        for some in groups
    ]


def _comparison_table(contenders: Sequence[Contender], title: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE)
    table.add_column("decoding", no_wrap=True)
    for m in contenders[0].measurements:
        table.add_column(f"acceptance, T = {m.temperature:g}\n(95 % interval)", justify="right", no_wrap=True)
        table.add_column("tok/s", justify="right", no_wrap=True)
    for contender in contenders:
        cells: list[str] = []
        for m in contender.measurements:
            a = m.acceptance
            cells += [f"{number(a.mean_acceptance_length)} ({interval(a.interval)})" if a else "1"]
            cells += [f"{m.tokens_per_second:.1f}"]
        table.add_row(contender.name, *cells)
    table.caption = (
        f"acceptance: mean acceptance length, bonus token included\ntexts that end in a loop: {loops(contenders)}"
    )
    if compared := greedy_equality(contenders):
        table.caption += f"\ngreedy texts unlike plain decoding's: {compared}"
    return table


def greedy_equality(contenders: Sequence[Contender]) -> str:
    """How many greedy texts of each contender differ from plain decoding's, and why; empty if none were compared."""
    found = []
    for contender in contenders:
        for m in contender.measurements:
            if m.equality:
                ties, faults = m.equality.mismatches - m.equality.faults, m.equality.faults
                why = f" ({ties} by rounding, {faults} faulty)" if m.equality.mismatches else ""
                found.append(f"{contender.name} {m.equality.mismatches} of {m.num_prompts}{why}")
    return ", ".join(found)


def difference_lines(contenders: Sequence[Contender], limit: int = 10) -> list[str]:
    """A line for each text that differs, faults first; after ``limit`` lines only how many more there are."""
    found = [
        (
            d.is_tie,
            f"{contender.name}, {m.task}: prompt {d.prompt} leaves plain decoding at new token {d.position}, ",
            d,
        )
        for contender in contenders
        for m in contender.measurements
        if m.equality
        for d in m.equality.differences
    ]
    found.sort(key=lambda item: item[0])
    lines = [
        f"{where}where the target's two largest logits are {d.gap:.2g} apart: {'rounding' if is_tie else 'A FAULT'}"
        for is_tie, where, d in found[:limit]
    ]
    return lines + [f"and {len(found) - limit} more"] * (len(found) > limit)


def loops(contenders: Sequence[Contender]) -> str:
    """The largest share of looping texts among the contenders, at each temperature."""
    columns = zip(*(contender.measurements for contender in contenders), strict=True)
    return ", ".join(f"{max(m.looping_share for m in c):.0%} at T = {c[0].temperature:g}" for c in columns)


def number(value: float | None) -> str:
    """Two decimals, or a dash where there is nothing to say."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}"


def interval(bounds: tuple[float, float]) -> str:
    """An interval as text, two decimals."""
    return f"{bounds[0]:.2f} - {bounds[1]:.2f}"
