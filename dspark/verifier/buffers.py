"""The memory of one sequence on one rank: states, latent rows, length. Allocated once; captured graphs refer to it."""

from typing import NamedTuple

import torch

from dspark.errors import ConfigError
from dspark.kernels import MAX_TOKENS
from dspark.kernels.rotary import rotary_angles
from dspark.target.config import TargetConfig
from dspark.verifier.weights import Shard

NUM_COUNTERS = 65536
"""Arrival counters that all split reductions share; kernels leave them at zero."""


class Buffers(NamedTuple):
    """Committed memory of one sequence, and what every pass shares.
    Shapes: state_LHEF and history_LWC the linear layers' memory (the W inputs before the next token); rows_MJC the
    latent layers' rows, of which the first length_1 (int64) count; angles_JE2 of every position; counters int32.
    """

    state_LHEF: torch.Tensor
    history_LWC: torch.Tensor
    rows_MJC: torch.Tensor
    length_1: torch.Tensor
    angles_JE2: torch.Tensor
    counters: torch.Tensor

    @property
    def capacity_tokens(self) -> int:
        """Tokens that can be committed: behind them there is room for one more window."""
        return self.rows_MJC.shape[1] - MAX_TOKENS

    @torch.no_grad()
    def clear(self) -> None:
        """Forget the sequence."""
        self.state_LHEF.zero_()
        self.history_LWC.zero_()
        self.length_1.zero_()

    def memory(self) -> tuple[torch.Tensor, ...]:
        """What a commit changes."""
        return self.state_LHEF, self.history_LWC, self.length_1


def allocate_buffers(
    config: TargetConfig, shard: Shard, capacity_tokens: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Buffers:
    """Empty memory for ``capacity_tokens`` committed tokens, on the meta device only shapes. Raises: ConfigError."""
    if capacity_tokens < 1:
        raise ConfigError(f"capacity_tokens must be at least 1, got {capacity_tokens}")
    wide = torch.promote_types(dtype, torch.float32)
    heads, width = shard.part(config.num_attention_heads), config.head_dim
    num_latent = sum(config.is_latent(layer) for layer in range(config.num_hidden_layers))
    num_linear = config.num_hidden_layers - num_latent
    num_rows, num_history = capacity_tokens + MAX_TOKENS, config.short_conv_kernel_size - 1
    row_width = config.kv_lora_rank + config.qk_rope_head_dim
    positions_J = torch.arange(num_rows, device=device)
    angles = rotary_angles(positions_J, config.qk_rope_head_dim, config.rope_theta, wide)
    return Buffers(
        state_LHEF=torch.zeros(num_linear, heads, width, width, dtype=wide, device=device),
        history_LWC=torch.zeros(num_linear, num_history, 3 * heads * width, dtype=dtype, device=device),
        rows_MJC=torch.zeros(num_latent, num_rows, row_width, dtype=dtype, device=device),
        length_1=torch.zeros(1, dtype=torch.int64, device=device),
        angles_JE2=torch.stack(angles, -1),
        counters=torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device),
    )
