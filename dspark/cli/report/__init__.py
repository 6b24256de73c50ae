"""dspark report: evaluations as a page to look at, and their plots as pictures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from dspark.errors import CheckpointError, ConfigError, RecordError
from dspark.eval.evaluation import Evaluation, read_evaluation
from dspark.files import write_whole
from dspark.target.loading import locate_target
from dspark.target.tokenizer import load_tokenizer, tokenizer_fingerprint
from dspark.train.log import METRICS, Row

PAGE = "report.html"


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that dspark eval --out wrote.", metavar="RUN")],
    compare: Annotated[bool, typer.Option("--compare", help="Also compare them, prompt by prompt.")] = False,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="The page.  [default: RUN/report.html]")] = None,
) -> None:
    """Draw evaluations as one HTML page that needs no network and no script, and every plot as a PNG beside it.

    Several RUNs stand side by side; the first one names the page, and --compare sets its draft against the others. The
    pictures lie in a folder named as the page is, report_png for report.html.
    """
    places = [folder.resolve() for folder in runs]
    if twice := [folder for number, folder in enumerate(runs) if places[number] in places[:number]]:
        raise ConfigError(f"{twice[0]}: given twice; name every RUN once")
    if compare and len(runs) < 2:
        raise ConfigError(f"--compare: give two RUNs or more, found {len(runs)}")
    from dspark.eval.page.report import render_report  # matplotlib is heavy, and only a page needs it

    evaluations = [_with_training(read_evaluation(folder)) for folder in runs]
    html, pictures = render_report(evaluations, [_decoder(each.report.target) for each in evaluations], compare)
    drawn = {name: draw() for name, draw in pictures.items()}
    page = out or runs[0] / PAGE
    folder = page.with_name(f"{page.stem}_png")
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in drawn.items():
        write_whole(folder / f"{name}.png", picture)
    write_whole(page, html.encode(errors="replace"))  # a name of a file may be no text
    console = Console(soft_wrap=True, markup=False, emoji=False, highlight=False)
    console.print(f"{page}\n{len(drawn)} pictures in {folder}")


def _with_training(evaluation: Evaluation) -> Evaluation:
    """With the log of the draft's training, where it lies beside the draft."""
    path = Path(str(evaluation.report.draft["name"])).parent / METRICS
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []  # whole ones: a killed run may leave a part
    try:
        return replace(evaluation, training=list(map(TypeAdapter(Row).validate_json, lines)))
    except ValidationError as error:
        raise RecordError(f"{path}: not the log of a training; mend it or move it away") from error


def _decoder(target: Mapping[str, object]) -> Callable[[Sequence[int]], str] | str:
    """What makes ids into words, or why there is nothing: it takes the target's tokenizer."""
    try:
        folder = locate_target(str(target["name"]))
        is_same = tokenizer_fingerprint(folder) == target.get("tokenizer_fingerprint")
    except (CheckpointError, OSError):
        return f"the target {target['name']} is not on this machine, which has the words of its tokens"
    if not is_same:
        return f"the tokenizer of {target['name']} on this machine is not the one that was measured"
    tokenizer = load_tokenizer(folder)
    return lambda ids: str(tokenizer.decode(list(ids)))
