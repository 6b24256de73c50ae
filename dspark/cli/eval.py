"""dspark eval: how many tokens a round a draft earns on its target."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from dspark.cli.device import DEFAULT_DEVICE, Device
from dspark.cli.progress import count_progress
from dspark.config import EvalSection, RunConfig, TargetSection, load_run, validated
from dspark.data.chat import ChatFormat, encode_prompt
from dspark.decode.sampling import Sampling
from dspark.errors import ConfigError
from dspark.eval.measure import measure
from dspark.eval.report import EvalReport, task_tables, write_json
from dspark.eval.tasks import load_task, task_names
from dspark.export import check_target, draft_fingerprint, read_draft
from dspark.provenance import describe_launch
from dspark.target.loading import load_target, locate_target, target_facts, target_fingerprint
from dspark.target.tokenizer import load_tokenizer, template_fingerprint, tokenizer_fingerprint

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
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float32 or float64.")] = None,
    device: Device = DEFAULT_DEVICE,
    seed: Annotated[int, typer.Option(min=0)] = 980406,
    thinking: Annotated[bool | None, typer.Option(help="Let the target think before it answers.")] = None,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, writable=True, help="Also write everything there.")
    ] = None,
) -> None:
    """Decode held-out prompts with a draft and count the tokens that each round commits."""
    _check_writable(json)
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
    measurements = []
    for name, ids in prompts.items():
        for temperature in plan.temperatures:
            sampling = Sampling(temperature, plan.max_new_tokens, facts.stop_token_ids, plan.top_k, plan.top_p)
            with count_progress(f"{name}, T = {temperature:g}", len(ids)) as advance:
                measurements.append(measure(model, drafter, (name, ids), sampling, seed, advance))
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
    settings = plan.model_dump() | {"seed": seed, "is_thinking": is_thinking, "device": device}
    report = EvalReport(of_target, of_draft, settings, describe_launch(sys.argv), tuple(measurements))
    console = Console()
    console.print(*task_tables(report))
    if json is not None:
        write_json(report, json)
        console.print(f"written to {json}")


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
