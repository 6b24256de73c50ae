"""dspark demo: the whole pipeline on the shipped nano target, in minutes on two CPU cores."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from ctypes import CDLL
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.config import load_run, read_yaml
from dspark.errors import DsparkError
from dspark.eval.tasks import REPOSITORY
from dspark.target.loading import locate_target
from dspark.train.run_folder import RUN

KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""Freed tensors stay with the process: to map them anew at every operation costs glibc a fifth of the time."""
END_WITH_PARENT = partial(CDLL(None).prctl, 1, signal.SIGTERM) if sys.platform == "linux" else None
"""PR_SET_PDEATHSIG: a stage gets the signal when the demo ends, however it ends; the launcher then ends its workers."""
STAGES, DEMO = Path(__file__).with_name("demo.yaml"), REPOSITORY / "configs" / "demo.yaml"


def demo(config: Annotated[Path, typer.Option(help="The run to demonstrate.", readable=False)] = DEMO) -> None:
    """Prompts in, a trained draft and a table out: the whole pipeline on the shipped nano target.

    It runs the commands that you would, shows each one, and writes runs/demo/report.html. Run it again to go on after a
    failure: what is finished is kept.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    run = load_run(config)
    folder = run.train.folder
    shipped = locate_target(run.target.path) / "draft"
    baselines = ["plain", "untrained", *([os.path.relpath(shipped, REPOSITORY)] if shipped.is_dir() else [])]
    out, page = folder.parent / "eval", folder.parent / "report.html"
    given = {"config": config.absolute(), "baselines": ",".join(baselines), "seed": run.seed, "out": out, "page": page}
    stages, seconds = read_yaml(STAGES, "the stages of the demo"), {}
    for number, (name, stage) in enumerate(stages.items(), 1):
        console.rule(f"{number} of {len(stages)}: {name}", align="left")
        command = [word.format(**given) for word in stage["words"].split()]
        if name == "train" and (REPOSITORY / folder / RUN).is_file():
            command.append("--resume")
        seconds[name] = run_stage(name, command, stage["settings"] | KEPT_MEMORY, console)
    parts = ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    console.print(f"Everything took {sum(seconds.values()):.0f} s ({parts}), {memory:.1f} GB at most in one process.")
    console.print(REPOSITORY / page)


def run_stage(name: str, command: Sequence[str], environment: Mapping[str, str], console: Console) -> float:
    """Run a stage as the user would, showing the command. Returns: seconds. Raises: DsparkError naming the stage."""
    settings = " ".join(f"{key}={value}" for key, value in environment.items())
    console.print(f"$ {settings} python {' '.join(command)}", style="dim")
    began = time.monotonic()
    words, variables = [sys.executable, *command], os.environ | environment
    code = subprocess.run(words, cwd=REPOSITORY, env=variables, preexec_fn=END_WITH_PARENT).returncode
    if code:
        raise DsparkError(f"demo: the stage {name} failed with exit status {code}: mend its cause, run the demo again")
    return time.monotonic() - began
