"""Whatever moment prepare and record are killed at, what they leave when they run again is what they leave undisturbed."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from prompts_run import write_prompts_run
from recorded import contents

from dspark.cli.prepare import prepare
from dspark.cli.record import record

KILLS = 50
ROWS = [{"prompt": f"Add {number} and {number % 7}, then say why it is {number % 3}."} for number in range(48)]


def write_run(place: Path) -> Path:
    config = write_prompts_run(place, *ROWS)
    fields = yaml.safe_load(config.read_text())
    fields["data"] |= {"max_response_tokens": 40, "generation_batch_size": 6, "temperatures": [1.0, 0.0]}
    fields["record"] |= {"folder": str(place / "record"), "shard_tokens": 300, "max_tokens": 160}
    config.write_text(yaml.safe_dump(fields))
    return config


def run_for(work: Callable[[], None], seconds: float) -> bool:
    """Do the work in a process that is killed after so long. Returns: whether it came to its end."""
    child = os.fork()
    if child == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            work()
        finally:
            os._exit(0)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0
            return True
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_fifty_random_kills_leave_what_an_undisturbed_run_leaves(tmp_path: Path) -> None:
    """Each process is a fork of this one, so that a kill falls into the work and not into the loading of packages."""
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    stages: list[Callable[[Path], None]] = [prepare, record]
    config = write_run(tmp_path / "undisturbed")
    took = []
    for stage in stages:
        began = time.monotonic()
        assert run_for(lambda stage=stage: stage(config), 600)
        took.append(time.monotonic() - began)
    config, draw = write_run(tmp_path / "killed"), random.Random(0)
    kills = 0
    for stage, seconds, share in zip(stages, took, (KILLS // 2, KILLS), strict=True):
        while kills < share:
            if run_for(lambda stage=stage: stage(config), draw.uniform(0, seconds)):
                ...
            kills += 1
        assert run_for(lambda stage=stage: stage(config), 600)
    assert contents(tmp_path / "killed" / "record") == contents(tmp_path / "undisturbed" / "record")
