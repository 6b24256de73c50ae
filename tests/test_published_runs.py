"""The runs in configs/ are complete, and their drafts are the ones that their comments promise."""

from pathlib import Path

import pytest
import torch
import yaml

from dspark.config import RunConfig, load_run
from dspark.draft.model import DraftModel
from dspark.eval.tasks import task_names

CONFIGS = Path(__file__).parent.parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def run_of(name: str) -> RunConfig:
    return load_run(CONFIGS / f"{name}.yaml")


def num_parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in DraftModel(run_of(name).draft).parameters())


def test_the_published_runs_are_there() -> None:
    assert {"nano", "smollm2", "ling-3.0-tiny", "ling-3.0-flash"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_published_run_is_valid_and_keeps_its_folders_apart(name: str) -> None:
    run = run_of(name)
    assert run.name == name
    assert run.train.folder.parent == run.record.folder.parent == Path("runs") / name
    assert set(run.eval.tasks) <= set(task_names())
    written = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert {"target", "data", "record", "draft", "train", "eval"} <= written.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_published_draft_has_its_own_mask_token(name: str) -> None:
    special = {"nano": {1, 2}, "demo": {1, 2}, "smollm2": {0, 1, 2}}.get(name, {156891, 156892, 156895})
    assert run_of(name).draft.mask_token_id not in special


def test_the_flash_draft_has_the_size_of_the_released_one() -> None:
    assert num_parameters("ling-3.0-flash") == 558_925_825


def test_the_other_drafts_have_the_sizes_that_are_stated() -> None:
    assert num_parameters("nano") <= 6_000_000
    stated = {"nano": 5.1e6, "smollm2": 25e6, "ling-3.0-tiny": 261e6}
    for name, size in stated.items():
        assert num_parameters(name) == pytest.approx(size, rel=0.02)
