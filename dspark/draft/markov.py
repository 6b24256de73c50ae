"""The Markov head: what the previous token of a slot adds to the slot's logits."""

from typing import cast

import torch
from torch import Tensor, nn

from dspark.config import DraftConfig


class MarkovHead(nn.Module):
    """Vanilla: the bias is W2 W1[previous token], the same at every slot.
    Source: DSpark (arXiv 2607.05147), sequential head; DeepSpec (specs/dspark.md 1.7).
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def embed(self, previous_ids: Tensor) -> Tensor:
        """Rows of W1, which the confidence head reads too. Shapes: int64 [...] -> [..., R]."""
        return cast(Tensor, self.markov_w1(previous_ids))

    def step(self, embedded_R: Tensor, hidden_D: Tensor, state_R: Tensor) -> tuple[Tensor, Tensor]:
        """What W2 is applied to at one slot, and the state for the next slot (zero before slot 0). Any leading shape.
        embedded_R is ``embed`` of the token before, hidden_D the slot's hidden state after the final norm.
        """
        return embedded_R, state_R

    def forward(self, embedded_AKR: Tensor, hidden_AKD: Tensor) -> Tensor:
        """What W2 is applied to at every slot of whole blocks, previous tokens known. Returns: [A, K, R]."""
        mixed_AKR, _ = self.step(embedded_AKR, hidden_AKD, torch.zeros_like(embedded_AKR))
        return mixed_AKR


class GatedMarkovHead(MarkovHead):
    """Gated: W2 (sigmoid(gate [h; e]) * e)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(self, embedded_R: Tensor, hidden_D: Tensor, state_R: Tensor) -> tuple[Tensor, Tensor]:
        gate_R = self.gate_proj(torch.cat([hidden_D, embedded_R], dim=-1)).sigmoid()
        return gate_R * embedded_R, state_R


class RnnMarkovHead(MarkovHead):
    """Recurrent: gate, candidate and output from [state; e; h], each block from a zero state.
    s_j = sigmoid(g) * s_{j-1} + (1 - sigmoid(g)) * tanh(c); the bias is W2 tanh(o).
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def step(self, embedded_R: Tensor, hidden_D: Tensor, state_R: Tensor) -> tuple[Tensor, Tensor]:
        gate_R, candidate_R, output_R = self.joint_proj(torch.cat([state_R, embedded_R, hidden_D], dim=-1)).chunk(3, -1)
        gate_R = gate_R.sigmoid()
        return output_R.tanh(), gate_R * state_R + (1 - gate_R) * candidate_R.tanh()

    def forward(self, embedded_AKR: Tensor, hidden_AKD: Tensor) -> Tensor:
        state_AR = torch.zeros_like(embedded_AKR[:, 0])
        mixed = []
        for embedded_AR, hidden_AD in zip(embedded_AKR.unbind(1), hidden_AKD.unbind(1), strict=True):
            mixed_AR, state_AR = self.step(embedded_AR, hidden_AD, state_AR)
            mixed.append(mixed_AR)
        return torch.stack(mixed, dim=1)


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RnnMarkovHead}
