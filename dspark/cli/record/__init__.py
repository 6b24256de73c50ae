"""``dspark record``: the target reads its own responses, and what it says is stored."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.cli.identity import describe_origin
from dspark.cli.record.job import Job, run_job
from dspark.cli.terminal import DEFAULT_DEVICE, Device, LeaveOut
from dspark.config import RunConfig, load_run
from dspark.data.responses import RESPONSES_FILE, Responses, ResponsesHeader, open_responses, read_header
from dspark.errors import ConfigError, DraftMismatchError, RecordError
from dspark.files import claim, differences
from dspark.record.format import Manifest, plan_shards
from dspark.record.order import drawn_order
from dspark.record.writer import check_same, start_record
from dspark.target.loading import TargetFacts, locate_target, target_facts
from dspark.target.tokenizer import load_tokenizer
from dspark.verifier.ranks import start

SECONDS_FOR_A_SHARD = 1800.0
"""How long ranks wait for the one that writes, at most."""


def record(
    config: Annotated[Path, typer.Option(help="The run's YAML file.", readable=False)],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, for a trial.")] = None,
    leave_out_unusable: LeaveOut = False,
    check: Annotated[bool, typer.Option("--check", help="Hold a finished record against the target.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Check, then record the shards with a fault anew.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Say what every shard holds; no target is asked.")] = False,
    measure_fp8: Annotated[Path | None, typer.Option(help="Say what record.taps=float8 costs this draft.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share the target, one GPU each.")] = 1,
    device: Device = DEFAULT_DEVICE,
) -> None:
    """Run the target over the responses of dspark prepare into record.folder. Run again to resume.

    Several of these may run at once, also on machines that share the folder: each takes shards that no other is at, and
    what a dead one was at is free again, after two minutes at most. On a GPU a Ling-3.0 target is read by the verifier.
    --check verifies checksums, text and first states of every shard, --stats its checksums alone.
    With record.ring_shards the record never lies there whole: it follows train.py, which reads and deletes it.
    """
    run = load_run(config, tuple(overrides or ()))
    if sum(map(bool, (check, repair, stats, measure_fp8))) > 1:
        raise ConfigError("--check, --repair, --stats, --measure-fp8: give one of them")
    if run.record.ring_shards and (check or repair or stats):
        hint = "leave out --check, --repair, --stats"
        raise ConfigError(f"record.ring_shards: such a record never lies there whole; {hint}")
    if tp > 1 and device not in {"cuda", "cpu"}:
        raise ConfigError(f"--device {device}: the ranks take the GPUs of their numbers; give --device cuda")
    folder = locate_target(run.target.path)
    check_draft(run, target_facts(folder))
    _, responses, manifest = read_prepared(run, folder, leave_out_unusable)
    wish = "check" if check else "repair" if repair else "stats" if stats else "record"
    job = Job(run, folder, manifest, responses, device, wish, measure_fp8)
    console = Console(soft_wrap=True, highlight=False)
    size = f"{manifest.total.num_tokens} tokens, {manifest.total.num_supervised} to predict"
    console.print(f"{len(responses)} sequences, {size}, {manifest.num_bytes / 1e9:.2f} GB", markup=False)
    with claim(run.record.folder, is_shared=True):
        if check or stats:
            check_same(run.record.folder, manifest)
        elif not measure_fp8:
            start_record(run.record.folder, manifest, run.record.ring_shards)
        start(partial(run_job, job=job), tp, device, SECONDS_FOR_A_SHARD)


def check_draft(run: RunConfig, facts: TargetFacts) -> None:
    """Refuse to record for a draft that cannot be bound to the target. Raises: DraftMismatchError."""
    its = {"vocab_size": facts.vocab_size, "hidden_size": facts.hidden_size, "num_target_layers": facts.num_layers}
    ours = run.draft.model_dump(include=set(its))
    wrong = [f"draft.{key} is {ours[key]}, the target has {its[key]}" for key in its if ours[key] != its[key]]
    if wrong:
        raise DraftMismatchError(f"{run.name}: {'; '.join(wrong)}; mend the draft section for {run.target.path}")


def read_prepared(run: RunConfig, folder: Path, is_leaving_out: bool) -> tuple[ResponsesHeader, Responses, Manifest]:
    """The responses in the order of the record to come, and its manifest. ``folder``: the target's, which
    ``check_draft`` has seen.
    Raises: RecordError when they were made by another target or setting; as ``open_responses``.
    """
    path, origin = run.record.folder / RESPONSES_FILE, describe_origin(run, folder, load_tokenizer(folder))
    header = read_header(path)
    same = ("target_fingerprint", "tokenizer_fingerprint", "template_fingerprint", "thinking")
    expected = {key: origin[key] for key in same}
    if header.answers == "target":
        expected |= {"temperatures": run.data.temperatures, "seed": run.seed}
    if wrong := differences(header.model_dump(), expected):
        raise RecordError(f"{path}: made with {wrong}; run dspark prepare into another record.folder")
    limits = {"max_tokens": run.record.max_tokens, "vocab_size": run.draft.vocab_size}
    answered = open_responses(path, header, **limits, is_leaving_out=is_leaving_out)
    responses = answered.reordered(drawn_order(len(answered), run.seed))
    tokens, supervised = responses.num_tokens_S.tolist(), responses.num_supervised_S.tolist()
    known = origin | header.model_dump(include={"answers", "temperatures"})
    known |= run.draft.model_dump(include={"target_layer_ids", "hidden_size", "vocab_size"})
    known |= run.record.model_dump(include={"taps", "shard_tokens"})
    shards = plan_shards(tokens, supervised, run.record.shard_tokens)
    return header, responses, Manifest(**known, text_sha256=responses.text_sha256, seed=run.seed, shards=shards)
