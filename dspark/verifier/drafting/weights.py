"""A rank's part of a DSpark draft as the kernels take it. C counts rows of a fused projection, or columns of fc."""

from copy import deepcopy
from math import inf
from typing import NamedTuple, cast

import torch
from torch import nn

from dspark.config import DraftConfig
from dspark.draft.backbone import DraftLayer
from dspark.draft.confidence import ConfidenceHead
from dspark.draft.markov import MarkovHead
from dspark.draft.model import DraftModel
from dspark.errors import ConfigError
from dspark.verifier.weights import ExpertWeights, Shard

DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size", "vocab_size")


class DraftLayerWeights(NamedTuple):
    """One layer: qkv_CD has the rows q | k | v of the rank's heads; the MLP is one expert without a limit."""

    input_norm_D: torch.Tensor
    qkv_CD: torch.Tensor
    q_norm_E: torch.Tensor
    k_norm_E: torch.Tensor
    out_DC: torch.Tensor
    post_norm_D: torch.Tensor
    experts: ExpertWeights


class DraftWeights(NamedTuple):
    """What one rank holds of a draft.

    fc is split by columns: the sum over ranks comes with hidden_norm in the exchange that every block ends in, and one
    rank of four reads 16 MB instead of 66. context_CD has the rows k | v of every layer once more, for one projection
    of the context instead of five. The Markov head is whole but for W2, the rank's rows.
    """

    config: DraftConfig
    shard: Shard
    fc_DC: torch.Tensor
    hidden_norm_D: torch.Tensor
    context_CD: torch.Tensor
    layers: tuple[DraftLayerWeights, ...]
    norm_D: torch.Tensor
    markov: MarkovHead
    confidence: ConfidenceHead | None


@torch.no_grad()
def draft_weights(
    draft: DraftModel, shard: Shard, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> DraftWeights:
    """Copy a rank's part of a draft. Raises: ConfigError when the ranks do not divide it."""
    config = draft.config
    wrong = [f"{name} {getattr(config, name)}" for name in DIVIDED if getattr(config, name) % shard.world_size]
    if wrong:
        raise ConfigError(f"{shard.world_size} ranks do not divide the draft's {', '.join(wrong)}; use fewer ranks")

    def put(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.to(device, dtype) for part in parts])

    def rows(module: nn.Module, dim: int = 0) -> torch.Tensor:
        return cast(torch.Tensor, module.weight).chunk(shard.world_size, dim)[shard.rank]

    layers, context = [], []
    for layer in cast(list[DraftLayer], draft.layers):
        attention, mlp = layer.self_attn, layer.mlp
        context += [rows(attention.k_proj), rows(attention.v_proj)]
        gate_up_XCD, down_XDI = put(rows(mlp.gate_proj), rows(mlp.up_proj))[None], put(rows(mlp.down_proj, 1))[None]
        norms = (layer.input_layernorm, attention.q_norm, attention.k_norm, layer.post_attention_layernorm)
        input_norm_D, q_norm_E, k_norm_E, post_norm_D = (put(norm.weight) for norm in norms)
        qkv_CD, out_DC = put(rows(attention.q_proj), *context[-2:]), put(rows(attention.o_proj, 1))
        experts = ExpertWeights(gate_up_XCD, down_XDI, torch.full((1,), inf, device=device))
        layers.append(DraftLayerWeights(input_norm_D, qkv_CD, q_norm_E, k_norm_E, out_DC, post_norm_D, experts))
    markov = deepcopy(draft.markov_head).to(device, dtype).requires_grad_(False)
    markov.markov_w2.weight = nn.Parameter(put(rows(markov.markov_w2)), requires_grad=False)
    confidence = deepcopy(draft.confidence_head)
    if confidence is not None:
        confidence = confidence.to(device, dtype).requires_grad_(False)
    fc_DC, norm_D, hidden_norm_D = put(rows(draft.fc, 1)), put(draft.norm.weight), put(draft.hidden_norm.weight)
    parts = (fc_DC, hidden_norm_D, put(*context), tuple(layers), norm_D)
    return DraftWeights(config, shard, *parts, markov, confidence)


def random_draft(config: DraftConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> DraftModel:
    """A draft as training begins with, drawn on the device, for measuring without a checkpoint."""
    with torch.device(device):
        draft = DraftModel(config).to(dtype)
    draft.initialise(torch.Generator(device).manual_seed(seed))
    return draft
