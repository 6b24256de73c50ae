"""What was measured, as JSON for machines and rich tables for people."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from dspark.eval.comparison import Contender
from dspark.eval.measure import Measurement
from dspark.files import write_whole


@dataclass(frozen=True)
class EvalReport:
    """One draft measured on its target, with everything needed to measure it again."""

    target: Mapping[str, object]
    draft: Mapping[str, object]
    settings: Mapping[str, object]
    provenance: Mapping[str, object]
    measurements: tuple[Measurement, ...]

    def mean_acceptance_lengths(self) -> dict[str, float]:
        """Macro mean over tasks at each temperature; none for plain decoding. Source: DeepSpec (dspark.md 7.1)."""
        lengths: dict[str, list[float]] = {}
        for m in self.measurements:
            if m.acceptance:
                lengths.setdefault(f"{m.temperature:g}", []).append(m.acceptance.mean_acceptance_length)
        return {temperature: sum(found) / len(found) for temperature, found in lengths.items()}


def write_json(report: EvalReport, path: Path) -> None:
    """Write the report whole or not at all; numbers that are not finite are refused by an assertion."""
    tree = asdict(report) | {"macro_mean_acceptance_length": report.mean_acceptance_lengths()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(tree, indent=2, allow_nan=False) + "\n")


def task_tables(report: EvalReport) -> list[Table]:
    """A table a task, with a column a temperature: lengths, counts, speed, and both acceptances of every slot."""
    return [
        _task_table(f"{task}: {report.draft['name']} on {report.target['name']}", list(measurements))
        for task, measurements in groupby(report.measurements, key=lambda m: m.task)
    ]


def _task_table(title: str, measurements: Sequence[Measurement]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE)
    table.add_column(f"{measurements[0].num_prompts} prompts")
    for m in measurements:
        table.add_column(f"T = {m.temperature:g}", justify="right", no_wrap=True)
    drafted = [m.acceptance for m in measurements if m.acceptance]
    assert len(drafted) == len(measurements), "plain decoding has no acceptance; see comparison_table"
    for name, cells in (
        ("acceptance length, bonus token included", [number(a.mean_acceptance_length) for a in drafted]),
        ("  95 % interval over prompts", [interval(a.interval) for a in drafted]),
        ("  without rounds that the end of the text cut", [number(a.mean_acceptance_length_uncut) for a in drafted]),
        ("  without texts that end in a loop", [number(m.mean_acceptance_length_without_loops) for m in measurements]),
        ("accepted drafts a round", [number(a.mean_accepted_drafts) for a in drafted]),
        ("rounds", [str(a.num_rounds) for a in drafted]),
        ("new tokens", [str(m.new_tokens) for m in measurements]),
        ("tokens/s, one prompt at a time", [f"{m.tokens_per_second:.1f}" for m in measurements]),
        ("texts that end in a loop", [f"{m.looping_share:.0%}" for m in measurements]),
    ):
        table.add_row(name, *cells)
    table.add_section()
    for slot in range(max(len(a.survival) for a in drafted)):
        pairs = [f"{_at(a.survival, slot)}  {_at(a.conditional, slot)}" for a in drafted]
        table.add_row(f"slot {slot}: survival, conditional acceptance", *pairs)
    table.add_section()
    for accepted in range(max(len(a.histogram) for a in drafted)):
        shares = [_at([n / a.num_rounds for n in a.histogram], accepted) for a in drafted]
        table.add_row(f"share of rounds with {accepted} accepted drafts", *shares)
    return table


def _at(values: Sequence[float | None], place: int) -> str:
    return number(values[place]) if place < len(values) else "-"


def comparison_table(contenders: Sequence[Contender], title: str) -> Table:
    """One row a contender: acceptance length with its interval, and speed, at every temperature."""
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
    return table


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
