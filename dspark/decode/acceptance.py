"""The acceptance rule as the host's rounds use it, with uniforms of the text's own."""

from torch import Tensor, float64

from dspark.decode.sampling import Uniforms
from dspark.verifier.drafting.acceptance import keep


def accept(ids_K: Tensor, draft_probs_KV: Tensor, target_probs_NV: Tensor, uniforms: Uniforms) -> tuple[int, int]:
    """``keep`` of a block. Takes K + 1 uniforms whatever happens: one a drafted token, then one for the last token.
    Shapes: as there, N = K + 1. Returns: (accepted_drafts, the id after them).
    """
    uniforms_N = target_probs_NV.new_tensor([uniforms() for _ in range(len(ids_K) + 1)], dtype=float64)
    count_1, next_id_1 = keep(ids_K, draft_probs_KV, target_probs_NV, uniforms_N)
    return int(count_1) - 1, int(next_id_1)
