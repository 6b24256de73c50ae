"""A draft against its teacher over the whole vocabulary, piece by piece: figures, and gradients in the same pass."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dspark.kernels.agreement import reference
from dspark.kernels.agreement.reference import Figures, Scales, Slopes, Weights
from dspark.kernels.dispatch import form_for

__all__ = ["Figures", "Piece", "Price", "Scales", "Slopes", "Weights", "judge", "slopes"]


class Piece(NamedTuple):
    """Rows whose logits are on hand together: a range of rows, a range of teacher rows, and of each row its place in
    that range (integers on the device).
    """

    rows: slice
    teachers: slice
    teacher_rows_P: Tensor


Price = Callable[[slice, Figures], Slopes]
"""Given a piece's rows and figures, the derivatives of the loss by them."""


def judge(
    hidden_ND: Tensor, mixed_NR: Tensor, head_VD: Tensor, markov_VR: Tensor, teacher_MD: Tensor, labels_N: Tensor,
    pieces: Sequence[Piece], price: Price,
) -> tuple[Tensor, Figures]:  # fmt: skip
    """Figures of N rows, and a zero that carries the loss's gradient into hidden_ND, mixed_NR and markov_VR.

    A row's draft logits are ``head hidden + markov mixed``, in autocast's dtype or else in that of markov_VR; its
    teacher's are ``head teacher``, always in the head's own. Of both only a piece exists at a time. ``price`` is asked
    for a piece's slopes while its logits are on hand, so the gradients are made in the forward pass and the logits
    never again. Add the zero to the loss that ``price`` prices. The head and the teacher are constants.
    Shapes: labels_N integers below V; pieces cover all rows in order. Returns: a scalar, figures of N rows, constants.
    Source: gradients in the forward pass of a chunked loss: Liger Kernel (arXiv 2410.10989) section 3.2.
    """
    pull, *figures = _Judged.apply(hidden_ND, mixed_NR, head_VD, markov_VR, teacher_MD, labels_N, pieces, price)
    return pull, Figures(*figures)


def slopes(figures: Figures, rows_A1: Tensor, rows: slice, num_slots: int, scales: Scales, weights: Weights) -> Slopes:
    """Derivatives of a loss by the figures of a piece of whole blocks, for ``judge``.

    Block a's valid slots, a prefix of its num_slots, have the rows rows_A1[a] to rows_A1[a + 1] of all rows, of which
    ``rows`` are the piece's. Shapes: rows_A1 int64; scales in the figures' dtype. One launch on a GPU.
    """
    return form_for(figures.acceptance, reference.slopes)(figures, rows_A1, rows.start, num_slots, scales, weights)


class _Judged(torch.autograd.Function):
    """Forward makes the gradients; backward multiplies them by the scalar that comes in."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, mixed_NR: Tensor, head_VD: Tensor, markov_VR: Tensor, teacher_MD: Tensor,
        labels_N: Tensor, pieces: Sequence[Piece], price: Price,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        kind = hidden_ND.device.type
        is_low = torch.is_autocast_enabled(kind)
        work = torch.get_autocast_dtype(kind) if is_low else markov_VR.dtype
        head, markov = head_VD.to(work) if is_low else head_VD, markov_VR.to(work)
        by_hidden_ND, by_mixed_NR = torch.empty_like(hidden_ND), torch.empty_like(mixed_NR)
        by_markov_VR = torch.zeros_like(markov_VR, dtype=torch.promote_types(markov_VR.dtype, torch.float32))
        wide = torch.promote_types(work, torch.float32)
        figures_5N = torch.empty(len(Figures._fields), len(hidden_ND), dtype=wide, device=hidden_ND.device)
        compare, gradient = form_for(figures_5N, reference.compare), form_for(figures_5N, reference.gradient)
        with torch.autocast(kind, enabled=False):
            for rows, teachers, teacher_rows_P in pieces:
                mixed_PR = mixed_NR[rows].to(work)
                draft_PV = functional.linear(hidden_ND[rows].to(head.dtype), head).to(work)
                draft_PV.addmm_(mixed_PR, markov.T)
                teacher_MV = functional.linear(teacher_MD[teachers].to(head_VD.dtype), head_VD)
                figures, kept = compare(draft_PV, teacher_MV, teacher_rows_P, labels_N[rows])
                gradient_PV = gradient(kept, price(rows, figures)).to(work)
                by_hidden_ND[rows] = (gradient_PV.to(head.dtype) @ head).to(by_hidden_ND.dtype)
                by_mixed_NR[rows] = (gradient_PV @ markov).to(by_mixed_NR.dtype)
                _add_product(by_markov_VR, gradient_PV, mixed_PR)
                figures_5N[:, rows] = torch.stack(figures)
                del draft_PV, teacher_MV, kept, gradient_PV  # before the next piece's are made
        ctx.save_for_backward(by_hidden_ND, by_mixed_NR, by_markov_VR.to(markov_VR.dtype))
        outputs = figures_5N.unbind()
        ctx.mark_non_differentiable(*outputs)
        return torch.zeros((), dtype=wide, device=hidden_ND.device), *outputs

    @staticmethod
    def backward(ctx: Any, pull: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, mixed, markov = (gradient.mul_(pull) for gradient in ctx.saved_tensors)  # torch refuses a second call
        return hidden, mixed, None, markov, None, None, None, None


def _add_product(sum_VR: Tensor, gradient_PV: Tensor, mixed_PR: Tensor) -> None:
    """sum_VR += gradient^T mixed. On a GPU the product itself adds, and what it adds is not rounded to sixteen bits.

    Source: pytorch pull request 167931 (2.10): ``addmm``'s summand may have the dtype of its output.
    """
    if sum_VR.is_cuda and sum_VR.dtype == torch.float32:
        torch.addmm(sum_VR, gradient_PV.T, mixed_PR, out_dtype=sum_VR.dtype, out=sum_VR)
    else:
        sum_VR += gradient_PV.T @ mixed_PR
