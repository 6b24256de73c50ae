"""dspark plan: what a run will take, before anything is made: bytes, GPU-hours, time and memory, and what to type."""

import shlex
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dspark.cli.identity import describe_origin
from dspark.cli.plan.stages import Rates, Stage, check_disk, expect_record, plan_stages, sample_prompts, try_stages
from dspark.cli.record import check_draft, describe, read_prepared
from dspark.cli.terminal import DEFAULT_DEVICE, Device
from dspark.config import RunConfig, load_run, read_yaml, validated
from dspark.data.responses import RESPONSES_FILE, open_responses
from dspark.errors import ConfigError
from dspark.target.loading import locate_target, target_facts
from dspark.target.tokenizer import load_tokenizer
from dspark.verifier.plan import free_bytes

NOTES = """GPU-hours: or of CPU processes. memory: of a process, weights, optimizer and a batch alone, so at least; ! is
more than there is. eval: every text as long as it may be, so at most. train: three checkpoints, the draft."""


def plan(
    config: Annotated[Path, typer.Option(help="The run's YAML file.", readable=False)],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, for a trial.")] = None,
    rates: Annotated[Path | None, typer.Option(help="YAML of rates, see --calibrate.", readable=False)] = None,
    calibrate: Annotated[float | None, typer.Option(min=0.1, max=3600, help="Seconds to try all stages.")] = None,
    response_tokens: Annotated[float | None, typer.Option(min=1, help="Mean tokens of an answer, if known.")] = None,
    device: Device = DEFAULT_DEVICE,
) -> None:
    """Say what a run will take, bytes, GPU-hours, time and memory of every stage, and print its commands in order.

    Times need --rates or --calibrate (which prints such rates, and whose rates go before stated ones). Beside every
    number stands how it is known. A run that the disk cannot hold is refused. Responses that are there already are
    counted exactly. A mixture is made, so that its rows can be counted.
    """
    run, is_gpu = load_run(config, tuple(overrides or ())), device != "cpu"
    folder, path = locate_target(run.target.path), run.record.folder / RESPONSES_FILE
    facts, is_answered = target_facts(folder), path.is_file()
    check_draft(run, facts)
    stated, source, how = Rates(num_gpus=torch.cuda.device_count() if is_gpu else 1), "no times without rates", "stated"
    if rates:
        stated, source = validated(Rates, read_yaml(rates, "rates"), rates), f"rates stated in {rates}"
    if calibrate or not is_answered:
        prompts, rows = sample_prompts(run, folder)
    if calibrate:
        found, how = try_stages(run, folder, prompts, calibrate, device)
        stated, source = stated.model_copy(update=found), f"rates measured on this machine, {device}"
    if is_answered:
        origin = describe_origin(run, folder, load_tokenizer(folder))
        header, limits = read_prepared(run, origin), (run.record.max_tokens, facts.vocab_size)
        responses = open_responses(path, header, max_tokens=limits[0], vocab_size=limits[1], is_leaving_out=True)
        manifest, to_answer = describe(run, facts, origin, responses, header), (0, 0)
        known, num_left_out = f"exact, {path}", header.num_left_out
    else:
        length, most = response_tokens or stated.response_tokens, run.data.max_response_tokens
        if length and length > most:
            raise ConfigError(f"response_tokens is {length:g}, above data.max_response_tokens; mend one of them")
        manifest, num_bytes = expect_record(run, prompts, rows, length or most)
        how = "stated" if response_tokens else how if length else "at most, data.max_response_tokens"
        sampled = f"{rows['all']} conversations counted, {rows['rows']} sampled, {rows['left out']} unusable"
        known, to_answer = (
            f"{sampled}; an answer {length or most:g} tokens, {how}",
            (manifest.num_supervised, num_bytes),
        )
        num_left_out = rows["left out"]
    stages = plan_stages(run, folder, manifest, to_answer, stated.num_gpus, device)
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    size = f"{manifest.num_sequences} sequences, {manifest.num_tokens} tokens, {manifest.num_supervised} to predict"
    console.print(f"{run.name}: {size} ({known}); {source}", tabulate(stages, stated, device), NOTES, sep="\n")
    console.print(f"epochs: {stages[2].num_tokens / manifest.num_tokens:.2f}, {stated.num_gpus} processes\n")
    if calibrate:
        console.print(*(f"{name}: {value:g}" for name, value in stated.model_dump(exclude_none=True).items()), sep="\n")
    check_disk(stages, run.record.folder)
    given = ["--config", str(config), *chain.from_iterable(("--set", text) for text in overrides or ())]
    lines = commands(run, shlex.join(given), " --leave-out-unusable" * bool(num_left_out), stages, device)
    console.print(*lines[is_answered:], sep="\n")


def tabulate(stages: Sequence[Stage], rates: Rates, device: str) -> Table:
    """A row for each stage."""
    table = Table("stage", "tokens", "GB disk", "GPU-hours", "time", "GB memory", box=SIMPLE)
    for name, num_tokens, disk_bytes, num_gpus, memory_bytes in stages:
        rate, is_too_much = getattr(rates, f"{name}_tokens_per_second"), memory_bytes > free_bytes(device)
        hours = num_tokens / rate / 3600 if rate else 0
        times = [f"{hours:.4g}", str(timedelta(seconds=ceil(hours * 3600 / num_gpus)))] if rate else ["-", "-"]
        sizes = [f"{disk_bytes / 1e9:.4g}", *times, f"{memory_bytes / 1e9:.4g}{'!' * is_too_much}"]
        table.add_row(name, f"{num_tokens:,}", *sizes)
    return table


def commands(run: RunConfig, given: str, leaving: str, stages: Sequence[Stage], device: str) -> list[str]:
    """What to type, in order. Behind a ring, recording runs along with training."""
    *_, (_, _, _, num_gpus, _), (_, _, _, num_ranks, _) = stages
    launch, ways = "accelerate launch", " --mixed_precision bf16" * (device != "cpu")
    if num_gpus > 1:
        ways = " --multi_gpu" if device == "cpu" else " --config_file configs/accelerate/multi_gpu.yaml"
        launch, ways = "ACCELERATE_USE_CPU=true " * (device == "cpu") + launch, ways + f" --num_processes {num_gpus}"
    tp, along, place = f" --tp {num_ranks}" * (num_ranks > 1), " &" * bool(run.record.ring_shards), run.train.folder
    trained, texts, kept = (shlex.quote(str(each)) for each in (place, place.parent / "eval", place.parent / "export"))
    return [
        f"dspark prepare {given}{leaving}",
        f"dspark record {given}{leaving}{tp}{along}",
        f"{launch}{ways} train.py {given}",
        f"dspark eval {given}{tp} --out {texts}",
        f"dspark export --run {trained} --out {kept}",
    ]
