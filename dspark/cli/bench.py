"""dspark bench: how fast a part of the system is on this machine."""

import json as json_text
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from dspark.errors import ConfigError, DsparkError
from dspark.files import write_whole
from dspark.kernels import MAX_TOKENS
from dspark.provenance import describe_launch
from dspark.target.config import TargetConfig, load_target_config
from dspark.target.loading import locate_target
from dspark.verifier import Shard, Step, Verifier, VerifierWeights, load_weights, make_plan, random_weights
from dspark.verifier.plan import free_bytes
from dspark.verifier.timing import (
    Clock,
    StageTime,
    distinct_experts,
    fill,
    read_bandwidth,
    record_step,
    slack_tokens,
    time_stages,
    time_step,
)

SHIPPED_CONFIGS = Path(__file__).parents[2] / "configs" / "targets"
DEVICE, DTYPE, SEED = "cuda", torch.bfloat16, 0
NUM_TAPS = 5

bench = typer.Typer(help="Measure how fast a part of the system is.", no_args_is_help=True, rich_markup_mode=None)


@bench.callback()
def _commands() -> None:
    """Measure how fast a part of the system is."""


def verify(
    target: Annotated[str, typer.Option(help="A name (ling-3.0-flash, ...) or a Hugging Face folder.")],
    weights: Annotated[str, typer.Option(help="random, or a folder of weights.")] = "random",
    emulate_tp: Annotated[int, typer.Option(min=1, help="Measure one rank of so many, communication left out.")] = 1,
    tokens: Annotated[str, typer.Option(help="Window lengths, separated by commas.")] = "9",
    context: Annotated[int, typer.Option(min=0, max=10**7, help="Committed tokens before the window.")] = 8192,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, writable=True, help="Also write everything there.")
    ] = None,
) -> None:
    """Time a verify step of the fused verifier, stage by stage and whole, against this GPU's read bandwidth."""
    if not torch.cuda.is_available():
        raise DsparkError("bench verify: needs a CUDA GPU, and torch finds none on this machine")
    windows = _windows(tokens)
    console = Console(soft_wrap=True, highlight=False)
    folder = locate_target(weights) if weights != "random" else _config_folder(target)
    if weights != "random" and load_target_config(folder) != load_target_config(_config_folder(target)):
        raise ConfigError(f"--weights: the config.json of {folder} is not that of {target}; give both the same target")
    config, shard, device = load_target_config(folder), Shard(0, emulate_tp), torch.device(DEVICE)
    capacity_tokens = context + slack_tokens(max(windows))
    plan = make_plan(config, shard, capacity_tokens, DTYPE, device)
    label = f"one rank of {emulate_tp}, communication left out" if emulate_tp > 1 else "the whole model on one GPU"
    console.print(f"{target}, {weights} weights, {label}; {plan.total_bytes / 1e9:.1f} GB")
    plan.check(free_bytes(device), torch.cuda.get_device_name(device))
    report: dict[str, Any] = {
        "target": target,
        "weights": weights,
        "label": label,
        "context": context,
        "plan_bytes": plan.parts(),
        "provenance": describe_launch(sys.argv),
        "windows": [],
    }
    save = partial(_save, report, json)
    save()
    clock = Clock(device)
    report["read_bytes_per_second"] = bandwidth = read_bandwidth(clock, free_bytes(device))
    report["graph_start_microseconds"] = clock.start_microseconds
    console.print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s; start of a graph {clock.start_microseconds:.1f} us")
    torch.cuda.empty_cache()
    taps = tuple(range(0, config.num_hidden_layers - 1, -(-config.num_hidden_layers // NUM_TAPS)))
    verifier = Verifier(_weights(weights, folder, config, shard), capacity_tokens, taps)
    for num_tokens in windows:
        found: dict[str, Any] = {"tokens": num_tokens}
        report["windows"].append(found)
        _measure(verifier, num_tokens, context, clock, bandwidth, found, console, save)


def _measure(
    verifier: Verifier,
    num_tokens: int,
    context: int,
    clock: Clock,
    bandwidth: float,
    found: dict[str, Any],
    console: Console,
    save: Callable[[], None],
) -> None:
    """One window length, with plain and chained launches: the step, then its stages. All is kept as it comes."""
    console.rule(f"T = {num_tokens}, context {context}", align="left")
    hidden_TD = []
    for kind in ("plain", "chained"):
        verifier.is_chained = kind == "chained"
        fill(verifier, num_tokens, context)
        step = Step(verifier, num_tokens)
        stages, eager = record_step(step)
        hidden_TD.append(step().hidden_TD.clone())
        is_finite, is_equal = bool(hidden_TD[-1].isfinite().all()), torch.equal(eager.hidden_TD, hidden_TD[-1])
        experts = distinct_experts(stages)
        timed = time_step(step, clock, context)
        this = found[kind] = asdict(timed) | {"is_finite": is_finite, "is_replay_equal": is_equal, "stages": []}
        this["distinct_experts"] = experts
        console.print(
            f"{kind} launches: whole step {timed.microseconds:.0f} us, back to back {timed.burst_microseconds:.0f} us, "
            f"{timed.num_launches} launches, {sum(experts) / max(len(experts), 1):.1f} experts a layer (shared one "
            f"included), finite: {is_finite}, replay equals eager: {is_equal}"
        )
        save()
        for stage in time_stages(verifier, stages, clock, context):
            this["stages"].append(asdict(stage))
            _print_stage(console, stage, bandwidth)
            save()
        num_bytes, total = (
            sum(row[key] * row["num_calls"] for row in this["stages"]) for key in ("num_bytes", "microseconds")
        )
        this["num_bytes"], this["floor_microseconds"] = num_bytes, num_bytes / bandwidth * 1e6
        floor = this["floor_microseconds"]
        console.print(f"sum of stages {total:.0f} us; {num_bytes / 1e9:.2f} GB, byte floor {floor:.0f} us")
    found["is_chained_equal"] = torch.equal(*hidden_TD)
    console.print(f"with and without chained launches bit-equal: {found['is_chained_equal']}")
    save()


def _print_stage(console: Console, stage: StageTime, bandwidth: float) -> None:
    share = stage.bytes_per_second / bandwidth
    launches = "?" if stage.num_launches is None else f"{stage.num_launches:g}"
    console.print(
        f"{stage.name:24} x{stage.num_calls:<3} {launches:>4} launches {stage.num_bytes / 1e6:9.2f} MB "
        f"{stage.microseconds:8.2f} us {share:6.1%} {stage.microseconds * stage.num_calls:8.0f} us in all"
    )


def _save(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json_text.dumps(report, indent=2) + "\n")


def _windows(tokens: str) -> list[int]:
    parts = tokens.split(",")
    if not all(len(part) < 5 and part.strip().isdecimal() and 1 <= int(part) <= MAX_TOKENS for part in parts):
        raise ConfigError(f"--tokens: expected numbers in 1..{MAX_TOKENS}, separated by commas, got {tokens!r}")
    return [int(part) for part in parts]


def _config_folder(target: str) -> Path:
    shipped = SHIPPED_CONFIGS / target
    return shipped if (shipped / "config.json").is_file() else locate_target(target)


def _weights(weights: str, folder: Path, config: TargetConfig, shard: Shard) -> VerifierWeights:
    if weights == "random":
        return random_weights(config, shard, DTYPE, SEED, DEVICE)
    return load_weights(folder, shard, DTYPE, DEVICE)
