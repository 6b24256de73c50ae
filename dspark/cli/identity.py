"""What a run's words, states and draft come from, as responses, records and exported folders state it."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from dspark.config import RunConfig
from dspark.export import FolderFields, architecture_for
from dspark.provenance import commit, versions
from dspark.target.loading import target_facts, target_fingerprint
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


def folder_fields(run: RunConfig) -> FolderFields:
    """What the exported config.json says beside the architecture."""
    facts = target_facts(run.target.path)
    ids = (facts.eos_token_id, facts.pad_token_id, facts.bos_token_id)
    return FolderFields(*ids, run.train.num_anchors, architecture_for(facts.architecture))
