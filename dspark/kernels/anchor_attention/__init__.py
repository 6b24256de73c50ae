"""interim"""

from torch import Tensor

from dspark.kernels.anchor_attention import reference
from dspark.kernels.anchor_attention.reference import attend

__all__ = ["anchor_attention", "attend"]


def anchor_attention(
    q_NHE: Tensor, context_k_TGE: Tensor, context_v_TGE: Tensor, k_NGE: Tensor, v_NGE: Tensor, starts_A: Tensor,
    anchors_A: Tensor,
) -> Tensor:  # fmt: skip
    return reference.anchor_attention(q_NHE, context_k_TGE, context_v_TGE, k_NGE, v_NGE, starts_A, anchors_A)
