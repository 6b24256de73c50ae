"""A run on a tiny Ling target whose data are the rows of a test."""

import json
from pathlib import Path
from typing import Any

import yaml
from tiny import write_tiny_ling
from training_run import run_fields


def write_prompts_run(folder: Path, *rows: dict[str, Any]) -> Path:
    """A run on the tiny Ling target whose data are these rows. Returns: the path of run.yaml."""
    if not (folder / "target").exists():
        write_tiny_ling(folder / "target")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = run_fields(folder)
    fields["data"] = {"sources": [str(folder / "rows.jsonl")], "max_response_tokens": 40, "generation_batch_size": 2}
    fields["record"] |= {"max_tokens": 120, "shard_tokens": 150}
    (folder / "run.yaml").write_text(yaml.safe_dump(fields))
    return folder / "run.yaml"
