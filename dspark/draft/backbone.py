"""The draft's dense layers: slots of a block attend to context keys and to each other, in both directions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark.config import DraftConfig
from dspark.kernels.anchor_attention import anchor_attention
from dspark.kernels.rotary import rotary_angles, rotate_half_pairs, turned
from dspark.layers.mlp import SwiGLU
from dspark.layers.rms_norm import RMSNorm

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine [N, E / 2] of the positions of some rows."""

Memory = Callable[["DraftAttention", Tensor, Tensor, Tensor], Tensor]
"""Given a layer's attention and the queries [N, H, E], keys and values [N, G, E] of the slots of blocks: what the
slots read [N, H, E], from the context and from their own block.
"""


def draft_rotary(config: DraftConfig, positions: Tensor, dtype: torch.dtype) -> Rotary:
    """Cosine and sine of integer positions [...] as the draft turns them: [..., E / 2] each, in ``dtype``.
    Source: scaled frequencies, and the factor on both, are those of transformers' ``ROPE_INIT_FUNCTIONS``.
    """
    scaling = config.rope_scaling
    if scaling is None:
        return rotary_angles(positions, config.head_dim, config.rope_theta, dtype)
    shape = config.model_dump(include={"head_dim", "max_position_embeddings"})
    rope = Qwen3Config(**shape, rope_parameters=scaling | {"rope_theta": config.rope_theta})
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](rope, positions.device)
    cos, sin = turned(positions, frequencies.double(), torch.float64)
    return (cos * factor).to(dtype), (sin * factor).to(dtype)


class DraftAttention(nn.Module):
    """Grouped-query attention whose keys come from two streams through the same projections.
    Source: DeepSpec, Qwen3 DSpark attention (specs/dspark.md 1.1).
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        query_width, key_width = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, query_width, bias=False)
        self.k_proj = nn.Linear(width, key_width, bias=False)
        self.v_proj = nn.Linear(width, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, hidden_ND: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys after norm and rotation, and values, of context rows or slots, both [N, G, E]."""
        keys_NGE = self.k_norm(self.k_proj(hidden_ND).unflatten(-1, (-1, self.head_dim)))
        return _rotate(keys_NGE, rotary), self.v_proj(hidden_ND).unflatten(-1, (-1, self.head_dim))

    def forward(self, hidden_ND: Tensor, rotary: Rotary, memory: Memory) -> Tensor:
        """Attend from N slots to what ``memory`` shows them. Query head h reads key-value head h // group."""
        queries_NHE = self.q_norm(self.q_proj(hidden_ND).unflatten(-1, (-1, self.head_dim)))
        read_NHE = memory(self, _rotate(queries_NHE, rotary), *self.keys_values(hidden_ND, rotary))
        attended_ND: Tensor = self.o_proj(read_NHE.flatten(1))
        return attended_ND


@dataclass(frozen=True)
class Anchored:
    """The memory of blocks in training: context rows from the start of a block's document to before its anchor.

    A layer makes the context's keys and values when it reads: only then FSDP2 has its weights whole, and where
    activations are computed again no more than one layer's exist at a time.
    Shapes: context_TD, rotary of T positions; starts_A, anchors_A as of ``anchor_attention``.
    """

    context_TD: Tensor
    rotary: Rotary
    starts_A: Tensor
    anchors_A: Tensor

    def __call__(self, attention: DraftAttention, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor) -> Tensor:
        context = attention.keys_values(self.context_TD, self.rotary)
        return anchor_attention(q_NHE, *context, k_NGE, v_NGE, self.starts_A, self.anchors_A)


class DraftLayer(nn.Module):
    """Pre-norm attention and SwiGLU. Context never passes through ``input_layernorm``; only the block does."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, hidden_ND: Tensor, rotary: Rotary, memory: Memory) -> Tensor:
        """One layer over the slots of blocks."""
        hidden_ND = hidden_ND + self.self_attn(self.input_layernorm(hidden_ND), rotary, memory)
        output_ND: Tensor = hidden_ND + self.mlp(self.post_attention_layernorm(hidden_ND))
        return output_ND


def _rotate(heads_NHE: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = rotary
    return rotate_half_pairs(heads_NHE, cos.unsqueeze(1), sin.unsqueeze(1))
