"""Metrics are pooled before they are divided, and the log has each step once, whatever stopped the run."""

import json
from pathlib import Path

import torch

from dspark.train.log import DECODED, PooledMetrics, Stopwatch, append_row, describe, drop_rows_after


def stopwatch() -> Stopwatch:
    return Stopwatch(torch.device("cpu"), torch.nn.Identity())


def pair(numerator: float, denominator: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(numerator, dtype=torch.float64), torch.tensor(denominator, dtype=torch.float64)


def test_numerators_and_denominators_are_summed_before_the_division() -> None:
    pooled = PooledMetrics(stopwatch())
    for acceptance, tokens in ((pair(1.0, 1.0), 10.0), (pair(1.0, 9.0), 30.0)):
        pooled.add({"expected_acceptance_ratio": acceptance, "tokens": pair(tokens, 1.0), "never": pair(0.0, 0.0)})
    row = pooled.row(step=4, rate=0.5)
    assert row["expected_acceptance_ratio"] == 0.2
    assert row["acceptance_length"] == 1.2
    assert row["tokens_per_second"] > 0
    assert (row["step"], row["learning_rate"]) == (4, 0.5)
    assert "never" not in row


def test_a_row_starts_anew() -> None:
    pooled = PooledMetrics(stopwatch())
    for value in (1.0, 3.0):
        pooled.add({"loss": pair(value, 1.0), "tokens": pair(1.0, 1.0)})
        assert pooled.row(step=1, rate=0.5)["loss"] == value


def test_rows_behind_the_checkpoint_and_a_line_cut_by_a_crash_are_dropped(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        append_row(tmp_path, {"step": step, "loss": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 8, "lo')
    drop_rows_after(tmp_path, 4)
    append_row(tmp_path, {"step": 6, "loss": 0.25})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 2, "loss": 0.5}, {"step": 4, "loss": 0.5}, {"step": 6, "loss": 0.25}]


def test_the_line_for_the_eye_has_loss_acceptance_speed_and_rate() -> None:
    row = {"step": 3, "loss": 1.25, "acceptance_length": 2.5, "tokens_per_second": 1234.5, "learning_rate": 6e-4}
    shown = "step 3  loss 1.2500  acceptance length 2.50  1,234 tokens/s  learning rate 6.00e-04"
    assert describe(row) == shown
    assert "acceptance length 2.50 (2.25 decoded)  1,234" in describe(row | {DECODED: 2.25})
    shares = {"data_wait_share": 0.014, "forward_share": 0.5, "backward_share": 0.3}
    assert describe(row | shares) == f"{shown}  data wait 1%, forward 50%, backward 30%"
