"""Attention of blocks to the context before their anchors and to themselves, defined."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def anchor_attention(
    q_NHE: Tensor, context_k_TGE: Tensor, context_v_TGE: Tensor, k_NGE: Tensor, v_NGE: Tensor, starts_A: Tensor,
    anchors_A: Tensor,
) -> Tensor:  # fmt: skip
    """A document at a time."""
    block_size = len(q_NHE) // len(anchors_A)
    starts, counts = starts_A.unique_consecutive(return_counts=True)
    first, read = 0, []
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        here_A = anchors_A[first : first + count] - start
        num_context = int(here_A.max())
        rows, context = slice(first * block_size, (first + count) * block_size), slice(start, start + num_context)
        context_AC = torch.arange(num_context, device=here_A.device) < here_A[:, None]
        own_AA = torch.eye(count, dtype=torch.bool, device=here_A.device)
        visible_AJ = torch.cat([context_AC, own_AA.repeat_interleave(block_size, 1)], 1)
        keys = torch.cat([context_k_TGE[context], k_NGE[rows]])
        values = torch.cat([context_v_TGE[context], v_NGE[rows]])
        read.append(attend(q_NHE[rows], keys, values, visible_AJ.repeat_interleave(block_size, 0)))
        first += count
    return torch.cat(read)


def attend(q_NHE: Tensor, k_JGE: Tensor, v_JGE: Tensor, visible_NJ: Tensor | None) -> Tensor:
    """Plain attention; None sees everything. The query heads of a group become rows of one head, so that keys and
    values are never copied.
    """
    num_heads = k_JGE.shape[1]
    q_GME = q_NHE.transpose(0, 1).reshape(num_heads, -1, q_NHE.shape[2])
    group = q_NHE.shape[1] // num_heads
    visible_MJ = None if visible_NJ is None else visible_NJ.repeat(group, 1)
    k_GJE, v_GJE = k_JGE.transpose(0, 1), v_JGE.transpose(0, 1)
    read_GME = scaled_dot_product_attention(q_GME[None], k_GJE[None], v_GJE[None], visible_MJ)[0]
    return read_GME.reshape(q_NHE.shape[1], -1, q_NHE.shape[2]).transpose(0, 1)
