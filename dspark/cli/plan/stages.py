"""What the stages of a run have to do, bytes and memory that follow from it, and a trial of how fast they are here."""

import os
import random
from collections import Counter, namedtuple
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from dspark.cli.mixing import prompt_sources
from dspark.cli.prepare import encode
from dspark.config import PositiveFloat, PositiveInt, RunConfig, Section
from dspark.data.chat import ChatFormat, Encoded
from dspark.data.conversations import encode_each, stream_rows
from dspark.data.rows import Prompt
from dspark.decode.engine import SLACK_TOKENS
from dspark.decode.generation import DraftSpeaker, PlainSpeaker
from dspark.decode.sampling import Sampling, row_uniforms
from dspark.decode.speaking import Stopwatch
from dspark.distributed import start_accelerator
from dspark.eval.measure import decode_prompts
from dspark.eval.tasks import num_prompts
from dspark.export.draft_folder import draft_parameter_count
from dspark.model_folder import Checkpoint
from dspark.record.capture import TOKENS_PER_CALL, read_pack
from dspark.record.format import Manifest, Shard, group_by_tokens
from dspark.record.writer import check_room
from dspark.target.config import LING_ARCHITECTURE, load_target_config
from dspark.target.loading import load_target, target_facts
from dspark.target.tokenizer import load_tokenizer
from dspark.train.measure import RandomRecord, least_bytes, random_learner, whole_steps
from dspark.verifier.plan import make_plan, make_reading_plan
from dspark.verifier.weights import DIVIDED
from dspark.verifier.weights import Shard as Rank

SAMPLED_ROWS, MOST_CALLS, EVALUATED_TOKENS = 2000, 20, 64
"""Of the sources; of a stage in a trial; of a text that a trial decodes with the draft; at most."""
CHECKPOINTS = 3
"""Of training on the disk at most: two are kept while a third is written."""
Trial = tuple[dict[str, float], str]
Stage = namedtuple("Stage", "name num_tokens disk_bytes num_gpus memory_bytes")
"""Tokens; bytes on the disk at most; GPUs, or CPU processes, that share it; bytes that each of them surely needs."""


class Rates(Section):
    """What the hardware does: tokens a second of one GPU (or CPU process), also where several share a stage. A stage
    without a rate is given no time.
    """

    num_gpus: PositiveInt = 1
    """That train, and on which endpoints answer or the ranks of recording and evaluation lie."""
    prepare_tokens_per_second: PositiveFloat | None = None
    record_tokens_per_second: PositiveFloat | None = None
    train_tokens_per_second: PositiveFloat | None = None
    eval_tokens_per_second: PositiveFloat | None = None
    response_tokens: PositiveFloat | None = None
    """Mean length of an answer to this run's prompts."""


def sample_prompts(run: RunConfig, folder: Path) -> tuple[list[Prompt], Counter[str]]:
    """Read all rows that prepare will ask, and encode some, drawn evenly by the run's seed, in every way in which they
    are asked; a mixture is made for it. ``folder``: the target's.
    Returns: the prompts; of the drawn ``rows`` how many were ``left out`` because they cannot be used, and how many
    there are of ``all``. Raises: as ``prompt_sources``, ``stream_rows`` and ``encode_each``.
    """
    tokenizer, stops = load_tokenizer(folder), target_facts(folder).stop_token_ids
    chats = [ChatFormat(tokenizer, stops, is_thinking) for is_thinking in run.data.thinking]
    drawn, counts, draw = list[tuple[str, int, Any]](), Counter[str](), random.Random(run.seed).randrange
    for row in stream_rows(prompt_sources(run, True), run.data.split, run.data.max_conversations):
        counts["all"] += 1
        place = len(drawn) if len(drawn) < SAMPLED_ROWS else draw(counts["all"])
        if place < SAMPLED_ROWS:
            drawn[place : place + 1] = [row]
    found = encode_each(drawn, partial(encode, run, chats, False), counts, is_leaving_out=True)
    return list(chain.from_iterable(found)), counts


def expect_record(run: RunConfig, prompts: list[Prompt], rows: Counter[str], length: float) -> tuple[Manifest, int]:
    """What follows from a sample (see ``sample_prompts``) and the mean ``length`` of an answer. Returns: a manifest of
    one shard, with nothing but what the record's bytes follow from; what prepare takes on the disk, the prompts and
    twice its file.
    """
    scale, asked = rows["all"] / rows["rows"], sum(len(prompt.ids) for prompt in prompts)
    said = len(prompts) * length
    shard = Shard(round(scale * len(prompts)), round(scale * (asked + said)), round(scale * said))
    known: dict[str, Any] = {"dtype": run.target.dtype, "taps": run.record.taps, "shards": (shard,)}
    known |= {"target_layer_ids": run.draft.target_layer_ids, "hidden_size": run.draft.hidden_size}
    asked_bytes = scale * sum(len(prompt.model_dump_json(exclude_none=True)) for prompt in prompts)
    return Manifest.model_construct(**known), round(asked_bytes * (3 + 2 * said / asked))


def plan_stages(
    run: RunConfig, folder: Path, manifest: Manifest, answer_bytes: int, num_gpus: int, device: str
) -> list[Stage]:
    """Prepare, record, train and eval, in this order; nothing is loaded. ``folder``: the target's;
    ``answer_bytes``: of prepare on the disk, 0 when all is answered. Behind a ring, what is read again is recorded so.
    Raises: ConfigError and CheckpointError as the target's folder deserves.
    """
    train, total, dtype = run.train, manifest.total, getattr(torch, run.target.dtype)
    num_ranks, num_parameters = 1, draft_parameter_count(run.draft)
    reading = decoding = target = Checkpoint(folder).num_parameters * dtype.itemsize
    if device != "cpu" and target_facts(folder).architecture == LING_ARCHITECTURE:
        config = load_target_config(folder)
        num_ranks = max(n for n in range(1, num_gpus + 1) if not any(getattr(config, name) % n for name in DIVIDED))
        shard, pack = Rank(0, num_ranks), max(TOKENS_PER_CALL, run.record.max_tokens)
        reading = make_reading_plan(config, shard, pack, dtype, device, len(run.draft.target_layer_ids)).total_bytes
        capacity = run.record.max_tokens + run.eval.max_new_tokens + SLACK_TOKENS
        decoding = make_plan(config, shard, capacity, dtype, device).total_bytes
    texts = sum(num_prompts(name, run.eval.max_prompts) for name in run.eval.tasks) * len(run.eval.temperatures)
    epochs = train.steps * train.batch_size * train.accumulation_steps * num_gpus / total.num_sequences
    held = min(1, run.record.ring_shards * run.record.shard_tokens / total.num_tokens) or 1
    new_tokens = total.num_supervised if answer_bytes else 0
    copies = (3 if train.optimizer == "adamw" else 2) + bool(train.ema_decay)
    saved = num_parameters * (CHECKPOINTS * 4 * copies + 2 * (1 + bool(train.probe_every_steps)))
    recorded, probing = total.num_tokens * (epochs if held < 1 else 1), target * bool(train.probe_every_steps)
    return [
        Stage("prepare", new_tokens, answer_bytes, *((num_gpus, 0) if run.data.endpoints else (1, target))),
        Stage("record", round(recorded), round(manifest.num_bytes * held), num_ranks, reading),
        Stage("train", round(total.num_tokens * epochs), saved, num_gpus, least_bytes(run) + probing),
        Stage("eval", texts * run.eval.turns * run.eval.max_new_tokens, 0, num_ranks, decoding),
    ]


def try_stages(run: RunConfig, folder: Path, prompts: list[Prompt], seconds: float, device: str) -> Trial:
    """Answer a batch of the prompts, train a new draft on made-up states of as many tokens, decode with that draft, and
    read a pack of those answers, each for about a quarter of ``seconds``, beside what is done once.

    All with the reference path: on a GPU dspark record and dspark eval have the verifier, which is faster, and a
    trained draft commits more tokens a round, so they are no slower. Of the disk nothing is seen. Endpoints are not
    asked, and their rate is left out.
    Returns: fields of ``Rates``, and how the length of answers is known. Raises: as the stages.
    """
    stops, section, most = target_facts(folder).stop_token_ids, run.train, run.data.max_response_tokens
    layers, dtype, part = run.draft.target_layer_ids, getattr(torch, run.target.dtype), seconds / 4
    target = load_target(folder, target_layer_ids=layers, dtype=dtype, device=device)
    ids = [torch.tensor(prompt.prompt_ids) for prompt in prompts[: run.data.generation_batch_size]]
    uniforms, texts = [row_uniforms(run.seed, row) for row in range(len(ids))], [list[int]() for _ in ids]
    sampling, moments = Sampling(run.data.temperatures[0], most, stops), [monotonic()]
    for news in PlainSpeaker(target)(ids, sampling, uniforms, Stopwatch()):
        for spoken in news:
            texts[spoken.row] += spoken.ids
        moments.append(monotonic())
        if len(moments) > 2 and moments[-1] - moments[1] > part:
            break
    ended = sum(text[-1] in stops or len(text) == most for text in texts)
    mean = sum(map(len, texts)) / len(texts) if ended else most
    each = (moments[-1] - moments[1]) / max(1, len(moments) - 2)
    found = {"response_tokens": mean} if ended else {}
    if not run.data.endpoints:
        found["prepare_tokens_per_second"] = len(ids) * mean / (moments[1] - moments[0] + mean * each)
    whole = [torch.cat((ids_T, torch.tensor(text))) for ids_T, text in zip(ids, texts, strict=True)]
    length, each_step = sum(map(len, whole)) // len(whole), section.batch_size * section.accumulation_steps
    short = run.model_copy(update={"record": run.record.model_copy(update={"max_tokens": length})})
    mode = ("ACCELERATE_USE_CPU", "true") if device == "cpu" else ("ACCELERATE_MIXED_PRECISION", "bf16")
    os.environ.setdefault(*mode)
    learner = random_learner(start_accelerator(section, os.environ, ()), short)
    with whole_steps(learner, RandomRecord(short, each_step)) as take:
        found["train_tokens_per_second"] = tokens_per_second(lambda: take() or each_step * length, part)
    draws = Sampling((*run.eval.temperatures, 1.0)[0], min(EVALUATED_TOKENS, run.eval.max_new_tokens), stops)
    decode = partial(decode_prompts, DraftSpeaker(target, learner.draft), ids[:1], draws, run.seed)
    with torch.compiler.set_stance("force_eager"):  # decoding has another shape in each round
        found["eval_tokens_per_second"] = tokens_per_second(lambda: decode()[0].num_tokens, part)
    masks = [torch.arange(len(ids_T)) >= len(prompt_T) for prompt_T, ids_T in zip(ids, whole, strict=True)]
    pack = [Encoded(whole[n], masks[n], "a trial") for n in group_by_tokens(map(len, whole), TOKENS_PER_CALL)[0]]
    read = partial(read_pack, target, pack, run.record.taps == "float8")
    found["record_tokens_per_second"] = tokens_per_second(lambda: len(read().states["ids_T"]), part)
    how = f"the mean of a trial in which {ended} of {len(texts)} answers ended"
    return {name: float(f"{value:.4g}") for name, value in found.items()}, how


def tokens_per_second(work: Callable[[], int], seconds: float) -> float:
    """Of ``work``, which says how many it did: called until the time is over, 20 times at most, after once for what is
    made once.
    """
    work()
    start, done = monotonic(), 0
    for _ in range(MOST_CALLS):
        if not done or monotonic() - start < seconds:
            done += work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    return done / (monotonic() - start)


def check_disk(stages: list[Stage], folder: Path) -> None:
    """Raises: RecordError when the disk of record.folder does not hold what prepare and record have yet to write."""
    there = sum(path.stat().st_size for path in folder.glob("*") if path.suffix != ".jsonl")
    check_room(folder, sum(each.disk_bytes for each in stages[:2]) - there, "prepare and record need")
