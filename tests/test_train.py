"""The training door as a user runs it: from a record to a draft, stopped and resumed, on one process and on two."""

import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import write_tiny_ling
from training_run import (
    LAST,
    assert_same,
    draws_of,
    half_way,
    launch,
    make_sequences,
    rows_of,
    run_fields,
    write_record,
    write_run,
)
from typer.testing import CliRunner

import train
from dspark.cli.probe import load_probe
from dspark.config import RunConfig, load_run
from dspark.errors import CheckpointError, ConfigError, RecordError
from dspark.export.draft_folder import read_draft
from dspark.files import claim
from dspark.target.loading import load_tables, target_fingerprint
from dspark.train.batches import Share
from dspark.train.log import DECODED

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a record, config.yaml, and in run/ the ten steps of it in one process, averaged."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "prompts.jsonl").write_text('{"prompt": "add"}\n{"text": "def add("}\n{"prompt": "more"}\n')
    train.main(write_run(folder, ema_decay=0.75))
    return folder


def probing(place: Path, folder: Path) -> list[str]:
    """The overrides that probe the draft where the run is logged, in a folder of its own."""
    chosen = {"folder": folder, "probe_every_steps": 2, "probe_prompts": 2}
    task = [f"eval.tasks=[{place / 'prompts.jsonl'}]", "eval.max_new_tokens=12"]
    return [*(f"train.{name}={value}" for name, value in chosen.items()), *task]


@pytest.fixture(scope="module")
def probed(place: Path) -> Path:
    """The same ten steps with a probe after every second."""
    train.main(place / "config.yaml", probing(place, place / "probed"))
    return place / "probed"


def assert_same_best(folder: Path, expected: Path) -> None:
    found, wanted = (json.loads((each / "best" / "provenance.json").read_text()) for each in (folder, expected))
    assert all(found[name] == wanted[name] for name in ("step", DECODED, "target_fingerprint", "run"))
    tables = load_tables(expected.parent / "target")
    drafts = [read_draft(each / "best", tables).state_dict() for each in (folder, expected)]
    for name, tensor in drafts[0].items():
        torch.testing.assert_close(tensor, drafts[1][name], rtol=2**-8, atol=1e-6)  # one rounding to bfloat16


def test_ten_steps_are_five_and_five_bit_for_bit(place: Path, tmp_path: Path) -> None:
    train.main(place / "config.yaml", half_way(place, tmp_path / "run"), resume=True)
    assert_same(tmp_path / "run", place / "run", tolerance=0.0)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "run" / "draft" / file).read_bytes() == (place / "run" / "draft" / file).read_bytes()
    assert len(json.loads((tmp_path / "run" / "provenance.json").read_text())) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's graphs are compiled in each process")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_on_a_gpu_they_are_so_in_another_process_whatever_it_sees_first(tmp_path: Path, precision: str) -> None:
    fields = run_fields(tmp_path, num_anchors=400, accumulation_steps=1)
    fields["record"]["max_tokens"] = fields["draft"]["max_position_embeddings"] = 4096
    sequences = make_sequences(lengths=(2000, 3500, 3000, 4000, 70, 30, 2500))
    run = RunConfig.model_validate(fields)
    firsts = [draws_of(sequences, run.seed, seen, Share(1, 1, 0, 1))[0][0][1] for seen in (0, 5)]
    assert [len(sequences[index].ids_T) > 1000 for index in firsts] == [True, False]  # of the run, and of its rest
    write_record(tmp_path / "record", write_tiny_ling(tmp_path / "target"), sequences)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(fields), encoding="utf-8")
    command = [sys.executable, "train.py", "--config", str(tmp_path / "config.yaml")]
    whole = launch(*command, ACCELERATE_MIXED_PRECISION=precision)
    assert "1 x cuda" in whole.stdout, whole.stderr
    override = half_way(tmp_path, tmp_path / "half")[0]
    rest = launch(*command, "--resume", "--set", override, ACCELERATE_MIXED_PRECISION=precision)
    assert "from step 5" in rest.stdout, rest.stderr
    assert_same(tmp_path / "half", tmp_path / "run", tolerance=0.0)


def test_so_they_are_with_muon_a_late_decay_and_layers_computed_again(tmp_path: Path) -> None:
    fields = {"optimizer": "muon", "schedule": "wsd", "ema_decay": 0.75, "activation_checkpointing": True}
    config = write_run(tmp_path, **fields)
    train.main(config)
    train.main(config, half_way(tmp_path, tmp_path / "half"), resume=True)
    assert_same(tmp_path / "half", tmp_path / "run", tolerance=0.0)
    draft = "draft/model.safetensors"
    assert (tmp_path / "half" / draft).read_bytes() == (tmp_path / "run" / draft).read_bytes()


def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(place: Path, probed: Path, tmp_path: Path) -> None:
    overrides = probing(place, tmp_path / "run")
    command = [sys.executable, "train.py", "--config", str(place / "config.yaml")]
    command += [word for override in overrides for word in ("--set", override)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not (tmp_path / "run" / "checkpoints" / "step-00000005").is_dir():
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    train.main(place / "config.yaml", overrides, resume=True)
    assert_same(tmp_path / "run", probed, tolerance=0.0)
    assert_same_best(tmp_path / "run", probed)
    weights = "best/model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (probed / weights).read_bytes()


def test_two_processes_learn_and_decode_what_one_does(place: Path, probed: Path, tmp_path: Path) -> None:
    done = launch(
        "accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0",
        "train.py", "--config", str(place / "config.yaml"), "--set", "train.accumulation_steps=2",
        *(word for override in probing(place, tmp_path / "run") for word in ("--set", override)),
        ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 x cpu, distributed: multi_cpu" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["communication_share"] < 1 for row in rows)
    assert_same(tmp_path / "run", probed, tolerance=1e-6)
    assert_same_best(tmp_path / "run", probed)


@pytest.mark.parametrize(("stage", "is_resumed"), [(1, True), (2, False)])
def test_deepspeed_learns_what_one_process_does_and_goes_on_with_its_checkpoints(
    place: Path, probed: Path, tmp_path: Path, stage: int, is_resumed: bool
) -> None:
    overrides, expected = probing(place, tmp_path / "run"), probed
    if is_resumed:
        overrides, expected = half_way(place, tmp_path / "run"), place / "run"
    done = launch(
        "accelerate", "launch", "--config_file", f"configs/accelerate/deepspeed_zero{stage}.yaml",
        "--num_processes", "2", "--main_process_port", "0",
        "tests/train_deepspeed_on_cpu.py", "--config", str(place / "config.yaml"), *["--resume"] * is_resumed,
        "--set", "train.accumulation_steps=2", *(word for override in overrides for word in ("--set", override)),
        DS_ACCELERATOR="cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 x cpu, distributed: deepspeed" in done.stdout
    assert_same(tmp_path / "run", expected, tolerance=1e-6)
    if not is_resumed:
        assert_same_best(tmp_path / "run", probed)


def test_probes_leave_training_as_it_is_bit_for_bit(place: Path, probed: Path, tmp_path: Path) -> None:
    shutil.copytree(probed, tmp_path / "run")
    rows = [{key: value for key, value in row.items() if key != DECODED} for row in rows_of(probed)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_same(tmp_path / "run", place / "run", tolerance=0.0)
    for file in ("config.json", "model.safetensors"):
        assert (probed / "draft" / file).read_bytes() == (place / "run" / "draft" / file).read_bytes()
    assert [row["step"] for row in rows_of(probed) if DECODED in row] == [2, 4, 6, 8, 10]


def test_a_probe_decodes_as_dspark_eval_does_and_the_best_draft_is_the_one_it_decoded(
    place: Path, probed: Path
) -> None:
    lengths = {row["step"]: row[DECODED] for row in rows_of(probed) if DECODED in row}
    made = json.loads((probed / "best" / "provenance.json").read_text())
    assert made[DECODED] == max(lengths.values()) == lengths[made["step"]]
    assert len(set(lengths.values())) > 1
    draft = read_draft(probed / "best", load_tables(place / "target"))
    run = load_run(place / "config.yaml", tuple(probing(place, probed)))
    assert load_probe(run, torch.device("cpu"))(draft) == pytest.approx(made[DECODED], rel=0.1)  # rounded to bfloat16


def scripted(monkeypatch: pytest.MonkeyPatch, *lengths: float) -> None:
    """Probes that find these lengths, one after the other."""
    values = iter(lengths)
    monkeypatch.setattr(train, "load_probe", lambda run, device: lambda draft: next(values))


def test_the_first_of_the_longest_is_the_best_and_a_resumed_run_knows_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = place / "config.yaml", tmp_path / "run"
    overrides = probing(place, folder)
    scripted(monkeypatch, 1.5, 2.0, 1.75, 2.0, 1.25)
    train.main(config, [*overrides, "train.trackers=[tensorboard]"])
    made = json.loads((folder / "best" / "provenance.json").read_text())
    assert (made["step"], made[DECODED]) == (4, 2.0)
    [events] = (folder / "dspark").glob("events.*")
    assert DECODED.encode() in events.read_bytes()
    weights = (folder / "best" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / LAST)
    scripted(monkeypatch, 1.75, 2.0, 1.25)
    train.main(config, overrides, resume=True)
    assert (folder / "best" / "model.safetensors").read_bytes() == weights
    assert json.loads((folder / "best" / "provenance.json").read_text()) == made
    shutil.rmtree(folder / LAST)
    scripted(monkeypatch, 1.75, 2.5, 1.25)
    train.main(config, overrides, resume=True)
    assert json.loads((folder / "best" / "provenance.json").read_text())["step"] == 8
    shutil.rmtree(folder / LAST)
    scripted(monkeypatch, 1.75, 2.25, 1.25)  # less than what is kept, though the log forgot that row
    train.main(config, overrides, resume=True)
    assert json.loads((folder / "best" / "provenance.json").read_text())[DECODED] == 2.5
    (folder / "best" / "provenance.json").write_text("{}")
    shutil.rmtree(folder / LAST)
    scripted(monkeypatch, 1.75, 2.25, 1.25)
    with pytest.raises(CheckpointError, match=r"expected decoded_acceptance_length .*delete .*best"):
        train.main(config, overrides, resume=True)


def test_a_probe_that_cannot_be_is_refused_before_the_first_step(place: Path, probed: Path, tmp_path: Path) -> None:
    overrides = probing(place, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"task none: not known"):
        train.main(place / "config.yaml", [*overrides, "eval.tasks=[none]"])
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"made with train.probe_prompts 2 \(now 3\)"):
        train.main(place / "config.yaml", [*probing(place, probed), "train.probe_prompts=3"], resume=True)


@pytest.mark.parametrize(
    "command", ["accelerate launch --cpu --num_processes 2 train.py", "accelerate-launch --num-processes=2"]
)
def test_a_launch_that_would_train_on_fewer_processes_than_asked_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(train, "parent_command", lambda: ["python3", *command.split()])
    with pytest.raises(ConfigError, match=r"asked for 2 processes and started 1 .*ACCELERATE_USE_CPU=true"):
        train.main(place / "config.yaml", [f"train.folder={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_a_mistake_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(tmp_path / "none.yaml")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {tmp_path / 'none.yaml'}: no such file")
    assert shown.count("\n") == 1


def test_help_gives_examples() -> None:
    shown = CliRunner().invoke(train.app, ["--help"]).stdout
    assert "accelerate launch train.py --config configs/nano.yaml" in " ".join(shown.split())


def test_the_run_folder_says_which_run_and_where_it_came_from(place: Path) -> None:
    assert load_run(place / "run" / "run.yaml") == load_run(place / "config.yaml")
    [entry] = json.loads((place / "run" / "provenance.json").read_text())
    assert {"commit", "versions", "hardware", "command", "record_manifest_sha256", "time"} <= entry.keys()
    assert [row["step"] for row in rows_of(place / "run")] == [2, 4, 5, 6, 8, 10]
    assert rows_of(place / "run")[-1]["acceptance_length"] > 1


def test_the_written_draft_is_the_trained_one(place: Path) -> None:
    tables = load_tables(place / "target")
    draft = read_draft(place / "run" / "draft", tables)
    kept = load_file(place / "run" / LAST / "moments.safetensors")
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, kept[f"ema.{name}"].bfloat16().float())
    config = json.loads((place / "run" / "draft" / "config.json").read_text())
    assert config["architectures"] == ["LingDSparkModel"]
    assert config["num_anchors"] == 6
    made = json.loads((place / "run" / "draft" / "provenance.json").read_text())
    assert made["target_fingerprint"] == target_fingerprint(place / "target")


def test_the_draft_learns_the_record_by_heart(place: Path, tmp_path: Path) -> None:
    overrides = [f"train.folder={tmp_path / 'run'}", "train.steps=60", "train.learning_rate=2e-2", "train.ema_decay=0"]
    train.main(place / "config.yaml", overrides)
    first, *_, last = rows_of(tmp_path / "run")
    trained = load_file(tmp_path / "run" / "checkpoints" / "step-00000060" / "draft.safetensors")
    draft = read_draft(tmp_path / "run" / "draft", load_tables(place / "target"))
    assert torch.equal(draft.fc.weight, trained["fc.weight"].bfloat16().float())  # no average: the last step's
    assert last["acceptance_length"] > first["acceptance_length"] + 0.5
    assert last["loss"] < 0.8 * first["loss"]


def test_training_may_start_from_an_exported_draft(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit; at the end stands what has changed since, prompt by prompt: here nothing."""
    begun = place / "run" / "draft"
    start = [f"train.init_from={begun}", f"train.folder={tmp_path / 'run'}", "train.steps=1"]
    train.main(place / "config.yaml", [*probing(place, tmp_path / "run"), *start, "train.learning_rate=1e-9"])
    said = re.search(
        rf"since {begun}: acceptance length (\S+) -> (\S+), \+0.00 \(\+0.00 to \+0.00, 2 prompts\)",
        capsys.readouterr().out,
    )
    assert said
    assert said[1] == said[2] > "1.00"
    tables = load_tables(place / "target")
    found, wanted = (read_draft(each / "run" / "draft", tables).state_dict() for each in (tmp_path, place))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    with pytest.raises(ConfigError, match=r"init_from .*a draft of block_size 4 \(now 5\)"):
        train.main(place / "config.yaml", [*start, "draft.block_size=5", f"train.folder={tmp_path / 'other'}"])


def test_wandb_stays_offline_and_tensorboard_writes_into_the_run_folder(place: Path, tmp_path: Path) -> None:
    overrides = [f"train.folder={tmp_path / 'run'}", "train.steps=2", "train.trackers=[wandb, tensorboard]"]
    train.main(place / "config.yaml", overrides)
    assert list((tmp_path / "run").rglob("offline-run-*/*.wandb"))
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))


def changed(place: Path, folder: Path, **sections: dict[str, Any]) -> Path:
    """config.yaml with other fields and its own run folder."""
    fields = run_fields(place)
    for section, values in ({"train": {"folder": str(folder / "run")}} | sections).items():
        fields[section] |= values
    (folder / "changed.yaml").write_text(yaml.safe_dump(fields))
    return folder / "changed.yaml"


def test_a_folder_that_holds_a_run_is_refused_without_resume(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds a run already; pass --resume"):
        train.main(place / "config.yaml")


@pytest.mark.parametrize("override", ["seed=1", "draft.markov_rank=4", "objective.confidence=0.5"])
def test_a_run_is_not_resumed_as_another_run(place: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=rf"made with {override.split('=')[0]} .* \(now {override.split('=')[1]}\)"):
        train.main(place / "config.yaml", [override], resume=True)


def test_a_folder_in_which_another_run_writes_is_refused(place: Path, tmp_path: Path) -> None:
    override = half_way(place, tmp_path / "half")
    with claim(tmp_path / "half"), pytest.raises(ConfigError, match=r"half: another process writes here"):
        train.main(place / "config.yaml", override, resume=True)
    train.main(place / "config.yaml", override, resume=True)
    assert_same(tmp_path / "half", place / "run", tolerance=0)


def test_a_run_is_not_resumed_on_another_record(place: Path, tmp_path: Path) -> None:
    write_record(tmp_path / "record", place / "target", make_sequences(seed=1))
    with pytest.raises(ConfigError, match=r"made with record_manifest_sha256"):
        train.main(place / "config.yaml", [f"record.folder={tmp_path / 'record'}"], resume=True)


def test_a_record_of_another_target_or_of_other_taps_is_refused(place: Path, tmp_path: Path) -> None:
    other = write_tiny_ling(tmp_path / "target", seed=1)
    with pytest.raises(RecordError, match=r"the record of target was made with target_fingerprint"):
        train.main(changed(place, tmp_path, target={"path": str(other)}))
    with pytest.raises(RecordError, match=r"made with target_layer_ids \(0, 2, 4\) \(now \(0, 2, 3\)\); mend"):
        train.main(changed(place, tmp_path, draft={"target_layer_ids": [0, 2, 3]}))
    assert not (tmp_path / "run").exists()


def test_a_damaged_shard_ends_the_run_with_its_name(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "record", tmp_path / "record")
    shard = tmp_path / "record" / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(RecordError, match=r"shard-00000.safetensors: sequence \d+ has not the bytes"):
        train.main(changed(place, tmp_path, record={"folder": str(tmp_path / "record")}))


def test_a_mask_token_whose_embedding_is_zero_is_refused(place: Path, tmp_path: Path) -> None:
    target = write_tiny_ling(tmp_path / "target")
    path = target / "model.safetensors"
    tensors = load_file(path)
    tensors["model.word_embeddings.weight"][317] = 0
    save_file(tensors, path)
    write_record(tmp_path / "record", target, make_sequences())
    sections = {"target": {"path": str(target)}, "record": {"folder": str(tmp_path / "record")}}
    with pytest.raises(ConfigError, match=r"mask_token_id 317: its embedding has norm 0"):
        train.main(changed(place, tmp_path, draft={"mask_token_id": 317}, **sections))


def test_a_mask_token_that_ends_answers_is_refused_before_training(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mask_token_id 302 is the target's end or padding token"):
        train.main(changed(place, tmp_path, draft={"mask_token_id": 302}))
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_refused_and_the_one_before_can_be_used(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    with (tmp_path / "run" / LAST / "draft.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    overrides = [f"train.folder={tmp_path / 'run'}"]
    with pytest.raises(CheckpointError, match=r"step-00000010.draft.safetensors: damaged.*delete"):
        train.main(place / "config.yaml", overrides, resume=True)
    shutil.rmtree(tmp_path / "run" / LAST)
    train.main(place / "config.yaml", overrides, resume=True)
    assert_same(tmp_path / "run", place / "run", tolerance=0.0)
