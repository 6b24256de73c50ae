"""Muon for many small matrices at once: matrices of one shape are orthogonalised as one batch."""

from collections.abc import Iterable

import torch


class Muon:
    """Momentum, orthogonalised by five Newton-Schulz steps, for parameters [..., rows, columns].

    The update of a rows x columns matrix is scaled by 0.2 sqrt(max(rows, columns)), which gives it about the size of
    an AdamW update, so both can share a learning rate. Leading dimensions (experts) are matrices of their own.
    Source: Jordan et al., Muon (2024), with its coefficients; Liu et al. (arXiv 2502.16982) section 2.2
    for the scale.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], weight_decay: float, momentum: float = 0.95) -> None:
        groups: dict[tuple[int, int], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault((parameter.shape[-2], parameter.shape[-1]), []).append(parameter)
        self.groups = list(groups.values())
        self.momenta = [torch.zeros_like(_stacked(group)) for group in self.groups]
        self.weight_decay, self.momentum = weight_decay, momentum

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Change every parameter that has a gradient; every one must have."""
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradient = torch.cat([p.grad.reshape(-1, *p.shape[-2:]) for p in group])
            momentum.lerp_(gradient, 1 - self.momentum)
            update = orthogonalised(gradient.lerp(momentum, self.momentum))
            update = update * (-learning_rate * 0.2 * max(update.shape[-2:]) ** 0.5)
            parts = update.to(momentum.dtype).split([p[..., 0, 0].numel() for p in group])
            torch._foreach_mul_(group, 1 - learning_rate * self.weight_decay)
            torch._foreach_add_(group, [part.view_as(p) for part, p in zip(parts, group, strict=True)])


def orthogonalised(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """About the nearest half-orthogonal matrix of each matrix in x, in bfloat16."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.bfloat16().mT if is_tall else x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


def _stacked(group: list[torch.nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1, *p.shape[-2:]) for p in group])
