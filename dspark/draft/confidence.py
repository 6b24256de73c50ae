"""The confidence head: how likely a slot is accepted, given that the slots before it were."""

import torch
from torch import Tensor, nn

from dspark.config import DraftConfig


class ConfidenceHead(nn.Module):
    """One linear row with bias on [h; W1[previous]], or on h alone; W1's plain row whatever the Markov head.
    Source: DSpark (arXiv 2607.05147); DeepSpec (specs/dspark.md 1.8).
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + self.with_markov * config.markov_rank, 1)

    def forward(self, hidden_D: Tensor, embedded_R: Tensor) -> Tensor:
        """Logits [...] of the conditional acceptance, float32 or better also under autocast.
        Shapes: hidden [..., D] after the final norm, embedded [..., R].
        """
        features = torch.cat([hidden_D, embedded_R], dim=-1) if self.with_markov else hidden_D
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        return (features * self.proj.weight[0]).sum(-1) + self.proj.bias
