"""dspark plan: what a run will take, before anything is made: bytes, GPU-hours, time and memory, and what to type."""

from datetime import timedelta
from math import ceil
from pathlib import Path
from shlex import quote
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dspark.cli.plan.stages import Rates, Stage, check_disk, expect_record, plan_stages, sample_prompts, try_stages
from dspark.cli.record import check_draft, read_prepared
from dspark.cli.terminal import DEFAULT_DEVICE, Device
from dspark.config import RunConfig, load_run, read_yaml, validated
from dspark.data.responses import RESPONSES_FILE
from dspark.errors import ConfigError
from dspark.target.loading import locate_target, target_facts

NOTES = """GPU-hours: or of CPU processes. memory: of a process, weights, optimizer and a batch alone, so at least.
eval: every text as long as it may be, so at most. train: three checkpoints, the draft."""


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
    run, num_gpus = load_run(config, tuple(overrides or ())), 1 if device == "cpu" else torch.cuda.device_count()
    folder, path = locate_target(run.target.path), run.record.folder / RESPONSES_FILE
    is_answered = path.is_file()
    check_draft(run, target_facts(folder))
    stated, source, how = Rates(num_gpus=num_gpus), "no times without rates", "stated"
    if rates:
        stated, source = validated(Rates, read_yaml(rates, "rates"), rates), f"rates stated in {rates}"
    if calibrate or not is_answered:
        prompts, rows = sample_prompts(run, folder)
    if calibrate:
        found, how = try_stages(run, folder, prompts, calibrate, device)
        stated, source = stated.model_copy(update=found), f"rates measured on this machine, {device}"
    if is_answered:
        header, _, manifest = read_prepared(run, folder, True)
        num_bytes, known, num_left_out = 0, f"exact, {path}", header.num_left_out
    else:
        length, most = response_tokens or stated.response_tokens, run.data.max_response_tokens
        num_left_out = rows["left out"]
        if length and not length <= most:
            raise ConfigError(f"response_tokens is {length:g}, above data.max_response_tokens; mend one of them")
        manifest, num_bytes = expect_record(run, prompts, rows, length or most)
        how = "stated" if response_tokens else how if length else "at most, data.max_response_tokens"
        known = f"{rows['all']} conversations counted, {rows['rows']} sampled, {num_left_out} unusable; "
        known += f"an answer {length or most:g} tokens, {how}"
    stages = plan_stages(run, folder, manifest, num_bytes, stated.num_gpus, device)
    num_sequences, num_tokens, num_supervised = manifest.total
    size = f"{num_sequences} sequences, {num_tokens} tokens, {num_supervised} to predict"
    size += f"; {stages[2].num_tokens / num_tokens:.2f} epochs on {stated.num_gpus} processes"
    told = [f"{run.name}: {size} ({known}); {source}", tabulate(stages, stated), NOTES]
    if calibrate:
        told += [f"{name}: {value:g}" for name, value in stated.model_dump(exclude_none=True).items()]
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.print(*told, sep="\n")
    check_disk(stages, run.record.folder)
    given = " ".join(["--config", quote(str(config)), *(f"--set {quote(text)}" for text in overrides or ())])
    lines = commands(run, given, " --leave-out-unusable" * bool(num_left_out), stages, device)
    console.print(*lines[is_answered:], sep="\n")


def tabulate(stages: list[Stage], rates: Rates) -> Table:
    """A row for each stage."""
    table = Table("stage", "tokens", "GB disk", "GPU-hours", "time", "GB memory", box=SIMPLE)
    for name, num_tokens, disk_bytes, num_gpus, memory_bytes in stages:
        rate, sizes = getattr(rates, f"{name}_tokens_per_second"), (disk_bytes / 1e9, memory_bytes / 1e9)
        hours = num_tokens / rate / 3600 if rate else 0
        times = [f"{hours:.4g}", str(timedelta(seconds=ceil(hours * 3600 / num_gpus)))] if rate else ["-", "-"]
        table.add_row(name, f"{num_tokens:,}", f"{sizes[0]:.4g}", *times, f"{sizes[1]:.4g}")
    return table


def commands(run: RunConfig, given: str, leaving: str, stages: list[Stage], device: str) -> list[str]:
    """What to type, in order. Behind a ring, recording runs along with training."""
    *_, (_, _, _, num_gpus, _), (_, _, _, num_ranks, _) = stages
    ways = " --mixed_precision bf16" * (device != "cpu")
    if num_gpus > 1:
        ways = f" --config_file configs/accelerate/multi_gpu.yaml --num_processes {num_gpus}"
    tp, along, place = f" --tp {num_ranks}" * (num_ranks > 1), " &" * bool(run.record.ring_shards), run.train.folder
    trained, texts, kept = (quote(str(each)) for each in (place, place.parent / "eval", place.parent / "export"))
    return [
        f"dspark prepare {given}{leaving}",
        f"dspark record {given}{leaving}{tp}{along}",
        f"accelerate launch{ways} train.py {given}",
        f"dspark eval {given}{tp} --out {texts}",
        f"dspark export --run {trained} --out {kept}",
    ]
