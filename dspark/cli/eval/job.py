"""What every rank of an evaluation does; the first one prints and writes."""

import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from dspark.cli.eval.contenders import HOST, Models
from dspark.cli.eval.match import Match
from dspark.cli.identity import Pair, find_pair
from dspark.config import EvalSection, TargetSection
from dspark.data.chat import ChatFormat
from dspark.decode.engine import SLACK_TOKENS
from dspark.errors import ConfigError, DsparkError, PromptError
from dspark.eval.evaluation import REPORT_FILE, find_shared, pair_up, read_evaluation
from dspark.eval.measure import DRAFT
from dspark.eval.records import JOURNAL_FILE, ROUNDS_FILE, Journal, open_journal, read_texts, write_rounds
from dspark.eval.report import EvalReport, printed, write_json
from dspark.eval.tasks import TaskPrompts, load_prompts
from dspark.export.draft_folder import read_draft
from dspark.provenance import describe_launch
from dspark.target.config import LING_ARCHITECTURE
from dspark.target.loading import locate_target, target_facts
from dspark.types import Target
from dspark.verifier import Verifier
from dspark.verifier.ranks import Ranks

REFERENCE, VERIFIER = "reference", "verifier"
TURN_TOKENS = 64
"""What a chat template writes around a turn and its answer, at most."""


class Job(NamedTuple):
    """An evaluation as it was asked for. ``seeds``: of the texts, and of the untrained draft."""

    target: TargetSection
    draft: Path | None
    plan: EvalSection
    baselines: tuple[str, ...]
    seeds: tuple[int, int]
    is_thinking: bool
    device: str
    engine: str
    tp: int
    out: Path | None
    against: Path | None


def choose_engine(name: str | None, target: str, plan: EvalSection, device: str, tp: int) -> str:
    """What decodes: as asked, else the verifier on a GPU for the family that it knows.
    Raises: ConfigError for what the verifier cannot do.
    """
    is_ling = target_facts(locate_target(target)).architecture == LING_ARCHITECTURE
    engine = name or (VERIFIER if tp > 1 or (device.startswith("cuda") and is_ling) else REFERENCE)
    if engine not in {REFERENCE, VERIFIER}:
        raise ConfigError(f"--engine: expected {VERIFIER} or {REFERENCE}, got {engine!r}")
    if engine == REFERENCE and tp > 1:
        raise ConfigError(f"--tp {tp}: ranks are the verifier's; give --engine {VERIFIER}")
    if engine == VERIFIER:
        other = f"give --engine {REFERENCE}"
        if not is_ling:
            raise ConfigError(f"--engine {VERIFIER}: it knows {LING_ARCHITECTURE} only; {other}")
        if plan.batch_size > 1:
            raise ConfigError(f"--batch-size {plan.batch_size}: the verifier decodes one text at a time; {other}")
        if plan.top_k or plan.top_p < 1:
            raise ConfigError(f"--top-k, --top-p: the verifier draws from the whole distribution; {other}")
        if tp > 1 and device not in {"cuda", "cpu"}:
            raise ConfigError(f"--device {device}: the ranks take the GPUs of their numbers; give --device cuda")
    return engine


def run(ranks: Ranks, job: Job) -> None:
    """Measure on one rank. Raises: DsparkError, when all is written, for a greedy text that is not the target's own."""
    console = Console(markup=False, emoji=False, quiet=ranks.rank > 0)
    if job.device.startswith("cuda:"):
        torch.cuda.set_device(job.device)  # graphs and kernels are made for the current one
    pair, plan, seed = find_pair(job.target.path, job.draft), job.plan, job.seeds[0]
    chat = ChatFormat(pair.tokenizer, pair.facts.stop_token_ids, job.is_thinking)
    positions = pair.draft.max_position_embeddings
    prompts = {n: load_prompts(n, chat, plan.max_prompts, seed=seed, max_tokens=positions) for n in plan.tasks}
    of_target, of_draft = pair.describe()
    of_target["dtype"] = job.target.dtype
    settings = _settings(job, prompts)
    there = read_evaluation(job.against) if job.against else None
    shared, lacking = find_shared(there, of_target, settings) if there else ([], [])
    decided = {"target": of_target, "draft": of_draft["fingerprint"], "settings": settings}
    opened = open_journal(job.out, decided) if job.out and ranks.rank == 0 else nullcontext(Journal(None, {}))
    with opened as journal:
        if journal.texts:
            console.print(f"{len(journal.texts)} texts lie in {job.out} already; going on behind them")
        models = _load(ranks, job, pair, prompts)
        _check_alike(ranks, decided, models.target)
        speakers = models.speakers(job.baselines)
        if job.out and ranks.rank > 0:
            # The first rank has opened it, for they met to load the verifier, and adds nothing before all decode.
            journal = Journal(None, read_texts(job.out / JOURNAL_FILE))
        match = Match(speakers, models, plan, seed, journal, ranks.rank == 0)
        tasks = [match.of_task(task, found, chat) for task, found in prompts.items()]
        everyone = {name: tuple(m for measured in tasks for m in measured[name]) for name in speakers}
        if ranks.rank == 0:
            pairings = pair_up(journal.texts, there, shared) if there else ()
            measured, others = everyone[DRAFT], {name: everyone[name] for name in job.baselines}
            report = EvalReport(of_target, of_draft, settings, describe_launch(sys.argv), measured, others, pairings)
            slow = [name for name in job.baselines if job.engine == VERIFIER and name.partition(":")[0] in HOST]
            for part in printed(report, slow, lacking):
                console.print(part, highlight=False)
            if job.out is not None:
                write_rounds(journal.texts, job.out / ROUNDS_FILE)
                write_json(report, job.out / REPORT_FILE)
                console.print(f"written to {job.out}")
            if n := sum(m.equality.faults for ms in everyone.values() for m in ms if m.equality):
                fault = "are not the target's own, which no rounding explains: see A FAULT above"
                raise DsparkError(f"{n} greedy texts {fault}")


def _settings(job: Job, prompts: Mapping[str, TaskPrompts]) -> dict[str, Any]:
    """What decides, beside target and draft, what the texts say."""
    settings = job.plan.model_dump(mode="json") | {"seed": job.seeds[0], "is_thinking": job.is_thinking}
    settings |= {"device": job.device, "engine": job.engine, "tp": job.tp, "baselines": list(job.baselines)}
    settings |= {"untrained_seed": job.seeds[1]} if "untrained" in job.baselines else {}
    return settings | {"prompts": {name: _describe_prompts(found) for name, found in prompts.items()}}


def _describe_prompts(found: TaskPrompts) -> dict[str, Any]:
    """Where a task's prompts come from, and which they are."""
    digest = hashlib.sha256(repr([ids_T.tolist() for ids_T in found.ids]).encode()).hexdigest()
    named = {"count": len(found.ids), "sha256": digest, "origin": found.origin, "is_synthetic": found.is_synthetic}
    return named | {"tokens": {"shortest": min(map(len, found.ids)), "longest": max(map(len, found.ids))}}


def _check_alike(ranks: Ranks, decided: Mapping[str, Any], target: Target[Any]) -> None:
    """Raises: PromptError when the ranks would decode different things, as when one alone could reach the hub."""
    digest = hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).digest()
    number_1 = torch.tensor([int.from_bytes(digest[:3])], dtype=torch.int32, device=target.head_VD.device)
    if len(set(ranks.gather(number_1).flatten().tolist())) > 1:
        raise PromptError("the ranks have read different prompts; fetch the tasks' data first, or give files")


def _load(ranks: Ranks, job: Job, pair: Pair, prompts: Mapping[str, TaskPrompts]) -> Models:
    dtype, layers = getattr(torch, job.target.dtype), pair.draft.target_layer_ids
    target: Target[Any]
    if job.engine == VERIFIER:
        longest = max(len(ids_T) for found in prompts.values() for ids_T in found.ids)
        said = [turn for found in prompts.values() for c in found.conversations for turn in c.later_turns]
        most = max((len(pair.tokenizer(turn).input_ids) for turn in said), default=0) + TURN_TOKENS
        capacity = longest + job.plan.max_new_tokens + SLACK_TOKENS
        capacity += (job.plan.turns - 1) * (most + job.plan.max_new_tokens) if said else 0
        target = Verifier.load(pair.folder, capacity, layers, dtype, job.device, ranks)
        draft = read_draft(pair.place, (target.embedding_VD, target.head_VD), dtype=dtype, device=job.device)
    else:
        target, draft = pair.load(dtype, job.device)
    return Models(pair, target, draft, job.seeds[1])
