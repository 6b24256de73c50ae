"""The attention that trains a draft: the blocks of many anchors over one packed row of documents, with gradients.

Slots and context lie in tensors of their own and are never put side by side. No mask is made on a GPU, and nothing
there waits for it: what a block reads follows from two numbers, the start of its document and its anchor.
"""

import torch
from torch import Tensor

from dspark.kernels.anchor_attention import reference
from dspark.kernels.anchor_attention.reference import attend
from dspark.kernels.dispatch import check

__all__ = ["anchor_attention", "attend"]

MAX_SLOTS = 256
MAX_WIDTH = 256


def anchor_attention(
    q_NHE: Tensor, context_k_TGE: Tensor, context_v_TGE: Tensor, k_NGE: Tensor, v_NGE: Tensor, starts_A: Tensor,
    anchors_A: Tensor,
) -> Tensor:  # fmt: skip
    """What every slot reads, o_NHE; differentiable in the five float tensors, the same bits every time.

    The N = A * K rows are A blocks of K slots. A slot of block a reads the context rows j with
    ``starts_A[a] <= j < anchors_A[a]`` and the K slots of its own block, in both directions, in one softmax of
    ``E ** -0.5`` times the products. Query head h reads key-value head ``h // (H / G)``.

    Shapes: any A, K of 1..256, H a multiple of G, E of 1..256, any T; one dtype, float64 on a CPU only; starts_A and
    anchors_A int64, neither ever falls, and ``0 <= starts_A <= anchors_A <= T``, which is trusted.
    Raises: ValueError for another shape or dtype.
    Source: DeepSpec, block visibility (specs/dspark.md 1.2).
    """
    kinds = (torch.bfloat16, torch.float16, torch.float32) + (() if q_NHE.is_cuda else (torch.float64,))
    sizes = check({}, *kinds, num_strided=3, q_NHE=q_NHE, k_NGE=k_NGE, v_NGE=v_NGE)
    sizes = check(sizes, q_NHE.dtype, num_strided=3, context_k_TGE=context_k_TGE, context_v_TGE=context_v_TGE)
    sizes = check(sizes, torch.int64, starts_A=starts_A, anchors_A=anchors_A)
    num_rows, num_heads, width, num_kv_heads, num_blocks = (sizes[letter] for letter in "NHEGA")
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads or not 1 <= width <= MAX_WIDTH:
        found = f"{num_heads} heads of {width} over {num_kv_heads}"
        raise ValueError(f"q_NHE: expected a multiple of k_NGE's heads, of 1 to {MAX_WIDTH} values, found {found}")
    fits = num_blocks > 0 and num_rows % num_blocks == 0 and 1 <= num_rows // num_blocks <= MAX_SLOTS
    if not fits and (num_rows, num_blocks) != (0, 0):
        found = f"{num_rows} rows of {num_blocks} blocks"
        raise ValueError(f"q_NHE: expected blocks of 1 to {MAX_SLOTS} slots, found {found}")
    inputs = (q_NHE, context_k_TGE, context_v_TGE, k_NGE, v_NGE, starts_A, anchors_A)
    if not q_NHE.is_cuda or num_blocks == 0:
        return reference.anchor_attention(*inputs)
    from dspark.kernels.anchor_attention import kernel  # Triton, which a CPU may lack

    return kernel.anchor_attention(*inputs)
