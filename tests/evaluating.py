"""What the tests of dspark eval, chat and report share: a draft for the tiny Ling, the command, how it fails."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import MASK_TOKEN_ID, STOP_TOKEN_ID, VOCAB_SIZE, write_tiny_ling
from typer.testing import CliRunner

from dspark.cli.main import app, main
from dspark.config import DraftConfig
from dspark.draft.model import DraftModel
from dspark.export.draft_config import FolderFields
from dspark.export.draft_folder import write_draft
from dspark.target.loading import load_tables


def write_tiny_draft(folder: Path, target: Path, **changes: Any) -> Path:
    """A random draft for the tiny Ling."""
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "num_target_layers": 6,
        "target_layer_ids": (1, 3, 4),
        "block_size": 4,
        "mask_token_id": MASK_TOKEN_ID,
        "markov_rank": 8,
    }
    draft = DraftModel(DraftConfig.model_validate(fields | changes))
    draft.initialise(torch.Generator().manual_seed(0))
    if not changes:
        draft.bind(*load_tables(target))
    write_draft(draft, folder, FolderFields(STOP_TOKEN_ID))
    return folder


def arguments(place: Path, **changes: str) -> list[str]:
    given = {
        "target": str(place / "target"),
        "draft": str(place / "draft"),
        "tasks": str(place / "prompts.jsonl"),
        "max-new-tokens": "12",
    } | changes
    return ["eval", *(part for key, value in given.items() if value for part in (f"--{key}", value))]


def failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """The line on stderr of a command that exits with status 2 without a traceback."""
    monkeypatch.setattr(sys, "argv", ["dspark", *words])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert text.startswith("dspark: ")
    return text


def write_evaluations(folder: Path) -> tuple[Path, Path]:
    """A tiny target, two drafts for it and their evaluations on the same prompts; that of the first has baselines too,
    and what costs hours to measure is written into its report.
    """
    write_tiny_ling(folder / "target")
    write_tiny_draft(folder / "draft", folder / "target")
    write_tiny_draft(folder / "other draft", folder / "target", markov_rank=4)
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "add {n}"}}\n' for n in range(3)))
    common = {"max-new-tokens": "12", "temperatures": "0,1"}
    baselines = {"baselines": "plain,ngram,untrained", "out": str(folder / "first")}
    other = {"draft": str(folder / "other draft"), "out": str(folder / "second"), "against": str(folder / "first")}
    for changes in (baselines, other):
        result = CliRunner().invoke(app, arguments(folder, **common | changes), catch_exceptions=False)
        assert result.exit_code == 0, result.stdout
    path = folder / "first" / "report.json"
    tree = json.loads(path.read_text())
    for m in (*tree["measurements"], *(m for group in tree["baselines"].values() for m in group)):
        spread = {"mean": 0.02, "median": 0.01, "p99": 0.1}
        phases = {"prefill": 0.5, "draft": 0.25, "verify": 0.5, "commit": 0.125, "other": 0.125}
        m["timing"] = {"time_per_token": spread, "first_token": spread, "output_tokens_per_second": 50.0}
        m["timing"]["phase_seconds"] = phases
    for m in tree["measurements"]:
        estimate = {"expected_acceptance_length": 1.5, "interval": [1.25, 1.75], "num_anchors": 9}
        m["teacher_forced"] = estimate | {"survival": [0.25, 0.125, 0.125, 0.0]}
    path.write_text(json.dumps(tree))
    return folder / "first", folder / "second"
