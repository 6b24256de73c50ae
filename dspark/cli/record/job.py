"""What every rank of a recording does; the first one writes and prints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dspark.cli.identity import check_pair
from dspark.cli.terminal import counted, token_progress
from dspark.config import RunConfig
from dspark.data.responses import Responses
from dspark.decode.sampling import Sampling
from dspark.errors import ConfigError, RecordError
from dspark.eval.probe import last_answer, tap_cost
from dspark.export.draft_folder import read_draft
from dspark.layers.float8 import from_float8, to_float8
from dspark.record.capture import TOKENS_PER_CALL, capture, take_turns
from dspark.record.checking import check_shards
from dspark.record.format import Manifest, shard_name
from dspark.record.leases import Leases
from dspark.record.reader import RecordReader
from dspark.record.ring import Ring
from dspark.record.writer import ShardWriter, missing_shards
from dspark.target.config import LING_ARCHITECTURE
from dspark.target.loading import load_target, target_facts
from dspark.types import Reading
from dspark.verifier.ranks import Ranks
from dspark.verifier.reading import PackedReader

PROBED_TEXTS = 64
"""The first sequences of the record, on which the cost of rounded taps is measured."""
WAIT, END = -1, -2


@dataclass(frozen=True)
class Job:
    """What was asked for: ``wish`` is record, check, repair or stats; ``probed``, in place of all that, the draft that
    rounded taps are measured on.
    """

    run: RunConfig
    target: Path
    manifest: Manifest
    responses: Responses
    device: str
    wish: str
    probed: Path | None


def run_job(ranks: Ranks, job: Job) -> None:
    """Do it on one rank. Raises: DsparkError, also where a check finds faults."""
    console = Console(soft_wrap=True, highlight=False, markup=False, quiet=ranks.rank > 0)
    folder = job.run.record.folder
    target = None if job.wish == "stats" else open_target(ranks, job)
    if job.probed and target:
        console.print(measure_float8(target, job, job.probed))
        return
    if job.wish != "record":
        faulty = find_faults(target, job, console)
        if faulty and job.wish != "repair":
            hint = "dspark record --repair records them anew"
            raise RecordError(f"{folder}: {len(faulty)} of {len(job.manifest.shards)} shards have a fault; {hint}")
        if not faulty:
            return
        for index in faulty if ranks.rank == 0 else ():
            (folder / shard_name(index)).unlink(missing_ok=True)
    assert target
    if ranks.rank:
        capture(target, job.responses, job.manifest, follow(ranks, target), None, lambda *_: None)
        return
    leases, is_ring = Leases(folder), bool(job.run.record.ring_shards)
    if is_ring:
        console.print("recording what train.py with this config reads next, until it ends")
    with recording_progress(job) as (missing, on_sequences):
        turns = take_turns(missing, leases)
        if ranks.world_size > 1:
            turns = lead(ranks, target, turns)
        open_shard = partial(ShardWriter, folder, job.manifest, leases)
        capture(target, job.responses, job.manifest, turns, open_shard, on_sequences)
    done = "training has read what it wanted of" if is_ring else f"{len(job.manifest.shards)} shards in"
    console.print(f"{done} {folder}")


def lead(ranks: Ranks, target: Reading, turns: Iterator[int | None]) -> Iterator[int | None]:
    """The turns of the first rank, which ``follow`` hears of."""
    device = target.embedding_VD.device
    for turn in turns:
        ranks.gather(torch.tensor([WAIT if turn is None else turn], device=device))
        yield turn
    ranks.gather(torch.tensor([END], device=device))


def follow(ranks: Ranks, target: Reading) -> Iterator[int | None]:
    """The turns that the first rank takes."""
    nothing = torch.tensor([WAIT], device=target.embedding_VD.device)
    while (turn := int(ranks.gather(nothing)[0, 0])) != END:
        ranks.check()
        yield None if turn == WAIT else turn


@contextmanager
def recording_progress(job: Job) -> Iterator[tuple[Callable[[], list[int] | None], Callable[[int, int], None]]]:
    """Yields what shards are missing, whoever records them, and what is to be told of sequences and tokens; a bar shows
    both.
    """
    record, manifest = job.run.record, job.manifest
    ring = Ring(record.folder, manifest, job.run.seed, record.ring_shards) if record.ring_shards else None
    if ring:
        ring.begin()
    with token_progress("recorded", None if ring else manifest.total.num_sequences) as advance:

        def missing() -> list[int] | None:
            if ring:
                return ring.missing()
            numbers = missing_shards(record.folder, manifest)
            num_lacking = sum(manifest.shards[number].num_sequences for number in numbers or ())
            advance(max(0, manifest.total.num_sequences - num_lacking - advance(0, 0)), 0)
            return numbers

        yield missing, advance


def find_faults(target: Reading | None, job: Job, console: Console) -> list[int]:
    """Print what every shard holds and what is wrong with it. Returns: those with a fault."""
    manifest, folder = job.manifest, job.run.record.folder
    reader = RecordReader(folder, is_whole=False)
    found_each = check_shards(reader, target, job.responses)
    checks = list(counted(found_each, "shards", len(manifest.shards), not console.quiet))
    table = Table("shard", "sequences", "tokens", "to predict", "nats each", "entropy", "states", box=SIMPLE)
    for found in checks:
        known = (found.nats, found.entropy, found.states_error)
        numbers = ("-" if value is None else f"{value:.3g}" for value in known)
        table.add_row(str(found.index), *map(str, manifest.shards[found.index]), *numbers)
    console.print(table, "nats, entropy: of what is to be predicted; states: recorded less those of now, of their norm")
    faulty = [found for found in checks if found.fault]
    for found in faulty:
        console.print(f"{folder / shard_name(found.index)}: {found.fault}")
    judge = "what the target says" if target else "whole"
    console.print(f"{len(checks) - len(faulty)} of {len(checks)} shards are {judge}")
    return [found.index for found in faulty]


def open_target(ranks: Ranks, job: Job) -> Reading:
    """The verifier's reader on a GPU, or for several ranks; else the reference. Raises: ConfigError."""
    is_ling = target_facts(job.target).architecture == LING_ARCHITECTURE
    layers, dtype = job.manifest.target_layer_ids, job.manifest.torch_dtype
    if job.probed:
        layers = check_pair(job.probed, job.target).target_layer_ids
    if job.device.startswith("cuda:"):
        torch.cuda.set_device(job.device)
    if ranks.world_size > 1 and not is_ling:
        raise ConfigError(f"--tp {ranks.world_size}: ranks can share a {LING_ARCHITECTURE} only; leave it out")
    if ranks.world_size > 1 or (is_ling and job.device.startswith("cuda")):
        most = max(TOKENS_PER_CALL, job.run.record.max_tokens)
        return PackedReader.load(job.target, most, layers, dtype, job.device, ranks)
    return load_target(job.target, target_layer_ids=layers, dtype=dtype, device=job.device)


def measure_float8(target: Reading, job: Job, folder: Path) -> str:
    """What the draft accepts less when its taps are rounded, in a line."""
    tables = (target.embedding_VD, target.head_VD)
    draft = read_draft(folder, tables, dtype=job.manifest.torch_dtype, device=job.device)
    texts = [last_answer(sequence) for sequence in islice(job.responses, PROBED_TEXTS)]
    stops, data = target_facts(job.target).stop_token_ids, job.run.data
    sampling = Sampling(max(data.temperatures), data.max_response_tokens, stops)
    cost = tap_cost(target, draft, texts, sampling, lambda taps: from_float8(*to_float8(taps), taps.dtype))
    return cost.line("float8 taps")
