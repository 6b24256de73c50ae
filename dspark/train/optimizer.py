"""What moves the draft's own parameters and averages them, and what changes from step to step."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dspark.config import ObjectiveSection, TrainSection

ADAMW, MUON, EMA = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",), "ema"
"""Names of what is kept of a parameter in an optimizer's state, in checkpoints too."""
MUON_PARTS = ("fc.", "layers.")
"""Where the draft's names of hidden matrices begin."""


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon in the first group, AdamW in the others: one list of groups and one state, as of any other optimizer."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self.parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter once. Groups and state are lent anew, for loading a state replaces them."""
        assert closure is None
        for part, groups in zip(self.parts, (self.param_groups[:1], self.param_groups[1:]), strict=True):
            part.param_groups, part.state = groups, self.state
            part.step()


def build_optimizer(draft: nn.Module, section: TrainSection) -> torch.optim.Optimizer:
    """The run's optimizer. Muon gets the matrices of attention, MLP and fc, AdamW the heads, norms and biases.

    Muon's updates are scaled to the root mean square of AdamW's, so that one learning rate and weight decay serve both.
    Source: Jordan 2024, Muon; Liu et al. 2025 (arXiv 2502.16982), section 2.2, for the scale.
    """
    if section.optimizer == "adamw":
        return adamw(draft, section)
    matrices = [p for name, p in draft.named_parameters() if name.startswith(MUON_PARTS) and p.ndim == 2]
    hidden = set(matrices)
    rest = nn.ParameterList(p for p in draft.parameters() if p not in hidden)
    rate, decay = section.learning_rate, section.weight_decay
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return MuonAndAdamW(muon, adamw(rest, section))


def moment_names(optimizer: Any) -> dict[Tensor, tuple[str, ...]]:
    """What the optimizer keeps of each of its parameters, beside the count of steps and the moving average."""
    return {p: MUON if "momentum" in group else ADAMW for group in optimizer.param_groups for p in group["params"]}


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """From now on, keep an exponential moving average of the parameters in the optimizer's state, under ``EMA``.

    It starts as the parameters after the first move, and it moves when they do: never in a step that is refused. It is
    of the optimizer's own parameters, float32, which under ZeRO are this process's slices.
    """

    def after_step(moved: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p.detach() for group in moved.param_groups for p in group["params"]]
        states = [moved.state[p] for group in moved.param_groups for p in group["params"]]
        for state, parameter in zip(states, parameters, strict=True):
            if EMA not in state:
                state[EMA] = parameter.clone()
        torch._foreach_lerp_([state[EMA] for state in states], parameters, 1 - decay)

    optimizer.register_step_post_hook(after_step)


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
    """The rate of step 0..steps-1: linear warm-up to ``learning_rate``, then a fall to the minimum ratio of it, along a
    cosine or, with wsd, a line over the last ``decay_ratio`` of the steps; the step after the last would reach it.
    Source: Loshchilov and Hutter 2017 (arXiv 1608.03983), equation 5 without restarts; wsd: Hu et al. 2024
    (arXiv 2404.06395), section 4, with the linear decay of Haegele et al. 2024 (arXiv 2405.18392).
    """
    warmup_steps = math.ceil(section.warmup_ratio * section.steps)
    if step < warmup_steps:
        return section.learning_rate * (step + 1) / warmup_steps
    lowest = section.min_learning_rate_ratio
    if section.schedule == "wsd":
        decay_steps = min(round(section.decay_ratio * section.steps), section.steps - warmup_steps)
        left = min(1.0, (section.steps - step) / decay_steps) if decay_steps else 1.0
        return section.learning_rate * (lowest + (1 - lowest) * left)
    progress = (step - warmup_steps) / (section.steps - warmup_steps)
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
