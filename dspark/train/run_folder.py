"""The folder of a run: which run it belongs to, and where each launch came from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.config import PROBE_TOKENS, RunConfig, load_run, save_run
from dspark.errors import ConfigError
from dspark.files import differences, file_sha256, write_whole
from dspark.provenance import describe_launch
from dspark.train.checkpoint import checkpoints

RUN, PROVENANCE, BEST = "run.yaml", "provenance.json", "best"
RECORD = "record_manifest_sha256"


def check_run_folder(run: RunConfig, launch: dict[str, Any], is_resumed: bool) -> None:
    """Refuse to train into a folder that holds another run. Reads only; every process may call it.
    Raises: ConfigError when the folder holds a run and ``is_resumed`` is false, or the run to resume has another seed,
    draft, objective, optimizer, moving average or record, or would choose the best draft by other texts than before.
    Steps, learning rate and the like may change; the folder's run.yaml then follows.
    """
    folder = run.train.folder
    path = folder / RUN
    if not path.is_file():
        # A launch that was killed at its first writes leaves provenance.json and hidden partial files, and no run.
        if folder.is_dir() and any(not p.name.startswith(".") and p.name != PROVENANCE for p in folder.iterdir()):
            raise ConfigError(f"{folder}: not empty and holds no run; choose another train.folder")
        return
    if not is_resumed:
        raise ConfigError(f"{folder}: holds a run already; pass --resume to go on, or choose another train.folder")
    for place in checkpoints(folder / "checkpoints")[-1:]:
        if int(place.name.removeprefix("step-")) > run.train.steps:
            raise ConfigError(f"{place}: has done more than train.steps {run.train.steps}; raise train.steps to go on")
    has_best = (folder / BEST).is_dir()
    made = _lasting_facts(load_run(path), has_best) | {RECORD: last_launch(folder)[RECORD]}
    if told := differences(made, _lasting_facts(run, has_best) | {RECORD: launch[RECORD]}):
        raise ConfigError(f"{path}: made with {told}; choose another train.folder")


def _lasting_facts(run: RunConfig, has_best: bool) -> dict[str, Any]:
    """What stays from a run's first launch to its last: seed, draft, objective, and what else its state depends on; and
    where a best draft was chosen, what the texts of a probe depend on.
    """
    facts: dict[str, Any] = {"seed": run.seed}
    facts |= {f"draft.{name}": value for name, value in run.draft}
    facts |= {f"objective.{name}": value for name, value in run.objective}
    facts |= {"train.optimizer": run.train.optimizer, "train.ema_decay": run.train.ema_decay}
    if not has_best:
        return facts
    return facts | {
        "train.probe_prompts": run.train.probe_prompts,
        "the first of eval.tasks": next(iter(run.eval.tasks), None),
        "the length of a probe's texts": min(PROBE_TOKENS, run.eval.max_new_tokens),
        "the first of data.thinking": run.data.thinking[0],
        "target.dtype": run.target.dtype,
    }


def last_launch(folder: Path) -> dict[str, Any]:
    """Where the last launch came from. Raises: ConfigError when the file is missing or damaged."""
    path = folder / PROVENANCE
    try:
        launch: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))[-1]
        return launch | {RECORD: str(launch[RECORD])}
    except (FileNotFoundError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path}: expected a list of launches ({error!r}); choose another train.folder") from error


def write_run_folder(run: RunConfig, launch: dict[str, Any]) -> None:
    """Create the folder, add this launch to provenance.json, a list, and write run.yaml last. One process calls it."""
    folder = run.train.folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PROVENANCE
    launches = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    write_whole(path, json.dumps([*launches, launch], indent=2) + "\n")
    save_run(run, folder / RUN)


def describe_training(command: Sequence[str], manifest: Path, processes: str) -> dict[str, Any]:
    """Where a launch came from (``dspark.provenance``), and the sha256 of the record's manifest."""
    launch = describe_launch(command)
    launch["hardware"]["processes"] = processes
    return launch | {RECORD: file_sha256(manifest)}
