"""Door: load a run, build the draft, step until done, save."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

# Read when torch is loaded: threads that wait soon sleep, or a busy CPU takes many times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from dspark.cli.identity import folder_fields
from dspark.cli.probe import decode_and_keep_best, load_probe, told_change
from dspark.config import RunConfig, load_run
from dspark.distributed import leave, parent_command, start_accelerator
from dspark.draft.model import DraftModel
from dspark.errors import DraftMismatchError, DsparkError, one_line
from dspark.eval.probe import Probe
from dspark.export.draft_config import config_json
from dspark.export.draft_folder import read_draft, write_draft
from dspark.files import claim
from dspark.record.format import MANIFEST_FILE
from dspark.record.reader import RecordReader
from dspark.record.ring import Patience, Ring
from dspark.target.loading import load_tables, locate_target, target_facts, target_fingerprint
from dspark.train.batches import AHEAD, Fed, Share, read_windows, share_of
from dspark.train.checkpoint import Progress as TrainingProgress
from dspark.train.checkpoint import checkpoints, finished_draft, gather_state, load_checkpoint, save_checkpoint
from dspark.train.log import PooledMetrics, append_row, describe, drop_rows_after, start_trackers
from dspark.train.optimizer import learning_rate
from dspark.train.run_folder import check_run_folder, describe_training, write_run_folder
from dspark.train.setup import average_note, bias_note, check_mask_row, check_record, fresh_draft, prepare
from dspark.train.step import Learner, make_graphs, train_step

EXAMPLES = """
Examples:\n
accelerate launch train.py --config configs/nano.yaml\n
python train.py --config configs/nano.yaml --set train.steps=10 --set train.folder=runs/trial\n
accelerate launch --config_file configs/accelerate/deepspeed_zero2.yaml train.py --config configs/ling-3.0-flash.yaml\n
accelerate launch --config_file configs/accelerate/fsdp2.yaml train.py --config configs/ling-3.0-flash.yaml\n
accelerate launch train.py --config configs/nano.yaml --resume
"""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=EXAMPLES)
def main(
    config: Annotated[Path, typer.Option(help="The run, one YAML file; see configs/.", readable=False)],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, may be repeated.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in train.folder.")] = False,
) -> None:
    """Train a draft from a record and write it to <train.folder>/draft."""
    run = load_run(config, tuple(overrides or ()))
    os.environ.setdefault("WANDB_MODE", "offline")
    accelerator = start_accelerator(run.train, os.environ, parent_command())
    patience = Patience(lambda line: print(line, file=sys.stderr)) if run.record.ring_shards else None
    if patience:
        signal.signal(signal.SIGINT, patience.interrupt)
    reader = RecordReader(run.record.folder, patience)
    processes = f"{accelerator.num_processes} x {accelerator.device.type}"
    launch = describe_training(sys.argv, reader.folder / MANIFEST_FILE, processes)
    check_run_folder(run, launch, resume)
    learner = prepare(accelerator, build_draft(run, reader), run)
    is_main = accelerator.is_main_process  # the only process that holds the target, and only to probe
    probe = load_probe(run, accelerator.device) if is_main and run.train.probe_every_steps else None
    with claim(run.train.folder) if is_main else nullcontext():
        if accelerator.device.type == "cuda":
            accelerator.print("compiling the layers, half a minute")
            make_graphs(learner)
        train(learner, reader, launch, resume, probe)
    leave(accelerator)


def train(learner: Learner, reader: RecordReader, launch: dict[str, Any], resume: bool, probe: Probe | None) -> None:
    """Step until done and save; every process calls it, and no other run writes into the folder meanwhile."""
    accelerator, run = learner.accelerator, learner.run
    folder, is_main = run.train.folder, accelerator.is_main_process
    share, done = share_of(accelerator, run.train), TrainingProgress(step=0, sequences_seen=0)
    if resume and (found := checkpoints(folder / "checkpoints")):
        done = load_checkpoint(found[-1], learner.draft, learner.optimizer)
    accelerator.wait_for_everyone()
    origin = (
        launch | {"run": run.name} | reader.manifest.model_dump(include={"target_fingerprint", "template_fingerprint"})
    )
    starts = share.starts(done.sequences_seen, run.train.steps - done.step)
    windows = open_windows(learner, reader, share, starts)
    if is_main:
        write_run_folder(run, origin)
        drop_rows_after(folder, done.step)
    start_trackers(accelerator, run)
    with progress_bar(run, done.step, is_main) as show, closing(windows):
        show(
            f"{run.name}: {len(reader)} sequences, {share.sequences_per_step} a step, from step {done.step}; "
            f"{launch['hardware']['processes']}, distributed: {accelerator.distributed_type.value.lower()}, "
            f"mixed precision: {accelerator.mixed_precision}{average_note(run.train)}"
            + bias_note(reader.manifest, run.objective)
        )
        metrics = PooledMetrics(learner.stopwatch)
        for window, feed in windows:
            metrics.add(train_step(learner, window, done.step, feed))
            done = TrainingProgress(done.step + 1, done.sequences_seen + share.sequences_per_step)
            is_saved = done.step % run.train.save_every_steps == 0 or done.step == run.train.steps
            is_probed = run.train.probe_every_steps and done.step % run.train.probe_every_steps == 0
            if is_saved or is_probed or done.step % run.train.log_every_steps == 0:
                row = metrics.row(done.step, learning_rate(done.step - 1, run.train))
                if is_probed:
                    row |= decode_and_keep_best(learner, probe, done.step, origin)
                    learner.stopwatch.restart()  # the probe's time is not training's
                accelerator.log(row, step=done.step)
                if is_main:
                    append_row(folder, row)
                show(describe(row), done.step)
            if is_saved:
                save(learner, done)
            learner.stopwatch.lap()  # rows and checkpoints are no wait for data
    draft = finished_draft(learner.draft, learner.optimizer, run.train)
    if is_main:
        write_draft(draft, folder / "draft", folder_fields(run), provenance=origin)
        show(f"wrote {folder / 'draft'}")
        if run.train.init_from is not None:
            show(told_change(run, probe, draft))


def open_windows(learner: Learner, reader: RecordReader, share: Share, starts: range) -> Fed:
    """What the steps in ``starts`` learn from. In a ring of shards, the first process says what is needed."""
    run, accelerator = learner.run, learner.accelerator
    fed = read_windows(reader, run, share, starts, accelerator.device)
    if not (run.record.ring_shards and accelerator.is_main_process):
        return fed
    ring = Ring(reader.folder, reader.manifest, run.seed, run.record.ring_shards)
    ring.check(starts, share.sequences_per_step * (2 + 2 * AHEAD))  # threads plan and fill ahead of the step
    ring.begin()
    return ring.accompany(fed, starts)


def save(learner: Learner, done: TrainingProgress) -> None:
    """Write a checkpoint; every process calls it, for each may hold a part of the optimizer's state."""
    state = gather_state(learner.draft, learner.optimizer)
    if learner.accelerator.is_main_process:
        save_checkpoint(learner.run.train.folder / "checkpoints", done, *state)


def build_draft(run: RunConfig, reader: RecordReader) -> DraftModel:
    """A new draft, or the one to start from, bound to the target's tables, with the record checked against both."""
    config_json(run.draft, folder_fields(run))  # what the export would refuse is refused before training
    target = locate_target(run.target.path)
    ours, its = run.draft.num_target_layers, target_facts(target).num_layers
    if ours != its:
        raise DraftMismatchError(f"draft.num_target_layers is {ours}, the target {target} has {its}; mend it")
    check_record(reader.manifest, run.draft, target_fingerprint(target))
    embedding_VD, head_VD = (table_VD.to(getattr(torch, run.target.dtype)) for table_VD in load_tables(target))
    check_mask_row(embedding_VD, run.draft)
    if run.train.init_from is not None:
        return read_draft(Path(run.train.init_from), (embedding_VD, head_VD))
    draft = fresh_draft(run.draft, run.seed)
    draft.bind(embedding_VD, head_VD)
    return draft


@contextmanager
def progress_bar(run: RunConfig, done: int, is_main: bool) -> Iterator[Callable[..., None]]:
    """A bar on the main process; yields ``show(line, step=None)``, which prints above it and moves it."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(soft_wrap=True, quiet=not is_main), disable=not is_main) as progress:
        task = progress.add_task(run.name, total=run.train.steps, completed=done)

        def show(line: str, step: int | None = None) -> None:
            progress.console.print(line, highlight=False)
            progress.update(task, completed=step)

        yield show


if __name__ == "__main__":
    try:
        app()
    except (DsparkError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None
