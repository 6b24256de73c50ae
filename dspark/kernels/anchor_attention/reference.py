"""A training block's attention, defined, and how a CPU computes it.

For query n of block a: o_n = sum_j p_nj v_j with p_n = softmax_j(q_n . k_j / sqrt(E)) over the context rows
starts_a <= j < anchors_a and the K slots of block a. One call a document, so that a mask is never larger than one.
"""

import torch
from torch import Tensor
from torch.nn import functional


def anchor_attention(
    q_NHE: Tensor, context_k_TGE: Tensor, context_v_TGE: Tensor, k_NGE: Tensor, v_NGE: Tensor, starts_A: Tensor,
    anchors_A: Tensor,
) -> Tensor:  # fmt: skip
    """See ``dspark.kernels.anchor_attention``. Blocks with one start are a document."""
    if not len(q_NHE):
        return q_NHE.clone()
    num_slots, parts, first = len(q_NHE) // len(starts_A), [], 0
    starts, counts = starts_A.unique_consecutive(return_counts=True)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        anchors_C = anchors_A[first : first + count]
        rows = slice(first * num_slots, (first + count) * num_slots)
        context = slice(start, int(anchors_C.max()))
        keys_JGE, values_JGE = (
            torch.cat((behind[context], own[rows])) for behind, own in ((context_k_TGE, k_NGE), (context_v_TGE, v_NGE))
        )
        is_read_NJ = _visibility(anchors_C, context, num_slots)
        parts.append(attend(q_NHE[rows], keys_JGE, values_JGE, is_read_NJ))
        first += count
    return torch.cat(parts)


def _visibility(anchors_C: Tensor, context: slice, num_slots: int) -> Tensor:
    """Which keys, context before slots, each slot of one document's blocks reads."""
    places_T = torch.arange(context.start, context.stop, device=anchors_C.device)
    blocks_C = torch.arange(len(anchors_C), device=anchors_C.device)
    reads_CT, owns_CC = places_T < anchors_C[:, None], blocks_C == blocks_C[:, None]
    return torch.cat((reads_CT, owns_CC.repeat_interleave(num_slots, 1)), 1).repeat_interleave(num_slots, 0)


def attend(q_NHE: Tensor, keys_JGE: Tensor, values_JGE: Tensor, is_read_NJ: Tensor | None) -> Tensor:
    """Plain attention of N rows to J keys, None for all of them; grouped as ``anchor_attention``. Returns: o_NHE.
    The query heads of a group become M = group * N rows of one head, so that keys and values are never copied.
    """
    (num_rows, num_heads, width), num_kv_heads = q_NHE.shape, keys_JGE.shape[1]
    q_1GME = q_NHE.transpose(0, 1).reshape(1, num_kv_heads, -1, width)
    is_read_MJ = None if is_read_NJ is None else is_read_NJ.repeat(num_heads // num_kv_heads, 1)
    keys_1GJE, values_1GJE = (rows_JGE.transpose(0, 1)[None] for rows_JGE in (keys_JGE, values_JGE))
    o_1GME = functional.scaled_dot_product_attention(q_1GME, keys_1GJE, values_1GJE, is_read_MJ)
    return o_1GME.reshape(num_heads, num_rows, width).transpose(0, 1)
