"""A run folder belongs to one run, and says where every launch came from."""

import json
from pathlib import Path
from typing import Any

import pytest
from training_run import make_run

from dspark.config import RunConfig, load_run
from dspark.errors import ConfigError
from dspark.train.run_folder import BEST, PROVENANCE, check_run_folder, describe_training, write_run_folder

LAUNCH = {"record_manifest_sha256": "1" * 64}


def test_a_new_or_empty_folder_is_fine(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    check_run_folder(run, LAUNCH, is_resumed=False)
    run.train.folder.mkdir()
    check_run_folder(run, LAUNCH, is_resumed=True)


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.train.folder.mkdir()
    (run.train.folder / "thesis.txt").write_text("all there is")
    for is_resumed in (False, True):
        with pytest.raises(ConfigError, match="not empty and holds no run"):
            check_run_folder(run, LAUNCH, is_resumed)


@pytest.mark.parametrize("failing", ["train.run_folder.write_whole", "train.run_folder.save_run", "config.write_whole"])
def test_a_launch_killed_at_its_first_writes_may_be_launched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    run = make_run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(f"dspark.{failing}", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_run_folder(run, LAUNCH)
    for is_resumed in (False, True):
        check_run_folder(run, LAUNCH, is_resumed)
    write_run_folder(run, LAUNCH)
    check_run_folder(run, LAUNCH, is_resumed=True)


def test_a_resumed_run_may_take_longer_but_not_learn_something_else(tmp_path: Path) -> None:
    write_run_folder(make_run(tmp_path), LAUNCH)
    longer = make_run(tmp_path, steps=20, save_every_steps=7)
    check_run_folder(longer, LAUNCH, is_resumed=True)
    with pytest.raises(ConfigError, match=r"made with seed 0 \(now 3\)"):
        check_run_folder(longer.model_copy(update={"seed": 3}), LAUNCH, is_resumed=True)
    with pytest.raises(ConfigError, match="record_manifest_sha256"):
        check_run_folder(longer, {"record_manifest_sha256": "2" * 64}, is_resumed=True)


def changed(run: RunConfig, section: str, **fields: Any) -> RunConfig:
    return run.model_copy(update={section: getattr(run, section).model_copy(update=fields)})


def test_a_best_draft_is_not_compared_on_other_texts(tmp_path: Path) -> None:
    run = make_run(tmp_path, probe_every_steps=2)
    write_run_folder(run, LAUNCH)
    others = [
        changed(run, "train", probe_prompts=3),
        changed(run, "train", probe_prompts=3, probe_every_steps=0),
        changed(run, "eval", tasks=("other",)),
        changed(run, "eval", max_new_tokens=8),
        changed(run, "data", thinking=(True, False)),
        changed(run, "target", dtype="float64"),
    ]
    for other in others:
        check_run_folder(other, LAUNCH, is_resumed=True)
    (run.train.folder / BEST).mkdir()
    for other in others:
        with pytest.raises(ConfigError, match=r"made with .* \(now .*\); choose another train.folder"):
            check_run_folder(other, LAUNCH, is_resumed=True)
    same = changed(run, "eval", tasks=(*run.eval.tasks, "further"), max_new_tokens=1024)
    check_run_folder(same, LAUNCH, is_resumed=True)


@pytest.mark.parametrize(("field", "value"), [("optimizer", "muon"), ("ema_decay", 0.9)])
def test_what_a_checkpoint_keeps_of_the_weights_may_not_change(tmp_path: Path, field: str, value: Any) -> None:
    write_run_folder(make_run(tmp_path), LAUNCH)
    check_run_folder(make_run(tmp_path, schedule="wsd", activation_checkpointing=True), LAUNCH, is_resumed=True)
    with pytest.raises(ConfigError, match=rf"made with train\.{field} ('adamw'|0\.0) \(now '?{value}'?\)"):
        check_run_folder(make_run(tmp_path, **{field: value}), LAUNCH, is_resumed=True)


def test_every_launch_is_kept_and_the_run_is_the_last_one(tmp_path: Path) -> None:
    write_run_folder(make_run(tmp_path), LAUNCH)
    longer = make_run(tmp_path, steps=20)
    write_run_folder(longer, LAUNCH | {"command": ["again"]})
    assert load_run(longer.train.folder / "run.yaml") == longer
    launches = json.loads((longer.train.folder / "provenance.json").read_text())
    assert [launch.get("command") for launch in launches] == [None, ["again"]]
    assert {path.name for path in longer.train.folder.iterdir()} == {"run.yaml", "provenance.json"}


def test_a_launch_names_the_record_by_its_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    launch = describe_training(["train.py"], tmp_path / "manifest.json", "1 x cpu")
    assert launch["record_manifest_sha256"].startswith("44136fa355b3678a")
    assert launch["command"] == "train.py"
    assert launch["versions"]["torch"]
    (tmp_path / "manifest.json").write_text("{ }")
    other = describe_training(["train.py"], tmp_path / "manifest.json", "")
    assert other["record_manifest_sha256"] != launch["record_manifest_sha256"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", "[3]"])
def test_a_damaged_provenance_is_named(tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path)
    write_run_folder(run, LAUNCH)
    (run.train.folder / PROVENANCE).write_text(content)
    with pytest.raises(ConfigError, match=r"provenance\.json: expected a list of launches"):
        check_run_folder(run, LAUNCH, is_resumed=True)
