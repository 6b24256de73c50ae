"""One optimisation step: forward and backward over the accumulation window, then, if all is finite, the move."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from dspark.config import RunConfig
from dspark.distributed import sum_over_ranks, whole
from dspark.draft.model import DraftModel, DraftOutput
from dspark.errors import TrainingError
from dspark.kernels.transfer import onto
from dspark.train.batches import Batch, Plan, blank_batch
from dspark.train.log import Stopwatch
from dspark.train.objective import Metrics, denominators, objective, summed
from dspark.train.optimizer import acceptance_weight, learning_rate, set_learning_rate

Priced = tuple[Tensor, Metrics]
"""A loss, and what to log of it."""


@dataclass(frozen=True)
class Learner:
    """What a step works on: the draft, the same draft and its optimizer as accelerate prepared them, the run, and the
    clock on which the step's parts are timed.
    """

    accelerator: Accelerator
    draft: DraftModel
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    run: RunConfig
    stopwatch: Stopwatch

    @property
    def engine(self) -> Any:
        """``wrapped`` when it is a DeepSpeed engine, which clips and moves by itself; else None."""
        return self.wrapped if self.accelerator.distributed_type == DistributedType.DEEPSPEED else None


def train_step(learner: Learner, window: Sequence[Plan], step: int, feed: Iterator[Batch]) -> Metrics:
    """Take step ``step`` on this process's micro-batches; every process calls it with its own.

    Losses are summed over processes and micro-steps and divided by denominators pooled over all of them beforehand, so
    the gradient does not depend on how the sequences were split. ``feed`` gives the window's batches on the device.
    Returns: this process's (numerator, denominator) pairs, detached, to be summed before dividing.
    Raises: TrainingError on every process when a loss or gradient is not finite; the optimizer has not moved then.
    """
    run, device, clock = learner.run, learner.accelerator.device, learner.stopwatch
    clock.lap("data_wait")
    local = torch.stack([denominators(plan.slots, run.objective.decay_positions) for plan in window]).sum(0)
    pooled = sum_over_ranks(onto(device, local))
    clock.lap("communication")
    one, losses, metrics = torch.ones((), device=device), [], []
    for place, plan in enumerate(window):
        is_last = place == len(window) - 1
        loss, found = micro_step(learner, next(feed), pooled, step, is_last)  # no name: the next one needs its memory
        losses.append(loss)
        metrics.append(found | {"tokens": (one * len(plan.ids_T), one)})
    _refuse_non_finite_losses(learner, torch.stack(losses), window, step)
    clock.lap("communication")
    set_learning_rate(learner.optimizer, learning_rate(step, run.train))
    norm = _move(learner, window, step)
    clock.lap("optimizer")
    share = one / learner.accelerator.num_processes
    once = {"loss": (torch.stack(losses).sum(), share), "gradient_norm": (norm * share, share)}
    return summed([*metrics, once])


def make_graphs(learner: Learner) -> None:
    """Compile what a GPU runs, on a batch that depends on the run alone; every process calls it before its first step.

    In which order a graph adds follows from the sizes that it first sees, so a run that goes on in another process
    would else round in another way. Nothing of the learner changes.
    """
    here = blank_batch(learner.run, learner.accelerator.device)
    with gradient_exchange(learner, is_last=False):
        taps_TLD = here.taps_TLD.requires_grad_()  # asked for alone, so that no parameter is given a gradient
        pooled = here.slots.valid_AK.new_ones(2, dtype=torch.float64)
        # Not through what accelerate wrapped: DeepSpeed would exchange gradients that are not there.
        loss, _ = judge_blocks(learner, draft_blocks(learner.draft, here), here, pooled, step=0)
        torch.autograd.grad(loss, taps_TLD)


def micro_step(learner: Learner, here: Batch, pooled: Tensor, step: int, is_last: bool) -> Priced:
    """Forward and backward of one micro-batch; its gradients are added to those that are there.

    ``here`` is on the device, and so are the step's denominators, pooled. Returns: the loss and what to log, detached.
    """
    clock = learner.stopwatch
    clock.lap("data_wait")
    with gradient_exchange(learner, is_last):
        loss, found = judge_blocks(learner, draft_blocks(learner.wrapped, here), here, pooled, step)
        clock.lap("forward")
        whole_loss = loss * learner.accelerator.num_processes  # what the processes exchange is a mean
        if learner.engine:
            learner.engine.backward(whole_loss, scale_wrt_gas=False)
        else:
            torch.autograd.backward(whole_loss)
    clock.lap("communication" if is_last and clock.sees_exchange else "backward")
    return loss.detach(), found


def draft_blocks(draft: nn.Module, here: Batch) -> DraftOutput:
    """What the draft, plain or as accelerate wrapped it, says about a batch on the device."""
    output: DraftOutput = draft(here.ids_T, here.positions_T, here.taps_TLD, here.starts_A, here.anchors_A)
    return output


def judge_blocks(learner: Learner, output: DraftOutput, here: Batch, pooled: Tensor, step: int) -> Priced:
    """The loss of what the draft said about a batch and what to log of it, as ``objective``."""
    section, head_VD = learner.run.objective, learner.draft.head_VD
    assert head_VD is not None
    with learner.accelerator.autocast():
        return objective(output, head_VD, here, section, acceptance_weight(step, section), pooled)


def gradient_exchange(learner: Learner, is_last: bool) -> AbstractContextManager[None]:
    """Exchange gradients in the last micro-step only (ZeRO-2 keeps a part of them, so it reduces in each)."""
    if learner.engine:
        learner.engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()
    exchange: AbstractContextManager[None] = learner.accelerator.no_sync(learner.wrapped)
    return nullcontext() if is_last else exchange


def _move(learner: Learner, window: Sequence[Plan], step: int) -> Tensor:
    """Clip and move unless a gradient is not finite. Returns: the gradient norm before clipping."""
    if learner.engine:
        learner.engine.step()
        is_finite = not learner.engine.optimizer.overflow
        norm = torch.as_tensor(learner.engine.get_global_grad_norm(), device=learner.accelerator.device)
    else:
        limit = learner.run.train.max_grad_norm
        norm = whole(learner.accelerator.clip_grad_norm_(learner.draft.parameters(), limit))
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            learner.optimizer.step()
        learner.optimizer.zero_grad()
    if not is_finite:
        raise TrainingError(_message("gradient", step, _indices(learner, window)))
    return norm.detach()


def _refuse_non_finite_losses(learner: Learner, losses_M: Tensor, window: Sequence[Plan], step: int) -> None:
    is_bad_N = learner.accelerator.gather((~torch.isfinite(losses_M)).long()).bool()
    if is_bad_N.any():
        raise TrainingError(_message("loss", step, _indices(learner, window)[is_bad_N]))


def _indices(learner: Learner, window: Sequence[Plan]) -> Tensor:
    """Record indices of the step's sequences on all processes, one row a micro-step: [N, B]."""
    indices = torch.tensor([plan.indices for plan in window], device=learner.accelerator.device)
    gathered: Tensor = learner.accelerator.gather(indices)
    return gathered


def _message(what: str, step: int, indices: Tensor) -> str:
    return (
        f"step {step}: the {what} is not finite; the optimizer has not moved. Sequences of the record: "
        f"{sorted(set(indices.flatten().tolist()))}; look at them, or lower train.learning_rate and resume"
    )
