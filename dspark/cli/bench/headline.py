"""dspark bench headline: plain decoding, NEXTN and DSpark at a fixed length, and the published figures."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from dspark.cli import bench
from dspark.cli.bench import DEVICE, DTYPE, RANDOM, SEED, config_folder, run_file
from dspark.cli.bench.report import Json, Report
from dspark.config import load_run, read_yaml
from dspark.decode.engine import SLACK_TOKENS, CycleSpeaker
from dspark.decode.sampling import Sampling
from dspark.errors import ConfigError
from dspark.eval.measure import decode_prompts, summarise
from dspark.eval.tables import render
from dspark.export.draft_config import read_layout
from dspark.export.draft_folder import read_draft
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
    if (weights == RANDOM) != (draft == RANDOM):
        raise ConfigError("--weights, --draft: give both as folders or both as random; one alone says nothing")
    lengths = bench.numbers("--mtp", mtp, 15) if mtp else ()
    folder = locate_target(weights) if weights != RANDOM else config_folder(target)
    if draft == RANDOM:
        run_file(target)
    job = Job(target, weights, folder, emulate_tp, draft, lengths, (prompt_tokens, new_tokens), num_prompts, json)
    bench.on_gpus(partial(run, job=job), tp, emulate_tp)


def run(ranks: Ranks, job: Job) -> None:
    """Measure on one rank; the first one prints and writes."""
    config, device, shard = load_target_config(job.folder), torch.device(DEVICE), job.shard(ranks)
    prompt_tokens, new_tokens = job.tokens
    capacity_tokens = prompt_tokens + new_tokens + SLACK_TOKENS
    plan = make_plan(config, shard, capacity_tokens, DTYPE, device, has_mtp=bool(job.mtp))
    plan.check(free_bytes(device), torch.cuda.get_device_name(device))
    label = f"{job.label(ranks)}, {torch.cuda.get_device_name(device)}, {job.weights} weights"
    facts = asdict(job) | {"folder": job.folder.name, "json": None, "label": label, "rows": []}
    report = Report(job.json, ranks.rank == 0, **facts)
    is_random = job.weights == RANDOM
    weights = job.open(random_weights, load_weights, shard, DTYPE, device=DEVICE)
    made = load_run(run_file(job.target)).draft if job.draft == RANDOM else read_layout(Path(job.draft))[0]
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
    sizes = {"new_tokens": new_tokens, "answer_tokens": ANSWER_TOKENS, "lengths": FIXED_LENGTHS}
    published = read_yaml(Path(__file__).with_name("published.yaml"), "the published figures")
    facts = {"rows": report["rows"], "title": title, "is_random": is_random, "published": published}
    report.console.print(*render(Path(__file__).with_name("headline.j2"), **sizes, **facts))


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
