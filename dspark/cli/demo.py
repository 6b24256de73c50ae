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

from dspark.config import load_run
from dspark.errors import DsparkError
from dspark.eval.tasks import REPOSITORY
from dspark.target.loading import locate_target
from dspark.train.run_folder import RUN

KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""Freed tensors stay with the process: to map them anew at every operation costs glibc a fifth of the time."""
TWO_THREADS = {"OMP_NUM_THREADS": "2", **KEPT_MEMORY}
ONE_THREAD = {"OMP_NUM_THREADS": "1", **KEPT_MEMORY}
"""Of eval, which decodes one prompt at a time."""
TWO_PROCESSES = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", **ONE_THREAD}
"""Of training. On two cores two processes of one thread each learn faster than one process of two threads."""
DSPARK = ["-m", "dspark.cli.main"]
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"]
LAUNCH += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]  # said, so that nothing is warned of
END_WITH_PARENT = partial(CDLL(None).prctl, 1, signal.SIGTERM) if sys.platform == "linux" else None
"""PR_SET_PDEATHSIG: a stage gets the signal when the demo ends, however it ends; the launcher then ends its workers."""
DEMO = REPOSITORY / "configs" / "demo.yaml"


def demo(config: Annotated[Path, typer.Option(help="The run to demonstrate.", readable=False)] = DEMO) -> None:
    """Prompts in, a trained draft and a table out: the whole pipeline on the shipped nano target.

    It runs the commands that you would, shows each one, and writes runs/demo/report.html. Run it again to go on after a
    failure: what is finished is kept.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    run = load_run(config)
    folder, given = run.train.folder, ["--config", str(config.absolute())]
    resume = ["--resume"] if (REPOSITORY / folder / RUN).is_file() else []
    shipped = locate_target(run.target.path) / "draft"
    baselines = ["plain", "untrained", *([os.path.relpath(shipped, REPOSITORY)] if shipped.is_dir() else [])]
    out, page = str(folder.parent / "eval"), folder.parent / "report.html"
    measured = ["--baselines", ",".join(baselines), "--seed", str(run.seed), "--device", "cpu", "--out", out]
    stages = {
        "prepare": ([*DSPARK, "prepare", *given], TWO_THREADS),
        "record": ([*DSPARK, "record", *given], TWO_THREADS),
        "train": ([*LAUNCH, "train.py", *given, *resume], TWO_PROCESSES),
        "eval": ([*DSPARK, "eval", *given, *measured], ONE_THREAD),
        "report": ([*DSPARK, "report", out, "--out", str(page)], ONE_THREAD),
    }
    seconds = {}
    for number, (name, (command, environment)) in enumerate(stages.items(), 1):
        console.rule(f"{number} of {len(stages)}: {name}", align="left")
        seconds[name] = run_stage(name, command, environment, console)
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
