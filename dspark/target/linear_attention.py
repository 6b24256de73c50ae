"""Linear attention: a Kimi Delta Attention block with its projections, short convolutions and gate."""

import torch
from torch import Tensor, nn

from dspark.kernels.kda import reference as kda
from dspark.layers.rms_norm import RMSNorm
from dspark.target.cache import Layout, LinearMemory, LinearStage
from dspark.target.config import TargetConfig


class LinearAttention(nn.Module):
    """One KDA block. No positions: order enters through the convolution and the recurrence only.
    The recurrence, the decay and the norms run in float32 or higher, also under autocast.
    Source: specs/ling-3.0.md section 4; modeling_bailing_moe_v3.py of inclusionAI/Ling-3.0-flash.
    """

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        width, self.num_heads, self.head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        inner = self.num_heads * self.head_dim
        taps = config.short_conv_kernel_size
        projections = (nn.Linear(width, inner, bias=False) for _ in range(5))
        self.q_proj, self.k_proj, self.v_proj, self.f_proj, self.g_proj = projections
        self.b_proj = nn.Linear(width, self.num_heads, bias=False)
        convolutions = (nn.Conv1d(inner, inner, taps, groups=inner, bias=False) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = convolutions
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.lower_bound = config.kda_lower_bound
        self.num_history = taps - 1

    def forward(self, x_ND: Tensor, layout: Layout) -> tuple[Tensor, LinearMemory]:
        """Read whole sequences from their first token; returns the output [N, D] and the memory after the last."""
        y_ND, stage = self.stage(x_ND, layout, None)
        history_BWC = kda.history_after(stage.window_BWC, layout.lengths_B, self.num_history)
        return y_ND, LinearMemory(stage.state_BHEF, history_BWC)

    def stage(self, x_ND: Tensor, layout: Layout, memory: LinearMemory | None) -> tuple[Tensor, LinearStage]:
        """Read further tokens after ``memory`` (None: nothing yet) and leave it as it is."""
        heads = (self.num_heads, self.head_dim)
        inputs_BTC = layout.pad(torch.cat((self.q_proj(x_ND), self.k_proj(x_ND), self.v_proj(x_ND)), -1))
        f_NHE, gate_NHF = self.f_proj(x_ND).unflatten(-1, heads), self.g_proj(x_ND).unflatten(-1, heads)
        beta_NH = self.b_proj(x_ND)
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        with torch.autocast(x_ND.device.type, enabled=False):
            if memory is None:
                num_sequences, _, channels = inputs_BTC.shape
                state_BHEF = inputs_BTC.new_zeros(num_sequences, *heads, self.head_dim, dtype=wide)
                memory = LinearMemory(state_BHEF, inputs_BTC.new_zeros(num_sequences, self.num_history, channels))
            window_BWC = torch.cat((memory.history_BWC, inputs_BTC), 1)
            taps_CJ = torch.cat((self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)).squeeze(1)
            mixed = torch.unflatten(kda.short_conv(window_BWC, taps_CJ), -1, (3, *heads))
            q_BTHE, k_BTHE = kda.l2norm(mixed[:, :, :2]).unbind(2)
            log_decay_NHE = kda.log_decay(f_NHE.to(wide), self.A_log, self.dt_bias.view(heads), self.lower_bound)
            log_decay_BTHE, beta_BTH = layout.pad(log_decay_NHE), layout.pad(beta_NH.to(wide).sigmoid())
            if layout.is_true_BT is not None:
                log_decay_BTHE = log_decay_BTHE * layout.is_true_BT[:, :, None, None]
                beta_BTH = beta_BTH * layout.is_true_BT[:, :, None]
            rule = kda.chunked(q_BTHE, k_BTHE, mixed[:, :, 2], log_decay_BTHE, beta_BTH, memory.state_BHEF)
            o_NHF = kda.gated_rms_norm(layout.pack(rule.o_BTHF), self.o_norm.weight, gate_NHF, self.o_norm.eps)
        y_ND = self.o_proj(o_NHF.flatten(1).to(gate_NHF.dtype))
        return y_ND, LinearStage(window_BWC, k_BTHE, log_decay_BTHE, rule.deltas_BTHF, rule.state_BHEF)
