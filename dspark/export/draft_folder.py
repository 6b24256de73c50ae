"""A draft as a Hugging Face folder: config.json and one safetensors file, written whole or not at all."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dspark.config import DraftConfig
from dspark.draft.model import DraftModel
from dspark.errors import CheckpointError, ConfigError, DraftMismatchError
from dspark.export.draft_config import READABLE_ARCHITECTURES, FolderFields, Runtime, config_json, read_layout
from dspark.export.layouts import Layout, canonical_names
from dspark.files import file_sha256, read_json, save_tensors, whole_folder
from dspark.model_folder import SINGLE_FILE, Checkpoint

PROVENANCE = "provenance.json"
WEIGHTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes of numbers that stand for themselves."""
TABLES = ("embed_tokens.weight", "lm_head.weight")


def draft_parameter_count(config: DraftConfig, with_tables: bool = False) -> int:
    """Number of parameters in the exported file, by the formula of specs/dspark.md 1.10 and the heads of 3.1."""
    width, rank, heads = config.hidden_size, config.markov_rank, config.num_attention_heads + config.num_key_value_heads
    layer = 2 * width * heads * config.head_dim + 2 * config.head_dim + 2 * width + 3 * width * config.intermediate_size
    mixing = {"vanilla": 0, "gated": (width + rank + 1) * rank, "rnn": (width + 2 * rank + 1) * 3 * rank}
    confidence = config.enable_confidence_head * (width + config.confidence_head_with_markov * rank + 1)
    own = config.num_hidden_layers * layer + len(config.target_layer_ids) * width**2 + 2 * width
    own += 2 * config.vocab_size * rank + mixing[config.markov_head_type] + confidence
    return own + with_tables * 2 * config.vocab_size * width


def write_draft(
    draft: DraftModel,
    folder: Path,
    fields: FolderFields,
    *,
    runtime: Runtime = "hf",
    provenance: Mapping[str, object] | None = None,
    beside: Mapping[str, str] | None = None,
) -> int:
    """Write the folder that ``runtime`` loads (hf: SGLang, transformers and we), and ``read_draft``.

    Weights are rounded to bfloat16. DeepSpec's loader needs bit-exact copies of the target's embedding and head, and a
    draft with tables of its own brings these. ``provenance`` goes to provenance.json, which runtimes ignore, with the
    sha256 of the weights, which ``read_draft`` checks; ``beside`` has further texts by their files' names. The folder
    appears whole; an earlier draft at that place is replaced. Returns: the number of its parameters. Raises:
    ConfigError as ``config_json``; CheckpointError when ``folder`` holds something that is not a draft, or a weight is
    not finite.
    Source: specs/dspark.md 2.6, 3.1 and 3.3.
    """
    folder, made = folder.resolve(), dict(provenance or {})  # through a link, and without its dots
    config = config_json(draft.config, fields, runtime, str(made.get("target", "")))
    beside = dict(beside or {})
    _refuse_to_replace(folder, {"config.json", SINGLE_FILE, PROVENANCE, "README.md", *beside})
    tensors = {name: tensor.detach() for name, tensor in draft.state_dict().items()}
    if has_tables(draft.config, runtime):
        tensors |= dict(zip(TABLES, (draft.embedding_VD, draft.head_VD), strict=True))
    rounded = {name: tensor.to("cpu", torch.bfloat16, copy=True).contiguous() for name, tensor in tensors.items()}
    wrong = [name for name, tensor in rounded.items() if not torch.isfinite(tensor).all()]
    if wrong:
        raise CheckpointError(f"{folder}: not written, {wrong[0]} holds numbers that are not finite in bfloat16")
    with whole_folder(folder) as place:
        save_tensors(rounded, place / SINGLE_FILE, metadata={"format": "pt"})
        made["weights_sha256"] = file_sha256(place / SINGLE_FILE)
        trees = {"config.json": config, PROVENANCE: made}
        texts = {name: json.dumps(tree, indent=2) + "\n" for name, tree in trees.items()} | beside
        for name, text in texts.items():
            (place / name).write_text(text, encoding="utf-8")
        written = Checkpoint(place)
        written.check(rounded)
        assert written.num_parameters == draft_parameter_count(draft.config, has_tables(draft.config, runtime))
    return written.num_parameters


def has_tables(config: DraftConfig, runtime: Runtime) -> bool:
    """Whether the folder for a runtime holds an embedding and a head."""
    return runtime == "deepspec" or config.own_tables


def read_draft(
    folder: Path,
    tables: tuple[torch.Tensor, torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    is_taking_tables: bool = False,
    num_target_layers: int | None = None,
) -> DraftModel:
    """Load an exported draft, ours or one in another layout of ``layouts``, and bind it to its target's
    (embedding_VD, head_VD), or to its own where its config.json says so.

    A file with its own copies of these tables must hold the same numbers, unless ``is_taking_tables``: then a draft of
    other ones reads those. Rows of neighbouring rotary pairs are put in the order of halves, which changes no product.
    Raises: CheckpointError naming missing, unexpected, wrongly shaped or damaged tensors; DraftMismatchError when the
    draft's vocabulary, width or tables are not the target's; ConfigError for another kind of network.
    """
    vocab_size, hidden_size = tables[0].shape
    check_target(folder, vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_target_layers)
    config, layout = read_layout(folder, num_target_layers)
    with torch.device("meta"):
        draft = DraftModel(config)
    checkpoint, expected = Checkpoint(folder), draft.state_dict()
    checkpoint.rename(canonical_names(folder, checkpoint.names))
    has_own = config.own_tables or bool(set(TABLES) & set(checkpoint.names))
    checkpoint.check(expected | (dict(zip(TABLES, tables, strict=True)) if has_own else {}), any_dtype=True)
    assert checkpoint.num_parameters == draft_parameter_count(config, has_own)
    _check_sha256(folder)
    if has_own:
        own = [_finite(checkpoint, name) for name in TABLES]
        wrong = [
            name
            for name, own_VD, table_VD in zip(TABLES, own, tables, strict=True)
            if not torch.equal(own_VD, table_VD.detach().to("cpu", own_VD.dtype))
        ]
        if wrong and not (config.own_tables or is_taking_tables):
            hint = "use the draft's own target, or dspark import --own-tables"
            raise DraftMismatchError(f"{folder}: {wrong[0]} differs from the target's; {hint}")
        if wrong:
            draft.config = config.model_copy(update={"own_tables": True})
            tables = (own[0].to(tables[0]), own[1].to(tables[1]))
    weights = {name: _halves(config, layout, name, _finite(checkpoint, name)).to(device, dtype) for name in expected}
    draft.load_state_dict(weights, assign=True)
    draft.bind(*tables)
    return draft.eval().requires_grad_(False)


def _halves(config: DraftConfig, layout: Layout, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A weight whose rows follow the draft's pairing of rotary rows, in the order of halves."""
    if layout.is_neox or not name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")):
        return tensor
    pairs = torch.unflatten(tensor, 0, (-1, config.head_dim // 2, 2))
    halves: torch.Tensor = pairs.transpose(1, 2).flatten(0, 2).contiguous()
    return halves


def draft_fingerprint(folder: Path) -> str:
    """Sha256 (hex) over config.json and the weights of an exported draft; any changed byte changes it."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in Checkpoint(folder).files:
        digest.update(file_sha256(path).encode())
    return digest.hexdigest()


def check_target(
    folder: Path, *, vocab_size: int, hidden_size: int, num_layers: int | None = None, fingerprint: str | None = None
) -> DraftConfig:
    """Refuse a draft for another target before any weight of the target is read. Returns: the draft's architecture.
    ``fingerprint`` is the target's; a draft whose provenance names its own target's must have the same.
    Raises: DraftMismatchError naming every field that differs; ConfigError or CheckpointError as ``read_layout``.
    """
    config, _ = read_layout(folder, num_layers)
    both = {"vocab_size": (config.vocab_size, vocab_size), "hidden_size": (config.hidden_size, hidden_size)}
    if num_layers is not None:
        both["num_target_layers"] = (config.num_target_layers, num_layers)
    wrong = [f"{name} is {its} in the draft and {own} in the target" for name, (its, own) in both.items() if its != own]
    if wrong:
        raise DraftMismatchError(f"{folder}: this draft belongs to another target: {'; '.join(wrong)}; use its own")
    trained_for = read_provenance(folder).get("target_fingerprint", fingerprint)
    if fingerprint is not None and trained_for != fingerprint:
        raise DraftMismatchError(
            f"{folder}: this draft was trained for the target with fingerprint {trained_for}, this one has "
            f"{fingerprint}; use its own target, or delete {PROVENANCE} to measure it on this one all the same"
        )
    return config


def _check_sha256(folder: Path) -> None:
    """A provenance.json with a sum makes flipped bits visible; drafts of other trainers have none."""
    path, expected = folder / SINGLE_FILE, read_provenance(folder).get("weights_sha256")
    if expected is not None and path.is_file() and expected != (found := file_sha256(path)):
        raise CheckpointError(f"{path}: damaged: sha256 {found}, expected {expected} by {PROVENANCE}; export it again")


def read_provenance(folder: Path) -> dict[str, Any]:
    """What a draft's provenance.json says; nothing for a draft without one."""
    path = folder / PROVENANCE
    return read_json(path) if path.is_file() else {}


def _finite(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    tensor = checkpoint.get(name)
    if tensor.dtype not in WEIGHTS or not torch.isfinite(tensor).all():
        raise CheckpointError(f"{checkpoint.folder}: {name} holds {tensor.dtype} or numbers that are not finite")
    return tensor


def _refuse_to_replace(folder: Path, own: set[str]) -> None:
    """Raises: CheckpointError unless all that lies there is a draft's, of files that are written anew."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        tags = read_json(folder / "config.json").get("architectures")
    except (ConfigError, OSError):
        tags = None
    if not isinstance(tags, list) or not any(tag in READABLE_ARCHITECTURES for tag in tags):
        raise CheckpointError(f"{folder}: holds something that is not a draft; choose another folder or move it away")
    if others := sorted({path.name for path in folder.iterdir()} - own):
        raise CheckpointError(f"{folder}: holds {', '.join(others[:3])} beside a draft; choose another folder")
