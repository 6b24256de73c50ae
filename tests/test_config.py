"""A run description is complete, frozen, and refuses what it does not know."""

from pathlib import Path

import pytest
import yaml

from dspark.config import RunConfig, load_run, save_run
from dspark.errors import ConfigError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text((CONFIGS[0].parent / "nano.yaml").read_text())
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_run_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    run = load_run(path)
    save_run(run, tmp_path / "copy.yaml")
    assert load_run(tmp_path / "copy.yaml") == run


def test_an_override_changes_one_value(run_file: Path) -> None:
    assert load_run(run_file, ("train.steps=7", "train.betas=[0.8, 0.9]")).train.steps == 7


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=3", ["train.stepz", "not a known key"]),
        ("train.steps=-3", ["train.steps", "greater than or equal to 1", "-3"]),
        ("draft.block_size=0", ["draft.block_size", "greater than or equal to 1", "0"]),
        ("objective.forward_kl=-0.5", ["objective.forward_kl", "-0.5"]),
        ("objective.forward_kl=.nan", ["objective.forward_kl", "nan"]),
        ("train.learning_rate=.inf", ["train.learning_rate", "inf"]),
        ("train.betas=[0.9, 1.0]", ["train.betas.1", "less than 1", "1.0"]),
        ("train.optimizer=sgd", ["train.optimizer", "'adamw' or 'muon'", "sgd"]),
        ("train.schedule=linear", ["train.schedule", "'cosine' or 'wsd'", "linear"]),
        ("train.decay_ratio=1.5", ["train.decay_ratio", "less than or equal to 1", "1.5"]),
        ("train.ema_decay=1.0", ["train.ema_decay", "less than 1", "1.0"]),
        ("draft.target_layer_ids=[3, 1]", ["target_layer_ids", "strictly increasing", "[3, 1]"]),
        ("draft.target_layer_ids=[1, 99]", ["target_layer_ids", "[1, 99]"]),
        ("draft.mask_token_id=9999999", ["mask_token_id", "9999999"]),
        ("record.max_tokens=9999", ["record.max_tokens", "max_position_embeddings", "4096", "9999"]),
        ("draft.enable_confidence_head=false", ["objective.confidence", "enable_confidence_head"]),
        ("draft.own_tables=true", ["draft.own_tables", "embedding and head"]),
        ("draft.rope_scaling={rope_type: dynamic, factor: 2}", ["rope_scaling must be linear with factor; yarn with"]),
        ("draft.rope_scaling={rope_type: linear, factor: -2}", ["rope_scaling must be", "-2"]),
        ("draft.num_key_value_heads=3", ["num_attention_heads", "multiple"]),
        ("train.probe_every_steps=-1", ["train.probe_every_steps", "greater than or equal to 0", "-1"]),
        ("train.probe_prompts=0", ["train.probe_prompts", "greater than or equal to 1", "0"]),
        ("train.steps=", ["train.steps", "None"]),
        ("train=3", ["train"]),
        ("steps", ["--set steps", "section.key=value"]),
        ("train.steps=[", ["--set train.steps=[", "not valid YAML"]),
    ],
)
def test_a_wrong_value_gets_one_error_with_place_and_finding(run_file: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_run(run_file, (override,))
    for word in words:
        assert word in str(error.value)


def test_a_probe_without_a_task_is_refused(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.probe_every_steps is 5 but eval.tasks is empty; name a task"):
        load_run(run_file, ("train.probe_every_steps=5", "eval.tasks=[]"))


def test_a_missing_key_is_named(run_file: Path) -> None:
    tree = yaml.safe_load(run_file.read_text())
    del tree["train"]["steps"]
    run_file.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"train\.steps is missing"):
        load_run(run_file)


@pytest.mark.parametrize("text", ["- 1\n", "", "a: [", "\x00"])
def test_a_file_that_is_no_run_is_refused(run_file: Path, text: str) -> None:
    run_file.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_run(run_file)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load_run("nowhere.yaml")


def test_what_a_run_chooses_stays_under_sixty_fields() -> None:
    """Without the draft's architecture, which is its checkpoint's config.json and no choice of ours to shorten."""
    sections = [field.annotation for name, field in RunConfig.model_fields.items() if name != "draft"]
    assert sum(len(getattr(section, "model_fields", {"": 0})) for section in sections) < 60
