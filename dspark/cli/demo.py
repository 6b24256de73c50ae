"""dspark demo: the whole pipeline on the shipped nano target, in minutes on two CPU cores."""

import json
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

import torch
import typer
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from dspark.cli.terminal import watched
from dspark.config import RunConfig, load_run
from dspark.data.chat import ChatFormat, encode_prompt
from dspark.decode.generation import DraftSpeaker, PlainSpeaker
from dspark.decode.speaking import Speaker
from dspark.errors import DsparkError
from dspark.eval.comparison import compare, summary
from dspark.eval.page import Page, pieces, render
from dspark.eval.report import comparison_tables
from dspark.eval.tasks import REPOSITORY, load_task
from dspark.export import draft_fingerprint, read_draft
from dspark.provenance import describe_launch
from dspark.target.loading import load_tables, load_target, locate_target, target_fingerprint
from dspark.target.tokenizer import load_tokenizer, stop_token_ids
from dspark.train.log import METRICS
from dspark.train.run_folder import RUN
from dspark.train.setup import fresh_draft

KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""Freed tensors stay with the process: to map them anew at every operation costs glibc a fifth of the time."""
ONE_PROCESS = {"OMP_NUM_THREADS": "2", **KEPT_MEMORY}
"""Of preparing and recording; eval, which decodes one prompt at a time, is fastest with one thread."""
TWO_PROCESSES = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **KEPT_MEMORY}
"""Of training. On two cores two processes of one thread each learn faster than one process of two threads."""
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"]
LAUNCH += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]  # said, so that nothing is warned of
END_WITH_PARENT = partial(CDLL(None).prctl, 1, signal.SIGTERM) if sys.platform == "linux" else None
"""PR_SET_PDEATHSIG: a stage gets the signal when the demo ends, however it ends; the launcher then ends its workers."""
DEMO = REPOSITORY / "configs" / "demo.yaml"
LEARNER = "demo draft"


def demo(config: Annotated[Path, typer.Option(help="The run to demonstrate.", readable=False)] = DEMO) -> None:
    """Prompts in, a trained draft and a table out: the whole pipeline on the shipped nano target.

    It runs the commands that you would, shows each one, and writes runs/demo/report.html. Run it again to go on after a
    failure: what is finished is kept.
    """
    start = time.monotonic()
    console = Console(soft_wrap=True, highlight=False)
    run = load_run(config)
    train_folder = REPOSITORY / run.train.folder
    given = ["--config", str(config.absolute())]
    resume = ["--resume"] if (train_folder / RUN).is_file() else []
    stages = {
        "prepare": (["-m", "dspark.cli.main", "prepare", *given], ONE_PROCESS),
        "record": (["-m", "dspark.cli.main", "record", *given], ONE_PROCESS),
        "train": ([*LAUNCH, "train.py", *given, *resume], TWO_PROCESSES),
    }
    seconds = {}
    for number, (name, (command, environment)) in enumerate(stages.items(), 1):
        console.rule(f"{number} of 5: {name}", align="left")
        seconds[name] = run_stage(name, command, environment, console)
    console.rule("4 of 5: eval", align="left")
    began = time.monotonic()
    torch.set_num_threads(1)
    folder = locate_target(run.target.path)
    tokenizer = load_tokenizer(folder)
    prompts = encode_prompts(run, folder, tokenizer)
    target = load_target(folder, dtype=getattr(torch, run.target.dtype))
    contenders = compare(
        open_speakers(run, folder, train_folder / "draft"),
        target,
        prompts,
        run.eval,
        (stop_token_ids(folder), run.seed),
        watched,
    )
    seconds |= {"eval": time.monotonic() - began, "all": time.monotonic() - start}
    console.rule("5 of 5: report", align="left")
    whos = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    facts = {
        "target": f"{run.target.path}, {run.target.dtype}, fingerprint {target_fingerprint(folder)[:16]}",
        LEARNER: f"{config.name}, fingerprint {draft_fingerprint(train_folder / 'draft')[:16]}",
        "prompts": f"{len(prompts)} of {', '.join(run.eval.tasks)}, at most {run.eval.max_new_tokens} new tokens each",
        "seconds": {name: round(value) for name, value in seconds.items()},
        "memory": f"{max(resource.getrusage(who).ru_maxrss for who in whos) / 1e6:.1f} GB at most in one process",
    }
    page = Page(
        title=f"DSpark on {Path(run.target.path).name}",
        contenders=contenders,
        learner=LEARNER,
        training=tuple(map(json.loads, (train_folder / METRICS).read_text(encoding="utf-8").splitlines())),
        prompt=str(tokenizer.decode(prompts[0])),
        excerpt=pieces(contenders[2].texts[0][0], lambda ids: str(tokenizer.decode(list(ids)))),
        provenance=facts | describe_launch(sys.argv),
    )
    path = train_folder.parent / "report.html"
    path.write_text(render(page), encoding="utf-8")
    console.print(*comparison_tables(contenders, page.title))
    console.print(f"{summary(contenders)} Everything took {seconds['all']:.0f} s.\n{path}")


def run_stage(name: str, command: Sequence[str], environment: Mapping[str, str], console: Console) -> float:
    """Run a stage as the user would, showing the command. Returns: seconds. Raises: DsparkError naming the stage."""
    settings = " ".join(f"{key}={value}" for key, value in environment.items())
    console.print(f"$ {settings} python {' '.join(command)}", style="dim")
    began = time.monotonic()
    code = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, env={**os.environ, **environment}, preexec_fn=END_WITH_PARENT
    ).returncode
    if code:
        raise DsparkError(f"demo: the stage {name} failed with exit status {code}: mend its cause, run the demo again")
    return time.monotonic() - began


def encode_prompts(run: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerFast) -> list[torch.Tensor]:
    """The ids of every prompt of the run's tasks."""
    chat = ChatFormat(tokenizer, stop_token_ids(folder), run.data.is_thinking)
    return [encode_prompt(chat, c) for task in run.eval.tasks for c in load_task(task, run.eval.max_prompts)]


def open_speakers(run: RunConfig, folder: Path, place: Path) -> dict[str, Speaker]:
    """What is compared: no draft, the run's before and after training, and the one shipped with the target, if any."""
    dtype = getattr(torch, run.target.dtype)
    embedding_VD, head_VD = (table_VD.to(dtype) for table_VD in load_tables(folder))
    untrained = fresh_draft(run.draft, run.seed).to(dtype)
    untrained.bind(embedding_VD, head_VD)
    places = {LEARNER: place} | ({"shipped draft": folder / "draft"} if (folder / "draft").is_dir() else {})
    drafts = {name: read_draft(where, (embedding_VD, head_VD), dtype=dtype) for name, where in places.items()}
    speakers: dict[str, Speaker] = {"plain decoding": PlainSpeaker(load_target(folder, dtype=dtype))}
    for name, draft in {"untrained draft": untrained, **drafts}.items():
        target = load_target(folder, target_layer_ids=draft.config.target_layer_ids, dtype=dtype)
        speakers[name] = DraftSpeaker(target, draft)
    return speakers
