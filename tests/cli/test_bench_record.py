"""dspark bench record: its figures are those of the record that it wrote, and nothing stays behind."""

import json
from pathlib import Path

from prompts_run import write_prompts_run
from typer.testing import CliRunner

from dspark.cli.main import app


def test_the_figures_are_those_of_the_record(tmp_path: Path) -> None:
    config = write_prompts_run(tmp_path, {"prompt": "Hi"})
    out = ["--folder", str(tmp_path), "--json", str(tmp_path / "bench.json"), "--device", "cpu"]
    run = [
        "bench",
        "record",
        "--config",
        str(config),
        "--tokens",
        "1200",
        "--length",
        "40",
        "--set",
        "record.taps=float8",
    ]
    result = CliRunner().invoke(app, [*run, *out], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["tokens"] == 1200
    width, taps, supervised = 32, 3, 20
    a_sequence = 40 * (4 + 1 + taps * (4 + width)) + supervised * (8 + 4 * width) + 16
    assert found["bytes"] == 30 * a_sequence + 10 * 512  # three of 40 tokens in each shard of 150
    assert [len(found[name]) for name in ("bare_seconds", "whole_seconds", "seconds")] == [3, 3, 3]
    assert f"recording {1200 / min(found['seconds']):,.0f} tokens/s" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"target", "rows.jsonl", "run.yaml", "bench.json"}
