"""The comparison of draft and teacher left to autograd: the oracle of the fused one."""

import torch
from torch import Tensor

from dspark.config import ObjectiveSection
from dspark.draft.anchors import BlockTargets, gather_positions, slot_positions
from dspark.draft.model import DraftModel, DraftOutput
from dspark.train import objective as room
from dspark.train.objective import Agreement, Teacher


def compare(draft_BAKV: Tensor, teacher_BAKV: Tensor, label_ids_BAK: Tensor) -> Agreement:
    """Slot by slot at temperature 1; gradients flow into the draft's logits."""
    q_BAKV, p_BAKV = draft_BAKV.log_softmax(-1), teacher_BAKV.detach().log_softmax(-1)
    labels = (x_BAKV.gather(-1, label_ids_BAK[..., None]).squeeze(-1) for x_BAKV in (q_BAKV, p_BAKV))
    divergence_BAK = (p_BAKV.exp() * (p_BAKV - q_BAKV)).sum(-1)
    acceptance_BAK = torch.minimum(p_BAKV.exp(), q_BAKV.exp()).sum(-1)
    agrees_BAK = (draft_BAKV.argmax(-1) == teacher_BAKV.argmax(-1)).to(draft_BAKV.dtype)
    return Agreement(*labels, divergence_BAK, acceptance_BAK, agrees_BAK)


def logits_of(draft: DraftModel, output: DraftOutput) -> Tensor:
    """All logits of a training pass, [B, A, K, V]."""
    bias_BAKV = output.mixed_BAKR.to(output.markov_VR.dtype) @ output.markov_VR.T
    return draft.base_logits(output.hidden_BAKD) + bias_BAKV


def teacher_logits(teacher: Teacher, block_size: int) -> Tensor:
    """The target's logits for every slot, [B, A, K, V]."""
    return gather_positions(teacher.last_hidden_BTD, slot_positions(teacher.anchors_BA, block_size)) @ teacher.head_VD.T


def plain_loss(
    output: DraftOutput,
    teacher: Teacher,
    targets: BlockTargets,
    section: ObjectiveSection,
    weight: float,
    pooled: Tensor,
) -> Tensor:
    """``objective`` from whole logits, term by term."""
    draft_BAKV = output.hidden_BAKD @ teacher.head_VD.T + output.mixed_BAKR @ output.markov_VR.T
    valid_BAK = targets.valid_BAK
    found = compare(draft_BAKV, teacher_logits(teacher, valid_BAK.shape[-1]), targets.label_ids_BAK)
    weights_BAK = room.slot_weights(valid_BAK, section.decay_positions).to(draft_BAKV.dtype)
    terms = {
        "cross_entropy": room.cross_entropy(found, weights_BAK),
        "forward_kl": room.forward_kl(found, weights_BAK),
        "total_variation": room.total_variation(found, weights_BAK),
    }
    if output.confidence_logits_BAK is not None:
        terms["confidence"] = room.confidence_bce(found, output.confidence_logits_BAK, weights_BAK)
    loss = sum(getattr(section, name) * term for name, term in terms.items()) / (pooled[0] + 1e-6)
    forms = {"ratio": room.expected_acceptance_ratio, "teacher_forced": room.expected_acceptance_teacher_forced}
    length = forms[section.acceptance_form](found, valid_BAK) / valid_BAK.shape[-1]
    return loss + weight * (valid_BAK[..., 0].sum() - length) / pooled[1].clamp(min=1)
