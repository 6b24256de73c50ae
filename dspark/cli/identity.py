"""Which target and draft a command works with, and what a run's words, states and draft come from."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from dspark.config import DraftConfig, RunConfig, TargetSection, validated
from dspark.draft.model import DraftModel
from dspark.errors import ConfigError
from dspark.export.draft_config import FolderFields, architecture_for
from dspark.export.draft_folder import check_target, draft_fingerprint, read_draft
from dspark.provenance import commit, versions
from dspark.target.loading import TargetFacts, load_target, locate_target, target_facts, target_fingerprint
from dspark.target.tokenizer import load_tokenizer, template_fingerprint, tokenizer_fingerprint
from dspark.types import Target


def describe_origin(run: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The fields that a ResponsesHeader and a record's Manifest share. Raises: CheckpointError and ConfigError."""
    return {
        "target": run.target.path,
        **fingerprints(folder, tokenizer),
        "thinking": run.data.thinking,
        "dtype": run.target.dtype,
        "versions": {"commit": commit()} | versions(),
    }


def fingerprints(folder: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, str | None]:
    """What identifies a target, its tokens and its template, where it has one."""
    return {
        "target_fingerprint": target_fingerprint(folder),
        "tokenizer_fingerprint": tokenizer_fingerprint(folder),
        "template_fingerprint": template_fingerprint(tokenizer) if tokenizer.chat_template else None,
    }


def folder_fields(run: RunConfig) -> FolderFields:
    """What the exported config.json says beside the weights' sizes."""
    return fields_of(target_facts(run.target.path), run.train.num_anchors)


def fields_of(facts: TargetFacts, num_anchors: int) -> FolderFields:
    """The same for a target by its facts."""
    ids = (facts.eos_token_id, facts.pad_token_id, facts.bos_token_id)
    return FolderFields(*ids, num_anchors, architecture_for(facts.architecture))


def choose_target(run: RunConfig | None, name: str | None, dtype: str | None, device: str) -> TargetSection:
    """What the options say, else the run, else a precision that suits the device. Raises: ConfigError."""
    path = name or (run and run.target.path)
    if not path:
        raise ConfigError("--target: missing; give a name such as ling-3.0-nano, a folder, or a run with --config")
    chosen = dtype or (run and run.target.dtype) or ("float32" if device == "cpu" else "bfloat16")
    return validated(TargetSection, {"path": path, "dtype": chosen}, "the target")


class Pair(NamedTuple):
    """A target and a draft that fit together, known by their files; nothing large is loaded yet."""

    name: str
    folder: Path
    place: Path
    facts: TargetFacts
    draft: DraftConfig
    tokenizer: PreTrainedTokenizerFast

    def load(self, dtype: torch.dtype, device: str) -> tuple[Target[Any], DraftModel]:
        """Both in ``dtype`` on ``device``, the target with the layers tapped that the draft reads."""
        target = load_target(self.folder, target_layer_ids=self.draft.target_layer_ids, dtype=dtype, device=device)
        return target, read_draft(self.place, (target.embedding_VD, target.head_VD), dtype=dtype, device=device)

    def describe(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a report says about the target and about the draft."""
        its = fingerprints(self.folder, self.tokenizer)
        of_draft: dict[str, Any] = {"name": str(self.place), "fingerprint": draft_fingerprint(self.place)}
        of_draft |= self.draft.model_dump(include={"sample_from_anchor", "block_size", "target_layer_ids"})
        of_draft |= {"verify_rows": self.draft.block_size + 1}
        return {"name": self.name, "fingerprint": its.pop("target_fingerprint")} | its, of_draft


def find_pair(target: str, place: Path | None) -> Pair:
    """A target by name or folder and an exported draft of it. Raises: ConfigError without a draft; as
    ``locate_target`` and ``check_target``.
    """
    folder = locate_target(target)
    if place is None:
        raise ConfigError("--draft: missing; give the folder of an exported draft, or a run with --config")
    draft = check_pair(place, folder)
    return Pair(target, folder, place, target_facts(folder), draft, load_tokenizer(folder))


def check_pair(place: Path, target: str | Path) -> DraftConfig:
    """``check_target`` with what the target's files say."""
    facts = target_facts(target)
    sizes = {"vocab_size": facts.vocab_size, "hidden_size": facts.hidden_size, "num_layers": facts.num_layers}
    return check_target(place, **sizes, fingerprint=target_fingerprint(target))
