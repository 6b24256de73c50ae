"""A short trial of every stage on this machine, through the stages' own functions, for the rates of a plan."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch

from dspark.cli.record import describe
from dspark.config import RunConfig
from dspark.data.chat import Encoded
from dspark.decode.generation import DraftSpeaker, PlainSpeaker, generate
from dspark.decode.sampling import Sampling, row_uniforms
from dspark.decode.speaking import Stopwatch
from dspark.distributed import start_accelerator
from dspark.eval.measure import decode_prompts
from dspark.record.capture import TOKENS_PER_CALL, capture
from dspark.record.format import group_by_tokens
from dspark.record.plan import existing
from dspark.record.reader import RecordReader
from dspark.record.writer import open_writer
from dspark.target.loading import load_target, target_facts
from dspark.train.measure import random_learner, whole_steps
from dspark.train.step import make_graphs
from dspark.types import Target

MOST_CALLS = 20
EVALUATED_TOKENS = 64
"""Of a text that is decoded with the draft, at most."""


def calibrate(
    run: RunConfig, origin: dict[str, Any], prompts: Sequence[torch.Tensor], seconds: float, device: str
) -> tuple[dict[str, float], str]:
    """Answer, record one pack, train a new draft on it and decode with that, each for about a quarter of ``seconds``.

    ``origin``: see ``describe_origin``. An untrained draft commits the fewest tokens a round, so evaluation with a
    trained one is no slower. Endpoints are not asked, and their rate is left out. Returns: fields of ``Rates``, and how
    the length of answers is known. Raises: as the stages.
    """
    part, facts, dtype = seconds / 4, target_facts(run.target.path), getattr(torch, run.target.dtype)
    target = load_target(run.target.path, target_layer_ids=run.draft.target_layer_ids, dtype=dtype, device=device)
    sequences, found, how = answer(target, prompts, run, facts.stop_token_ids, part)
    description = describe(run, facts, origin, sequences, is_given=False)
    with TemporaryDirectory(dir=existing(run.record.folder)) as place:

        def record() -> int:
            rmtree(place)
            capture(target, sequences, open_writer(Path(place), description), lambda: None)
            return description.num_tokens

        found["record_tokens_per_second"] = tokens_per_second(record, part)
        is_cpu = device == "cpu"
        os.environ.setdefault(*(("ACCELERATE_USE_CPU", "true") if is_cpu else ("ACCELERATE_MIXED_PRECISION", "bf16")))
        learner = random_learner(start_accelerator(run.train, os.environ, ()), run)
        if not is_cpu:
            make_graphs(learner)
        num_tokens = run.train.batch_size * run.train.accumulation_steps * description.num_tokens // len(sequences)
        with whole_steps(learner, RecordReader(place)) as take:
            take()  # what is made once
            found["train_tokens_per_second"] = tokens_per_second(lambda: take() or num_tokens, part)
    speaker, ids = DraftSpeaker(target, learner.draft), prompts[: run.eval.batch_size]
    most = min(EVALUATED_TOKENS, run.eval.max_new_tokens)
    sampling = Sampling(run.eval.temperatures[0], most, facts.stop_token_ids)

    def decode() -> int:
        texts = decode_prompts(speaker, ids, sampling, run.seed, batch_size=len(ids))
        return sum(text.num_tokens for text in texts)

    with torch.compiler.set_stance("force_eager"):  # decoding has another shape in each round
        found["eval_tokens_per_second"] = tokens_per_second(decode, part)
    return {name: float(f"{value:.4g}") for name, value in found.items()}, how


def answer(
    target: Target[Any], prompts: Sequence[torch.Tensor], run: RunConfig, stop_ids: tuple[int, ...], seconds: float
) -> tuple[list[Encoded], dict[str, float], str]:
    """As many prompts as are read in half the time, with as much of their answers as there is time for.
    Returns: as many as are recorded in one pack; rate and mean length of the answers; how that is known.
    """
    most, ids = run.data.max_response_tokens, list(prompts[: run.data.generation_batch_size])
    sampling = Sampling(run.data.temperature, most, stop_ids)
    uniforms = [row_uniforms(run.seed, row) for row in range(len(ids))]
    generate(target, ids[:1], replace(sampling, max_new_tokens=2), uniforms[:1])  # what is made once
    speed = tokens_per_second(lambda: len(target.prefill(ids[:1])[1].last_hidden_ND), seconds / 10)
    ids = ids[: len(group_by_tokens(list(map(len, ids)), round(speed * seconds / 2))[0])]
    texts: list[list[int]] = [[] for _ in ids]
    start = monotonic()
    for news in PlainSpeaker(target)(ids, sampling, uniforms[: len(ids)], Stopwatch()):
        for spoken in news:
            texts[spoken.row] += spoken.ids
        if monotonic() - start > seconds:
            break
    total = sum(map(len, texts))
    found = {} if run.data.endpoints else {"generate_tokens_per_second": total / (monotonic() - start)}
    ended, length = sum(text[-1] in stop_ids or len(text) == most for text in texts), total / len(texts)
    if 0 < ended < len(texts):  # as if every token were an answer's last with the same chance
        length = (1 - (1 - ended / total) ** most) * total / ended
    if ended:
        found["response_tokens"] = min(length, most)
    pairs = [(torch.cat((ids_T, torch.tensor(text))), len(ids_T)) for ids_T, text in zip(ids, texts, strict=True)]
    sequences = [Encoded(ids_T, torch.arange(len(ids_T)) >= begin, "a trial's text") for ids_T, begin in pairs]
    num_recorded = len(group_by_tokens([len(ids_T) for ids_T, _ in pairs], TOKENS_PER_CALL)[0])
    return sequences[:num_recorded], found, f"measured on a batch of {len(texts)}, {ended} ended"


def tokens_per_second(work: Callable[[], int], seconds: float) -> float:
    """Of ``work``, which says how many it did: called until the time is over, 20 times at most."""
    start, done = monotonic(), 0
    for _ in range(MOST_CALLS):
        done += work()
        if monotonic() - start > seconds:
            break
    return done / (monotonic() - start)
