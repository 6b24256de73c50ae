"""Another trainer's draft comes in by one command, which says what it took it for."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dspark.cli.main import app, main
from dspark.export.draft_config import FolderFields
from dspark.export.draft_folder import draft_parameter_count, read_draft, write_draft
from dspark.export.layouts import speculators_json
from dspark.target.loading import load_tables, target_facts

NANO = Path("data/nano/draft")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The shipped draft as the speculators package writes one: without the number of the target's layers."""
    folder = tmp_path / "theirs"
    facts = target_facts("ling-3.0-nano")
    draft = read_draft(NANO, load_tables("ling-3.0-nano"))
    write_draft(draft, folder, FolderFields(facts.eos_token_id, facts.pad_token_id))
    tree = speculators_json(json.loads((folder / "config.json").read_text()), "a-target")
    del tree["num_target_layers"]
    (folder / "config.json").write_text(json.dumps(tree))
    (folder / "provenance.json").unlink()
    return folder


def imported(source: Path, out: Path, *words: str) -> str:
    command = ["import", str(source), "--target", "ling-3.0-nano", "--out", str(out), *words]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_says_which_layout_it_was_and_keeps_every_bit(theirs: Path, tmp_path: Path) -> None:
    said = imported(theirs, tmp_path / "ours")
    assert "layout speculators, for speculators_model_type is 'dspark'; rotary pairs: halves" in said
    ours, shipped = (load_file(folder / "model.safetensors") for folder in (tmp_path / "ours", NANO))
    assert ours.keys() == shipped.keys()
    assert all((ours[name] == shipped[name]).all() for name in ours)
    draft = read_draft(tmp_path / "ours", load_tables("ling-3.0-nano"))
    assert f"{draft_parameter_count(draft.config):,} parameters" in said
    assert draft.config == read_draft(NANO, load_tables("ling-3.0-nano")).config
    made = json.loads((tmp_path / "ours" / "provenance.json").read_text())
    assert (made["imported_from"], made["layout"]) == ("theirs", "speculators")
    assert "| imported from |" in (tmp_path / "ours" / "README.md").read_text()


def test_tables_that_are_not_the_targets_come_only_when_asked_for(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embedding_VD, head_VD = load_tables("ling-3.0-nano")
    weights = load_file(theirs / "model.safetensors")
    weights |= {"embed_tokens.weight": embedding_VD.clone(), "lm_head.weight": (head_VD * 2).clone()}
    save_file(weights, theirs / "model.safetensors")
    fails(capsys, theirs, tmp_path / "ours", "lm_head.weight differs from the target's")
    assert not (tmp_path / "ours").exists()
    imported(theirs, tmp_path / "ours", "--own-tables")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["own_tables"] is True


def test_a_draft_of_another_target_or_of_nothing_known_is_one_clear_line(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(tree | {"num_target_layers": 9}))
    fails(capsys, theirs, tmp_path / "ours", "num_target_layers is 9 in the draft")
    (theirs / "config.json").write_text(json.dumps(tree | {"sample_from_anchor": None}))
    fails(capsys, theirs, tmp_path / "ours", "write what the draft was trained with")
    fails(capsys, tmp_path, tmp_path / "ours", "config.json: no such file")


def fails(capsys: pytest.CaptureFixture[str], source: Path, out: Path, complaint: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dspark", "import", str(source), "--target", "ling-3.0-nano", "--out", str(out)])
        with pytest.raises(SystemExit) as error:
            main()
    said = capsys.readouterr().err
    assert error.value.code == 2
    assert complaint in said
    assert said.count("\n") == 1
