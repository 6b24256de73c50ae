"""What the tests of dspark eval and dspark chat share: a draft for the tiny Ling, the command, how it fails."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import MASK_TOKEN_ID, STOP_TOKEN_ID, VOCAB_SIZE

from dspark.cli.main import main
from dspark.config import DraftConfig
from dspark.draft.model import DraftModel
from dspark.export import FolderFields, write_draft
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
