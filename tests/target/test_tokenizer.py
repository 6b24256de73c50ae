"""A target's tokenizer, template and stop tokens come from its folder and are checked against its config."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import MASK_TOKEN_ID, PAD_TOKEN_ID, STOP_TOKEN_ID, TOKEN_ID, write_tiny_ling

from dspark.errors import CheckpointError, ConfigError
from dspark.target.tokenizer import load_tokenizer, stop_token_ids, template_fingerprint, tokenizer_fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_ling(tmp_path / "ling")


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_special_tokens_are_single_ids_and_text_comes_back(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "<role>HUMAN</role>déjà vu\n<|role_end|>"
    ids = tokenizer(text).input_ids
    assert ids[0] == TOKEN_ID["<role>"]
    assert ids[-1] == STOP_TOKEN_ID == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == text
    assert MASK_TOKEN_ID not in tokenizer.get_vocab().values()


def test_the_template_gives_the_golden_text(folder: Path, ling_golden: dict[str, Any]) -> None:
    golden = ling_golden["tokenizer_ids"]["rendered_no_thinking"]
    messages = [{"role": role, "content": content} for role, content in golden["messages"]]
    text = load_tokenizer(folder).apply_chat_template(messages, tokenize=False, enable_thinking=False)
    assert text == golden["text"]


def test_a_tokenizer_with_more_ids_than_rows_is_refused(folder: Path) -> None:
    change(folder / "config.json", vocab_size=308)
    with pytest.raises(CheckpointError, match=r"largest id is 308, but vocab_size in config\.json is 308"):
        load_tokenizer(folder)


def test_a_missing_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(folder)


def test_generation_config_decides_the_stop_tokens_before_config(folder: Path) -> None:
    assert stop_token_ids(folder) == (STOP_TOKEN_ID,)
    change(folder / "generation_config.json", eos_token_id=[STOP_TOKEN_ID, PAD_TOKEN_ID])
    assert stop_token_ids(folder) == (STOP_TOKEN_ID, PAD_TOKEN_ID)
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", eos_token_id=PAD_TOKEN_ID)
    assert stop_token_ids(folder) == (PAD_TOKEN_ID,)


@pytest.mark.parametrize("value", [None, [], 320, [302, -1], "</s>"])
def test_an_impossible_stop_token_is_refused(folder: Path, value: Any) -> None:
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", eos_token_id=value)
    with pytest.raises(ConfigError, match="eos_token_id must be ids below vocab_size 320"):
        stop_token_ids(folder)


def test_fingerprints_change_with_what_they_name(folder: Path) -> None:
    before = tokenizer_fingerprint(folder), template_fingerprint(load_tokenizer(folder))
    with (folder / "chat_template.jinja").open("a") as file:
        file.write("x")
    assert tokenizer_fingerprint(folder) == before[0]
    assert template_fingerprint(load_tokenizer(folder)) != before[1]
    change(folder / "tokenizer.json", added_tokens=[])
    assert tokenizer_fingerprint(folder) != before[0]
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="expected one chat template, found NoneType"):
        template_fingerprint(load_tokenizer(folder))
