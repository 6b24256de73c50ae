"""The dspark command: registers the commands and turns a user's mistake into one clear line."""

from pathlib import Path

import typer
from rich.console import Console

from dspark.cli.bench import bench, verify
from dspark.cli.bench.headline import headline
from dspark.cli.bench.record import record as bench_record
from dspark.cli.bench.train import train
from dspark.cli.chat import chat
from dspark.cli.demo import demo
from dspark.cli.doctor import doctor
from dspark.cli.eval import evaluate
from dspark.cli.export import export
from dspark.cli.export.importing import import_draft
from dspark.cli.plan import plan
from dspark.cli.prepare import prepare
from dspark.cli.record import record
from dspark.cli.report import report
from dspark.config import read_yaml
from dspark.errors import DsparkError, one_line

EXAMPLES = read_yaml(Path(__file__).with_name("examples.yaml"), "the examples")


def as_typed(examples: str) -> str:
    """Examples for a help text, whose lines the formatter leaves alone."""
    return "\b\n" + f"Examples:\n{examples.rstrip()}".replace("\n", "\n  ").replace("\n  \n", "\n")


app = typer.Typer(
    help="Train a DSpark draft for a frozen target and measure how many tokens a round it earns.",
    epilog=as_typed(EXAMPLES["dspark"]),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
for command in (demo, doctor, plan, prepare, record, evaluate, report, chat, export, import_draft):
    name = command.__name__.replace("evaluate", "eval").removesuffix("_draft")
    app.command(name, epilog=as_typed(EXAMPLES[name]))(command)
for measure in (verify, headline, train, bench_record):
    bench.command(epilog=as_typed(EXAMPLES["bench"][measure.__name__]))(measure)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run a command; a DsparkError, or a file that the system refuses, is one message on stderr and exit status 2."""
    try:
        app()
    except (DsparkError, OSError) as error:
        line = f"dspark: {one_line(error)}"
        Console(stderr=True, soft_wrap=True).print(line, style="bold red", markup=False, emoji=False, highlight=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
