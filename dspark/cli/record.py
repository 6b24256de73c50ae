"""``dspark record``: the target reads its own responses, and what it says is stored."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dspark.cli.identity import describe_origin
from dspark.cli.terminal import DEFAULT_DEVICE, Device, count_progress
from dspark.config import RunConfig, load_run
from dspark.data.chat import Encoded
from dspark.data.responses import RESPONSES_FILE, Responses, ResponsesHeader, open_responses, read_header
from dspark.errors import DraftMismatchError, RecordError
from dspark.files import claim
from dspark.record.capture import capture
from dspark.record.checking import check_shards
from dspark.record.format import Manifest
from dspark.record.reader import RecordReader
from dspark.record.writer import open_writer
from dspark.target.loading import TargetFacts, load_target, locate_target, target_facts
from dspark.target.tokenizer import load_tokenizer
from dspark.types import Target


def record(
    config: Annotated[Path, typer.Option(help="The run's YAML file.", readable=False)],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, for a trial.")] = None,
    leave_out_unusable: Annotated[
        bool, typer.Option("--leave-out-unusable", help="Go on without the conversations that cannot be used.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Hold a finished record against the target: checksums, text, states.")
    ] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Check, then record the shards with a fault anew.")] = False,
    device: Device = DEFAULT_DEVICE,
) -> None:
    """Run the target over the responses of dspark prepare into record.folder. Run again to resume."""
    run = load_run(config, tuple(overrides or ()))
    folder = locate_target(run.target.path)
    facts = target_facts(folder)
    check_draft(run, facts)
    tokenizer = load_tokenizer(folder)
    origin = describe_origin(run, folder, tokenizer)
    header = read_prepared(run, origin)
    limits = {"max_tokens": run.record.max_tokens, "vocab_size": facts.vocab_size}
    sequences = open_responses(run.record.folder / RESPONSES_FILE, header, **limits, is_leaving_out=leave_out_unusable)
    description = describe(run, facts, origin, sequences, header)
    with claim(run.record.folder):
        writer = open_writer(run.record.folder, description)
        console = Console(soft_wrap=True, highlight=False)
        size = f"{description.num_tokens} tokens, {description.num_supervised} to predict"
        console.print(f"{len(sequences)} sequences, {size}, about {description.num_bytes / 1e9:.2f} GB", markup=False)
        layers = run.draft.target_layer_ids
        target = load_target(folder, target_layer_ids=layers, dtype=description.torch_dtype, device=device)
        if check or repair:
            faulty = find_faults(target, sequences, run.record.folder, console)
            if not faulty or not repair:
                raise typer.Exit(2 if faulty else 0)
            for file in faulty:
                (run.record.folder / file).unlink(missing_ok=True)
        with count_progress("recorded", len(sequences)) as on_sequence:
            capture(target, sequences, writer, on_sequence)
        console.print(f"{len(writer.manifest.shards)} shards in {run.record.folder}", markup=False)


def find_faults(target: Target[Any], sequences: Sequence[Encoded], folder: Path, console: Console) -> list[str]:
    """Print what every shard holds and what is wrong with it. Returns: the files of those with a fault."""
    reader = RecordReader(folder)
    with count_progress("shards", len(reader.manifest.shards)) as on_shard:
        checks = list(check_shards(target, sequences, reader, on_shard))
    table = Table("shard", "tokens", "to predict", "nats each", "states", box=SIMPLE)
    for found in checks:
        numbers = ("-" if value is None else f"{value:.2g}" for value in (found.nats, found.states_error))
        table.add_row(found.file, str(found.num_tokens), str(found.num_supervised), *numbers)
    console.print(table, "nats each: of what is to be predicted; states: recorded less those of now, of their norm")
    faulty = [found for found in checks if found.fault]
    for found in faulty:
        console.print(f"{folder / found.file}: {found.fault}", markup=False)
    console.print(f"{len(checks) - len(faulty)} of {len(checks)} shards are what the target says", markup=False)
    return [found.file for found in faulty]


def check_draft(run: RunConfig, facts: TargetFacts) -> None:
    """Refuse to record for a draft that cannot be bound to the target. Raises: DraftMismatchError."""
    pairs = {
        "vocab_size": (run.draft.vocab_size, facts.vocab_size),
        "hidden_size": (run.draft.hidden_size, facts.hidden_size),
        "num_target_layers": (run.draft.num_target_layers, facts.num_layers),
    }
    wrong = [f"draft.{key} is {ours}, the target has {its}" for key, (ours, its) in pairs.items() if ours != its]
    if wrong:
        raise DraftMismatchError(f"{run.name}: {'; '.join(wrong)}; mend the draft section for {run.target.path}")


def read_prepared(run: RunConfig, origin: dict[str, Any]) -> ResponsesHeader:
    """The header of the responses. Raises: RecordError when they were made by another target or setting."""
    path = run.record.folder / RESPONSES_FILE
    header = read_header(path)
    same = ("target_fingerprint", "tokenizer_fingerprint", "template_fingerprint", "thinking")
    expected = {key: origin[key] for key in same}
    if header.answers == "target":
        expected |= {"temperatures": run.data.temperatures, "seed": run.seed}
    made = header.model_dump()
    wrong = [f"{key} {made[key]!r} (now {value!r})" for key, value in expected.items() if made[key] != value]
    if wrong:
        raise RecordError(f"{path}: made with {', '.join(wrong)}; run dspark prepare into another record.folder")
    return header


def describe(
    run: RunConfig, facts: TargetFacts, origin: dict[str, Any], responses: Responses, header: ResponsesHeader
) -> Manifest:
    """The manifest of the record to come, without shards."""
    return Manifest(
        **origin,
        target_layer_ids=run.draft.target_layer_ids,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        answers=header.answers,
        temperatures=header.temperatures,
        text_sha256=responses.text_sha256,
        num_sequences=len(responses),
        num_tokens=int(responses.num_tokens_S.sum()),
        num_supervised=int(responses.num_supervised_S.sum()),
        shard_tokens=run.record.shard_tokens,
    )
