"""A draft against its teacher in Triton: the vocabulary is read twice, and a third time to put the gradient in place.

compare: a program owns a row. First it walks both rows' tiles with sums and maxima of its own in every lane (an
exponential for each number and one for each group of GROUP, when the lane's maximum moves), then, the two normalisers
known, it walks them again for what needs both laws. Lanes are added up at the ends only.
gradient: a program owns a tile of a row and writes over the draft's logits.
A lane past the vocabulary reads LOWEST, whose exponential is zero.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from dspark.kernels.agreement.reference import Figures, Slopes

GROUP, LANES, WARPS = 4, 1024, 4
"""A tile is GROUP x LANES numbers; a thread holds GROUP times 8, 16 bytes a load."""
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _pair(draft, teacher, start, V: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr):
    """A tile of both rows, in units of log 2, and its columns."""
    column_GL = start + tl.arange(0, GROUP)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    if V % (GROUP * LANES) == 0:
        zq_GL, zp_GL = tl.load(draft + column_GL), tl.load(teacher + column_GL)
    else:
        zq_GL = tl.load(draft + column_GL, mask=column_GL < V, other=LOWEST)
        zp_GL = tl.load(teacher + column_GL, mask=column_GL < V, other=LOWEST)
    return zq_GL.to(tl.float32) * LOG2_E, zp_GL.to(tl.float32) * LOG2_E, column_GL


@triton.jit
def compare_kernel(
    draft, teacher, teacher_rows, labels, figures, P, V: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr
):
    """One row: eight numbers, each in a row of its own of ``figures`` [8, P]."""
    row = tl.program_id(0).to(tl.int64)
    draft, teacher = draft + row * V, teacher + tl.load(teacher_rows + row).to(tl.int64) * V
    low_L, zero_L = tl.full((LANES,), LOWEST, tl.float32), tl.zeros((LANES,), tl.float32)
    most_q_L, most_p_L, sum_q_L, sum_p_L, gap_L = low_L, low_L, zero_L, zero_L, zero_L
    for start in range(0, V, GROUP * LANES):
        zq_GL, zp_GL, _ = _pair(draft, teacher, start, V, GROUP, LANES)
        now_q_L, now_p_L = tl.maximum(most_q_L, tl.max(zq_GL, 0)), tl.maximum(most_p_L, tl.max(zp_GL, 0))
        shrink_L = tl.exp2(most_p_L - now_p_L)
        p_GL = tl.exp2(zp_GL - now_p_L[None, :])
        sum_q_L = sum_q_L * tl.exp2(most_q_L - now_q_L) + tl.sum(tl.exp2(zq_GL - now_q_L[None, :]), 0)
        sum_p_L = sum_p_L * shrink_L + tl.sum(p_GL, 0)
        gap_L = gap_L * shrink_L + tl.sum(p_GL * (zp_GL - zq_GL), 0)
        most_q_L, most_p_L = now_q_L, now_p_L
    most_q, most_p = tl.max(most_q_L, 0), tl.max(most_p_L, 0)
    shrink_L = tl.exp2(most_p_L - most_p)
    sum_p = tl.sum(sum_p_L * shrink_L, 0)
    norm_q = most_q + tl.log2(tl.sum(sum_q_L * tl.exp2(most_q_L - most_q), 0))
    norm_p = most_p + tl.log2(sum_p)
    divergence = (tl.sum(gap_L * shrink_L, 0) / sum_p + norm_q - norm_p) / LOG2_E
    least_L, inner_L, top_L = zero_L, zero_L, tl.full((LANES,), V, tl.int32)
    for start in range(0, V, GROUP * LANES):
        zq_GL, zp_GL, column_GL = _pair(draft, teacher, start, V, GROUP, LANES)
        q_GL, p_GL = tl.exp2(zq_GL - norm_q), tl.exp2(zp_GL - norm_p)
        least_L += tl.sum(tl.minimum(p_GL, q_GL), 0)
        inner_L += tl.sum(tl.where(p_GL > q_GL, q_GL, tl.where(p_GL < q_GL, -q_GL, 0.0)), 0)
        top_L = tl.minimum(top_L, tl.min(tl.where(zp_GL == most_p, column_GL, V), 0))
    label, top = tl.load(labels + row), tl.min(top_L, 0)
    agrees = tl.load(draft + top).to(tl.float32) * LOG2_E == most_q
    place = figures + row
    tl.store(place, tl.load(draft + label).to(tl.float32) - norm_q / LOG2_E)
    tl.store(place + P, tl.load(teacher + label).to(tl.float32) - norm_p / LOG2_E)
    tl.store(place + 2 * P, divergence)
    tl.store(place + 3 * P, tl.sum(least_L, 0))
    tl.store(place + 4 * P, agrees.to(tl.float32))
    tl.store(place + 5 * P, tl.sum(inner_L, 0))
    tl.store(place + 6 * P, norm_q)
    tl.store(place + 7 * P, norm_p)


@triton.jit
def gradient_kernel(
    draft, teacher, teacher_rows, labels, figures, by_logprob, by_divergence, by_acceptance, P, V: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A tile of a row, in place of the draft's logits."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * (GROUP * LANES)
    draft, teacher = draft + row * V, teacher + tl.load(teacher_rows + row).to(tl.int64) * V
    inner, norm_q = tl.load(figures + 5 * P + row), tl.load(figures + 6 * P + row)
    norm_p, label = tl.load(figures + 7 * P + row), tl.load(labels + row)
    logprob, divergence = tl.load(by_logprob + row), tl.load(by_divergence + row)
    half = tl.load(by_acceptance + row) / 2
    zq_GL, zp_GL, column_GL = _pair(draft, teacher, start, V, GROUP, LANES)
    q_GL, p_GL = tl.exp2(zq_GL - norm_q), tl.exp2(zp_GL - norm_p)
    sign_GL = tl.where(p_GL > q_GL, 1.0, tl.where(p_GL < q_GL, -1.0, 0.0))
    slope_GL = q_GL * (divergence - logprob + half * (sign_GL - inner)) - p_GL * divergence
    slope_GL += tl.where(column_GL == label, logprob, 0.0)
    tl.store(draft + column_GL, slope_GL.to(draft.dtype.element_ty), mask=column_GL < V)


def compare(
    draft_PV: torch.Tensor, teacher_MV: torch.Tensor, teacher_rows_P: torch.Tensor, labels_P: torch.Tensor
) -> tuple[Figures, Any]:
    """``reference.compare`` of logits in bfloat16 or float32."""
    num_rows, vocab_size = draft_PV.shape
    figures_8P = torch.empty(8, num_rows, dtype=torch.float32, device=draft_PV.device)
    inputs = (draft_PV, teacher_MV, teacher_rows_P, labels_P, figures_8P)
    compare_kernel[(num_rows,)](*inputs, num_rows, V=vocab_size, GROUP=GROUP, LANES=LANES, num_warps=WARPS)
    return Figures(*figures_8P[:5]), inputs


def gradient(kept: Any, slopes: Slopes) -> torch.Tensor:
    """``reference.gradient``, in the memory and dtype of the draft's logits."""
    draft_PV: torch.Tensor = kept[0]
    num_rows, vocab_size = draft_PV.shape
    gradient_kernel[(num_rows, triton.cdiv(vocab_size, GROUP * LANES))](
        *kept, *slopes, num_rows, V=vocab_size, GROUP=GROUP, LANES=LANES, num_warps=WARPS
    )
    return draft_PV
