"""A target's tokenizer, chat template and stop tokens, as its folder states them."""

import hashlib
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from dspark.errors import CheckpointError, ConfigError
from dspark.files import read_json
from dspark.target.config import read_config_json


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """Read tokenizer.json, tokenizer_config.json and chat_template.jinja; no code of the folder is run.
    Raises: CheckpointError when one is missing or damaged, or the tokenizer knows ids that the model has no row for.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; download it from the model's repository")
    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        files = "tokenizer.json, tokenizer_config.json or chat_template.jinja"
        raise CheckpointError(f"{folder}: {files} is damaged ({type(error).__name__}: {error})") from error
    vocab_size = read_config_json(folder).get("vocab_size")
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if not isinstance(vocab_size, int) or largest >= vocab_size:
        raise CheckpointError(f"{path}: its largest id is {largest}, but vocab_size in config.json is {vocab_size}")
    return tokenizer


def stop_token_ids(folder: Path | str) -> tuple[int, ...]:
    """The ids that end an answer: ``eos_token_id`` of generation_config.json, else of config.json, in that order.
    Raises: ConfigError when neither names one, or an id is no row of the vocabulary.
    """
    folder = Path(folder)
    values = read_config_json(folder)
    vocab_size = values.get("vocab_size", 0)
    generation = folder / "generation_config.json"
    stated: Any = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if stated is None:
        stated = values.get("eos_token_id")
    ids = tuple(stated) if isinstance(stated, list) else (stated,)
    if not ids or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise ConfigError(f"{folder}: eos_token_id must be ids below vocab_size {vocab_size}, got {stated!r}")
    return ids


def tokenizer_fingerprint(folder: Path | str) -> str:
    """SHA-256 of tokenizer.json, in hex."""
    return hashlib.sha256((Path(folder) / "tokenizer.json").read_bytes()).hexdigest()


def template_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256, in hex, of the tokenizer's chat template. Raises: ConfigError when it has none, or several."""
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ConfigError(f"{tokenizer.name_or_path}: expected one chat template, found {type(template).__name__}")
    return hashlib.sha256(template.encode()).hexdigest()
