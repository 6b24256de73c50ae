"""What is timed: a micro-step, its two halves alone, and whole steps; all of it training's own functions."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cached_property, partial
from itertools import count

import torch
from torch import Tensor

from dspark.draft.model import DraftOutput
from dspark.train import timing
from dspark.train.batches import Record, read_windows, share_of
from dspark.train.log import PooledMetrics
from dspark.train.objective import denominators
from dspark.train.step import Learner, draft_blocks, gradient_exchange, judge_blocks, micro_step, train_step


class MicroStep:
    """The first micro-step of the run on data that is on the device already, and its two halves alone.

    Gradients are not exchanged between processes, as in all micro-steps of a step but the last. ``clear`` drops every
    gradient and belongs before each call.
    """

    def __init__(self, learner: Learner, record: Record) -> None:
        self.learner, device = learner, learner.accelerator.device
        share = share_of(learner.accelerator, learner.run.train)
        with closing(read_windows(record, learner.run, share, share.starts(0, 1), device)) as windows:
            _, feed = next(windows)
            self.here = next(feed)
        self.pooled = denominators(self.here.slots, learner.run.objective.decay_positions)

    @cached_property
    def output(self) -> DraftOutput:
        """What the draft says, in leaves of its own; made when it is first asked for, as ``pulls`` is."""
        with torch.no_grad():
            said = draft_blocks(self.learner.wrapped, self.here)
        return DraftOutput(*(None if x is None else x.detach().requires_grad_() for x in said))  # type: ignore[arg-type]

    @cached_property
    def pulls(self) -> list[Tensor]:
        """A random gradient of each thing that the draft says."""
        generator = torch.Generator(self.pooled.device).manual_seed(self.learner.run.seed)
        normal = partial(torch.randn, generator=generator, device=self.pooled.device)
        return [normal(x.shape, dtype=x.dtype) for x in _own_tensors(self.output)]

    def clear(self) -> None:
        """No gradient is held."""
        for tensor in (*self.learner.draft.parameters(), *self.__dict__.get("output", ())):
            if tensor is not None:
                tensor.grad = None

    def whole(self) -> Tensor:
        """Forward and backward, as ``train_step`` does them. Returns: the loss."""
        loss, _ = micro_step(self.learner, self.here, self.pooled, self._step, is_last=False)
        return loss

    def loss(self) -> Tensor:
        """From what the draft said to the loss and the gradients of hidden, mixed, markov and confidence logits."""
        loss, _ = judge_blocks(self.learner, self.output, self.here, self.pooled, self._step)
        torch.autograd.backward(loss)
        return loss.detach()

    def body(self) -> None:
        """The draft alone: forward, and backward from a random gradient of what it says."""
        with gradient_exchange(self.learner, is_last=False):
            torch.autograd.backward(_own_tensors(draft_blocks(self.learner.wrapped, self.here)), self.pulls)

    @property
    def _step(self) -> int:
        return self.learner.run.objective.acceptance_warmup_steps


@contextmanager
def whole_steps(learner: Learner, record: Record) -> Iterator[Callable[[], None]]:
    """Yields a function that takes the next step of training, from the wait for its data to the sums of its metrics;
    it can be called as often as ``time_calls`` does.
    """
    run, device, share = learner.run, learner.accelerator.device, share_of(learner.accelerator, learner.run.train)
    starts = share.starts(0, timing.WARMUPS + timing.REPEATS)
    steps, metrics = count(), PooledMetrics(learner.stopwatch)
    with closing(read_windows(record, run, share, starts, device)) as windows:

        def take() -> None:
            window, feed = next(windows)
            metrics.add(train_step(learner, window, next(steps), feed))

        yield take


def _own_tensors(said: DraftOutput) -> list[Tensor]:
    """What the draft computed; markov_VR is a parameter."""
    return [x for x in (said.hidden_AKD, said.mixed_AKR, said.confidence_logits_AK) if x is not None]
