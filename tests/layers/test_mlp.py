"""The gated feed-forward block."""

import torch
from torch.nn import functional

from dspark.layers.mlp import SwiGLU


def test_the_block_is_down_of_silu_gate_times_up_with_its_limit() -> None:
    torch.manual_seed(0)
    x = 4 * torch.randn(3, 8)
    for limit in (None, 0.5):
        block = SwiGLU(8, 12, limit)
        bound = limit or torch.inf
        gate = functional.silu(x @ block.gate_proj.weight.T).clamp(max=bound)
        up = (x @ block.up_proj.weight.T).clamp(-bound, bound)
        torch.testing.assert_close(block(x), (gate * up) @ block.down_proj.weight.T)
        assert {name for name, _ in block.named_parameters()} == {
            "gate_proj.weight",
            "up_proj.weight",
            "down_proj.weight",
        }
