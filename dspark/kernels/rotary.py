"""Rotary position embedding in its two pairings."""

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``position * theta^(-2i / width)`` for i in 0..width/2-1, in ``dtype``.
    Shapes: positions [...] integers; both results [..., width / 2]. Angles are taken in float64, so a position near
    262,144 loses nothing. Source: Su et al. 2021 (arXiv 2104.09864), section 3.2.2.
    """
    steps = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    return turned(positions, theta ** (-steps / width), dtype)


def turned(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``position * frequency``: positions [...], float64 frequencies [E2], results [..., E2]."""
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_interleaved_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i+1) and leave them in place: the target's pairing. Computed in the higher of the dtypes,
    returned in x's. Shapes: x [..., width]; cos and sin broadcast to [..., width / 2].
    """
    even, odd = torch.unflatten(x, -1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def rotate_half_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As ``rotate_interleaved_pairs`` with the pairs (i, i + width/2): the draft's pairing (NeoX, rotate-half)."""
    halves = torch.unflatten(x, -1, (2, -1))
    # Halves that are swapped and no joining of two results: what a compiler makes of that reads and writes once.
    turned = halves * cos.unsqueeze(-2) + halves.flip(-2) * torch.stack((-sin, sin), -2)
    return turned.flatten(-2).to(x.dtype)
