"""A small draft, its tables, and what is done to its folder, for the tests of export and import."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dspark.config import DraftConfig
from dspark.draft.model import DraftModel
from dspark.draft.proposal import ContextCache, extend, propose
from dspark.export.draft_config import FolderFields

FIELDS = FolderFields(eos_token_id=57, pad_token_id=58)
SMALL = DraftConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    num_target_layers=8,
    target_layer_ids=(1, 4, 6),
    block_size=5,
    mask_token_id=60,
    markov_rank=6,
)


def tables(config: DraftConfig, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, config.vocab_size, config.hidden_size)
    embedding_VD, head_VD = torch.randn(shape, generator=generator).bfloat16().float().unbind()
    return embedding_VD, head_VD


def make_draft(config: DraftConfig = SMALL, seed: int = 0) -> DraftModel:
    """A bound draft of random weights large enough that proposals depend on all of them, rounded to bfloat16."""
    draft = DraftModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).bfloat16() * 0.5)
    draft.bind(*tables(config))
    return draft.eval()


def proposals(draft: DraftModel) -> list[tuple[list[int], list[float]]]:
    """Greedy proposals and confidences along a text of ten rounds."""
    generator = torch.Generator().manual_seed(2)
    cache, said = ContextCache(draft), []
    for anchor_id in range(10):
        extend(draft, cache, torch.randn(3, 3, draft.config.hidden_size, generator=generator))
        proposal = propose(draft, cache, anchor_id, lambda logits_V: int(logits_V.argmax()))
        confidence = proposal.confidence_logits_K
        said.append((proposal.ids_K.tolist(), [] if confidence is None else confidence.tolist()))
    return said


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Change tensors of an exported draft as another trainer might have (its file holds no checksum)."""
    weights = load_file(folder / "model.safetensors") | {k: v for k, v in changes.items() if v is not None}
    save_file({k: v for k, v in weights.items() if changes.get(k, v) is not None}, folder / "model.safetensors")
    (folder / "provenance.json").unlink(missing_ok=True)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
