"""What was measured, as JSON for machines and rich tables for people."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from dspark.eval.measure import DRAFT, Measurement
from dspark.eval.statistics import PairedComparison
from dspark.eval.tables import render
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


def printed(report: EvalReport, slow: Sequence[str] = (), lacking: Sequence[str] = ()) -> list[Table | str]:
    """What is printed of a report: of every task tables of the draft, of all ways to decode and of their times; the
    greedy texts that differ; and what was compared with another evaluation. A table of 80 characters has room for two
    temperatures. ``slow``: ways whose rounds the host sees through; ``lacking``: what the other evaluation has not.
    """
    everyone, tasks = {**report.baselines, DRAFT: report.measurements}, []
    for task in dict.fromkeys(m.task for m in report.measurements):
        ways = [(name, [m for m in ms if m.task == task]) for name, ms in everyone.items()]
        places = range(0, len(ways[0][1]), 2)
        twos = [[(name, ms[place : place + 2]) for name, ms in ways] for place in places]
        tasks.append({"label": report.label(task), "ways": ways, "twos": twos})
    words = {"phase_columns": phase_columns, "differences": difference_lines, "slow": slow, "lacking": lacking}
    return render(Path(__file__).with_name("tables.j2"), report=report, tasks=tasks, **words)


PHASES = (("prefill",), ("draft",), ("verify", "cycle"), ("commit", "update"), ("other",))
"""What one column counts: a draft's context update is with the commit, a round that is not divided with the verify."""


def phase_columns(phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds of every column of ``PHASES``, in its order."""
    return {group[0]: sum(phases.get(name, 0.0) for name in group) for group in PHASES}


def difference_lines(everyone: Mapping[str, Sequence[Measurement]], limit: int = 10) -> list[str]:
    """A line for each text that differs, faults first; after ``limit`` lines only how many more there are."""
    found = [(d, name, m) for name, ms in everyone.items() for m in ms if m.equality for d in m.equality.differences]
    found.sort(key=lambda item: item[0].is_tie)
    lines = [
        f"{name}, {m.task}: prompt {d.prompt} leaves plain decoding at new token {d.position}, "
        f"by a logit {d.gap:.2g} below the target's largest: {'rounding' if d.is_tie else 'A FAULT'}"
        for d, name, m in found[:limit]
    ]
    return lines + [f"and {len(found) - limit} more"] * (len(found) > limit)
