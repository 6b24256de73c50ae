"""Whenever prepare and record are killed, what they leave after another run is what they leave undisturbed."""

import os
import random
import shutil
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
ROWS = [{"prompt": f"Add {number} and {number % 7}, then say why it is {number % 3}."} for number in range(14)]


def write_run(place: Path) -> Path:
    config = write_prompts_run(place, *ROWS)
    fields = yaml.safe_load(config.read_text())
    fields["data"] |= {"max_response_tokens": 12, "generation_batch_size": 4, "temperatures": [1.0, 0.0]}
    fields["record"] |= {"shard_tokens": 200, "max_tokens": 160}
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
    """Each process is a fork of this one, so that a kill falls into the work and not into the loading of packages. A
    stage that comes to its end among the kills begins anew.
    """
    config, draw = write_run(tmp_path), random.Random(0)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for stage in (prepare, record):
        began = time.monotonic()
        assert run_for(lambda: stage(config, [f"record.folder={undisturbed}"]), 600)  # noqa: B023
        seconds, num_kills = (time.monotonic() - began) / 2, 0
        before = contents(killed) if killed.exists() else {}
        while num_kills < KILLS // 2:
            if not run_for(lambda: stage(config, [f"record.folder={killed}"]), draw.uniform(0, seconds)):  # noqa: B023
                num_kills += 1
                continue
            assert contents(killed) == contents(undisturbed)
            shutil.rmtree(killed)
            killed.mkdir()
            for name, content in before.items():
                (killed / name).write_bytes(content)
        assert run_for(lambda: stage(config, [f"record.folder={killed}"]), 600)  # noqa: B023
        assert contents(killed) == contents(undisturbed)
