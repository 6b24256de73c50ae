"""dspark bench headline: plain decoding, NEXTN and DSpark at a fixed length, and the published figures."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from dspark.cli import bench
from dspark.cli.bench import DEVICE, DTYPE, RANDOM, SEED, config_folder, run_file
from dspark.cli.bench.report import Json, Report
from dspark.config import load_run, read_yaml
from dspark.decode.engine import SLACK_TOKENS, CycleSpeaker
from dspark.decode.sampling import Sampling
from dspark.errors import ConfigError
from dspark.eval.measure import decode_prompts, summarise
from dspark.export import read_draft, read_draft_config
from dspark.target.config import load_target_config
from dspark.target.loading import locate_target
from dspark.verifier import Verifier, load_mtp, load_weights, make_plan, random_mtp, random_weights
from dspark.verifier.drafting import BlockDrafter, Drafter, MtpDrafter, NoDrafter, draft_weights, random_draft
from dspark.verifier.plan import free_bytes
from dspark.verifier.ranks import Ranks
from dspark.verifier.timing import replay, uniform_trace

ANSWER_TOKENS = 5000
TRACE_TOKENS = 128
FIXED_LENGTHS = {"NEXTN": (3.25,), "DSpark": (3.25, 5.29)}
"""Acceptance lengths at which random weights, whose own mean nothing, are read, beside that of a whole window: NEXTN's
of the LMSYS run, and DSpark's over nine tasks by the card of Ling-3.0-flash-dspark."""


@dataclass(frozen=True)
class Job(bench.Model):
    """What every rank measures."""

    draft: str
    mtp: tuple[int, ...]
    tokens: tuple[int, int]
    num_prompts: int
    json: Path | None


def headline(
    target: Annotated[str, typer.Option(help="A name (ling-3.0-flash, ...) or a Hugging Face folder.")],
    weights: Annotated[str, typer.Option(help="random, or a folder of weights.")] = RANDOM,
    draft: Annotated[str, typer.Option(help="random (as configs/TARGET.yaml has it), or an exported draft.")] = RANDOM,
    tp: Annotated[int, typer.Option(min=1, help="Ranks, one GPU each, that work together.")] = 1,
    emulate_tp: Annotated[int, typer.Option(min=1, help="Measure one rank of so many, communication left out.")] = 1,
    mtp: Annotated[str, typer.Option(help="Drafts of NEXTN, separated by commas; empty leaves it out.")] = "5",
    prompt_tokens: Annotated[int, typer.Option(min=1, max=10**6, help="Random ids of a prompt.")] = 8192,
    new_tokens: Annotated[int, typer.Option(min=2, max=10**6, help="Of every text; no stop token ends it.")] = 1024,
    num_prompts: Annotated[int, typer.Option(min=1, max=1000)] = 4,
    json: Json = None,
) -> None:
    """Decode the field's fixed workload plainly, with NEXTN and with DSpark: one request at a time, greedy, bf16.

    With random weights no acceptance length means anything: a round's time is measured, its experts visited evenly, and
    the time per token is given at the published acceptance lengths and at that of a whole window. Needs a CUDA GPU of
    compute capability 9.0 or 10.0.
    """
    bench.check_ranks(tp, emulate_tp)
    if (weights == RANDOM) != (draft == RANDOM):
        raise ConfigError("--weights, --draft: give both as folders or both as random; one alone says nothing")
    lengths = bench.numbers("--mtp", mtp, 15) if mtp else ()
    folder = locate_target(weights) if weights != RANDOM else config_folder(target)
    if draft == RANDOM:
        run_file(target)
    job = Job(target, weights, folder, emulate_tp, draft, lengths, (prompt_tokens, new_tokens), num_prompts, json)
    bench.on_gpus("headline", partial(run, job=job), tp)


def run(ranks: Ranks, job: Job) -> None:
    """Measure on one rank; the first one prints and writes."""
    config, device, shard = load_target_config(job.folder), torch.device(DEVICE), job.shard(ranks)
    prompt_tokens, new_tokens = job.tokens
    capacity_tokens = prompt_tokens + new_tokens + SLACK_TOKENS
    plan = make_plan(config, shard, capacity_tokens, DTYPE, device, has_mtp=bool(job.mtp))
    plan.check(free_bytes(device), torch.cuda.get_device_name(device))
    label = f"{ranks.world_size} ranks" if ranks.world_size > 1 else "the whole model on one GPU"
    if job.emulated > 1:
        label = f"one rank of {job.emulated}, emulated: their exchange is left out"
    label += f", {torch.cuda.get_device_name(device)}, {job.weights} weights"
    facts = asdict(job) | {"folder": job.folder.name, "json": None, "label": label, "rows": []}
    report = Report(job.json, ranks.rank == 0, **facts)
    is_random = job.weights == RANDOM
    weights = job.open(random_weights, load_weights, shard, DTYPE, device=DEVICE)
    made = load_run(run_file(job.target)).draft if job.draft == RANDOM else read_draft_config(Path(job.draft))
    verifier = Verifier(weights, capacity_tokens, made.target_layer_ids, ranks=ranks)
    if is_random:  # its text repeats itself and visits few experts: all but NEXTN's layer are routed evenly
        trace_NLK = uniform_trace(config, TRACE_TOKENS, SEED)
        report["routing"] = [replay(verifier, trace_NLK, 1 + n) for n in (0, *job.mtp, made.block_size)]
    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(config.vocab_size, (job.num_prompts, prompt_tokens), generator=generator)
    for name, make in _ways(job, verifier):
        speaker = CycleSpeaker(verifier, make())
        texts = decode_prompts(speaker, list(prompts), Sampling(0.0, new_tokens), SEED)
        measured = summarise(f"random:{prompt_tokens}", 0.0, texts)
        num_rounds = sum(len(text.rounds) for text in texts) or sum(text.num_tokens - 1 for text in texts)
        decoding = sum(value for phase, value in measured.timing.phase_seconds.items() if phase != "prefill")
        row = {"decoding": name, "num_drafts": speaker.drafter.num_drafts, "round_seconds": decoding / num_rounds}
        report["rows"].append(row | {"measurement": asdict(measured)})
        report.say(f"{name}: a round takes {decoding / num_rounds * 1e3:.3f} ms")
    title = f"{job.target}, {label}; {prompt_tokens} -> {new_tokens}"
    report.console.print(_table(report["rows"], title, is_random, new_tokens), _published())


def _ways(job: Job, verifier: Verifier) -> Iterator[tuple[str, Callable[[], Drafter]]]:
    """What is compared, and what makes its drafter; a drafter's weights are there while it is measured."""
    own, shard = verifier.weights, verifier.weights.shard
    yield "plain", partial(NoDrafter, verifier)
    if job.mtp:
        mtp = job.open(random_mtp, load_mtp, shard, DTYPE, device=DEVICE)
        for number in job.mtp:
            yield f"NEXTN, {number}", partial(MtpDrafter, verifier, mtp, number)
    if job.draft == RANDOM:
        draft = random_draft(load_run(run_file(job.target)).draft, DTYPE, DEVICE, SEED)
    else:
        draft = read_draft(Path(job.draft), (own.embedding_VD, verifier.head_VD), dtype=DTYPE, device=DEVICE)
    block_size = draft.config.block_size
    weights = draft_weights(draft, shard, DTYPE, DEVICE)
    del draft
    yield f"DSpark, {block_size}", partial(BlockDrafter, verifier, weights, block_size)


def _table(rows: list[dict[str, Any]], title: str, is_random: bool, new_tokens: int) -> Table:
    names = ("length", "round", "first", "TPOT", "median", "tokens/s", "answer")
    table = Table(Column("decoding", no_wrap=True), *(Column(n, justify="right", no_wrap=True) for n in names))
    table.title, table.title_justify, table.caption_justify, table.box = title, "left", "left", SIMPLE
    for row in rows:
        kind, timing, num_drafts = row["decoding"].split(",")[0], row["measurement"]["timing"], row["num_drafts"]
        first, pace, round_seconds = timing["first_token"]["median"], timing["time_per_token"], row["round_seconds"]
        found = row["measurement"]["acceptance"]
        lengths = (*FIXED_LENGTHS[kind], num_drafts + 1) if is_random and num_drafts else ()
        read = [(f"at {length:g}", round_seconds / length, round_seconds / length) for length in lengths]
        own = f"{found['mean_acceptance_length']:.2f}" if found else "1"
        for said, mean, median in read or [(own, pace["mean"], pace["median"])]:
            answer = first + (ANSWER_TOKENS - 1) * mean
            speed = new_tokens / (first + (new_tokens - 1) * mean)
            cells = (said, f"{round_seconds * 1e3:.2f}", f"{first * 1e3:.0f}", f"{mean * 1e3:.3f}")
            table.add_row(row["decoding"], *cells, f"{median * 1e3:.3f}", f"{speed:.0f}", f"{answer:.1f}")
    table.caption = (
        "decoding, and its drafts a round; length: acceptance length; milliseconds of a round, to the\n"
        f"first token and per token (mean, median of texts); seconds of a {ANSWER_TOKENS}-token answer"
    )
    if is_random:
        table.caption += (
            "\nrandom weights, experts visited evenly: a row with a draft is a round as measured, read at\n"
            "an acceptance length that others published, or at that of a whole window"
        )
    return table


def _published() -> Table:
    found = read_yaml(Path(__file__).with_name("published.yaml"), "the published figures")
    table = Table(*(Column(name, no_wrap=True) for name in found["columns"]), title_justify="left", box=SIMPLE)
    table.title, table.caption, table.caption_justify = "published by others, not measured here", found["note"], "left"
    for row in found["rows"]:
        table.add_row(*row)
    return table
