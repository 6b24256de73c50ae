"""dspark eval: how many tokens a round a draft earns on its target."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from dspark.cli.identity import choose_target, find_pair
from dspark.cli.terminal import DEFAULT_DEVICE, Device, text_progress
from dspark.config import EvalSection, RunConfig, load_run, validated
from dspark.data.chat import ChatFormat
from dspark.decode.drafter import Draft, LookupDrafter
from dspark.draft.model import DraftModel
from dspark.errors import ConfigError, DsparkError
from dspark.eval.comparison import Contender, compare
from dspark.eval.measure import DecodedText, Each, Measurement
from dspark.eval.pairing import DRAFT, REPORT_FILE, ROUNDS_FILE, Opponent, find_opponent, pair_up
from dspark.eval.records import Journal, TextKey, open_journal, write_rounds
from dspark.eval.report import EvalReport, comparison_tables, difference_lines, pairing_table, task_tables, write_json
from dspark.eval.tasks import TaskPrompts, describe_tasks, load_prompts, task_names
from dspark.provenance import describe_launch
from dspark.train.setup import fresh_draft

BASELINES = ("plain", "ngram", "untrained")
BASELINES_HELP = f"Compare with some of {','.join(BASELINES)}.  [default: none]"
TASKS_HELP = f"Separated by commas: {', '.join(task_names())}, random:LENGTH, long:LENGTH, .jsonl or .parquet files."
OUT_HELP = "Keep every text, the rounds and the report in this folder; a run that was stopped goes on there."
AGAINST_HELP = "The folder of an earlier one: also compare the two drafts prompt by prompt."


def evaluate(
    config: Annotated[Path | None, typer.Option(help="A run: target, eval section, draft.", readable=False)] = None,
    target: Annotated[str | None, typer.Option(help="A name (ling-3.0-nano, ...) or a Hugging Face folder.")] = None,
    draft: Annotated[Path | None, typer.Option(help="An exported draft.")] = None,
    tasks: Annotated[str | None, typer.Option(help=TASKS_HELP + "  [default: heldout]")] = None,
    temperatures: Annotated[str | None, typer.Option(help="Separated by commas; 0 is greedy.  [default: 0,1]")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens; 0 is off.  [default: 0]")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest of this mass.  [default: 1]")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Of each task, the first ones.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of each prompt.  [default: 2048]")] = None,
    baselines: Annotated[str | None, typer.Option(help=BASELINES_HELP)] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float32 or float64.")] = None,
    device: Device = DEFAULT_DEVICE,
    seed: Annotated[int, typer.Option(min=0)] = 980406,
    thinking: Annotated[bool | None, typer.Option(help="Let the target think before it answers.")] = None,
    out: Annotated[Path | None, typer.Option(file_okay=False, help=OUT_HELP)] = None,
    against: Annotated[Path | None, typer.Option(help=AGAINST_HELP)] = None,
    list_tasks: Annotated[bool, typer.Option("--list-tasks", help="Say what every task is, and stop.")] = False,
) -> None:
    """Decode held-out prompts with a draft and count the tokens that each round commits.

    With --baselines the same prompts are also decoded otherwise, for one table: plain is the target alone, ngram looks
    up what followed the last words before, untrained is a new draft of the same shape. Beside plain, every greedy text
    must be plain decoding's own; those that are not are named, and rounding is told apart from faults.
    """
    console = Console(markup=False, emoji=False)
    if list_tasks:
        console.print(describe_tasks())
        return
    _check_writable(out)
    run, named = load_run(config) if config else None, _named(baselines)
    listed = {"tasks": _listed(tasks), "temperatures": _listed(temperatures)}
    limits = {"max_prompts": max_prompts, "max_new_tokens": max_new_tokens, "top_k": top_k, "top_p": top_p}
    plan, chosen = _plan(run, listed | limits), choose_target(run, target, dtype, device)
    pair = find_pair(chosen.path, draft or (run.train.folder / "draft" if run else None))
    is_thinking = thinking if thinking is not None else bool(run and run.data.is_thinking)
    chat = ChatFormat(pair.tokenizer, pair.facts.stop_token_ids, is_thinking)
    positions = pair.draft.max_position_embeddings
    prompts = {n: load_prompts(n, chat, plan.max_prompts, seed=seed, max_tokens=positions) for n in plan.tasks}
    of_target, of_draft = pair.describe()
    of_target["dtype"], untrained_seed = chosen.dtype, run.seed if run else seed
    settings = plan.model_dump(mode="json") | {"seed": seed, "is_thinking": is_thinking, "device": device}
    settings |= {"baselines": list(named)} | ({"untrained_seed": untrained_seed} if "untrained" in named else {})
    settings["prompts"] = {name: _describe_prompts(found) for name, found in prompts.items()}
    opponent = find_opponent(against, of_target, settings) if against else None
    decided = {"target": of_target, "draft": of_draft["fingerprint"], "settings": settings}
    with open_journal(out, decided) if out else nullcontext(None) as journal:
        _say_what_is_there(console, out, journal)
        model, drafter = pair.load(getattr(torch, chosen.dtype), device)
        drafts = _baselines(named, drafter, untrained_seed) | {DRAFT: drafter}
        kept: dict[TextKey, DecodedText] = {}
        contenders = {
            name: compare(
                lambda _: model,
                drafts,
                found.ids,
                plan.model_copy(update={"tasks": (name,)}),
                (pair.facts.stop_token_ids, seed),
                partial(_watch, name, kept, journal),
            )
            for name, found in prompts.items()
        }
        pairings = pair_up({key: text.rounds for key, text in kept.items()}, opponent) if opponent else ()
        others = {group[0].name: measured(group) for group in zip(*contenders.values(), strict=True)}
        own = others.pop(DRAFT)
        report = EvalReport(of_target, of_draft, settings, describe_launch(sys.argv), own, others, pairings)
        _show(console, report, contenders if named else {}, opponent)
        if out is not None:
            write_rounds(kept, out / ROUNDS_FILE)
            write_json(report, out / REPORT_FILE)
            console.print(f"written to {out}")
        _refuse_faults(report)


def _say_what_is_there(console: Console, out: Path | None, journal: Journal | None) -> None:
    if journal and journal.texts:
        console.print(f"{len(journal.texts)} texts lie in {out} already; going on behind them")


@contextmanager
def _watch(
    task: str, kept: dict[TextKey, DecodedText], journal: Journal | None, name: str, temperature: float, total: int
) -> Iterator[Each]:
    """Texts that the journal has are taken from it, others are decoded and go into it; all go into ``kept``."""
    with text_progress(f"{task}, {name}, T = {temperature:g}", total) as advance:

        def each(index: int, decode: Callable[[], DecodedText]) -> DecodedText:
            key = TextKey(task, temperature, name, index)
            text = journal.texts.get(key) if journal else None
            if text is None:
                text = decode()
                if journal:
                    journal.append(key, text)
            kept[key] = text
            advance(text)
            return text

        yield each


def _refuse_faults(report: EvalReport) -> None:
    """When all is written. Raises: DsparkError when a greedy text is not the target's own."""
    measurements = (*report.measurements, *(m for group in report.baselines.values() for m in group))
    faults = sum(m.equality.faults for m in measurements if m.equality)
    if faults:
        raise DsparkError(
            f"{faults} greedy texts are not the target's own, which no rounding explains: see A FAULT above"
        )


def _describe_prompts(found: TaskPrompts) -> dict[str, Any]:
    """Where a task's prompts come from, and which they are."""
    digest = hashlib.sha256(repr([ids_T.tolist() for ids_T in found.ids]).encode()).hexdigest()
    return {"count": len(found.ids), "sha256": digest, "origin": found.origin, "is_synthetic": found.is_synthetic}


def measured(group: Sequence[Contender]) -> tuple[Measurement, ...]:
    """The measurements of one contender's tasks, task after task."""
    return tuple(m for contender in group for m in contender.measurements)


def _show(
    console: Console, report: EvalReport, contenders: Mapping[str, Sequence[Contender]], opponent: Opponent | None
) -> None:
    console.print(*task_tables(report))
    for task, group in contenders.items():
        title = f"{report.label(task)}: {report.draft['name']} on {report.target['name']}"
        console.print(*comparison_tables(group, title))
        for line in difference_lines(group):
            console.print(line, highlight=False)
    if report.pairings:
        console.print(pairing_table(report.pairings))
    if opponent and opponent.lacking:
        console.print(f"not compared, for {opponent.folder} has it not: {', '.join(opponent.lacking)}")


def _listed(words: str | None) -> list[str] | None:
    """What commas separate, each once."""
    return list(dict.fromkeys(words.split(","))) if words else None


def _check_writable(out: Path | None) -> None:
    """What cannot be written is known before the hours of work."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise ConfigError(f"--out: nothing can be written in {out}; choose another folder")


def _baselines(named: Sequence[str], drafter: DraftModel, seed: int) -> dict[str, Draft | None]:
    """What the draft is compared with, by name, plain decoding first: greedy texts are compared with it."""
    config, weight = drafter.config, drafter.fc.weight
    found: dict[str, Draft | None] = {"plain": None} if "plain" in named else {}
    if "ngram" in named:
        found["ngram"] = partial(LookupDrafter, config.block_size, config.vocab_size)
    if "untrained" in named:
        assert drafter.embedding_VD is not None, "read_draft binds both tables"
        assert drafter.head_VD is not None
        untrained = fresh_draft(config, seed).to(weight.device, weight.dtype)
        untrained.bind(drafter.embedding_VD, drafter.head_VD)
        found["untrained"] = untrained.eval()
    return found


def _named(baselines: str | None) -> tuple[str, ...]:
    named = tuple(baselines.split(",")) if baselines else ()
    for name in named:
        if name not in BASELINES:
            raise ConfigError(f"--baselines: {name!r} is not known; expected some of {','.join(BASELINES)}")
    return tuple(name for name in BASELINES if name in named)


def _plan(run: RunConfig | None, given: dict[str, Any]) -> EvalSection:
    before = run.eval.model_dump() if run else {"tasks": ("heldout",)}
    given = {key: value for key, value in given.items() if value is not None}
    return validated(EvalSection, before | given, "dspark eval")
