"""The sequential head of a DSpark draft, slot by slot: the bias of the token before, and the slot's choice."""

import torch
from torch import Tensor

from dspark.kernels.dispatch import check, check_counters, form_for
from dspark.kernels.markov import reference


def step(
    base_V: Tensor, mixed_NR: Tensor, row_1: Tensor | None, w2_VR: Tensor, first_id: int, counters: Tensor, *,
    noise_V: Tensor | None = None, inverse_temperature_1: Tensor | None = None, logits_V: Tensor | None = None,
    is_chained: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One slot's choice over the V rows of this rank: best_1 float32 and id_1 int64 (row plus ``first_id``).

    The logits are ``base + W2 mixed``, summed in float32 and not rounded. The choice is the largest of
    ``logits * inverse temperature + noise`` (best_1 is that number), of equal ones the smaller id; NaN counts as -inf.
    Noise drawn as -log(-log(u)) makes it a sample of the softmax.

    Shapes: base_V, noise_V, logits_V and inverse_temperature_1 float32 (float64 for float64), contiguous; logits_V, if
    given, receives the logits and may be base_V. mixed_NR and w2_VR of one dtype, contiguous. Row row_1 (int64) of
    mixed_NR is what W2 is applied to: W1 and the token before for a vanilla head, one computed row and None for others.
    counters: one int32 number or more, zero before and after.
    Raises: ValueError for another shape or dtype.
    Source: DSpark (arXiv 2607.05147), sequential head; Gumbel-max sampling: Maddison et al. 2014 (arXiv 1411.0030).
    """
    wide = torch.promote_types(w2_VR.dtype, torch.float32)
    sizes = check({"N": 1} if row_1 is None else {}, w2_VR.dtype, w2_VR=w2_VR, mixed_NR=mixed_NR)
    check(sizes, wide, base_V=base_V, noise_V=noise_V, logits_V=logits_V, inverse_temperature_1=inverse_temperature_1)
    check({}, torch.int64, row_1=row_1)
    check_counters(counters)
    run = form_for(base_V, reference.step, counters=counters, is_chained=is_chained)
    options = {"noise_V": noise_V, "inverse_temperature_1": inverse_temperature_1, "logits_V": logits_V}
    return run(base_V, mixed_NR, row_1, w2_VR, first_id, **options)
