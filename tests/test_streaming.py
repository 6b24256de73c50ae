"""Recording and training at once, through a few shards at a time, learns what a record on disk teaches."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prompts_run import write_prompts_run
from safetensors.torch import load_file
from training_run import ROOT, rows_of, write_run

from dspark.cli.prepare import prepare
from dspark.cli.record import record
from dspark.record.format import read_manifest

RING = 24
STEPS = 24


def write_runs(place: Path) -> tuple[Path, Path]:
    """A run with its responses and its whole record, and the same one in a ring. Returns: their configs."""
    config = write_prompts_run(place, *({"prompt": f"Add {number} and {number % 7}."} for number in range(60)))
    fields = yaml.safe_load(config.read_text())
    fields["data"] |= {"max_response_tokens": 24, "generation_batch_size": 20}
    fields["record"] |= {"shard_tokens": 90}
    fields["train"] |= {"steps": STEPS, "accumulation_steps": 2, "log_every_steps": 1, "save_every_steps": 8}
    config.write_text(yaml.safe_dump(fields))
    prepare(config)
    ring = place / "ring"
    ring.mkdir()
    for path in (place / "record").iterdir():
        (ring / path.name).write_bytes(path.read_bytes())
    fields["record"] |= {"folder": str(ring), "ring_shards": RING}
    fields["train"] |= {"folder": str(place / "ring_run")}
    (place / "ring.yaml").write_text(yaml.safe_dump(fields))
    record(config)
    return config, place / "ring.yaml"


STARTED: list["subprocess.Popen[str]"] = []


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    for process in STARTED:
        process.kill()


def start(*command: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_two_recorders_and_a_trainer_give_the_loss_log_of_a_whole_record_also_when_each_is_killed(
    tmp_path: Path,
) -> None:
    config, ring = write_runs(tmp_path)
    shards = read_manifest(tmp_path / "record").shards
    assert len(shards) > 2 * RING
    whole = start("train.py", "--config", str(config))
    recorders = [start("-m", "dspark.cli.main", "record", "--config", str(ring)) for _ in range(2)]
    trainer = start("train.py", "--config", str(ring))
    most, metrics = 0, tmp_path / "ring_run" / "metrics.jsonl"
    has_killed = False
    while trainer.poll() is None:
        assert recorders[1].poll() in (None, 0), recorders[1].communicate()[0]
        most = max(most, len(list((tmp_path / "ring").glob("shard-*"))))
        num_rows = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
        if num_rows > 10 and not has_killed:
            has_killed = True
            for process in (trainer, recorders[0]):
                process.send_signal(signal.SIGKILL)
                process.wait()
            trainer = start("train.py", "--config", str(ring), "--resume")
        time.sleep(0.01)
    assert has_killed
    for process in (whole, trainer, recorders[1]):
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    assert "training has read what it wanted" in output
    assert RING - 2 <= most <= RING + 2, most  # a shard that is written just then is not one that is read
    assert rows_of(tmp_path / "ring_run") == rows_of(tmp_path / "run")
    drafts = [load_file(tmp_path / name / "draft" / "model.safetensors") for name in ("run", "ring_run")]
    assert drafts[0].keys() == drafts[1].keys()
    assert all(values.equal(drafts[1][name]) for name, values in drafts[0].items())


def test_a_trainer_whose_recorder_never_comes_is_stopped_by_one_interrupt(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    fields = yaml.safe_load(config.read_text())
    fields["record"] |= {"ring_shards": 8}
    config.write_text(yaml.safe_dump(fields))
    (tmp_path / "record" / "shard-00000.safetensors").unlink()
    trainer = start("train.py", "--config", str(config))
    while not (tmp_path / "run" / "run.yaml").exists():
        assert trainer.poll() is None, trainer.communicate()[0]
        time.sleep(0.05)
    time.sleep(1.0)  # by then its threads wait
    assert trainer.poll() is None
    trainer.send_signal(signal.SIGINT)
    output, _ = trainer.communicate(timeout=30)
    assert trainer.returncode not in (None, 0), output
