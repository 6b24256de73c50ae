"""One slot of the sequential head on a rank's vocabulary rows, defined. V rows of this rank, R the head's rank."""

import torch
from torch import Tensor

from dspark.kernels.head.reference import larger_then_smaller_id


def step(
    base_V: Tensor, mixed_NR: Tensor, row_1: Tensor | None, w2_VR: Tensor, first_id: int, noise_V: Tensor | None = None,
    inverse_temperature_1: Tensor | None = None, logits_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The largest of ``base + W2 mixed`` (times the inverse temperature, plus the noise) and its row plus ``first_id``.

    All of it in float32 or higher; of equal ones the smaller id. NaN counts as -inf.
    """
    mixed_R = mixed_NR[0] if row_1 is None else mixed_NR[row_1[0]]
    biased_V = base_V + w2_VR.to(base_V.dtype) @ mixed_R.to(base_V.dtype)
    if logits_V is not None:
        logits_V.copy_(biased_V)
    if inverse_temperature_1 is not None:
        biased_V = biased_V * inverse_temperature_1
    if noise_V is not None:
        biased_V = biased_V + noise_V
    ids_V = first_id + torch.arange(len(w2_VR), device=w2_VR.device)
    return larger_then_smaller_id(biased_V[None], ids_V[None])
