"""dspark calibrate: temperatures for a draft's confidences, and how many drafted tokens are worth verifying."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from dspark.decode.scheduler import StepTimes
from dspark.errors import ConfigError, RecordError
from dspark.eval.calibration import temperatures as sts
from dspark.eval.calibration.replay import BatchRates, batch_rates
from dspark.eval.evaluation import Evaluation, read_evaluation
from dspark.eval.measure import DRAFT
from dspark.files import write_whole

SPLIT_SEED = 980406
STEP_TIMES_HELP = "JSON of dspark bench verify, or of seconds by number of tokens: also find the best budgets."


def calibrate(
    runs: Annotated[list[Path], typer.Argument(help="What dspark eval --out wrote.", metavar="EVAL_FOLDER")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The temperatures, as JSON that SGLang reads.")],
    step_times: Annotated[Path | None, typer.Option(dir_okay=False, help=STEP_TIMES_HELP)] = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="A PNG of confidence against acceptance.")] = None,
) -> None:
    """Fit a temperature to every slot's confidence on one half of the prompts, and test them on the other.

    All rounds of the draft count, whatever their task and temperature: give evaluations that decode as the server will.
    A row of the table is about the product of the confidences up to a slot (the last row pools the slots): the share of
    rounds that accepted all of these slots, then mean, expected calibration error (20 bins) and AUROC of the product,
    before and after.

    With --step-times the other half is replayed for 1, 2, 4, ... texts in step, as if what follows a round did not
    depend on how much of it was verified. The second table has tokens a second: undrafted is without any draft, whole
    with all drafted tokens verified (- where so many were not timed), budgeted with the best number of them a step,
    lagged with the best by the confidences of two rounds before, admitted by Algorithm 1 of the paper.
    """
    times = StepTimes.read(step_times) if step_times else None
    evaluations = [read_evaluation(folder) for folder in runs]
    texts = _drafted(evaluations)
    try:
        fitted, tested = sts.split_by_prompt(texts, SPLIT_SEED)
        fit_rounds, test_rounds = (sum(half, ()) for half in (fitted, tested))
        temperatures = sts.fit_temperatures(fit_rounds)
        before, after = (sts.product_calibrations(test_rounds, t) for t in ([1.0] * len(temperatures), temperatures))
    except ValueError as error:
        raise RecordError(f"{', '.join(map(str, runs))}: {error}") from error
    rates = list(batch_rates(tested, temperatures, times)) if times else []
    measured = [m for evaluation in evaluations for m in evaluation.report.measurements]
    dataset = ", ".join(dict.fromkeys(f"{m.task} at T = {m.temperature:g}" for m in measured))
    eces = {"ece_before": [c.ece for c in before[:-1]], "ece_after": [c.ece for c in after[:-1]]}
    facts = {"temperatures": temperatures, "dataset": dataset, "num_samples": len(fit_rounds)}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, sts.Temperatures.model_validate(facts | eces).model_dump_json(indent=2) + "\n")
    columns: dict[str, Sequence[float | None]] = {"slot": [*range(len(temperatures)), None]}
    columns |= {"temperature": [*temperatures, None], "accepted": [c.acceptance for c in before]}
    for name, field in (("mean", "mean_confidence"), ("ECE", "ece"), ("AUROC", "auroc")):
        columns |= {name: [getattr(c, field) for c in before], f"{name}\nafter": [getattr(c, field) for c in after]}
    console = Console(markup=False, emoji=False)
    halves = f"fitted on {len(fit_rounds)} rounds, tested on {len(test_rounds)} of other prompts"
    console.print(_table(f"{dataset}: {halves}", columns))
    if rates:
        console.print(_table("tokens a second", dict(zip(BatchRates._fields, zip(*rates, strict=True), strict=True))))
    if plot:
        from dspark.eval.page.plots import png, styled  # matplotlib is heavy, and only a picture needs it
        from dspark.eval.page.sections import reliability_plot

        curves = [("before", 0, before[-1]), ("after", 1, after[-1])]
        picture = styled(reliability_plot)(curves, "product of confidences")
        plot.parent.mkdir(parents=True, exist_ok=True)
        write_whole(plot, png(picture, "Confidence and acceptance", dataset))


def _drafted(evaluations: Sequence[Evaluation]) -> list[sts.PromptRounds]:
    """The draft's texts. A later turn goes with its conversation's first, where every conversation has it.
    Raises: ConfigError for evaluations of several drafts, or one given twice.
    """
    models = {(str(e.report.target.get("fingerprint")), str(e.report.draft.get("fingerprint"))) for e in evaluations}
    if len(models) > 1 or len({evaluation.folder.resolve() for evaluation in evaluations}) < len(evaluations):
        raise ConfigError("EVAL_FOLDER: expected different folders, all of one draft on one target")
    texts = [item for evaluation in evaluations for item in evaluation.texts.items() if item[0].contender == DRAFT]
    return [((key.task.partition(", turn ")[0], key.prompt_index), text.rounds) for key, text in texts if text.rounds]


def _table(title: str, columns: Mapping[str, Sequence[float | None]]) -> Table:
    """Numbers by the names of their columns."""
    right = (Column(name, justify="right") for name in columns)
    table = Table(*right, title=title, title_justify="left", box=SIMPLE, collapse_padding=True)
    for row in zip(*columns.values(), strict=True):
        digits = (3 if isinstance(n, float) and n < 10 else 0 for n in row)
        table.add_row(*("-" if n is None else f"{n:.{d}f}" for n, d in zip(row, digits, strict=True)))
    return table
