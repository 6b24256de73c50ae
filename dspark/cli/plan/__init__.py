"""dspark plan: what a run will take, before anything is made: bytes, GPU-hours, time and memory, and what to type."""

import shlex
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from math import ceil
from pathlib import Path
from typing import Annotated

import torch
import typer
import yaml
from rich.console import Console

from dspark.cli.identity import describe_origin
from dspark.cli.plan.calibration import calibrate as calibrate_stages
from dspark.cli.plan.facts import exact_amounts, expected_amounts, look_at_prompts, model_sizes
from dspark.cli.record import check_draft
from dspark.cli.terminal import DEFAULT_DEVICE, Device
from dspark.config import load_run, read_yaml, validated
from dspark.data.chat import ChatFormat
from dspark.data.responses import RESPONSES_FILE
from dspark.errors import ConfigError
from dspark.record.plan import Estimate, Facts, Rates, check_disk, estimate, num_read
from dspark.target.loading import locate_target, target_facts
from dspark.target.tokenizer import load_tokenizer
from dspark.verifier.plan import free_bytes

RATES_HELP = "YAML that states rates (dspark/record/plan.py); --calibrate prints one."
CALIBRATE_HELP = "Measure the rates here: try every stage, all together for about so many seconds."
NOTES = """disk: of prepare twice its file; of train three checkpoints and the draft. GPU-hours: or of CPU processes.
memory: weights, optimizer and batches alone, so at least; ! is more than there is. eval: every text as long as it may
be, so at most."""
LENGTH_HELP = "Mean tokens of an answer; else measured, or data.max_response_tokens as a bound."


def plan(
    config: Annotated[Path, typer.Option(help="The run's YAML file.", readable=False)],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, for a trial.")] = None,
    rates: Annotated[Path | None, typer.Option(help=RATES_HELP, readable=False)] = None,
    calibrate: Annotated[float | None, typer.Option(min=0.1, max=3600, help=CALIBRATE_HELP)] = None,
    response_tokens: Annotated[float | None, typer.Option(min=1, help=LENGTH_HELP)] = None,
    device: Device = DEFAULT_DEVICE,
) -> None:
    """Say what a run will take, bytes, GPU-hours, time and memory of every stage, and print its commands in order.

    Times need --rates or --calibrate; without either there are none. Beside every number stands how it is known. A run
    that the disk cannot hold is refused. Responses that are there already are counted exactly.
    """
    if rates and calibrate:
        raise ConfigError("--rates, --calibrate: give one of them")
    run = load_run(config, tuple(overrides or ()))
    folder = locate_target(run.target.path)
    tokenizer, target = load_tokenizer(folder), target_facts(folder)
    check_draft(run, target)
    path, unusable, origin = run.record.folder / RESPONSES_FILE, 0, partial(describe_origin, run, folder, tokenizer)
    stated = Rates(num_gpus=1 if device == "cpu" else torch.cuda.device_count())
    source, how = "no times without --rates or --calibrate", "stated"
    if rates:
        stated, source = validated(Rates, read_yaml(rates, "rates"), rates), f"rates stated in {rates}"
    if calibrate or not path.is_file():
        chat = ChatFormat(tokenizer, target.stop_token_ids, run.data.is_thinking)
        prompts, text_bytes, unusable, number, counted = look_at_prompts(run, chat)
    if calibrate:
        found, how = calibrate_stages(run, origin(), prompts, calibrate, device)
        stated, source = stated.model_copy(update=found), f"rates measured on this machine, {device}"
    if response_tokens:
        stated, how = stated.model_copy(update={"response_tokens": response_tokens}), "stated"
    if path.is_file():
        amounts, known = exact_amounts(run, origin()), f"exact, {path}"
    else:
        how = how if stated.response_tokens else "at most, data.max_response_tokens"
        length = stated.response_tokens or run.data.max_response_tokens
        amounts = expected_amounts(run, prompts, text_bytes, number, length)
        sampled = f"{len(prompts)} prompts sampled, {unusable} more unusable"
        known = f"{counted}; {sampled}; an answer {length:g} tokens, {how}"
    facts = Facts(*amounts, *model_sizes(run, folder, stated.num_gpus, device))
    estimates, read = estimate(run, facts, stated), num_read(run, stated.num_gpus)
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    words = f"{facts.num_sequences} sequences, {facts.num_tokens} tokens, {facts.num_supervised} to predict"
    console.print(f"{run.name}: {words} ({known}); {source}\n{tabulate(estimates, device)}\n{NOTES}")
    console.print(f"epochs: {read / facts.num_sequences:.2f} ({read} sequences, {stated.num_gpus} processes)\n")
    if calibrate:
        console.print(yaml.safe_dump(stated.model_dump(exclude_none=True), sort_keys=False))
    check_disk(estimates, run.record.folder)
    given = shlex.join(["--config", str(config), *(word for text in overrides or () for word in ("--set", text))])
    console.print(commands(run.train.folder, given, bool(unusable), (stated.num_gpus, facts.num_ranks), device))


def commands(folder: Path, given: str, has_unusable: bool, sizes: tuple[int, int], device: str) -> str:
    """What to type, in order. ``folder``: train.folder; ``sizes``: processes that train, ranks that evaluate."""
    num_gpus, num_ranks = sizes
    launch = "accelerate launch" + " --mixed_precision bf16" * (device != "cpu")
    if num_gpus > 1 and device == "cpu":
        launch = f"ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes {num_gpus}"
    elif num_gpus > 1:
        launch = f"accelerate launch --config_file configs/accelerate/multi_gpu.yaml --num_processes {num_gpus}"
    leaving, tp = " --leave-out-unusable" * has_unusable, f" --tp {num_ranks}" * (num_ranks > 1)
    texts, kept = (shlex.quote(str(folder.parent / name)) for name in ("eval", "export"))
    return (
        f"dspark prepare {given}{leaving}\ndspark record {given}{leaving}\n{launch} train.py {given}\n"
        f"dspark eval {given}{tp} --out {texts}\ndspark export --run {shlex.quote(str(folder))} --out {kept}"
    )


def tabulate(estimates: Sequence[Estimate], device: str) -> str:
    """A line for each stage. Where there is no GPU the models lie in the host's memory."""
    form, is_gpu = "{:8}{:>15}{:>10}{:>11}{:>18}{:>10}{:>10}".format, device != "cpu"
    lines = [form("stage", "tokens", "GB disk", "GPU-hours", "time", "GB a GPU", "GB host")]
    for each in estimates:
        on_gpu, on_host = each.device_bytes * is_gpu, each.host_bytes + each.device_bytes * each.num_gpus * (not is_gpu)
        memory = [f"{x / 1e9:.4g}{'!' * (x > free_bytes(y))}" for x, y in ((on_gpu, device), (on_host, "cpu"))]
        times = ["-", "-"]
        if each.seconds is not None:
            times = [f"{each.seconds / 3600:.4g}", str(timedelta(seconds=ceil(each.seconds / each.num_gpus)))]
        lines.append(form(each.stage, f"{each.num_tokens:,}", f"{each.disk_bytes / 1e9:.4g}", *times, *memory))
    return "\n".join(lines)
