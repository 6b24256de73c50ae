"""dspark bench record: how fast a target's states are recorded, beside its bare forward pass, and read back."""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from dspark.cli.bench import config_folder, save_report
from dspark.cli.terminal import DEFAULT_DEVICE, Device
from dspark.config import RunConfig, load_run
from dspark.data.chat import Encoded
from dspark.provenance import describe_launch
from dspark.record.capture import TOKENS_PER_CALL, capture
from dspark.record.format import Manifest, group_by_tokens, plan_shards
from dspark.record.leases import Leases
from dspark.record.reader import RecordReader
from dspark.record.writer import ShardWriter, start_record
from dspark.target.config import load_target_config
from dspark.target.loading import load_target, target_facts
from dspark.types import Target
from dspark.verifier import Shard, random_weights
from dspark.verifier.reading import PackedReader

READING_THREADS = 2


def record(
    config: Annotated[Path, typer.Option(help="The run: target, tapped layers, record section.", readable=False)],
    tokens: Annotated[int, typer.Option(min=2, max=10**8, help="To record in all.")] = 65_536,
    length: Annotated[int, typer.Option(min=2, max=10**6, help="Of a sequence; its second half is predicted.")] = 1024,
    folder: Annotated[Path | None, typer.Option(help="On the disk to write to.  [default: the temporary one]")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, may be repeated.")] = None,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, writable=True, help="Also write everything there.")
    ] = None,
    device: Device = DEFAULT_DEVICE,
) -> None:
    """Time recording random ids through the code that dspark record runs, three times after one that is not counted.

    The bare forward pass reads the same packs and keeps nothing. On a GPU the weights are random, as are those of a
    target of which only the shape is here. Two threads read whole sequences back at random, from the page cache.
    """
    run = load_run(config, tuple(overrides or ()))
    target, sequences = open_target(run, device), random_sequences(run, tokens, length)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    report: dict[str, Any] = {
        "provenance": describe_launch(sys.argv),
        "target": run.target.path,
        "taps": run.record.taps,
    }
    with TemporaryDirectory(dir=folder) as place:
        bare, recording = [], []
        for number in range(4):
            manifest = describe(run, target, sequences, Path(place) / str(number))
            bare.append(timed(device, partial(read_only, target, sequences)))
            recording.append(timed(device, partial(write, target, sequences, manifest, Path(place) / str(number))))
        reading = min(timed("cpu", partial(read_back, Path(place) / "3")) for _ in range(3))
    num_tokens, best = manifest.num_tokens, [min(times[1:]) for times in (bare, recording)]
    report |= {"tokens": num_tokens, "bytes": manifest.num_bytes, "bare_seconds": bare[1:], "seconds": recording[1:]}
    report["reading_seconds"] = reading
    rates = [num_tokens / seconds for seconds in best]
    console.print(f"{num_tokens} tokens in sequences of {length}, {manifest.num_bytes / num_tokens / 1e3:.2f} kB each")
    console.print(f"bare forward pass {rates[0]:,.0f} tokens/s; recording {rates[1]:,.0f}: {rates[1] / rates[0]:.1%}")
    console.print(f"read back, whole sequences at random: {manifest.num_bytes / reading / 1e9:.2f} GB/s")
    save_report(report, json)


def open_target(run: RunConfig, device: str) -> Target[Any]:
    """The run's target: on a GPU the verifier's reader with random weights, else the reference."""
    folder, dtype, layers = config_folder(run.target.path), getattr(torch, run.target.dtype), run.draft.target_layer_ids
    if device.startswith("cuda"):
        return PackedReader(random_weights(load_target_config(folder), Shard(0, 1), dtype, 0, device), layers)
    return load_target(folder, target_layer_ids=layers, dtype=dtype, device=device)


def random_sequences(run: RunConfig, num_tokens: int, length: int) -> list[Encoded]:
    """Of random ids, drawn by the run's seed."""
    generator, loss_mask_T = torch.Generator().manual_seed(run.seed), torch.arange(length) >= length // 2
    vocab_size = target_facts(config_folder(run.target.path)).vocab_size
    draws = (torch.randint(vocab_size, (length,), generator=generator) for _ in range(max(1, num_tokens // length)))
    return [Encoded(ids_T, loss_mask_T, "random") for ids_T in draws]


def describe(run: RunConfig, target: Target[Any], sequences: list[Encoded], folder: Path) -> Manifest:
    """The manifest of a record of them, which is begun."""
    sizes = [len(each.ids_T) for each in sequences], [each.num_supervised for each in sequences]
    manifest = Manifest(
        target=run.target.path, target_fingerprint="0" * 64, tokenizer_fingerprint="0" * 64, text_sha256="0" * 64,
        target_layer_ids=run.draft.target_layer_ids, hidden_size=target.hidden_size, vocab_size=target.vocab_size,
        dtype=run.target.dtype, taps=run.record.taps, answers="given", thinking=(False,), temperatures=(),
        shard_tokens=run.record.shard_tokens, shards=plan_shards(*sizes, run.record.shard_tokens),
    )  # fmt: skip
    start_record(folder, manifest)
    return manifest


def read_only(target: Target[Any], sequences: list[Encoded]) -> None:
    """The forward pass of every pack."""
    for group in group_by_tokens([len(each.ids_T) for each in sequences], TOKENS_PER_CALL):
        target.prefill([each.ids_T for each in sequences[group.start : group.stop]])


def write(target: Target[Any], sequences: list[Encoded], manifest: Manifest, folder: Path) -> None:
    """Record, to the last flush."""
    leases = Leases(folder)

    def open_shard(index: int, sizes: Sequence[tuple[int, int]]) -> ShardWriter:
        return ShardWriter(folder, manifest, index, leases, sizes)

    capture(target, sequences, manifest, range(len(manifest.shards)), open_shard, lambda sequences, tokens: None)


def read_back(folder: Path) -> None:
    """Every sequence once, at random."""
    reader = RecordReader(folder)
    with ThreadPoolExecutor(READING_THREADS) as pool:
        for _ in pool.map(reader.__getitem__, torch.randperm(len(reader)).tolist()):
            pass


def timed(device: str, work: Callable[[], None]) -> float:
    """Seconds, to the end of what a GPU was given."""
    began = time.monotonic()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.monotonic() - began
