"""dspark bench train: what it counts, what it measures and writes, what it refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from torch.utils.flop_counter import FlopCounterMode
from training_run import read_window, run_fields
from typer.testing import CliRunner

from dspark.cli.bench import train as door
from dspark.cli.bench.report import Report
from dspark.cli.main import app
from dspark.config import RunConfig
from dspark.distributed import start_accelerator
from dspark.draft.anchors import BlockTargets
from dspark.errors import ConfigError, DsparkError
from dspark.record.order import ReadingOrder
from dspark.train import measure
from dspark.train.batches import Batch, Share, lay_out, window_draws
from dspark.train.measure import (
    MicroStep,
    RandomRecord,
    Timing,
    count_operations,
    least_bytes,
    random_learner,
    time_calls,
    whole_steps,
)
from dspark.train.objective import Metrics
from dspark.train.step import Learner, train_step

ROOT = Path(__file__).parents[2]
FLASH = ROOT / "configs" / "ling-3.0-flash.yaml"
ROWS = ["micro-step, forward and backward", "its loss alone, from hidden states", "its body alone"]
TOKENS = 40


@pytest.fixture(autouse=True)
def _a_fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr(measure, "REPEATS", 2)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_fields(tmp_path)))
    return path


def bench(*arguments: str) -> BaseException | None:
    result = CliRunner().invoke(app, ["bench", "train", *arguments])
    assert result.exit_code == 0 or result.exception, result.output
    return result.exception


def learner_of(config: Path, *overrides: str) -> tuple[Learner, RandomRecord]:
    run = door.measured_run(config, TOKENS, 2, overrides)
    return random_learner(start_accelerator(run.train, {}, ()), run), RandomRecord(run, 3)


def test_a_micro_step_of_the_flash_draft_takes_the_operations_that_were_worked_out_by_hand() -> None:
    run = door.measured_run(FLASH, 4096, 4, ())
    record = ids_alone(run)
    batch = read_window(record, run, 0, Share(1, 1, 0, 1))[0]
    batch = replace(batch, slots=lay_out(targets_of(batch), batch.anchors_A, 1 << 27, run.draft.vocab_size))
    found = count_operations(run.draft, batch)
    teachers = lay_out(targets_of(batch), batch.anchors_A, 1 << 40, run.draft.vocab_size).teachers_M
    assert 2600 < len(teachers) < 2800
    draft_alone = 4 * 2560 * 157184 * int(batch.slots.valid_AK.sum())  # measured-h200 has a teacher row a slot
    as_there = found | {"head": draft_alone * 3 // 2}
    assert sum(as_there.values()) / 1e12 == pytest.approx(27.4, rel=0.01)
    for part, wanted in {"head": 9.9, "markov": 1.0, "body": 10.9, "context": 2.6, "attention": 2.4}.items():
        assert as_there[part] / 1e12 == pytest.approx(wanted, rel=0.03), part
    shared = draft_alone + 2 * 2560 * 157184 * len(teachers)
    assert shared < found["head"] < 1.1 * shared  # a position that two pieces share is computed in both


def targets_of(batch: Batch) -> BlockTargets:
    """The targets that the batch was laid out from, all labels alike."""
    return BlockTargets(torch.zeros_like(batch.slots.valid_AK, dtype=torch.int64), batch.slots.valid_AK)


def ids_alone(run: RunConfig) -> Any:
    """The flash run's record without its states."""
    small = run.draft.model_copy(update={"hidden_size": 1})
    return RandomRecord(run.model_copy(update={"draft": small}), 1)


def test_operations_are_those_that_a_counter_sees(config: Path) -> None:
    for kind in ("vanilla", "gated", "rnn"):
        learner, record = learner_of(config, f"draft.markov_head_type={kind}")
        micro = MicroStep(learner, record)
        found = count_operations(learner.run.draft, micro.here)
        assert micro.pulls  # made before the counters count
        with FlopCounterMode(display=False) as loss:
            micro.loss()
        in_place = found["markov"] // 3  # the counter does not see a product that is added in place
        assert sum(found[part] for part in door.LOSS) - loss.get_total_flops() in {0, in_place}, kind
        with FlopCounterMode(display=False) as body:
            micro.body()
        of_attention = sum(
            flops for operation, flops in body.get_flop_counts()["Global"].items() if "attention" in str(operation)
        )
        products = sum(found[part] for part in ("body", "context", "features"))
        assert products == body.get_total_flops() - of_attention, kind


def test_attention_is_counted_by_what_every_slot_sees(config: Path) -> None:
    run = door.measured_run(config, TOKENS, 1, ("train.batch_size=2", "train.num_anchors=3"))
    batch = read_window(RandomRecord(run, 2), run, 0, Share(2, 1, 0, 1))[0]
    context = [anchor % TOKENS for anchor in batch.anchors_A.tolist()]
    assert len(context) == 6
    seen = sum(4 * (tokens + 4) for tokens in context)
    width = 4 * 8  # of all heads
    assert count_operations(run.draft, batch)["attention"] == (2 + 5) * 2 * width * seen * 2  # in two layers


def test_the_two_halves_hold_every_gradient_of_the_whole(config: Path) -> None:
    learner, record = learner_of(config)
    micro = MicroStep(learner, record)
    micro.whole()
    assert all(parameter.grad is not None for parameter in learner.draft.parameters())
    whole = micro.output.markov_VR.grad, learner.draft.markov_head.markov_w2.weight.grad
    assert whole[0] is None
    micro.clear()
    assert all(parameter.grad is None for parameter in learner.draft.parameters())
    micro.loss()
    assert all(x is not None and x.grad.abs().max() > 0 for x in micro.output)
    torch.testing.assert_close(micro.output.markov_VR.grad, whole[1], rtol=0.1, atol=1e-4)
    assert all(parameter.grad is None for parameter in learner.draft.parameters())
    micro.body()
    missing = {name for name, parameter in learner.draft.named_parameters() if parameter.grad is None}
    assert missing == {"markov_head.markov_w2.weight"}
    micro.clear()
    assert all(x is not None and x.grad is None for x in micro.output)


def test_the_loss_is_of_every_term_and_of_a_teacher_that_is_neither_sure_nor_flat(config: Path) -> None:
    learner, record = learner_of(config)
    assert all(getattr(learner.run.objective, name) > 0 for name in (*door.EVERY_TERM, "confidence"))
    assert learner.run.objective.acceptance_warmup_steps == 0
    assert learner.draft.head_VD is not None
    probs = (record[0].last_hidden_TD @ learner.draft.head_VD.T).softmax(-1)
    assert 0.02 < float(probs.amax(-1).mean()) < 0.5
    chosen = door.measured_run(config, TOKENS, 2, ("objective.cross_entropy=0", "objective.acceptance_warmup_steps=9"))
    assert (chosen.objective.cross_entropy, chosen.objective.acceptance_warmup_steps) == (0, 9)
    assert chosen.objective.total_variation > 0


def test_whole_steps_move_the_draft_and_read_the_record_in_training_s_order(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, record = learner_of(config)
    places, drawn = [], []

    def step(learner: Learner, window: Sequence[Batch], place: int, feed: Iterator[Batch]) -> Metrics:
        places.append(place)
        drawn.extend(index for batch in window for index in batch.indices)
        return train_step(learner, window, place, feed)

    monkeypatch.setattr(measure, "train_step", step)
    before = learner.draft.fc.weight.detach().clone()
    with whole_steps(learner, record) as take:
        time_calls(take, torch.device("cpu"))
    assert places == list(range(3 + 2))
    draws = [window_draws(ReadingOrder([0, 3], learner.run.seed), 2 * place, Share(1, 2, 0, 1)) for place in places]
    assert drawn == [index for window in draws for ((_, index),) in window]
    assert not torch.equal(before, learner.draft.fc.weight)


def test_a_call_is_warmed_up_and_cleared_and_the_median_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []
    takes = iter([50.0, 60.0, 70.0, 9.0, 1.0, 2.0])  # three to warm up
    monkeypatch.setattr(measure, "REPEATS", 3)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def spend(name: str, seconds: float) -> None:
        calls.append(name)
        now[0] += seconds

    found = time_calls(lambda: spend("call", next(takes)), torch.device("cpu"), lambda: spend("before", 100.0))
    assert calls == ["before", "call"] * 6
    assert (found.milliseconds, found.least_milliseconds, found.most_milliseconds) == (2e3, 1e3, 9e3)
    assert found.peak_bytes is None


def test_all_rows_are_printed_and_written(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "out.json"
    given = ["--config", str(config), "--tokens", str(TOKENS), "--accumulation", "3", "--json", str(path)]

    def in_50_ms(call: Callable[[], object], *_: object) -> Timing:
        call()
        return Timing(50.0, 40.0, 60.0, None)

    monkeypatch.setattr(measure, "time_calls", in_50_ms)
    result = CliRunner().invoke(app, ["bench", "train", *given, "--set", "train.batch_size=2"])
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert [row["name"] for row in report["rows"]] == [*ROWS, "optimizer step of 3, with its data"]
    assert report["mixed_precision"] == "bf16"
    assert report["distributed"] == "no"
    assert report["blocks"] == 12
    assert report["run"]["record"]["max_tokens"] == TOKENS
    assert {"commit", "versions", "hardware"} <= report["provenance"].keys()
    whole, loss, body, step = (row["flops"] for row in report["rows"])
    assert whole == loss + body == sum(report["flops"].values())
    assert step == 3 * whole
    assert report["tokens_per_second"] == 3 * 2 * TOKENS / 50e-3
    assert report["share_in_micro_steps"] == pytest.approx(3.0)
    assert report["rows"][0]["share_of_matmul"] is None
    assert all(name in result.output for name in ROWS)
    assert f"commit {report['provenance']['commit']}" in result.output


def test_a_rate_is_compared_with_the_peak(tmp_path: Path) -> None:
    table = Report(None, rows=[], matmul_flops_per_second=800e12)
    door.add(table, "row", Timing(50.0, 40.0, 60.0, 7_000_000_000), 20 * 10**12)
    assert table["rows"][0]["share_of_matmul"] == pytest.approx(0.5)


def test_what_cannot_work_is_refused_in_one_line(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "time_rows", lambda *_: pytest.fail("it began"))
    for arguments, said in {
        ("--config", str(config), "--tokens", "513"): "--tokens 513",
        ("--config", "none.yaml"): "no such file",
        ("--config", str(config), "--set", "train.stepz=1"): "train.stepz is not a known key",
    }.items():
        error = bench(*arguments)
        assert isinstance(error, ConfigError), error
        assert said in str(error)
        assert "\n" not in str(error)
    monkeypatch.setattr(door, "free_bytes", lambda device: 10**5)
    error = bench("--config", str(config), "--tokens", str(TOKENS))
    assert isinstance(error, DsparkError)
    assert "takes 0.0 GB and more, cpu has 0.0 GB" in str(error)


def test_memory_that_runs_out_is_one_line(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")

    monkeypatch.setattr(door, "time_rows", fail)
    error = bench("--config", str(config), "--tokens", str(TOKENS))
    assert isinstance(error, DsparkError)
    assert "no room on cpu: CUDA out of memory. Tried to allocate 2.00 GiB; give fewer --tokens" in str(error)


def test_the_least_that_training_takes(config: Path) -> None:
    learner, _ = learner_of(config)
    tensors = sum(parameter.numel() for parameter in learner.draft.parameters())
    tables = learner.draft.head_VD.numel() * 2  # type: ignore[union-attr]
    assert least_bytes(learner.run) == 16 * tensors + 4 * (tables + TOKENS * 4 * 32)
    averaged = door.measured_run(config, TOKENS, 2, ("train.ema_decay=0.9",))
    assert least_bytes(averaged) == least_bytes(learner.run) + 4 * tensors
    assert 10e9 < least_bytes(door.measured_run(FLASH, 4096, 4, ())) < 12e9


BLOCKED = """
import runpy, sys
for name in ("datasets", "wandb", "deepspeed", "triton"):
    sys.modules[name] = None
sys.argv = ["eval/bench_train.py", *sys.argv[1:]]
runpy.run_path("eval/bench_train.py", run_name="__main__")
"""


def start(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "DS_"))}
    variables, command = inherited | environment, [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240, check=False)


def test_it_runs_where_heavy_packages_are_missing(config: Path) -> None:
    done = start(["-c", BLOCKED, "--config", str(config), "--tokens", str(TOKENS)], ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    assert "mixed precision: bf16" in done.stdout


def test_two_processes_print_one_table(config: Path, tmp_path: Path) -> None:
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--main_process_port", "0", "--mixed_precision", "bf16", "eval/bench_train.py"]
    given = ["--config", str(config), "--tokens", str(TOKENS), "--json", str(tmp_path / "out.json")]
    done = start([*launch, *given], ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(ROWS[0]) == 1
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["processes"], report["distributed"], report["mixed_precision"]) == (2, "multi_cpu", "bf16")
    step = report["rows"][-1]
    assert report["tokens_per_second"] == pytest.approx(2 * 4 * TOKENS / step["milliseconds"] * 1e3)
