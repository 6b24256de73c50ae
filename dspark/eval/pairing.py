"""Two evaluations of the same prompts, compared prompt by prompt."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.decode.round import Round
from dspark.errors import ConfigError, RecordError
from dspark.eval.records import TextKey, read_rounds
from dspark.eval.statistics import PairedComparison, compare_pairs

REPORT_FILE, ROUNDS_FILE = "report.json", "rounds.parquet"
DRAFT = "draft"
"""The contender that an evaluation is about."""
DRAWN = ("seed", "is_thinking", "max_new_tokens", "top_k", "top_p")
"""What decides, beside the drafts, how texts come about."""


@dataclass(frozen=True)
class Pairing:
    """A task at a temperature: this evaluation's draft against that of ``folder``."""

    task: str
    temperature: float
    folder: str
    comparison: PairedComparison


@dataclass(frozen=True)
class Opponent:
    """An earlier evaluation: its rounds, what it shares with another as the keys of every task and temperature, and
    what it has not of the other's, in words.
    """

    folder: Path
    rounds: Mapping[TextKey, tuple[Round, ...]]
    shared: tuple[tuple[TextKey, ...], ...]
    lacking: tuple[str, ...]


def find_opponent(folder: Path, of_target: Mapping[str, Any], settings: Mapping[str, Any]) -> Opponent:
    """The evaluation in a folder, for one whose report will hold ``of_target`` and ``settings`` (JSON values).
    Raises: ConfigError when the folder holds none, one of another target, of other prompts, drawn in another way, or
    with no task at a temperature in common; RecordError as ``read_rounds``.
    """
    there = read_report(folder)
    _check_alike(f"{folder}: target", there["target"], of_target, ("fingerprint", "template_fingerprint"))
    _check_alike(f"{folder}: settings", there["settings"], settings, DRAWN)
    counted = {(m["task"], m["temperature"]): m["acceptance"] for m in there["measurements"]}
    shared, lacking = [], []
    for task, prompts in settings["prompts"].items():
        for temperature in settings["temperatures"]:
            if counted.get((task, temperature)):
                _check_alike(f"{folder}: prompts of {task}", there["settings"]["prompts"][task], prompts, ("sha256",))
                shared.append(tuple(TextKey(task, temperature, DRAFT, index) for index in range(prompts["count"])))
            else:
                lacking.append(f"{task} at T = {temperature:g}")
    if not shared:
        raise ConfigError(f"{folder}: holds none of these tasks at these temperatures; compare what was measured alike")
    rounds = read_rounds(folder / ROUNDS_FILE)
    for keys in shared:
        of_task = [counts for key in keys for counts in rounds.get(key, ())]
        found = len(of_task), sum(counts.acceptance_length for counts in of_task)
        expected = counted[keys[0].task, keys[0].temperature]
        if found != (expected["num_rounds"], expected["num_tokens"]):
            place = f"{folder / ROUNDS_FILE}: {keys[0].task} at T = {keys[0].temperature:g}"
            raise RecordError(f"{place} has other rounds than {REPORT_FILE} counts; evaluate again")
    return Opponent(folder, rounds, tuple(shared), tuple(lacking))


def pair_up(rounds: Mapping[TextKey, tuple[Round, ...]], opponent: Opponent) -> tuple[Pairing, ...]:
    """Compare this evaluation's draft with the opponent's, for every task at every temperature that both have."""
    found = []
    for keys in opponent.shared:
        first, second = ({key: part.get(key, ()) for key in keys} for part in (rounds, opponent.rounds))
        comparison = compare_pairs(first, second)
        found.append(Pairing(keys[0].task, keys[0].temperature, str(opponent.folder), comparison))
    return tuple(found)


def read_report(folder: Path) -> dict[str, Any]:
    """The report.json of an evaluation. Raises: ConfigError when there is none; RecordError when it is damaged."""
    path = folder / REPORT_FILE
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected the folder of a finished dspark eval --out")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(tree, allow_nan=False)
        if isinstance(tree["settings"]["prompts"], dict) and all(m["task"] for m in tree["measurements"]):
            return dict(tree)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(f"{path}: not the report of an evaluation ({error}); evaluate again") from error
    raise RecordError(f"{path}: not the report of an evaluation; evaluate again")


def _check_alike(what: str, there: Mapping[str, Any], here: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if there.get(name) != here.get(name):
            raise ConfigError(f"{what} had {name} {there.get(name)!r}, this evaluation has {here.get(name)!r}")
