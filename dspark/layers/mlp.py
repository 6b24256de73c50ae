"""The gated feed-forward block."""

from torch import Tensor, nn

from dspark.kernels.moe import swiglu


class SwiGLU(nn.Module):
    """``down(swiglu(gate(x), up(x)))`` without biases, with the clamp of ``swiglu``; x [..., width] -> [..., width].
    Source: Shazeer 2020 (arXiv 2002.05202), equation 6.
    """

    def __init__(self, width: int, inner_width: int, limit: float | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner_width, bias=False)
        self.up_proj = nn.Linear(width, inner_width, bias=False)
        self.down_proj = nn.Linear(inner_width, width, bias=False)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), self.limit))
        return hidden
