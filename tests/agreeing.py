"""The comparison of draft and teacher left to autograd: the oracle of the fused one."""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.config import ObjectiveSection
from dspark.draft.anchors import BlockTargets, gather_positions, slot_positions
from dspark.draft.model import DraftModel, DraftOutput
from dspark.train import objective as room
from dspark.train.batches import PIECE_NUMBERS, Batch, lay_out
from dspark.train.objective import Figures, Metrics


class Teacher(NamedTuple):
    """What teaches a row of blocks, and where they stand."""

    head_VD: Tensor
    last_hidden_TD: Tensor
    anchors_A: Tensor


def objective(
    output: DraftOutput,
    teacher: Teacher,
    targets: BlockTargets,
    section: ObjectiveSection,
    weight: float,
    pooled: Tensor,
) -> tuple[Tensor, Metrics]:
    """The room's, with the slots laid out as for training on a CPU."""
    slots = lay_out(targets, teacher.anchors_A, PIECE_NUMBERS["cpu"], len(teacher.head_VD))
    nothing, states_TD = torch.zeros(0), teacher.last_hidden_TD
    here = Batch(nothing, nothing, nothing, teacher.anchors_A, slots, (), nothing, states_TD)
    return room.objective(output, teacher.head_VD, here, section, weight, pooled)


def compare(draft_AKV: Tensor, teacher_AKV: Tensor, label_ids_AK: Tensor) -> Figures:
    """Slot by slot at temperature 1; gradients flow into the draft's logits."""
    q_AKV, p_AKV = draft_AKV.log_softmax(-1), teacher_AKV.detach().log_softmax(-1)
    labels = (x_AKV.gather(-1, label_ids_AK[..., None]).squeeze(-1) for x_AKV in (q_AKV, p_AKV))
    divergence_AK = (p_AKV.exp() * (p_AKV - q_AKV)).sum(-1)
    acceptance_AK = torch.minimum(p_AKV.exp(), q_AKV.exp()).sum(-1)
    agrees_AK = (draft_AKV.argmax(-1) == teacher_AKV.argmax(-1)).to(draft_AKV.dtype)
    return Figures(*labels, divergence_AK, acceptance_AK, agrees_AK)


def logits_of(draft: DraftModel, output: DraftOutput) -> Tensor:
    """All logits of a training pass, [A, K, V]."""
    bias_AKV = output.mixed_AKR.to(output.markov_VR.dtype) @ output.markov_VR.T
    return draft.base_logits(output.hidden_AKD) + bias_AKV


def teacher_logits(teacher: Teacher, block_size: int) -> Tensor:
    """The target's logits for every slot, [A, K, V]."""
    return gather_positions(teacher.last_hidden_TD, slot_positions(teacher.anchors_A, block_size)) @ teacher.head_VD.T


def plain_loss(
    output: DraftOutput,
    teacher: Teacher,
    targets: BlockTargets,
    section: ObjectiveSection,
    weight: float,
    pooled: Tensor,
) -> Tensor:
    """``objective`` from whole logits, term by term."""
    draft_AKV = output.hidden_AKD @ teacher.head_VD.T + output.mixed_AKR @ output.markov_VR.T
    valid_AK = targets.valid_AK
    found = compare(draft_AKV, teacher_logits(teacher, valid_AK.shape[-1]), targets.label_ids_AK)
    weights_AK = room.slot_weights(valid_AK, section.decay_positions).to(draft_AKV.dtype)
    terms = {
        "cross_entropy": room.cross_entropy(found, weights_AK),
        "forward_kl": room.forward_kl(found, weights_AK),
        "total_variation": room.total_variation(found, weights_AK),
    }
    if output.confidence_logits_AK is not None:
        terms["confidence"] = room.confidence_bce(found, output.confidence_logits_AK, weights_AK)
    loss = sum(getattr(section, name) * term for name, term in terms.items()) / (pooled[0] + 1e-6)
    forms = {"ratio": room.expected_acceptance_ratio, "teacher_forced": room.expected_acceptance_teacher_forced}
    length = forms[section.acceptance_form](found, valid_AK) / valid_AK.shape[-1]
    return loss + weight * (valid_AK[..., 0].sum() - length) / pooled[1].clamp(min=1)
