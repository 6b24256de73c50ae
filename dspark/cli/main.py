"""The dspark command: registers the commands and turns a user's mistake into one clear line."""

from collections.abc import Callable

import typer
from rich.console import Console

from dspark.cli.bench import bench, verify
from dspark.cli.bench.headline import headline
from dspark.cli.bench.record import record as bench_record
from dspark.cli.bench.train import train
from dspark.cli.chat import chat
from dspark.cli.demo import demo
from dspark.cli.eval import evaluate
from dspark.cli.export import export
from dspark.cli.plan import plan
from dspark.cli.prepare import prepare
from dspark.cli.record import record
from dspark.cli.report import report
from dspark.errors import DsparkError, one_line

STAGES = """
dspark demo

dspark plan --config configs/nano.yaml --calibrate 20
dspark prepare --config configs/nano.yaml
dspark record --config configs/nano.yaml
accelerate launch train.py --config configs/nano.yaml
dspark eval --config configs/nano.yaml
"""
EXAMPLES: dict[Callable[..., None], str] = {
    demo: """
dspark demo
dspark demo --config my-demo.yaml
""",
    plan: """
dspark plan --config configs/nano.yaml --response-tokens 150
dspark plan --config configs/nano.yaml --calibrate 20
dspark plan --config configs/nano.yaml --set data.max_conversations=50000 --rates my-rates.yaml
""",
    prepare: """
dspark prepare --config configs/nano.yaml
dspark prepare --config configs/nano.yaml --set data.max_conversations=10 --set record.folder=runs/trial
dspark prepare --config configs/nano.yaml --show 3
dspark prepare --config RUN.yaml --as-given --leave-out-unusable
dspark prepare --config RUN.yaml --set "data.endpoints=[http://host:8000/v1]" --set data.served_model=NAME
""",
    record: """
dspark record --config configs/nano.yaml
dspark record --config configs/ling-3.0-flash.yaml --tp 4 --set record.taps=float8
dspark record --config configs/ling-3.0-flash.yaml --measure-fp8 DRAFT
dspark record --config configs/nano.yaml --repair
""",
    evaluate: """
dspark eval --target ling-3.0-nano --draft data/nano/draft --tasks heldout
dspark eval --target ling-3.0-nano --draft data/nano/draft --tasks my.jsonl --temperatures 0,0.6 --out runs/mine
dspark eval --target ling-3.0-nano --draft other --tasks my.jsonl --temperatures 0,0.6 --against runs/mine
dspark eval --target ling-3.0-nano --draft data/nano/draft --baselines plain,ngram,untrained,drafts:4 --max-prompts 8
dspark eval --target ling-3.0-flash --draft DRAFT --tasks gsm8k --temperatures 0 --baselines plain,mtp:3,mtp:5 --tp 4
dspark eval --config configs/nano.yaml --max-prompts 8 --temperatures 0.8 --top-k 40 --top-p 0.95
""",
    report: """
dspark report runs/nano/eval
dspark report --compare runs/mine runs/other --out compared.html
""",
    chat: """
dspark chat --target ling-3.0-nano --draft data/nano/draft
echo "def add(a, b):" | dspark chat --target ling-3.0-nano --draft data/nano/draft --temperature 1 --max-new-tokens 60
""",
    export: """
dspark export --run runs/nano/train --out my-draft
dspark export --run runs/nano/train --step 2000 --out my-draft
dspark export --draft my-draft --target ling-3.0-nano --architecture Qwen3DSparkModel --with-tables --out other
""",
}
BENCH: dict[Callable[..., None], str] = {
    verify: """
dspark bench verify --target ling-3.0-flash --emulate-tp 4 --tokens 1,9 --json bench.json
dspark bench verify --target ling-3.0-flash --weights FOLDER --tp 2 --routing trace.safetensors
""",
    headline: """
dspark bench headline --target ling-3.0-flash --emulate-tp 4 --json headline.json
dspark bench headline --target ling-3.0-flash --weights FOLDER --draft FOLDER --tp 4 --mtp 3,5
""",
    train: """
dspark bench train --config configs/ling-3.0-flash.yaml --json bench.json
dspark bench train --config configs/ling-3.0-flash.yaml --tokens 32768 --set train.activation_checkpointing=true
accelerate launch --num_processes 2 --mixed_precision bf16 eval/bench_train.py --config configs/ling-3.0-flash.yaml
""",
    bench_record: """
dspark bench record --config configs/nano.yaml
dspark bench record --config configs/ling-3.0-tiny.yaml --tokens 262144 --set record.taps=float8 --json bench.json
""",
}


def as_typed(examples: str) -> str:
    """Examples for a help text, whose lines the formatter leaves alone."""
    return "\b\nExamples:" + examples.rstrip().replace("\n", "\n  ").replace("\n  \n", "\n")


app = typer.Typer(
    help="Train a DSpark draft for a frozen target and measure how many tokens a round it earns.",
    epilog=as_typed(STAGES),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
for command, examples in EXAMPLES.items():
    app.command(command.__name__.replace("evaluate", "eval"), epilog=as_typed(examples))(command)
for command, examples in BENCH.items():
    bench.command(epilog=as_typed(examples))(command)
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
