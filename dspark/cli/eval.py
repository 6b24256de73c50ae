"""dspark eval: how many tokens a round a draft earns on its target."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from dspark.cli.device import DEFAULT_DEVICE, Device
from dspark.cli.progress import count_progress
from dspark.config import EvalSection, RunConfig, TargetSection, load_run, validated
from dspark.data.chat import ChatFormat, encode_prompt
from dspark.decode.drafter import Draft, LookupDrafter
from dspark.draft.model import DraftModel
from dspark.errors import ConfigError
from dspark.eval.comparison import Contender, compare
from dspark.eval.measure import Measurement
from dspark.eval.report import EvalReport, comparison_table, difference_lines, task_tables, write_json
from dspark.eval.tasks import load_task, task_names
from dspark.export import check_target, draft_fingerprint, read_draft
from dspark.provenance import describe_launch
from dspark.target.loading import load_target, locate_target, target_facts, target_fingerprint
from dspark.target.tokenizer import load_tokenizer, template_fingerprint, tokenizer_fingerprint
from dspark.train.setup import fresh_draft

BASELINES = ("plain", "ngram", "untrained")
BASELINES_HELP = f"Compare with some of {','.join(BASELINES)}.  [default: none]"
DRAFT = "draft"
TASKS_HELP = f"Separated by commas: {', '.join(task_names())}, or .jsonl and .parquet files.  [default: heldout]"


def evaluate(
    config: Annotated[Path | None, typer.Option(help="A run: target, eval section, draft.", readable=False)] = None,
    target: Annotated[str | None, typer.Option(help="A name (ling-3.0-nano, ...) or a Hugging Face folder.")] = None,
    draft: Annotated[Path | None, typer.Option(help="An exported draft.")] = None,
    tasks: Annotated[str | None, typer.Option(help=TASKS_HELP)] = None,
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
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, writable=True, help="Also write everything there.")
    ] = None,
) -> None:
    """Decode held-out prompts with a draft and count the tokens that each round commits.

    With --baselines the same prompts are also decoded otherwise, for one table: plain is the target alone, ngram looks
    up what followed the last words before, untrained is a new draft of the same shape. Beside plain, every greedy text
    must be plain decoding's own; those that are not are named, and rounding is told apart from faults.
    """
    _check_writable(json)
    named = _named(baselines)
    run = load_run(config) if config else None
    listed = {"tasks": tasks and tasks.split(","), "temperatures": temperatures and temperatures.split(",")}
    limits = {"max_prompts": max_prompts, "max_new_tokens": max_new_tokens, "top_k": top_k, "top_p": top_p}
    plan = _plan(run, listed | limits)
    chosen = _target(run, target, dtype, device)
    folder = locate_target(chosen.path)
    place = draft or (run.train.folder / "draft" if run else None)
    if place is None:
        raise ConfigError("--draft: missing; give the folder of an exported draft, or a run with --config")
    facts = target_facts(folder)
    fingerprint = target_fingerprint(folder)
    draft_config = check_target(
        place,
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        fingerprint=fingerprint,
    )
    is_thinking = thinking if thinking is not None else bool(run and run.data.is_thinking)
    tokenizer = load_tokenizer(folder)
    chat = ChatFormat(tokenizer, facts.stop_token_ids, is_thinking)
    prompts = {name: [encode_prompt(chat, c) for c in load_task(name, plan.max_prompts)] for name in plan.tasks}
    tensor_dtype = getattr(torch, chosen.dtype)
    model = load_target(folder, target_layer_ids=draft_config.target_layer_ids, dtype=tensor_dtype, device=device)
    drafter = read_draft(place, (model.embedding_VD, model.head_VD), dtype=tensor_dtype, device=device)
    untrained_seed = run.seed if run else seed
    drafts = _baselines(named, drafter, untrained_seed) | {DRAFT: drafter}
    contenders = {
        name: compare(
            lambda _: model,
            drafts,
            ids,
            plan.model_copy(update={"tasks": (name,)}),
            (facts.stop_token_ids, seed),
            partial(_progress, name),
        )
        for name, ids in prompts.items()
    }
    template = template_fingerprint(tokenizer) if tokenizer.chat_template else None
    words = {"tokenizer_fingerprint": tokenizer_fingerprint(folder), "template_fingerprint": template}
    of_target = {"name": chosen.path, "fingerprint": fingerprint} | words | {"dtype": chosen.dtype}
    of_draft = {
        "name": str(place),
        "fingerprint": draft_fingerprint(place),
        "block_size": draft_config.block_size,
        "verify_rows": draft_config.block_size + 1,
        "sample_from_anchor": True,
        "target_layer_ids": draft_config.target_layer_ids,
    }
    settings = plan.model_dump() | {"seed": seed, "is_thinking": is_thinking, "device": device, "baselines": named}
    settings |= {"untrained_seed": untrained_seed} if "untrained" in named else {}
    others = {group[0].name: measured(group) for group in zip(*contenders.values(), strict=True)}
    measurements = others.pop(DRAFT)
    report = EvalReport(of_target, of_draft, settings, describe_launch(sys.argv), measurements, others)
    _show(report, contenders if named else {})
    if json is not None:
        write_json(report, json)
        Console().print(f"written to {json}")


def _progress(task: str, label: str, total: int) -> AbstractContextManager[Callable[..., None]]:
    return count_progress(f"{task}, {label}", total)


def measured(group: Sequence[Contender]) -> tuple[Measurement, ...]:
    """The measurements of one contender's tasks, task after task."""
    return tuple(m for contender in group for m in contender.measurements)


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


def _show(report: EvalReport, contenders: Mapping[str, Sequence[Contender]]) -> None:
    console = Console()
    console.print(*task_tables(report))
    for task, group in contenders.items():
        console.print(comparison_table(group, f"{task}: {report.draft['name']} on {report.target['name']}"))
        console.print(*difference_lines(group), sep="\n", end="\n" * bool(difference_lines(group)), highlight=False)


def _check_writable(json: Path | None) -> None:
    """What cannot be written is known before the hours of work."""
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(json.parent, os.W_OK):
            raise ConfigError(f"--json: nothing can be written in {json.parent}; choose another folder")


def _plan(run: RunConfig | None, given: dict[str, Any]) -> EvalSection:
    before = run.eval.model_dump() if run else {"tasks": ("heldout",)}
    given = {key: value for key, value in given.items() if value is not None}
    return validated(EvalSection, before | given, "dspark eval")


def _target(run: RunConfig | None, target: str | None, dtype: str | None, device: str) -> TargetSection:
    path = target or (run and run.target.path)
    if not path:
        raise ConfigError("--target: missing; give a name such as ling-3.0-nano, a folder, or a run with --config")
    chosen = dtype or (run and run.target.dtype) or ("float32" if device == "cpu" else "bfloat16")
    return validated(TargetSection, {"path": path, "dtype": chosen}, "dspark eval")
