"""dspark export: a checkpoint or a draft becomes the folder that was asked for."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny import PAD_TOKEN_ID, STOP_TOKEN_ID, write_tiny_ling
from training_run import run_fields
from typer.testing import CliRunner

from dspark.cli.export.card import render_card
from dspark.cli.main import app, main
from dspark.config import DraftConfig, RunConfig, save_run
from dspark.draft.model import DraftModel
from dspark.errors import ConfigError, DraftMismatchError
from dspark.export.draft_folder import draft_parameter_count, read_draft
from dspark.target.loading import load_tables
from dspark.train.checkpoint import Progress, save_checkpoint

TABLES = {"embed_tokens.weight", "lm_head.weight"}


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    """A run folder with two checkpoints of different weights."""
    config = RunConfig.model_validate(run_fields(tmp_path))
    folder = config.train.folder
    folder.mkdir()
    write_tiny_ling(tmp_path / "target")
    save_run(config, folder / "run.yaml")
    for step in (5, 10):
        draft = DraftModel(config.draft)
        draft.initialise(torch.Generator().manual_seed(step))
        parameters = {name: parameter.detach() for name, parameter in draft.named_parameters()}
        moments = {f"{moment}.{name}": t * 0 for moment in ("exp_avg", "exp_avg_sq") for name, t in parameters.items()}
        save_checkpoint(folder / "checkpoints", Progress(step, step), parameters, moments)
    (folder / "provenance.json").write_text(json.dumps([{"record_manifest_sha256": "0" * 64}]))
    return config


def test_the_average_is_exported_where_the_run_keeps_one(run: RunConfig, tmp_path: Path) -> None:
    tree = run.model_dump(mode="json")
    tree["train"]["ema_decay"] = 0.9
    save_run(RunConfig.model_validate(tree), run.train.folder / "run.yaml")
    place = run.train.folder / "checkpoints" / "step-00000010"
    parameters, moments = load_file(place / "draft.safetensors"), load_file(place / "moments.safetensors")
    moments |= {f"ema.{name}": tensor * 2 for name, tensor in parameters.items()}
    save_checkpoint(run.train.folder / "checkpoints", Progress(15, 15), parameters, moments)
    export("--run", run.train.folder, "--out", tmp_path / "draft")
    draft = read_draft(tmp_path / "draft", load_tables(run.target.path))
    assert torch.equal(draft.fc.weight, moments["ema.fc.weight"].bfloat16().float())


def export(*words: object) -> str:
    result = CliRunner().invoke(app, ["export", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_newest_checkpoint_or_the_one_asked_for_is_exported(run: RunConfig, tmp_path: Path) -> None:
    for step, words in ((10, ()), (5, ("--step", 5))):
        said = export("--run", run.train.folder, "--out", tmp_path / f"draft{step}", *words)
        assert f"step-{step:08d}" in said.replace("\n", "")
        draft = read_draft(tmp_path / f"draft{step}", load_tables(run.target.path))
        saved = load_file(run.train.folder / "checkpoints" / f"step-{step:08d}" / "draft.safetensors")
        assert torch.equal(draft.fc.weight, saved["fc.weight"].bfloat16().float())
        tree = json.loads((tmp_path / f"draft{step}" / "config.json").read_text())
        assert tree["architectures"] == ["LingDSparkModel"]
        assert tree["num_anchors"] == run.train.num_anchors


def test_a_draft_is_written_again_in_another_form(run: RunConfig, tmp_path: Path) -> None:
    export("--run", run.train.folder, "--out", tmp_path / "one")
    words = ("--target", run.target.path, "--runtime", "deepspec")
    export("--draft", tmp_path / "one", *words, "--out", tmp_path / "two")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert two.keys() - one.keys() == TABLES
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(two["lm_head.weight"], load_tables(run.target.path)[1].bfloat16())
    tree = json.loads((tmp_path / "two" / "config.json").read_text())
    assert tree["architectures"] == ["Qwen3DSparkModel"]
    assert tree["num_anchors"] == run.train.num_anchors != 512
    assert read_draft(tmp_path / "two", load_tables(run.target.path)).config == run.draft
    write_tiny_ling(tmp_path / "other", seed=1)
    with pytest.raises(DraftMismatchError, match="trained for the target with fingerprint"):
        export("--draft", tmp_path / "one", "--target", tmp_path / "other", "--out", tmp_path / "three")


@pytest.mark.parametrize("runtime", ["hf", "sglang", "vllm", "speculators", "deepspec"])
def test_the_card_tells_where_a_draft_comes_from_and_how_it_is_served(
    run: RunConfig, tmp_path: Path, runtime: str
) -> None:
    launch = {"run": "a-run", "record_manifest_sha256": "f" * 64, "target_fingerprint": "0" * 64}
    (run.train.folder / "provenance.json").write_text(json.dumps([launch | {"run": "another"}, launch]))
    temperatures = tmp_path / "t.json"
    temperatures.write_text(json.dumps({"temperatures": [1.0] * run.draft.block_size}))
    words = ("--runtime", runtime, "--temperatures", temperatures)
    export("--run", run.train.folder, "--out", tmp_path / "draft", *words)
    card = (tmp_path / "draft" / "README.md").read_text()
    assert card.startswith(f'---\nbase_model: "{run.target.path}"\n')
    for line in ("| run | a-run |", f"| record, sha256 of its manifest | {'f' * 64} |", "target, fingerprint"):
        assert line in card
    count = draft_parameter_count(run.draft, runtime == "deepspec")
    assert f"{count:,} parameters in this folder" in card
    rows = run.draft.block_size + 1
    assert ("--speculative-algorithm DSPARK" in card) == (runtime in ("hf", "sglang"))
    assert ("--linear-replayssm-cache-len 16" in card) == (runtime in ("hf", "sglang"))
    assert 8 < 2 * rows <= 16
    assert "\n\n\n" not in card
    assert (f'"num_speculative_tokens": {rows - 1}' in card) == (runtime in ("hf", "vllm", "speculators"))
    assert ("confidence-sts-path THIS_FOLDER/temperatures.json`" in card) == (runtime in ("hf", "sglang"))
    assert (tmp_path / "draft" / "temperatures.json").read_bytes() == temperatures.read_bytes()


def test_the_ring_of_a_block_of_eight_holds_32() -> None:
    draft = DraftConfig.model_validate(yaml.safe_load(Path("configs/ling-3.0-flash.yaml").read_text())["draft"])
    assert "--linear-replayssm-cache-len 32" in render_card(draft, "sglang", "BailingMoeV3ForCausalLM", {"target": "x"})
    assert "replayssm" not in render_card(draft, "sglang", "Qwen3ForCausalLM", {"target": "x"})


def test_a_card_names_no_server_that_cannot_compute_the_draft() -> None:
    draft = DraftConfig.model_validate(yaml.safe_load(Path("configs/ling-3.0-flash.yaml").read_text())["draft"])
    for changes, servers in (
        ({}, (True, True)),
        ({"own_tables": True}, (False, True)),
        ({"markov_head_type": "rnn"}, (True, False)),
        ({"own_tables": True, "markov_head_type": "rnn"}, (False, False)),
    ):
        card = render_card(draft.model_copy(update=changes), "hf", "BailingMoeV3ForCausalLM", {"target": "a 'b"})
        assert tuple(name in card for name in ("--speculative-algorithm", "vllm serve")) == servers
        assert ("None of the runtimes" in card) == (not any(servers))
        assert "--model-path a" not in card  # but in quotation marks


def test_what_was_measured_is_told_of_the_very_draft_alone(tmp_path: Path) -> None:
    """An evaluation of the shipped draft, and of a copy with another byte in its config.json."""
    nano, found = Path("data/nano/draft"), tmp_path / "evaluation"
    command = ["eval", "--target", "ling-3.0-nano", "--draft", str(nano), "--tasks", "heldout", "--max-prompts", "2"]
    done = CliRunner().invoke(app, [*command, "--max-new-tokens", "8", "--out", str(found)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    words = ("--target", "ling-3.0-nano", "--evaluation", found, "--out", tmp_path / "out")
    export("--draft", nano, *words)
    card, report = (tmp_path / "out" / "README.md").read_text(), json.loads((found / "report.json").read_text())
    for row in report["measurements"]:
        length, interval = row["acceptance"]["mean_acceptance_length"], row["acceptance"]["interval"]
        assert (
            f"| heldout | {row['temperature']:g} | 2 | {length:.2f} ({interval[0]:.2f} - {interval[1]:.2f}) |" in card
        )
    shutil.copytree(nano, tmp_path / "other")
    with (tmp_path / "other" / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ConfigError, match="it measured the draft data/nano/draft"):
        export("--draft", tmp_path / "other", *words)


def test_the_end_token_is_not_padding_although_the_target_stops_on_both(run: RunConfig, tmp_path: Path) -> None:
    stops = {"eos_token_id": [PAD_TOKEN_ID, STOP_TOKEN_ID]}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(stops))
    export("--run", run.train.folder, "--out", tmp_path / "draft")
    tree = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (tree["eos_token_id"], tree["pad_token_id"]) == (STOP_TOKEN_ID, PAD_TOKEN_ID)


def test_mistakes_are_named(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")]
    folder = str(run.train.folder)
    for words, complaint in (
        ([], "give either --run TRAIN_FOLDER or --draft FOLDER"),
        (["--run", folder, "--draft", "x"], "give either --run TRAIN_FOLDER or --draft FOLDER"),
        (["--run", folder, "--step", "7"], "the steps there are: 5, 10"),
        (["--run", str(tmp_path / "none")], "run.yaml: no such file"),
        (["--draft", "x"], "--target: missing"),
        (["--draft", "x", "--target", "y", "--step", "3"], "--step: is of a run"),
    ):
        monkeypatch.setattr(sys, "argv", ["dspark", "export", *out, *words])
        with pytest.raises(SystemExit) as error:
            main()
        assert error.value.code == 2
        assert complaint in capsys.readouterr().err
    tree = yaml.safe_load((run.train.folder / "run.yaml").read_text())
    tree["draft"]["markov_rank"] += 1
    (run.train.folder / "run.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(sys, "argv", ["dspark", "export", *out, "--run", folder])
    with pytest.raises(SystemExit):
        main()
    assert "made for another draft" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
