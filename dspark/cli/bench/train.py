"""dspark bench train: how fast a micro-step and a whole step of a run's training are on this machine."""

import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from accelerate.utils import DistributedType

from dspark.cli.bench.report import Json, Report, line
from dspark.config import RunConfig, load_run
from dspark.distributed import leave, parent_command, start_accelerator
from dspark.errors import ConfigError, DsparkError
from dspark.train import measure
from dspark.train.step import Learner
from dspark.verifier.plan import free_bytes
from dspark.verifier.timing import Clock, matmul_flops

EVERY_TERM = {"cross_entropy": 0.1, "forward_kl": 1.0, "total_variation": 1.0, "acceptance_length": 0.5}
LOSS, BODY = ("head", "markov"), ("body", "context", "features", "attention")


def train(
    config: Annotated[Path, typer.Option(help="The run, one YAML file; see configs/.", readable=False)],
    tokens: Annotated[int, typer.Option(min=2, max=10**7, help="Of every sequence.")] = 4096,
    accumulation: Annotated[int, typer.Option(min=1, max=10**4, help="Micro-steps of a whole step.")] = 4,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, may be repeated.")] = None,
    json: Json = None,
) -> None:
    """Time training on made-up data of the target's size, through the code that train.py runs.

    Every term of the objective is on, from the first step, unless --set says otherwise; tokens and micro-steps stand in
    place of record.max_tokens and train.accumulation_steps. bfloat16 with float32 weights,
    as mixed_precision bf16; where accelerate launch starts it, the precision is the one that was given there.
    Milliseconds are medians of 20 calls one behind the other, without what was compiled before; GB are all that torch's
    allocator gave out at most. A CPU has no measured peak of products and no GB.
    """
    run = measured_run(config, tokens, accumulation, tuple(overrides or ()))
    os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "bf16")
    accelerator = start_accelerator(run.train, os.environ, parent_command())
    device, need, free = accelerator.device, measure.least_bytes(run), free_bytes(accelerator.device)
    if need > free:
        sizes = f"{need / 1e9:.1f} GB and more, {device} has {free / 1e9:.1f} GB"
        raise DsparkError(f"bench train: {run.name} takes {sizes}")
    facts = {"run": run.model_dump(mode="json"), "processes": accelerator.num_processes, "rows": []}
    distributed = accelerator.distributed_type.value.lower()
    facts |= {"distributed": distributed, "mixed_precision": accelerator.mixed_precision}
    report = Report(json, accelerator.is_main_process, **facts)
    hardware = report["provenance"]["hardware"]
    place = hardware["gpus"][device.index or 0] if device.type == "cuda" else hardware["processor"]
    report.say(line("training", run, report, place))
    if device.type == "cuda":
        report["matmul_flops_per_second"] = peak = matmul_flops(Clock(device))
        report.say(f"product of two large bfloat16 matrices: {peak / 1e12:.0f} TFLOP/s")
        torch.cuda.empty_cache()
    sequences = run.train.batch_size * accumulation * accelerator.num_processes
    try:
        time_rows(measure.random_learner(accelerator, run), measure.RandomRecord(run, sequences), report)
    except torch.OutOfMemoryError as error:
        what = ". ".join(str(error).split(". ")[:2])
        raise DsparkError(f"bench train: no room on {device}: {what}; give fewer --tokens") from error
    leave(accelerator)


def measured_run(config: Path, tokens: int, accumulation: int, overrides: tuple[str, ...]) -> RunConfig:
    """The run with every term of its objective, of sequences of ``tokens``. Raises: ConfigError."""
    run = load_run(config, overrides)
    if tokens > (most := run.draft.max_position_embeddings):
        raise ConfigError(f"--tokens {tokens}: {config} has draft.max_position_embeddings {most}; give no more tokens")
    terms = EVERY_TERM | {"confidence": 1.0 * run.draft.enable_confidence_head, "acceptance_warmup_steps": 0}
    before = (f"objective.{name}={value}" for name, value in terms.items())
    after = f"record.max_tokens={tokens}", f"train.accumulation_steps={accumulation}", "train.steps=1000"
    return load_run(config, (*before, *overrides, *after, "train.init_from=null", "train.trackers=[]"))


def time_rows(learner: Learner, record: measure.RandomRecord, report: Report) -> None:
    """All rows. DeepSpeed and FSDP, which take a step apart in their own way, have the whole step alone."""
    accelerator, run, device = learner.accelerator, learner.run, learner.accelerator.device
    micro = measure.MicroStep(learner, record)
    flops = measure.count_operations(run.draft, micro.here)
    report.update(blocks=len(micro.here.anchors_A), flops=flops)
    alone = None
    if accelerator.distributed_type not in {DistributedType.DEEPSPEED, DistributedType.FSDP}:
        alone = measure.time_calls(micro.whole, device, micro.clear)
        add(report, "micro-step, forward and backward", alone, sum(flops.values()))
        loss = measure.time_calls(micro.loss, device, micro.clear)
        add(report, "its loss alone, from hidden states", loss, sum(flops[kind] for kind in LOSS))
        body = measure.time_calls(micro.body, device, micro.clear)
        add(report, "its body alone", body, sum(flops[kind] for kind in BODY))
    micro.clear()
    del micro
    num_steps = run.train.accumulation_steps
    with measure.whole_steps(learner, record) as take:
        step = measure.time_calls(take, device)
    add(report, f"optimizer step of {num_steps}, with its data", step, num_steps * sum(flops.values()))
    tokens = num_steps * run.train.batch_size * run.record.max_tokens * accelerator.num_processes
    report["tokens_per_second"] = tokens / step.milliseconds * 1e3
    if alone is not None:  # what of a step its micro-steps are: so many times the first row
        report["share_in_micro_steps"] = num_steps * alone.milliseconds / step.milliseconds
    report.say(line("speed", report, num_steps))


def add(report: Report, name: str, timing: measure.Timing, flops: int) -> None:
    """A row: its time, its operations against the peak of products measured before, its memory."""
    peak = report.get("matmul_flops_per_second")
    share = flops / timing.milliseconds * 1e3 / peak if peak else None
    report["rows"].append({"name": name, **timing._asdict(), "flops": flops, "share_of_matmul": share})
    report.say(line("work", report["rows"][-1]))
