"""The folder of a finished evaluation, read whole and checked; and two of them compared prompt by prompt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from dspark.config import describe_validation
from dspark.errors import ConfigError, RecordError
from dspark.eval.measure import DRAFT, Measurement
from dspark.eval.records import JOURNAL_FILE, TextKey, keys_of, read_texts
from dspark.eval.report import EvalReport, Pairing
from dspark.eval.statistics import compare_pairs
from dspark.eval.timing import DecodedText

REPORT_FILE = "report.json"
Facts = Mapping[str, Any]
DRAWN = ("seed", "is_thinking", "max_new_tokens", "top_k", "top_p")
"""What decides, beside the drafts, how texts come about."""


class _Prompts(BaseModel):
    count: int
    sha256: str


class _Settings(BaseModel):
    prompts: dict[str, _Prompts]
    temperatures: tuple[float, ...]


class _Model(BaseModel):
    name: str


class _Named(BaseModel):
    """What is read of the parts of a report that are not measured."""

    target: _Model
    draft: _Model
    settings: _Settings


@dataclass(frozen=True)
class Evaluation:
    """A report and its texts, and of the draft's training what its log says, if that is known."""

    folder: Path
    report: EvalReport
    texts: Mapping[TextKey, DecodedText]
    training: Sequence[Mapping[str, float]] = ()

    def everyone(self) -> dict[str, tuple[Measurement, ...]]:
        """The measurements of every contender, the draft's first."""
        return {DRAFT: self.report.measurements, **self.report.baselines}

    def texts_of(self, contender: str, m: Measurement) -> list[DecodedText]:
        """The texts that a measurement counts, in the order of the prompts."""
        return [self.texts[key] for key in keys_of(m.task, m.temperature, contender, m.num_prompts)]


def read_evaluation(folder: Path) -> Evaluation:
    """The evaluation in a folder that ``dspark eval --out`` wrote.
    Raises: ConfigError when there is none; RecordError when its report or its journal is damaged or they do not belong
    together.
    """
    path = folder / REPORT_FILE
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected the folder of a finished dspark eval --out")
    try:
        report = TypeAdapter(EvalReport).validate_json(path.read_bytes())
        _Named.model_validate(report, from_attributes=True)
        json.dumps(asdict(report), allow_nan=False)
    except ValueError as error:
        problem = describe_validation(error) if isinstance(error, ValidationError) else error
        raise RecordError(f"{path}: not the report of an evaluation ({problem}); evaluate again") from error
    evaluation = Evaluation(folder, report, read_texts(folder / JOURNAL_FILE))
    _check_texts(evaluation)
    return evaluation


def _check_texts(evaluation: Evaluation) -> None:
    report, texts = evaluation.report, evaluation.texts
    measured = [(m.task, m.temperature) for m in report.measurements]
    if not measured:
        raise RecordError(f"{evaluation.folder / REPORT_FILE}: nothing was measured; evaluate again")
    for name, measurements in evaluation.everyone().items():
        if [(m.task, m.temperature) for m in measurements] != measured:
            raise RecordError(f"{evaluation.folder / REPORT_FILE}: {name} was measured on other tasks; evaluate again")
        for m in measurements:
            keys = keys_of(m.task, m.temperature, name, m.num_prompts)
            lengths = [counts.acceptance_length for key in keys if key in texts for counts in texts[key].rounds]
            expected = (m.acceptance.num_rounds, m.acceptance.num_tokens) if m.acceptance else (0, 0)
            if not keys or not texts.keys() >= set(keys) or (len(lengths), sum(lengths)) != expected:
                place = f"{evaluation.folder / JOURNAL_FILE}: {name} on {m.task} at T = {m.temperature:g}"
                raise RecordError(f"{place} has other texts than {REPORT_FILE} counts; evaluate again")


def find_shared(there: Evaluation, of_target: Facts, settings: Facts) -> tuple[list[list[TextKey]], list[str]]:
    """What an earlier evaluation shares with one whose report will hold ``of_target`` and ``settings`` (JSON values).
    Returns: the keys of every task and temperature that both have, and what it has not of the other's, in words.
    Raises: ConfigError for one of another target, of other prompts, drawn in another way, or with no task at a
    temperature in common.
    """
    folder, theirs = there.folder, there.report.settings
    _check_alike(f"{folder}: target", there.report.target, of_target, ("fingerprint", "template_fingerprint"))
    _check_alike(f"{folder}: settings", theirs, settings, DRAWN)
    drafted = {(m.task, m.temperature) for m in there.report.measurements if m.acceptance}
    shared, lacking = [], []
    for task, prompts in settings["prompts"].items():
        for temperature in settings["temperatures"]:
            if (task, temperature) in drafted:
                _check_alike(f"{folder}: prompts of {task}", theirs["prompts"][task], prompts, ("sha256",))
                shared.append(keys_of(task, temperature, DRAFT, prompts["count"]))
            else:
                lacking.append(f"{task} at T = {temperature:g}")
    if not shared:
        raise ConfigError(f"{folder}: holds none of these tasks at these temperatures; compare what was measured alike")
    return shared, lacking


def pair_up(own: Mapping[TextKey, DecodedText], there: Evaluation, shared: list[list[TextKey]]) -> tuple[Pairing, ...]:
    """Compare the draft of ``own`` texts with another evaluation's, for every task and temperature they share."""
    found = []
    for keys in shared:
        comparison = compare_pairs(*({key: part[key].rounds for key in keys} for part in (own, there.texts)))
        found.append(Pairing(keys[0].task, keys[0].temperature, str(there.folder), comparison))
    return tuple(found)


def _check_alike(what: str, there: Facts, here: Facts, names: tuple[str, ...]) -> None:
    for name in names:
        if there.get(name) != here.get(name):
            raise ConfigError(f"{what} had {name} {there.get(name)!r}, this evaluation has {here.get(name)!r}")
