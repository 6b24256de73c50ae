"""A draft against its teacher in Triton: the vocabulary is read twice, and a third time to put the gradient in place.

compare: a program owns a row and walks both rows' tiles. First forwards, with a maximum and a sum in every lane (an
exponential for each number and one for each group of GROUP, when the lane's maximum moves); then, both normalisers
known, backwards, for what needs both laws: the tiles read last may still be in the cache. Lanes are added up at the
ends only. A log-probability is (logit - maximum) - log(sum), as exact at large logits as at small ones.
gradient: a program owns a tile of a row and writes over the draft's logits.
slopes: a lane owns a block of slots.
A lane past the vocabulary reads LOWEST, whose exponential is zero.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.agreement.reference import Figures, Scales, Slopes, Weights

GROUP, LANES, WARPS = 4, 1024, 4
"""A tile is GROUP x LANES numbers; a thread holds GROUP times 8, 16 bytes a load."""
BLOCKS = 32
"""Blocks of slots whose slopes a program makes."""
NUM_FIGURES = 10
"""``Figures``, then what ``gradient`` needs of a row: inner, and of draft and teacher the maximum and log2(sum)."""
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _tile(row, start, V: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Logits of a tile of a row; a whole tile lies inside the vocabulary."""
    column_GL = start + tl.arange(0, GROUP)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    if IS_WHOLE:
        return tl.load(row + column_GL).to(tl.float32)
    z_GL = tl.load(row + column_GL, mask=column_GL < V, other=0.0).to(tl.float32)
    return tl.where(column_GL < V, z_GL, LOWEST)


@triton.jit
def _summed(z_GL, most_L, sum_L):
    """A lane's maximum and its sum of exp(logit - maximum), one tile further."""
    now_L = tl.maximum(most_L, tl.max(z_GL, 0))
    sum_L = sum_L * tl.exp2((most_L - now_L) * LOG2_E) + tl.sum(tl.exp2((z_GL - now_L[None, :]) * LOG2_E), 0)
    return now_L, sum_L


@triton.jit
def _joined(most_L, sum_L):
    """Maximum and log2(sum) over all lanes."""
    most = tl.max(most_L, 0)
    return most, tl.log2(tl.sum(sum_L * tl.exp2((most_L - most) * LOG2_E), 0))


@triton.jit
def _overlap(
    draft, teacher, start, sums, most_q, log_q, most_p, log_p, V: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Sums of p log2(p / q), min(p, q) and q sign(p - q), one tile further."""
    gap_L, least_L, inner_L = sums
    zq_GL = _tile(draft, start, V, GROUP, LANES, IS_WHOLE)
    zp_GL = _tile(teacher, start, V, GROUP, LANES, IS_WHOLE)
    log_q_GL, log_p_GL = (zq_GL - most_q) * LOG2_E - log_q, (zp_GL - most_p) * LOG2_E - log_p
    q_GL, p_GL = tl.exp2(log_q_GL), tl.exp2(log_p_GL)
    gap_L += tl.sum(p_GL * (log_p_GL - log_q_GL), 0)
    least_L += tl.sum(tl.minimum(p_GL, q_GL, propagate_nan=tl.PropagateNan.ALL), 0)
    inner_L += tl.sum(tl.where(p_GL > q_GL, q_GL, tl.where(p_GL < q_GL, -q_GL, 0.0)), 0)
    return gap_L, least_L, inner_L


@triton.jit
def compare_kernel(
    draft, teacher, teacher_rows, labels, figures, P, V: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr
):
    """One row: NUM_FIGURES numbers, each in a row of its own of ``figures``."""
    TILE: tl.constexpr = GROUP * LANES
    WHOLE: tl.constexpr = V // TILE * TILE
    row = tl.program_id(0).to(tl.int64)
    draft, teacher = draft + row * V, teacher + tl.load(teacher_rows + row).to(tl.int64) * V
    low_L, zero_L = tl.full((LANES,), LOWEST, tl.float32), tl.zeros((LANES,), tl.float32)
    most_q_L, most_p_L, sum_q_L, sum_p_L, first_L = low_L, low_L, zero_L, zero_L, tl.zeros((LANES,), tl.int32)
    for start in range(0, WHOLE, TILE):
        zq_GL = _tile(draft, start, V, GROUP, LANES, True)
        zp_GL = _tile(teacher, start, V, GROUP, LANES, True)
        before_L = most_p_L
        most_q_L, sum_q_L = _summed(zq_GL, most_q_L, sum_q_L)
        most_p_L, sum_p_L = _summed(zp_GL, most_p_L, sum_p_L)
        first_L = tl.where(most_p_L > before_L, start, first_L)
    if WHOLE < V:
        before_L = most_p_L
        most_q_L, sum_q_L = _summed(_tile(draft, WHOLE, V, GROUP, LANES, False), most_q_L, sum_q_L)
        most_p_L, sum_p_L = _summed(_tile(teacher, WHOLE, V, GROUP, LANES, False), most_p_L, sum_p_L)
        first_L = tl.where(most_p_L > before_L, WHOLE, first_L)
    most_q, log_q = _joined(most_q_L, sum_q_L)
    most_p, log_p = _joined(most_p_L, sum_p_L)
    # The teacher's first most likely token lies in the first tile of those in which a lane met the maximum.
    top_start = tl.min(tl.where(most_p_L == most_p, first_L, V), 0)
    sums = zero_L, zero_L, zero_L
    if WHOLE < V:
        sums = _overlap(draft, teacher, WHOLE, sums, most_q, log_q, most_p, log_p, V, GROUP, LANES, False)
    for end in range(0, WHOLE, TILE):
        start = WHOLE - TILE - end
        sums = _overlap(draft, teacher, start, sums, most_q, log_q, most_p, log_p, V, GROUP, LANES, True)
    gap_L, least_L, inner_L = sums
    column_GL = top_start + tl.arange(0, GROUP)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    zp_GL = _tile(teacher, top_start, V, GROUP, LANES, False)
    top = tl.min(tl.min(tl.where(zp_GL == most_p, column_GL, V), 0), 0)
    label = tl.load(labels + row)
    agrees = tl.load(draft + tl.minimum(top, V - 1)).to(tl.float32) == most_q  # no logit of a row of NaN is the most
    draft_logprob = tl.load(draft + label).to(tl.float32) - most_q - log_q / LOG2_E
    teacher_logprob = tl.load(teacher + label).to(tl.float32) - most_p - log_p / LOG2_E
    divergence, acceptance, inner = tl.sum(gap_L, 0) / LOG2_E, tl.sum(least_L, 0), tl.sum(inner_L, 0)
    kept = (inner, most_q, log_q, most_p, log_p)
    numbers = (draft_logprob, teacher_logprob, divergence, acceptance, agrees.to(tl.float32)) + kept  # noqa: RUF005
    for i in tl.static_range(len(numbers)):
        tl.store(figures + i * P + row, numbers[i])


@triton.jit
def gradient_kernel(
    draft, teacher, teacher_rows, labels, figures, by_logprob, by_divergence, by_acceptance, P, V: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A tile of a row, in place of the draft's logits."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * (GROUP * LANES)
    draft, teacher = draft + row * V, teacher + tl.load(teacher_rows + row).to(tl.int64) * V
    place = figures + row
    inner, most_q, log_q = tl.load(place + 5 * P), tl.load(place + 6 * P), tl.load(place + 7 * P)
    most_p, log_p, label = tl.load(place + 8 * P), tl.load(place + 9 * P), tl.load(labels + row)
    logprob, divergence = tl.load(by_logprob + row), tl.load(by_divergence + row)
    half = tl.load(by_acceptance + row) / 2
    level = divergence - logprob - half * inner
    zq_GL = _tile(draft, start, V, GROUP, LANES, V % (GROUP * LANES) == 0)
    zp_GL = _tile(teacher, start, V, GROUP, LANES, V % (GROUP * LANES) == 0)
    q_GL, p_GL = tl.exp2((zq_GL - most_q) * LOG2_E - log_q), tl.exp2((zp_GL - most_p) * LOG2_E - log_p)
    factor_GL = tl.where(p_GL > q_GL, level + half, tl.where(p_GL < q_GL, level - half, level))
    column_GL = start + tl.arange(0, GROUP)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    slope_GL = q_GL * factor_GL - p_GL * divergence + tl.where(column_GL == label, logprob, 0.0)
    tl.store(draft + column_GL, slope_GL.to(draft.dtype.element_ty), mask=column_GL < V)


@triton.jit(do_not_specialize=["num_blocks", "first_row"])
def slopes_kernel(
    by_logprob, by_divergence, by_acceptance, draft_logprobs, teacher_logprobs, acceptances, block_rows, weight, length,
    num_blocks, first_row, cross_entropy, forward_kl, total_variation, rate, K: tl.constexpr, HAS_LENGTH: tl.constexpr,
    IS_RATIO: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A lane owns a block and walks its slots twice; between the walks ``by_acceptance`` holds how far one comes."""
    block_A = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_block_A = block_A < num_blocks
    row_A = tl.load(block_rows + block_A, mask=is_block_A, other=0)
    count_A = tl.load(block_rows + block_A + 1, mask=is_block_A, other=0) - row_A
    row_A -= first_row
    divisor, gain = tl.load(weight), tl.load(length)
    reach_A, tail_A = tl.full((BLOCKS,), 1.0, tl.float32), tl.zeros((BLOCKS,), tl.float32)
    if HAS_LENGTH:
        for slot in range(K):
            tl.store(by_acceptance + row_A + slot, reach_A, mask=slot < count_A)
            _, go_on_A, _ = _step(draft_logprobs, teacher_logprobs, acceptances, row_A + slot, slot < count_A, IS_RATIO)
            reach_A *= go_on_A
    for back in range(K):
        slot = K - 1 - back
        is_valid_A, at_A = slot < count_A, row_A + slot
        share = tl.exp(-rate * slot) / divisor
        step_A, go_on_A, gap_A = _step(draft_logprobs, teacher_logprobs, acceptances, at_A, is_valid_A, IS_RATIO)
        logprob_A, acceptance_A = share * -cross_entropy + step_A * 0, share * -2 * total_variation + step_A * 0
        if HAS_LENGTH:
            by_step_A = tl.load(by_acceptance + at_A, mask=is_valid_A, other=0.0) * gain
            acceptance_A -= by_step_A
            if IS_RATIO:
                logprob_A -= tl.where(gap_A <= 0, by_step_A * tail_A * go_on_A, 0.0)
            else:
                acceptance_A -= by_step_A * tail_A
            tail_A = step_A + go_on_A * tail_A
        tl.store(by_logprob + at_A, logprob_A, mask=is_valid_A)
        tl.store(by_divergence + at_A, share * forward_kl + step_A * 0, mask=is_valid_A)
        tl.store(by_acceptance + at_A, acceptance_A, mask=is_valid_A)


@triton.jit
def _step(draft_logprobs, teacher_logprobs, acceptances, at_A, is_valid_A, IS_RATIO: tl.constexpr):
    """A slot's acceptance, what it passes on, and the logarithm of the ratio; zeros where it is not valid."""
    step_A = tl.load(acceptances + at_A, mask=is_valid_A, other=0.0)
    gap_A = tl.load(draft_logprobs + at_A, mask=is_valid_A, other=0.0)
    gap_A -= tl.load(teacher_logprobs + at_A, mask=is_valid_A, other=0.0)
    go_on_A = tl.where(is_valid_A, tl.exp(tl.minimum(gap_A, 0.0)), 0.0) if IS_RATIO else step_A
    return step_A, go_on_A, gap_A


def slopes(
    figures: Figures, rows_A1: Tensor, first_row: int, num_slots: int, scales: Scales, weights: Weights
) -> Slopes:
    """``reference.slopes`` of float32 figures, whose rows begin at ``first_row`` of those that rows_A1 counts."""
    draft_P, teacher_P, _, acceptance_P, _ = figures
    out_3P, num_blocks = torch.empty(3, len(draft_P), dtype=torch.float32, device=draft_P.device), len(rows_A1) - 1
    slopes_kernel[(triton.cdiv(num_blocks, BLOCKS),)](
        *out_3P, draft_P, teacher_P, acceptance_P, rows_A1, *scales, num_blocks, first_row, weights.cross_entropy,
        weights.forward_kl, weights.total_variation, 1 / weights.decay_positions, K=num_slots,
        HAS_LENGTH=weights.has_length, IS_RATIO=weights.is_ratio, BLOCKS=BLOCKS, num_warps=1,
    )  # fmt: skip
    return Slopes(*out_3P)


def compare(draft_PV: Tensor, teacher_MV: Tensor, teacher_rows_P: Tensor, labels_P: Tensor) -> tuple[Figures, Any]:
    """``reference.compare`` of logits in float32 or sixteen bits, each of the two in its own dtype; contiguous."""
    num_rows, vocab_size = draft_PV.shape
    figures = torch.empty(NUM_FIGURES, num_rows, dtype=torch.float32, device=draft_PV.device)
    inputs = (draft_PV, teacher_MV, teacher_rows_P, labels_P, figures)
    compare_kernel[(num_rows,)](*inputs, num_rows, V=vocab_size, GROUP=GROUP, LANES=LANES, num_warps=WARPS)
    return Figures(*figures[: len(Figures._fields)]), inputs


def gradient(kept: Any, slopes: Slopes) -> Tensor:
    """``reference.gradient``, in the memory and dtype of the draft's logits; slopes float32, contiguous."""
    draft_PV: Tensor = kept[0]
    num_rows, vocab_size = draft_PV.shape
    gradient_kernel[(num_rows, triton.cdiv(vocab_size, GROUP * LANES))](
        *kept, *slopes, num_rows, V=vocab_size, GROUP=GROUP, LANES=LANES, num_warps=WARPS
    )
    return draft_PV
