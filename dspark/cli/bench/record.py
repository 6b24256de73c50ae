"""dspark bench record: how fast a target's states are recorded, beside its bare forward pass, and read back."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch.utils.benchmark import timer

from dspark.cli.bench import config_folder
from dspark.cli.bench.report import Json, Report
from dspark.cli.terminal import DEFAULT_DEVICE, Device
from dspark.config import RunConfig, load_run
from dspark.data.chat import Encoded
from dspark.record.capture import TOKENS_PER_CALL, capture
from dspark.record.format import Manifest, group_by_tokens, plan_shards
from dspark.record.leases import Leases
from dspark.record.reader import RecordReader
from dspark.record.writer import ShardWriter, start_record
from dspark.target.config import load_target_config
from dspark.target.loading import load_target
from dspark.types import Reading
from dspark.verifier import Shard, random_weights
from dspark.verifier.plan import LOGIT_ROWS
from dspark.verifier.reading import PackedReader

READING_THREADS = 2


def record(
    config: Annotated[Path, typer.Option(help="The run: target, tapped layers, record section.", readable=False)],
    tokens: Annotated[int, typer.Option(min=2, max=10**8, help="To record in all.")] = 65_536,
    length: Annotated[int, typer.Option(min=2, max=10**6, help="Of a sequence; its second half is predicted.")] = 1024,
    folder: Annotated[Path | None, typer.Option(exists=True, help="On the disk to write to.  [default: /tmp]")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, may be repeated.")] = None,
    json: Json = None,
    device: Device = DEFAULT_DEVICE,
) -> None:
    """Time recording random ids through the code that dspark record runs, three times after one that is not counted.

    The forward pass reads the same packs and keeps nothing. On a GPU the weights are random, as are those of a
    target of which only the shape is here. Two threads read whole sequences back at random, from the page cache.
    """
    run = load_run(config, tuple(overrides or ()))
    target, generator = open_target(run, device), torch.Generator().manual_seed(run.seed)
    loss_mask_T, num_sequences = torch.arange(length) >= length // 2, max(1, tokens // length)
    draws = (torch.randint(target.vocab_size, (length,), generator=generator) for _ in range(num_sequences))
    sequences = [Encoded(ids_T, loss_mask_T, "random") for ids_T in draws]
    manifest = describe(run, target, sequences)
    with TemporaryDirectory(dir=folder) as place:
        made = Path(place) / "record"
        bare, whole = ([timed(read, target, sequences, has_head) for _ in range(4)][1:] for has_head in (False, True))
        recording = [timed(write, target, sequences, manifest, anew(made, manifest)) for _ in range(4)][1:]
        reading = min(timed(read_back, made) for _ in range(3))
    num_tokens, num_bytes = manifest.total.num_tokens, manifest.num_bytes
    report = Report(json, target=run.target.path, taps=run.record.taps, tokens=num_tokens, bytes=num_bytes)
    report |= {"bare_seconds": bare, "whole_seconds": whole, "seconds": recording, "reading_seconds": reading}
    first, second, rate = (num_tokens / min(seconds) for seconds in (bare, whole, recording))
    report.say(f"{num_tokens} tokens in sequences of {length}, {num_bytes / num_tokens / 1e3:.2f} kB each")
    report.say(f"forward pass without the head {first:,.0f} tokens/s, with logits of what is predicted {second:,.0f}")
    report.say(f"recording {rate:,.0f} tokens/s: {rate / first:.1%} and {rate / second:.1%} of them")
    report.say(f"read back, whole sequences at random: {num_bytes / reading / 1e9:.2f} GB/s")


def open_target(run: RunConfig, device: str) -> Reading:
    """The run's target: on a GPU the verifier's reader with random weights, else the reference."""
    folder, dtype, layers = config_folder(run.target.path), getattr(torch, run.target.dtype), run.draft.target_layer_ids
    if device.startswith("cuda"):
        return PackedReader(random_weights(load_target_config(folder), Shard(0, 1), dtype, 0, device), layers)
    return load_target(folder, target_layer_ids=layers, dtype=dtype, device=device)


def describe(run: RunConfig, target: Reading, sequences: list[Encoded]) -> Manifest:
    """The manifest of a record of them."""
    sizes = [len(each.ids_T) for each in sequences], [each.num_supervised for each in sequences]
    made: dict[str, Any] = run.record.model_dump(include={"taps", "shard_tokens"}) | run.target.model_dump()
    made |= {"target": made.pop("path"), "answers": "given", "thinking": (False,), "temperatures": ()}
    made |= dict.fromkeys(("target_fingerprint", "tokenizer_fingerprint", "text_sha256"), "0" * 64)
    made |= {name: getattr(target, name) for name in ("target_layer_ids", "hidden_size", "vocab_size")}
    return Manifest(**made, shards=plan_shards(*sizes, run.record.shard_tokens))


def read(target: Reading, sequences: list[Encoded], has_head: bool) -> None:
    """The forward pass of every pack."""
    for group in group_by_tokens([len(each.ids_T) for each in sequences], TOKENS_PER_CALL):
        _, output = target.prefill([each.ids_T for each in sequences[group.start : group.stop]])
        predicted = sum(sequences[row].num_supervised for row in group)
        for hidden_ND in torch.split(output.last_hidden_ND[:predicted], LOGIT_ROWS) if has_head else ():
            target.logits(hidden_ND)


def anew(folder: Path, manifest: Manifest) -> Path:
    """The folder, with nothing recorded in it."""
    rmtree(folder, ignore_errors=True)
    start_record(folder, manifest)
    return folder


def write(target: Reading, sequences: list[Encoded], manifest: Manifest, folder: Path) -> None:
    """Record, to the last flush."""
    open_shard, shards = partial(ShardWriter, folder, manifest, Leases(folder)), range(len(manifest.shards))
    capture(target, sequences, manifest, shards, open_shard, lambda sequences, tokens: None)


def read_back(folder: Path) -> None:
    """Every sequence once, at random."""
    reader = RecordReader(folder)
    with ThreadPoolExecutor(READING_THREADS) as pool:
        for _ in pool.map(reader.__getitem__, torch.randperm(len(reader)).tolist()):
            pass


def timed(work: Callable[..., None], *parts: Any) -> float:
    """Seconds, to the end of what a GPU was given."""
    began = timer()
    work(*parts)
    return timer() - began
