"""Root mean square normalisation."""

from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * weight`` in x's dtype; statistics in float32 or higher, one rounding at the end.
    The weight is used as stored (no +1). Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4.
    """

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        return normed.to(x.dtype)  # torch 2.12's autocast has it in float32 on a GPU
