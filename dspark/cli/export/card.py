"""README.md of an exported draft: what it is, where it comes from, what was measured, how it is served."""

import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from dspark.config import DraftConfig
from dspark.errors import ConfigError
from dspark.eval.evaluation import read_evaluation
from dspark.eval.report import EvalReport
from dspark.eval.tables import read_template
from dspark.export.draft_config import Runtime, unsupported
from dspark.export.draft_folder import draft_fingerprint, draft_parameter_count, has_tables
from dspark.provenance import describe_launch
from dspark.target.loading import REPOSITORIES, target_fingerprint

CHAIN = {
    "run": "run",
    "step": "step of its best checkpoint",
    "imported_from": "imported from",
    "layout": "layout there",
    "commit": "commit of dspark at export",
    "record_manifest_sha256": "record, sha256 of its manifest",
    "target_fingerprint": "target, fingerprint of config and weights",
    "template_fingerprint": "chat template, sha256",
}
"""What is told of a draft's origin, from the draft back to the target, where its provenance knows it."""
SERVERS: dict[Runtime, tuple[Runtime, ...]] = {
    "hf": ("sglang", "vllm"), "sglang": ("sglang",), "vllm": ("vllm",), "speculators": ("vllm",), "deepspec": ()
}  # fmt: skip
"""Who serves a folder that was written for a runtime."""


def describe_draft(known: Mapping[str, Any], target: str, **origin: str) -> dict[str, Any]:
    """The provenance of a draft that is written anew: of ``known``, its earlier one, what is still true; this launch;
    where it comes from; and its target.
    """
    kept = {key: known[key] for key in CHAIN if key in known}
    its = {"target": REPOSITORIES.get(target, target), "target_fingerprint": target_fingerprint(target)}
    return kept | describe_launch(sys.argv) | origin | its


def render_card(
    config: DraftConfig, runtime: Runtime, architecture: str, made: Mapping[str, Any],
    report: EvalReport | None = None, has_temperatures: bool = False,
) -> str:  # fmt: skip
    """The card as Markdown. ``architecture``: the target's; ``made``: the draft's provenance, ``target`` among it."""
    chain = {title: made[key] for key, title in CHAIN.items() if made.get(key) is not None}
    ring = 1 << (2 * (config.block_size + 1) - 1).bit_length()
    count = draft_parameter_count(config, has_tables(config, runtime))
    served = [name for name in SERVERS[runtime] if not unsupported(config, name)]
    known = {"target": made["target"], "quoted": quote(made["target"]), "is_ling": architecture.startswith("Bailing")}
    known |= {"config": config, "runtime": runtime, "served": served, "has_temperatures": has_temperatures}
    known |= {"chain": chain, "report": report, "ring": ring, "parameters": count}
    return read_template(Path(__file__).with_name("card.md.j2")).render(known).strip() + "\n"


def evaluation_of(folder: Path, draft: Path | None, target_fingerprint: str) -> EvalReport:
    """The report in an evaluation's folder. Raises: ConfigError unless it measured the very draft on the very target;
    as ``read_evaluation``.
    """
    report = read_evaluation(folder).report
    if report.target.get("fingerprint") != target_fingerprint:
        raise ConfigError(f"--evaluation {folder}: it measured on another target, {report.target.get('name')}")
    if draft is None or report.draft.get("fingerprint") != draft_fingerprint(draft):
        hint = "give that draft with --draft (training's own lies in TRAIN_FOLDER/draft)"
        raise ConfigError(f"--evaluation {folder}: it measured the draft {report.draft.get('name')}; {hint}")
    return report
