"""dspark export: a draft as the folder that a runtime loads."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.cli.identity import fields_of
from dspark.config import load_run
from dspark.draft.model import DraftModel
from dspark.errors import CheckpointError, ConfigError
from dspark.export import Runtime, check_target, draft_parameter_count, has_tables, read_draft, write_draft
from dspark.provenance import describe_launch
from dspark.target.config import read_config_json
from dspark.target.loading import load_tables, target_facts, target_fingerprint
from dspark.train.checkpoint import checkpoints, finished_draft, load_checkpoint
from dspark.train.optimizer import build_optimizer
from dspark.train.run_folder import RUN


def export(
    out: Annotated[Path, typer.Option(help="The folder to write; an earlier draft there is replaced.")],
    run: Annotated[Path | None, typer.Option(help="A train.folder; its newest checkpoint is exported.")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="The checkpoint of this step instead.")] = None,
    draft: Annotated[Path | None, typer.Option(help="An exported draft to write in another form.")] = None,
    target: Annotated[str | None, typer.Option(help="Its target: a name or a folder. A run knows its own.")] = None,
    runtime: Annotated[Runtime, typer.Option(help="Who is to load it; only config and names differ.")] = "hf",
) -> None:
    """Write a draft as the folder that a runtime loads.

    Training has already written one to TRAIN_FOLDER/draft, which is that of hf and SGLang; this writes it from a
    checkpoint, or for another runtime. vLLM and DeepSpec know the Qwen3 tag, DeepSpec needs the target's embedding and
    head beside the draft, speculators has a config of its own. What a runtime cannot say is refused by name.
    """
    if (run is None) == (draft is None):
        raise ConfigError("dspark export: give either --run TRAIN_FOLDER or --draft FOLDER with --target")
    if run is not None:
        model, place, name, num_anchors = _from_run(run, step)
    else:
        assert draft is not None
        if target is None:
            raise ConfigError("--target: missing; name the target that the draft was trained for")
        tables = load_tables(target)
        vocab_size, hidden_size = tables[0].shape
        check_target(draft, vocab_size=vocab_size, hidden_size=hidden_size, fingerprint=target_fingerprint(target))
        model, place, name = read_draft(draft, tables), draft, target
        num_anchors = read_config_json(draft).get("num_anchors", 512)
    fields, fingerprint = fields_of(target_facts(name), num_anchors), target_fingerprint(name)
    source = {"exported_from": str(place), "target": name, "target_fingerprint": fingerprint, "runtime": runtime}
    write_draft(model, out, fields, runtime=runtime, provenance=describe_launch(sys.argv) | source)
    count = draft_parameter_count(model.config, has_tables(model.config, runtime))
    Console().print(f"{out}: {count:,} parameters for {runtime}, from {place}", highlight=False)


def _from_run(folder: Path, step: int | None) -> tuple[DraftModel, Path, str, int]:
    """The draft of a checkpoint, bound to its target; the checkpoint; the target's name; the anchors it trained on."""
    run = load_run(folder / RUN)
    found = checkpoints(folder / "checkpoints")
    chosen = found[-1:] if step is None else [place for place in found if place.name == f"step-{step:08d}"]
    if not chosen:
        steps = ", ".join(str(int(place.name.removeprefix("step-"))) for place in found) or "none"
        raise CheckpointError(f"{folder / 'checkpoints'}: no such checkpoint; the steps there are: {steps}")
    model = DraftModel(run.draft)
    optimizer = build_optimizer(model, run.train)
    load_checkpoint(chosen[0], model, optimizer)
    model = finished_draft(model, optimizer, run.train)
    model.bind(*load_tables(run.target.path))
    return model, chosen[0], run.target.path, run.train.num_anchors
