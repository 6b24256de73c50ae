"""What a run's words and states come from, as the headers of responses and records state it."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from dspark.config import RunConfig
from dspark.provenance import commit, versions
from dspark.target.loading import target_fingerprint
from dspark.target.tokenizer import template_fingerprint, tokenizer_fingerprint


def describe_origin(run: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The fields that a ResponsesHeader and a record's Manifest share. Raises: CheckpointError and ConfigError."""
    return {
        "target": run.target.path,
        "target_fingerprint": target_fingerprint(folder),
        "tokenizer_fingerprint": tokenizer_fingerprint(folder),
        "template_fingerprint": template_fingerprint(tokenizer) if tokenizer.chat_template else None,
        "is_thinking": run.data.is_thinking,
        "dtype": run.target.dtype,
        "versions": {"commit": commit()} | versions(),
    }
