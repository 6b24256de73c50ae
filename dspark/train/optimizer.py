"""AdamW over the draft's own parameters, and what changes from step to step: learning rate and acceptance weight."""

import math

import torch
from torch import nn

from dspark.config import ObjectiveSection, TrainSection


def adamw(draft: nn.Module, section: TrainSection) -> torch.optim.AdamW:
    """AdamW on every parameter; weight decay on matrices only. The target's tables are buffers, hence not in it."""
    parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=section.learning_rate, betas=section.betas, fused=True)


def learning_rate(step: int, section: TrainSection) -> float:
    """The rate of step 0..steps-1: linear warm-up to ``learning_rate``, then a cosine towards the minimum ratio of it.
    Source: Loshchilov and Hutter 2017 (arXiv 1608.03983), equation 5 without restarts.
    """
    warmup_steps = math.ceil(section.warmup_ratio * section.steps)
    if step < warmup_steps:
        return section.learning_rate * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (section.steps - warmup_steps)
    lowest = section.min_learning_rate_ratio
    return section.learning_rate * (lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group this rate; the schedule itself has no state to save."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def acceptance_weight(step: int, section: ObjectiveSection) -> float:
    """Weight of the acceptance-length term at a step: it rises linearly from 0 over ``acceptance_warmup_steps``."""
    if section.acceptance_warmup_steps == 0:
        return section.acceptance_length
    return section.acceptance_length * min(1.0, step / section.acceptance_warmup_steps)
