"""dspark export: a draft as the folder that a runtime loads."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.cli.export.card import describe_draft, evaluation_of, render_card
from dspark.cli.identity import check_pair, fields_of
from dspark.config import is_positive, load_run
from dspark.draft.model import DraftModel
from dspark.errors import CheckpointError, ConfigError
from dspark.export.draft_config import Runtime
from dspark.export.draft_folder import read_draft, read_provenance, write_draft
from dspark.files import read_json
from dspark.target.loading import load_tables, target_facts
from dspark.train.checkpoint import checkpoints, finished_draft, load_checkpoint
from dspark.train.optimizer import build_optimizer
from dspark.train.run_folder import RUN, last_launch


def export(
    out: Annotated[Path, typer.Option(help="The folder to write; an earlier draft there is replaced.")],
    run: Annotated[Path | None, typer.Option(help="A train.folder; its newest checkpoint is exported.")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="The checkpoint of this step instead.")] = None,
    draft: Annotated[Path | None, typer.Option(help="An exported draft to write in another form.")] = None,
    target: Annotated[str | None, typer.Option(help="Its target: a name or a folder. A run knows its own.")] = None,
    runtime: Annotated[Runtime, typer.Option(help="Who is to load it; only config and names differ.")] = "hf",
    evaluation: Annotated[
        Path | None, typer.Option(help="Of --draft, by dspark eval --out, for the model card.")
    ] = None,
    temperatures: Annotated[Path | None, typer.Option(help="JSON that SGLang reads, laid beside the weights.")] = None,
) -> None:
    """Write a draft as the folder that a runtime loads, with a model card.

    Training has already written one to TRAIN_FOLDER/draft, which is that of hf and SGLang; this writes it from a
    checkpoint, or for another runtime. vLLM and DeepSpec know the Qwen3 tag, DeepSpec needs the target's embedding and
    head beside the draft, speculators has a config of its own. What a runtime cannot say is refused by name.
    """
    if (run is None) == (draft is None):
        raise ConfigError("dspark export: give either --run TRAIN_FOLDER or --draft FOLDER with --target")
    if run is not None:
        model, place, name, num_anchors = _from_run(run, step)
        known = last_launch(run)
    else:
        assert draft is not None
        if target is None:
            raise ConfigError("--target: missing; name the target that the draft was trained for")
        if step is not None:
            raise ConfigError("--step: is of a run; leave it out with --draft")
        check_pair(draft, target)
        model, place, name = read_draft(draft, load_tables(target)), draft, target
        num_anchors, known = num_anchors_of(draft), read_provenance(draft)
    facts = target_facts(name)
    made = describe_draft(known, name, exported_from=str(place))
    report = evaluation_of(evaluation, draft, made["target_fingerprint"]) if evaluation else None
    beside = {"README.md": render_card(model.config, runtime, facts.architecture, made, report, bool(temperatures))}
    if temperatures:
        if not model.config.enable_confidence_head:
            raise ConfigError(f"--temperatures {temperatures}: the draft has no confidence head")
        beside["temperatures.json"] = _temperatures(temperatures, model.config.block_size)
    fields = fields_of(facts, num_anchors)
    count = write_draft(model, out, fields, runtime=runtime, provenance=made, beside=beside)
    Console().print(f"{out}: {count:,} parameters for {runtime}, from {place}", highlight=False)


def num_anchors_of(folder: Path) -> int:
    """What a draft's config.json says of its training, or what is usual."""
    found = read_json(folder / "config.json").get("num_anchors")
    return found if isinstance(found, int) else 512


def _temperatures(path: Path, block_size: int) -> str:
    """The file, as it is. Raises: ConfigError unless it has a temperature above 0 for every slot."""
    found = read_json(path).get("temperatures")
    if not isinstance(found, list) or len(found) != block_size or not all(is_positive(each) for each in found):
        raise ConfigError(f"{path}: temperatures is {found!r:.80}, expected {block_size} numbers above 0")
    return path.read_text(encoding="utf-8")


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
