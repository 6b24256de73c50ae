"""Training checkpoints: exact, whole or not at all, and refused when they are not what they say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training_run import make_run

from dspark import files
from dspark.errors import CheckpointError
from dspark.train import checkpoint
from dspark.train.checkpoint import (
    Progress,
    checkpoints,
    finished_draft,
    gather_state,
    load_checkpoint,
    save_checkpoint,
)
from dspark.train.optimizer import build_optimizer, keep_average
from dspark.train.setup import fresh_draft


def trained(folder: Path, seed: int = 0, steps: int = 3, **train: Any):
    run = make_run(folder, **train)
    draft = fresh_draft(run.draft, seed)
    optimizer = build_optimizer(draft, run.train)
    if run.train.ema_decay:
        keep_average(optimizer, run.train.ema_decay)
    for _ in range(steps):
        sum((parameter**2).sum() for parameter in draft.parameters()).backward()
        optimizer.step()
    return draft, optimizer


def state_of(draft, optimizer):
    moments = {
        f"{key}.{name}": value for name, p in draft.named_parameters() for key, value in optimizer.state[p].items()
    }
    return dict(draft.named_parameters()) | moments


@pytest.mark.parametrize(
    "train", [{}, {"optimizer": "muon"}, {"ema_decay": 0.5}, {"optimizer": "muon", "ema_decay": 0.5}]
)
def test_a_checkpoint_gives_back_every_bit(tmp_path: Path, train: dict[str, Any]) -> None:
    draft, optimizer = trained(tmp_path, **train)
    place = save_checkpoint(tmp_path / "c", Progress(3, 12), *gather_state(draft, optimizer))
    assert place.name == "step-00000003"
    other, other_optimizer = trained(tmp_path, seed=1, steps=0, **train)
    assert load_checkpoint(place, other, other_optimizer) == Progress(3, 12)
    expected, found = state_of(draft, optimizer), state_of(other, other_optimizer)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert any(name.startswith("ema.") for name in found) == ("ema_decay" in train)


@pytest.mark.parametrize("kinds", [("adamw", "muon"), ("muon", "adamw")])
def test_a_checkpoint_of_another_optimizer_is_refused_and_changes_nothing(
    tmp_path: Path, kinds: tuple[str, str]
) -> None:
    place = save_checkpoint(tmp_path / "c", Progress(3, 12), *gather_state(*trained(tmp_path, optimizer=kinds[0])))
    draft, optimizer = trained(tmp_path, seed=1, steps=0, optimizer=kinds[1])
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"step-00000003: made with another optimizer"):
        load_checkpoint(place, draft, optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.state_dict().items())


def test_the_average_takes_the_place_of_the_weights(tmp_path: Path) -> None:
    draft, optimizer = trained(tmp_path, ema_decay=0.5)
    weights = draft.fc.weight.clone()
    wanted = {name: optimizer.state[parameter]["ema"].clone() for name, parameter in draft.named_parameters()}
    assert finished_draft(draft, optimizer, make_run(tmp_path, ema_decay=0.5).train) is draft
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in draft.state_dict().items())
    assert not torch.equal(weights, draft.fc.weight)


def test_a_checkpoint_holds_safetensors_and_json_only_and_no_table(tmp_path: Path) -> None:
    draft, optimizer = trained(tmp_path)
    table_VD = torch.zeros(draft.config.vocab_size, draft.config.hidden_size)
    draft.bind(table_VD, table_VD)
    parameters, moments = gather_state(draft, optimizer)
    place = save_checkpoint(tmp_path / "c", Progress(3, 12), parameters, moments)
    assert {path.suffix for path in place.iterdir()} == {".safetensors", ".json"}
    assert not [name for name in [*parameters, *moments] if "embedding_VD" in name or "head_VD" in name]


def test_the_newest_two_stay(tmp_path: Path) -> None:
    state = gather_state(*trained(tmp_path))
    for step in (5, 10, 15):
        save_checkpoint(tmp_path / "c", Progress(step, step), *state)
    assert [place.name for place in checkpoints(tmp_path / "c")] == ["step-00000010", "step-00000015"]


@pytest.mark.parametrize("moment", ["save_tensors", "file_sha256", "flush"])
def test_a_kill_while_saving_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    draft, optimizer = trained(tmp_path)
    state = gather_state(draft, optimizer)
    save_checkpoint(tmp_path / "c", Progress(5, 5), *state)
    room = files if moment == "flush" else checkpoint
    whole, calls = getattr(room, moment), []

    def killed(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*given)

    monkeypatch.setattr(room, moment, killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "c", Progress(10, 10), *state)
    monkeypatch.undo()
    [place] = checkpoints(tmp_path / "c")
    assert load_checkpoint(place, draft, optimizer) == Progress(5, 5)
    save_checkpoint(tmp_path / "c", Progress(10, 10), *state)
    assert len(list((tmp_path / "c").iterdir())) == 2


@pytest.mark.parametrize("file", ["draft.safetensors", "moments.safetensors", "state.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_refused_by_name_and_changes_nothing(tmp_path: Path, file: str, harm: str) -> None:
    place = save_checkpoint(tmp_path / "c", Progress(3, 12), *gather_state(*trained(tmp_path)))
    data = bytearray((place / file).read_bytes())
    if harm == "remove":
        (place / file).unlink()
    else:
        data[-20] ^= 64
        (place / file).write_bytes(data if harm == "flip" else data[:-20])
    draft, optimizer = trained(tmp_path, seed=1, steps=0)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"{file}.*delete"):
        load_checkpoint(place, draft, optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.state_dict().items())


def test_a_checkpoint_of_another_draft_is_refused(tmp_path: Path) -> None:
    place = save_checkpoint(tmp_path / "c", Progress(3, 12), *gather_state(*trained(tmp_path)))
    run = make_run(tmp_path)
    draft = fresh_draft(run.draft.model_copy(update={"markov_rank": 4}), 0)
    with pytest.raises(CheckpointError, match=r"another draft; confidence_head.proj.weight is \(1, 40\)"):
        load_checkpoint(place, draft, build_optimizer(draft, run.train))


def test_the_state_file_says_how_far_the_run_is(tmp_path: Path) -> None:
    place = save_checkpoint(tmp_path / "c", Progress(3, 12), *gather_state(*trained(tmp_path)))
    state = json.loads((place / "state.json").read_text())
    assert (state["step"], state["sequences_seen"]) == (3, 12)
