"""Latent attention: a gated MLA block with its projections, rotary part and head gate."""

import torch
from torch import nn

from dspark.kernels import mla
from dspark.kernels.rotary import rotate_interleaved_pairs
from dspark.layers.rms_norm import RMSNorm
from dspark.target.cache import Layout, View
from dspark.target.config import TargetConfig

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of every row's position, [N, rope width / 2]."""


class LatentAttention(nn.Module):
    """One gated MLA block: queries from the input or a low rank, keys and values from one latent a token.
    Source: specs/ling-3.0.md section 5; DeepSeek-V2 (arXiv 2405.04434) section 2.1, with a sigmoid gate a head.
    """

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        width, self.num_heads, self.latent_width = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        self.nope_width, self.rope_width = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_width = config.v_head_dim
        self.scale = config.qk_head_dim**-0.5
        queries = self.num_heads * config.qk_head_dim
        self.has_low_rank_queries = config.q_lora_rank is not None
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.latent_width + self.rope_width, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent_width, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.latent_width, self.num_heads * (self.nope_width + self.value_width), bias=False)
        self.g_proj = nn.Linear(width, self.num_heads, bias=False)
        self.dense = nn.Linear(self.num_heads * self.value_width, width, bias=False)

    def forward(self, x_ND: torch.Tensor, layout: Layout, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Read whole sequences from their first token; returns the output [N, D] and the rows to keep [B, T, C]."""
        q_NHE, rows_NC = self._project(x_ND, angles)
        latent_NC, k_rope_NE = rows_NC.tensor_split((self.latent_width,), -1)
        kv_NHG = torch.unflatten(self.kv_b_proj(latent_NC), -1, (self.num_heads, -1))
        k_nope_NHE, v_NHF = kv_NHG.tensor_split((self.nope_width,), -1)
        k_NHE = torch.cat((k_nope_NHE, k_rope_NE[:, None].expand(-1, self.num_heads, -1).to(k_nope_NHE.dtype)), -1)
        o_BTHF = mla.causal_attention(layout.pad(q_NHE), layout.pad(k_NHE), layout.pad(v_NHF), self.scale)
        return self._finish(x_ND, layout.pack(o_BTHF)), layout.pad(rows_NC)

    def stage(self, x_ND: torch.Tensor, angles: Angles, view: View, rows_BJC: torch.Tensor) -> torch.Tensor:
        """Read further tokens after the cached ones; writes their rows behind the committed rows."""
        layout = view.layout
        q_NHE, rows_NC = self._project(x_ND, angles)
        rows_BJC[view.sequences_B1, view.slots_BT] = layout.pad(rows_NC)
        kv_HGC = torch.unflatten(self.kv_b_proj.weight, 0, (self.num_heads, -1))
        keys_HEC, values_HFC = kv_HGC.tensor_split((self.nope_width,), 1)
        q_nope_NHE, q_rope_NHE = q_NHE.tensor_split((self.nope_width,), -1)
        absorbed_NHC = (q_nope_NHE.transpose(0, 1) @ keys_HEC).transpose(0, 1)
        q_BTHC = layout.pad(torch.cat((absorbed_NHC, q_rope_NHE), -1))
        seen_BJC = rows_BJC[:, : view.bias_BTJ.shape[2]]
        context_BTHC = mla.absorbed_attention(q_BTHC, seen_BJC, view.bias_BTJ, self.latent_width, self.scale)
        o_NHF = (layout.pack(context_BTHC).transpose(0, 1) @ values_HFC.transpose(1, 2)).transpose(0, 1)
        return self._finish(x_ND, o_NHF)

    def _project(self, x_ND: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the queries [N, H, E] and the rows to keep [N, C]: the latent, then the keys' rotated part."""
        if self.has_low_rank_queries:
            q_NC = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_ND)))
        else:
            q_NC = self.q_proj(x_ND)
        q_NHE = q_NC.unflatten(-1, (self.num_heads, -1))
        latent_NC, k_rope_NE = self.kv_a_proj_with_mqa(x_ND).split((self.latent_width, self.rope_width), -1)
        turning = torch.cat((q_NHE[..., self.nope_width :], k_rope_NE[:, None]), 1)
        turned = rotate_interleaved_pairs(turning, angles[0][:, None], angles[1][:, None])
        q_NHE = torch.cat((q_NHE[..., : self.nope_width], turned[:, :-1]), -1)
        return q_NHE, torch.cat((self.kv_a_layernorm(latent_NC), turned[:, -1]), -1)

    def _finish(self, x_ND: torch.Tensor, o_NHF: torch.Tensor) -> torch.Tensor:
        gate_NH = self.g_proj(x_ND)
        wide = torch.promote_types(gate_NH.dtype, torch.float32)
        gated_NHF = o_NHF * gate_NH.to(wide).sigmoid().to(o_NHF.dtype).unsqueeze(-1)
        y_ND: torch.Tensor = self.dense(gated_NHF.flatten(1))
        return y_ND
