"""dspark import: another trainer's draft in our layout, which every command and runtime reads."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.cli.export import num_anchors_of
from dspark.cli.export.card import describe_draft, render_card
from dspark.cli.identity import check_pair, fields_of
from dspark.export.draft_config import read_layout
from dspark.export.draft_folder import draft_fingerprint, read_draft, read_provenance, write_draft
from dspark.target.loading import load_tables, locate_target, target_facts


def import_draft(
    source: Annotated[Path, typer.Argument(help="The folder of a draft.")],
    target: Annotated[str, typer.Option(help="Its target: a name or a folder.")],
    out: Annotated[Path, typer.Option(help="The folder to write; an earlier draft there is replaced.")],
    own_tables: Annotated[
        bool, typer.Option("--own-tables", help="Keep its embedding and head if they differ.")
    ] = False,
) -> None:
    """Read a draft in any layout that is known, say which one it is, and write it in ours.

    Known: ours, which is SGLang's and DeepSpec's; SpecForge's dflash_config; speculators, whose layer ids count from
    one; tensors named as in vLLM. Weights keep every bit that bfloat16 has, but rotary pairs of neighbours are put in
    halves. A file that says two things, or leaves out what no reader should guess, is refused.
    """
    folder = locate_target(target)
    facts = target_facts(folder)
    _, layout = read_layout(source, facts.num_layers)
    check_pair(source, folder)
    draft = read_draft(source, load_tables(folder), is_taking_tables=own_tables, num_target_layers=facts.num_layers)
    origin = {"imported_from": source.resolve().name, "layout": layout.name}
    made = describe_draft(read_provenance(source), target, source_fingerprint=draft_fingerprint(source), **origin)
    card = {"README.md": render_card(draft.config, "hf", facts.architecture, made)}
    count = write_draft(draft, out, fields_of(facts, num_anchors_of(source)), provenance=made, beside=card)
    pairs = "halves" if layout.is_neox else "neighbours, put in halves"
    line = f"{source}: layout {layout.name}, for {layout.reason}; rotary pairs: {pairs}\n"
    Console(soft_wrap=True).print(f"{line}{out}: {count:,} parameters", markup=False, highlight=False)
