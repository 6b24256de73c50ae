"""The folder of a finished evaluation, read whole and checked before anything is drawn from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dspark.config import describe_validation
from dspark.errors import RecordError
from dspark.eval.measure import DecodedText, Measurement
from dspark.eval.pairing import DRAFT, REPORT_FILE, read_report
from dspark.eval.records import JOURNAL_FILE, TextKey, read_texts
from dspark.eval.report import EvalReport


@dataclass(frozen=True)
class _Prompts:
    count: int
    sha256: str


@dataclass(frozen=True)
class _Settings:
    prompts: Mapping[str, _Prompts]
    temperatures: tuple[float, ...]


@dataclass(frozen=True)
class _Target:
    name: str
    tokenizer_fingerprint: str


@dataclass(frozen=True)
class _Draft:
    name: str


@dataclass(frozen=True)
class _Named:
    """What a page takes from the parts of a report that are not measured."""

    target: _Target
    draft: _Draft
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
        return [self.texts[TextKey(m.task, m.temperature, contender, index)] for index in range(m.num_prompts)]


def read_evaluation(folder: Path) -> Evaluation:
    """The evaluation in a folder that ``dspark eval --out`` wrote.
    Raises: ConfigError when there is none; RecordError when its report or its journal is damaged or they do not belong
    together.
    """
    tree, path = read_report(folder), folder / REPORT_FILE
    try:
        report = TypeAdapter(EvalReport).validate_python(tree)
        TypeAdapter(_Named).validate_python(tree)
    except ValidationError as error:
        problem = describe_validation(error)
        raise RecordError(f"{path}: not the report of an evaluation ({problem}); evaluate again") from error
    evaluation = Evaluation(folder, report, read_texts(folder / JOURNAL_FILE))
    _check_texts(evaluation)
    return evaluation


def _check_texts(evaluation: Evaluation) -> None:
    report = evaluation.report
    measured = [(m.task, m.temperature) for m in report.measurements]
    if not measured:
        raise RecordError(f"{evaluation.folder / REPORT_FILE}: nothing was measured; evaluate again")
    for name, measurements in evaluation.everyone().items():
        if [(m.task, m.temperature) for m in measurements] != measured:
            raise RecordError(f"{evaluation.folder / REPORT_FILE}: {name} was measured on other tasks; evaluate again")
        for m in measurements:
            keys = [TextKey(m.task, m.temperature, name, index) for index in range(m.num_prompts)]
            num_rounds = sum(len(evaluation.texts[key].rounds) for key in keys if key in evaluation.texts)
            is_whole = bool(keys) and all(key in evaluation.texts for key in keys)
            if not is_whole or num_rounds != (m.acceptance.num_rounds if m.acceptance else 0):
                place = f"{evaluation.folder / JOURNAL_FILE}: {name} on {m.task} at T = {m.temperature:g}"
                raise RecordError(f"{place} has other texts than {REPORT_FILE} counts; evaluate again")
