"""States in eight bits: float8_e4m3fn, with one scale for each token and tap."""

import torch
from torch import Tensor

_ABOVE_448 = 0x1FFFFF
"""Added to a float32's bits it carries into the exponent just where the fraction is above 1.75: 448 is 1.75 * 2^8."""


def to_float8(states_NLD: Tensor) -> tuple[Tensor, Tensor]:
    """The states divided by their row's scale, rounded to nearest even, and the scales.

    A scale is the least power of two that brings the row's largest magnitude to 448 or below, not that magnitude / 448:
    then dividing and multiplying are exact in every dtype and on every device, the cast is the only rounding, and what
    came back goes and comes again bit for bit. Its price is the finest step near zero, at most twice as wide, and that
    the largest element is rounded like all others. An element x comes back as x + e, |e| <= max(2^-4 |x|, 2^-10 scale),
    where scale <= largest / 224. Scales stop at 2^-126, so that none is subnormal; a row of zeros has that one.
    Shapes: bfloat16 or float32 [N, L, D], any leading dimensions; finite, and of magnitudes up to 3.28e38: rounding may
    take what is nearer the end of the range to infinity.
    Returns: float8_e4m3fn [N, L, D] and float32 [N, L]. Source: OCP OFP8 1.0 for the format; power-of-two scales as in
    OCP Microscaling Formats (MX) 1.0, 6.3, but exponents rounded up, so that nothing saturates.
    """
    largest_NL = states_NLD.abs().amax(-1).float()
    exponents_NL = ((largest_NL.view(torch.int32) + _ABOVE_448) >> 23) - 8
    scales_NL = (exponents_NL.clamp(min=1) << 23).view(torch.float32)
    return (states_NLD / scales_NL[..., None].to(states_NLD.dtype)).to(torch.float8_e4m3fn), scales_NL


def from_float8(values_NLD: Tensor, scales_NL: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``to_float8`` was given, as it rounded it: [N, L, D] in ``dtype``."""
    return values_NLD.to(dtype) * scales_NL[..., None].to(dtype)
