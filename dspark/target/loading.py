"""From a target's name to the target: where it lies, which code computes it, what identifies it."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from dspark.errors import CheckpointError, ConfigError
from dspark.model_folder import Checkpoint
from dspark.target.config import LING_ARCHITECTURE, TargetConfig, load_target_config, read_config_json
from dspark.target.model import LingModel, tensor_shapes
from dspark.target.tokenizer import stop_token_ids
from dspark.types import Target

REPOSITORIES = {"ling-3.0-flash": "inclusionAI/Ling-3.0-flash", "ling-3.0-tiny": "inclusionAI/Ling-3.0-tiny"}
NANO_FOLDER = Path(__file__).parents[2] / "data" / "nano"
_EMBEDDING_NAMES = ("model.word_embeddings.weight", "model.embed_tokens.weight")
_HEAD_NAME = "lm_head.weight"
_SAMPLES, _SAMPLE_BYTES = 16, 4096


class TargetFacts(NamedTuple):
    """What the other rooms need to know of a target before any weight is read."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    stop_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None

    @property
    def eos_token_id(self) -> int:
        """The first stop token that is not padding (Ling stops on both), or padding where nothing else stops."""
        return next((token for token in self.stop_token_ids if token != self.pad_token_id), self.stop_token_ids[0])


def locate_target(name_or_folder: str | Path) -> Path:
    """The folder of a target: a folder itself, a shipped or published name, or a repository in the local hub cache.
    Nothing is downloaded. Raises: CheckpointError saying where it looked and which command fetches the model.
    """
    folder = Path(name_or_folder)
    if (folder / "config.json").is_file():
        return folder
    name = str(name_or_folder)
    if name == "ling-3.0-nano":
        if (NANO_FOLDER / "config.json").is_file():
            return NANO_FOLDER
        raise CheckpointError(f"{name}: not in {NANO_FOLDER}, which a clone of this repository holds")
    repository = REPOSITORIES.get(name, name)
    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        command = f"hf download {repository if repository.count('/') == 1 else REPOSITORIES['ling-3.0-flash']}"
        known = ", ".join((*REPOSITORIES, "ling-3.0-nano"))
        raise CheckpointError(
            f"{name}: no folder with a config.json, and not in the hub cache {constants.HF_HUB_CACHE}. "
            f"Give a folder, one of {known}, or fetch it first: {command}"
        ) from error


def check_ids(ids: torch.Tensor, vocab_size: int) -> None:
    """Raises: ConfigError unless these are whole numbers of the vocabulary. On a GPU it waits for the device."""
    is_whole = ids.dtype in {torch.int64, torch.int32}
    if not is_whole or (ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size):
        has_range = ids.numel() and not ids.is_floating_point()
        found = f"{ids.dtype}, {int(ids.min())} to {int(ids.max())}" if has_range else f"{ids.dtype}"
        raise ConfigError(f"token ids: expected whole numbers from 0 to {vocab_size - 1}, found {found}")


def check_taps(target_layer_ids: tuple[int, ...], num_layers: int) -> None:
    """Raises: ConfigError for tapped layers that repeat or are not there; the last one is no tap (dspark.md 1.4)."""
    last = num_layers - 2
    if len(set(target_layer_ids)) < len(target_layer_ids) or not all(0 <= layer <= last for layer in target_layer_ids):
        raise ConfigError(f"target_layer_ids must be distinct and in 0..{last}, got {list(target_layer_ids)}")


def load_target(
    name_or_folder: str | Path, *, target_layer_ids: tuple[int, ...] = (), dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Target[Any]:  # fmt: skip
    """Read a target's weights, frozen and ready: Ling-3.0 by this project's own code, any other through transformers.
    Raises: CheckpointError and ConfigError as the config, the weights and ``target_layer_ids`` deserve.
    """
    folder = locate_target(name_or_folder)
    facts = target_facts(folder)
    check_taps(target_layer_ids, facts.num_layers)
    if facts.architecture != LING_ARCHITECTURE:
        from dspark.target.transformers_target import load_transformers_target  # heavy

        return load_transformers_target(folder, target_layer_ids, dtype, device)
    config, checkpoint = open_ling(folder)
    model = LingModel(config, target_layer_ids, dtype, device)
    model.load_tensors(checkpoint.get)
    return model.eval().requires_grad_(False)


def open_ling(folder: Path | str) -> tuple[TargetConfig, Checkpoint]:
    """The config of a Ling-3.0 folder and its weights, of which nothing is read yet but names, shapes and dtypes.
    Raises: CheckpointError and ConfigError as they deserve.
    """
    config, checkpoint = load_target_config(folder), Checkpoint(folder)
    checkpoint.check(tensor_shapes(config))
    return config, checkpoint


def load_tables(name_or_folder: str | Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The embedding and the output head, both [V, D] as stored, one tensor twice when tied; nothing else is read.
    Raises: CheckpointError when the folder has no such tensors or they disagree with config.json.
    """
    folder = locate_target(name_or_folder)
    facts = target_facts(folder)
    checkpoint = Checkpoint(folder)
    name = next((name for name in _EMBEDDING_NAMES if name in checkpoint.names), _EMBEDDING_NAMES[0])
    embedding_VD = checkpoint.get(name)
    is_tied = read_config_json(folder).get("tie_word_embeddings", _HEAD_NAME not in checkpoint.names)
    head_VD = embedding_VD if is_tied else checkpoint.get(_HEAD_NAME)
    expected = [facts.vocab_size, facts.hidden_size]
    for table, found in ((name, embedding_VD), (_HEAD_NAME, head_VD)):
        if list(found.shape) != expected:
            raise CheckpointError(f"{folder}: {table} must be {expected} by config.json, found {list(found.shape)}")
    return embedding_VD, head_VD


def target_facts(name_or_folder: str | Path) -> TargetFacts:
    """What config.json and generation_config.json say of a target of any family. Raises: ConfigError naming the key."""
    folder = locate_target(name_or_folder)
    values = read_config_json(folder)
    for key in ("architectures", "vocab_size", "hidden_size", "num_hidden_layers"):
        if not values.get(key):
            raise ConfigError(f"{folder / 'config.json'}: {key} is missing")
    for key in ("pad_token_id", "bos_token_id"):
        if values.get(key) is not None and not (type(values[key]) is int and 0 <= values[key] < values["vocab_size"]):
            raise ConfigError(f"{folder / 'config.json'}: {key} must be an id below vocab_size, got {values[key]!r}")
    sizes = (values["vocab_size"], values["hidden_size"], values["num_hidden_layers"])
    tokens = (stop_token_ids(folder), values.get("pad_token_id"), values.get("bos_token_id"))
    return TargetFacts(values["architectures"][0], *sizes, *tokens)


def target_fingerprint(name_or_folder: str | Path) -> str:
    """SHA-256, in hex, of config.json and of each weight file's name, size, header and 16 samples of 4 KiB.
    It tells another model, a fine-tune or another precision apart without reading every byte. Raises: CheckpointError.
    """
    folder = locate_target(name_or_folder)
    digest = hashlib.sha256(json.dumps(read_config_json(folder), sort_keys=True).encode())
    for path in Checkpoint(folder).files:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(f"\n{path.name} {size}\n".encode() + file.read(header_bytes))
            data_bytes = size - 8 - header_bytes
            for sample in range(_SAMPLES):
                file.seek(8 + header_bytes + sample * max(data_bytes - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
