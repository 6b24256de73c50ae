"""dspark eval: how many tokens a round a draft earns on its target, and how soon its texts are there."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.cli.eval.contenders import FORMS, contender_names
from dspark.cli.eval.job import Job, choose_engine, run
from dspark.cli.identity import choose_target
from dspark.cli.terminal import DEFAULT_DEVICE, Device
from dspark.config import EvalSection, load_run, validated
from dspark.errors import ConfigError
from dspark.eval.tasks import describe_tasks, task_names
from dspark.files import check_writable
from dspark.verifier.ranks import start

BASELINES_HELP = f"Compare with {FORMS}, separated by commas."
TASKS_HELP = f"Separated by commas: {', '.join(task_names())}, random:LENGTH, long:LENGTH, .jsonl or .parquet files."
TURNS_HELP = "Of conversations with several (mt-bench, rows with 'turns'), after the draft's own answers.  [default: 1]"
OUT_HELP = "Keep every text, the rounds and the report in this folder; a run that was stopped goes on there."
AGAINST_HELP = "The folder of an earlier one: also compare the two drafts prompt by prompt."
ENGINE_HELP = "verifier (Ling-3.0 on our kernels, one text at a time) or reference.  [default: verifier on a GPU]"


def evaluate(
    config: Annotated[Path | None, typer.Option(help="A run: target, eval section, draft.", readable=False)] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value of the run.")] = None,
    target: Annotated[str | None, typer.Option(help="A name (ling-3.0-nano, ...) or a Hugging Face folder.")] = None,
    draft: Annotated[Path | None, typer.Option(help="An exported draft.")] = None,
    tasks: Annotated[str | None, typer.Option(help=TASKS_HELP + "  [default: heldout]")] = None,
    temperatures: Annotated[str | None, typer.Option(help="Separated by commas; 0 is greedy.  [default: 0,1]")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens; 0 is off.  [default: 0]")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest of this mass.  [default: 1]")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Of each task, the first ones.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of each prompt.  [default: 2048]")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Texts decoded in step.  [default: 1]")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help=TURNS_HELP)] = None,
    baselines: Annotated[str | None, typer.Option(help=BASELINES_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float32 or float64.")] = None,
    device: Device = DEFAULT_DEVICE,
    engine: Annotated[str | None, typer.Option(help=ENGINE_HELP)] = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks of the verifier, one GPU each.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 980406,
    thinking: Annotated[bool | None, typer.Option(help="Let the target think before it answers.")] = None,
    out: Annotated[Path | None, typer.Option(file_okay=False, help=OUT_HELP)] = None,
    against: Annotated[Path | None, typer.Option(help=AGAINST_HELP)] = None,
    list_tasks: Annotated[bool, typer.Option("--list-tasks", help="Say what every task is, and stop.")] = False,
) -> None:
    """Decode held-out prompts with a draft and count the tokens that each round commits.

    With --baselines the same prompts are also decoded otherwise, for one table: plain is the target alone, ngram looks
    up what followed the last words before, untrained is a new draft of the same shape, mtp:3 the target's own
    prediction layer with three drafts, drafts:4 this draft with four, confidence:0.5 this draft cut before the first
    confidence below that, budget:8 this draft with so many drafts a pass over all texts, FOLDER another draft. Every
    greedy text must be plain decoding's own; those that are not are named, and rounding is told apart from faults.
    """
    if list_tasks:
        Console(markup=False, emoji=False, highlight=False, soft_wrap=True).print(*describe_tasks())
        return
    for name, path in (("--draft", draft), ("--out", out), ("--against", against)):
        if path == Path():
            raise ConfigError(f"{name}: is empty, or this very folder; give a folder of its own")
    if out is not None:
        check_writable(out, "--out")
    if overrides and not config:
        raise ConfigError("--set: changes a run; give its --config")
    given = load_run(config, tuple(overrides or ())) if config else None
    options: dict[str, object] = {"tasks": _listed(tasks), "temperatures": _listed(temperatures)}
    options |= {"turns": turns, "batch_size": batch_size, "max_prompts": max_prompts, "max_new_tokens": max_new_tokens}
    options |= {"top_k": top_k, "top_p": top_p}
    said = {key: value for key, value in options.items() if value is not None}
    plan = validated(EvalSection, (given.eval.model_dump() if given else {"tasks": ("heldout",)}) | said, "dspark eval")
    chosen = choose_target(given, target, dtype, device)
    names = contender_names(baselines)
    place = draft or (given.train.folder / "draft" if given else None)
    is_thinking = thinking if thinking is not None else bool(given and given.data.thinking[0])
    if is_thinking and plan.turns > 1:
        raise ConfigError("--turns: what was thought before is not told again by every template; leave --thinking out")
    made = choose_engine(engine, chosen.path, plan, device, tp)
    seeds = (seed, given.seed if given else seed)
    job = Job(chosen, place, plan, names, seeds, is_thinking, device, made, tp, out, against)
    start(partial(run, job=job), tp, device)


def _listed(words: str | None) -> list[str] | None:
    """What commas separate, each once."""
    return list(dict.fromkeys(words.split(","))) if words else None
