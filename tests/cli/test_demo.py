"""dspark demo: the real stages on a tiny target end in a table and a page; a second run goes on; a failure is named."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from tiny import write_tiny_ling
from training_run import run_fields

from dspark.cli.demo import KEPT_MEMORY, STAGES, demo, run_stage
from dspark.cli.main import main
from dspark.config import load_run, read_yaml
from dspark.eval.tasks import REPOSITORY
from dspark.export.draft_config import FolderFields
from dspark.export.draft_folder import write_draft
from dspark.target.loading import load_tables
from dspark.train.run_folder import PROVENANCE
from dspark.train.setup import fresh_draft

TRAIN = read_yaml(STAGES, "the stages")["train"]
LAUNCH = TRAIN["words"].partition(" train.py")[0].split()


def write_demo(folder: Path) -> Path:
    """A tiny target with a shipped draft, prompts, and a run over them."""
    fields = run_fields(folder / "demo", steps=4, save_every_steps=4, batch_size=2, accumulation_steps=1)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "add {n}"}}\n' for n in range(4)))
    fields["target"]["path"] = str(write_tiny_ling(folder / "target"))
    fields["data"] = {"sources": [str(prompts)], "max_response_tokens": 16}
    fields["eval"] = {"tasks": [str(prompts)], "max_prompts": 2, "max_new_tokens": 8}
    path = folder / "demo.yaml"
    path.write_text(yaml.safe_dump(fields))
    run = load_run(path)
    draft = fresh_draft(run.draft, 5)
    draft.bind(*load_tables(run.target.path))
    write_draft(draft, folder / "target" / "draft", FolderFields(0))
    return path


def test_the_pipeline_ends_in_a_table_and_a_page_and_goes_on_when_run_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_demo(tmp_path)
    demo(config)
    said, page, out = capfd.readouterr().out, tmp_path / "demo" / "report.html", tmp_path / "demo" / "eval"
    shipped = os.path.relpath(tmp_path / "target" / "draft", REPOSITORY)
    tree, html = json.loads((out / "report.json").read_text()), page.read_text()
    assert list(tree["baselines"]) == ["plain", "untrained", shipped]
    assert (tree["settings"]["seed"], tree["settings"]["untrained_seed"]) == (load_run(config).seed,) * 2
    for m in (m for group in (tree["measurements"], *tree["baselines"].values()) for m in group if m["acceptance"]):
        low, high = m["acceptance"]["interval"]
        assert f"{m['acceptance']['mean_acceptance_length']:.2f} ({low:.2f} - {high:.2f})" in said
    for name in ("plain", "untrained", "draft", shipped):
        assert name[-20:] in html
    assert "acceptance, T = 1" in said
    assert "<h2>How the draft learned</h2>" in html
    assert "no points were logged" not in html
    assert list((tmp_path / "demo" / "report_png").glob("how-the-draft-learned-*.png"))
    assert said.splitlines()[-1] == str(page)
    commands: list[list[str]] = []

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert (command[0], options["cwd"]) == (sys.executable, REPOSITORY)
        commands.append(list(command[1:]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    demo(config)
    assert commands.pop(2) == [*LAUNCH, "train.py", "--config", str(config), "--resume"]
    stages = ("prepare", "record", "eval", "report")
    assert [command[:3] for command in commands] == [["-m", "dspark.cli.main", stage] for stage in stages]
    (launch,) = json.loads((load_run(config).train.folder / PROVENANCE).read_text())
    assert launch["hardware"]["processes"] == "2 x cpu"


def test_workers_end_with_a_demo_that_is_killed(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, pathlib, time\npathlib.Path(__file__).with_name(f'{os.getpid()}.pid').touch()\ntime.sleep(120)\n"
    )
    stage = ("train", [*LAUNCH, str(worker)], TRAIN["settings"] | KEPT_MEMORY, Console(quiet=True))
    parent = multiprocessing.get_context("fork").Process(target=run_stage, args=stage)
    parent.start()
    pids: list[int] = []
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, 60)
        pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        (launcher,) = {int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in pids}
        pids.append(launcher)
        os.kill(parent.pid or 0, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, pids)), 20)
    finally:
        parent.kill()
        parent.join()
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie, which nobody may collect here."""
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().split()[2] != "Z"


def wait_until(is_true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_stage_that_fails_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_demo(tmp_path)
    (tmp_path / "prompts.jsonl").unlink()
    monkeypatch.setattr(sys, "argv", ["dspark", "demo", "--config", str(config)])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    said = capfd.readouterr().err
    assert "prompts.jsonl: no such file" in said
    assert "demo: the stage prepare failed with exit status 2" in said
