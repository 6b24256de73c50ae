"""From logits to a token: temperature, truncation, inverse-CDF draws, and where the random numbers come from."""

import random
from collections.abc import Callable, Sequence

import torch
from pydantic.dataclasses import dataclass

from dspark.config import NonNegativeFloat, NonNegativeInt, PositiveInt, Share
from dspark.errors import CheckpointError

Uniforms = Callable[[], float]
"""A source of independent random numbers in [0, 1); each call takes the next one."""

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one mean greedy decoding (DeepSpec's bound)."""


@dataclass(frozen=True)
class Sampling:
    """How text is drawn and when it ends: after a stop token (which belongs to the text) or after max_new_tokens.
    ``top_k`` (0 is off) and ``top_p`` (1 is off) leave the likeliest tokens only, see ``token_probs``.
    Raises: ValueError for a temperature that is negative or no number, and for what else lies outside its range.
    """

    temperature: NonNegativeFloat
    max_new_tokens: PositiveInt
    stop_token_ids: tuple[int, ...] = ()
    top_k: NonNegativeInt = 0
    top_p: Share = 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


def row_uniforms(seed: int, row: int) -> Uniforms:
    """The random numbers of one row of a run: a generator of its own, seeded by the text "seed/row".

    ``row`` is the row's number in its data, not in its batch, so its text does not depend on its neighbours. Python's
    generator, because torch's keeps only 32 bits of a seed, in which (seed, row) pairs would collide.
    """
    return random.Random(f"{seed}/{row}").random


def token_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution that tokens are drawn from: softmax(logits / temperature), or one-hot at the argmax if greedy.

    ``top_k`` then keeps the k likeliest tokens, and of these ``top_p`` the fewest likeliest whose share of their mass
    reaches it, at least one; what is kept is normalised again. Of equal logits the lower id is the likelier.
    Draft and target rows both come from here, so speculative text has the truncated target's law.
    Shapes: logits float32 or float64 [..., V]; the result has their shape and dtype.
    Source: top-p is nucleus sampling (arXiv 1904.09751), in the order that serving engines apply the three.
    """
    if sampling.is_greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    scaled = logits / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        scaled = scaled.masked_fill(~_is_kept(scaled, sampling), -torch.inf)
    return torch.softmax(scaled, dim=-1)


def _is_kept(scaled: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The tokens that truncation leaves, bool [..., V]; sums are float64, so only they decide where top_p cuts."""
    order = scaled.sort(dim=-1, descending=True, stable=True).indices
    order = order[..., : sampling.top_k or None]
    cumulative = torch.softmax(scaled.gather(-1, order).double(), dim=-1).cumsum(-1)
    is_first = torch.ones_like(cumulative[..., :1], dtype=torch.bool)
    is_needed = torch.cat((is_first, cumulative[..., :-1] < sampling.top_p), dim=-1)
    return torch.zeros_like(scaled, dtype=torch.bool).scatter_(-1, order, is_needed)


def draw(probs_NV: torch.Tensor, uniforms_N: Sequence[float]) -> torch.Tensor:
    """Draw one id a row by inverse CDF: the first id whose cumulative probability exceeds the uniform.

    The cumulative sum is float64 and the uniform is scaled by its total, so rows need not sum to one and an id of
    probability zero is never drawn (a float64 below 1 times the total rounds to less than the total).
    Shapes: probs_NV non-negative, each row with a positive sum. Returns ids_N int64.
    """
    cumulative_NV = probs_NV.cumsum(-1, dtype=torch.float64)
    total_N1 = cumulative_NV[:, -1:]
    level_N1 = total_N1.new_tensor(uniforms_N)[:, None] * total_N1
    return torch.searchsorted(cumulative_NV, level_N1, right=True).squeeze(1)


def sample(logits_NV: torch.Tensor, sampling: Sampling, uniforms_N: Sequence[float]) -> torch.Tensor:
    """Draw one id a row from its logits. Greedy rows ignore their uniform, as an inverse CDF of one-hot would.
    Shapes: logits_NV float32 or float64. Returns ids_N int64. Raises: CheckpointError for logits that are no numbers.
    """
    if bool(logits_NV.isnan().any()):
        raise CheckpointError("the target's logits are not finite; check its weights, or set target.dtype to float32")
    if sampling.is_greedy:
        return logits_NV.argmax(-1)
    return draw(token_probs(logits_NV, sampling), uniforms_N)
