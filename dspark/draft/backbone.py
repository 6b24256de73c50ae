"""The draft's dense layers: slots of a block attend to context keys and to each other, in both directions."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from dspark.config import DraftConfig
from dspark.layers.mlp import SwiGLU
from dspark.layers.rms_norm import RMSNorm
from dspark.layers.rotary import rotate_half_pairs

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine [B, T, E / 2] of the positions of some rows."""

Memory = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes the block's own keys and values [B, H, N, E] and returns all that the block may read, context first."""


class DraftAttention(nn.Module):
    """Grouped-query attention whose keys come from two streams through the same projections.
    Source: DeepSpec, Qwen3 DSpark attention (specs/dspark.md 1.1).
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.num_key_value_heads = config.num_key_value_heads
        query_width, key_width = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, query_width, bias=False)
        self.k_proj = nn.Linear(width, key_width, bias=False)
        self.v_proj = nn.Linear(width, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, hidden_BTD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys after norm and rotation, and values, of context rows or slots, both [B, key-value heads, T, E]."""
        heads = (*hidden_BTD.shape[:2], self.num_key_value_heads, self.head_dim)
        keys_BTHE = self.k_norm(self.k_proj(hidden_BTD).view(heads))
        values_BTHE = self.v_proj(hidden_BTD).view(heads)
        return _rotate(keys_BTHE, rotary).transpose(1, 2), values_BTHE.transpose(1, 2)

    def forward(
        self, hidden_BND: Tensor, rotary: Rotary, keys_BHTE: Tensor, values_BHTE: Tensor, visible_B1NT: Tensor | None
    ) -> Tensor:
        """Attend from N slots to T keys. None sees everything.
        Query head h reads key-value head h // group: the query heads of a group become M = group * N rows of one head,
        so that keys and values are never copied.
        """
        num_batch, num_slots = hidden_BND.shape[:2]
        queries_BNHE = self.q_norm(self.q_proj(hidden_BND).view(num_batch, num_slots, -1, self.head_dim))
        queries_BHNE = _rotate(queries_BNHE, rotary).transpose(1, 2)
        queries_BHME = queries_BHNE.reshape(num_batch, self.num_key_value_heads, -1, self.head_dim)
        group = queries_BHNE.shape[1] // self.num_key_value_heads
        visible_B1MT = None if visible_B1NT is None else visible_B1NT.repeat(1, 1, group, 1)
        read_BHME = functional.scaled_dot_product_attention(queries_BHME, keys_BHTE, values_BHTE, visible_B1MT)
        read_BNHE = read_BHME.reshape(queries_BHNE.shape).transpose(1, 2)
        attended_BND: Tensor = self.o_proj(read_BNHE.flatten(2))
        return attended_BND


class DraftLayer(nn.Module):
    """Pre-norm attention and SwiGLU. Context never passes through ``input_layernorm``; only the block does."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, hidden_BND: Tensor, rotary: Rotary, memory: Memory, visible_B1NT: Tensor | None) -> Tensor:
        """One layer over the slots of blocks; ``memory`` joins their keys with the context's."""
        normed_BND = self.input_layernorm(hidden_BND)
        keys_BHTE, values_BHTE = memory(*self.self_attn.keys_values(normed_BND, rotary))
        hidden_BND = hidden_BND + self.self_attn(normed_BND, rotary, keys_BHTE, values_BHTE, visible_B1NT)
        output_BND: Tensor = hidden_BND + self.mlp(self.post_attention_layernorm(hidden_BND))
        return output_BND


def _rotate(heads_BTHE: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = rotary
    return rotate_half_pairs(heads_BTHE, cos.unsqueeze(2), sin.unsqueeze(2))
