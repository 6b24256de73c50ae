"""What is timed: a micro-step, its two halves alone, and whole steps; all of it training's own functions."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count

import torch
from torch import Tensor

from dspark.draft.model import DraftOutput
from dspark.kernels.transfer import onto
from dspark.train.batches import Record, Share, copied_ahead, read_window, read_windows, with_feed
from dspark.train.log import PooledMetrics
from dspark.train.measure import clock
from dspark.train.objective import denominators
from dspark.train.step import Learner, draft_blocks, gradient_exchange, judge_blocks, micro_step, train_step


class MicroStep:
    """The first micro-step of the run on data that is on the device already, and its two halves alone.

    Gradients are not exchanged between processes, as in all micro-steps of a step but the last. ``clear`` drops every
    gradient and belongs before each call.
    """

    def __init__(self, learner: Learner, record: Record) -> None:
        self.learner, device = learner, learner.accelerator.device
        self.batch = read_window(record, learner.run, 0, share_of(learner), device)[0]
        self.here = next(copied_ahead([self.batch], device))
        self.pooled = onto(device, denominators(self.batch.slots, learner.run.objective.decay_positions))
        with torch.no_grad():
            said = draft_blocks(learner, self.here)
        *three, confidence = said
        hidden_AKD, mixed_AKR, markov_VR = (x.detach().requires_grad_() for x in three)
        confidence = None if confidence is None else confidence.detach().requires_grad_()
        self.output = DraftOutput(hidden_AKD, mixed_AKR, markov_VR, confidence)
        generator = torch.Generator(device).manual_seed(learner.run.seed)
        self._pulls = [
            torch.randn(x.shape, generator=generator, device=device, dtype=x.dtype) for x in _own_tensors(said)
        ]

    def clear(self) -> None:
        """No gradient is held."""
        for tensor in (*self.learner.draft.parameters(), *self.output):
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
            torch.autograd.backward(_own_tensors(draft_blocks(self.learner, self.here)), self._pulls)

    @property
    def _step(self) -> int:
        return self.learner.run.objective.acceptance_warmup_steps


@contextmanager
def whole_steps(learner: Learner, record: Record) -> Iterator[Callable[[], None]]:
    """Yields a function that takes the next step of training, from the wait for its data to the sums of its metrics;
    it can be called as often as ``time_calls`` does.
    """
    run, device, share = learner.run, learner.accelerator.device, share_of(learner)
    starts = share.starts(0, clock.WARMUPS + clock.REPEATS)
    steps, metrics = count(), PooledMetrics(learner.stopwatch)
    with closing(with_feed(read_windows(record, run, share, starts, device), device)) as windows:  # type: ignore[type-var]

        def take() -> None:
            window, feed = next(windows)
            metrics.add(train_step(learner, window, next(steps), feed))

        yield take


def share_of(learner: Learner) -> Share:
    """This process's share of every step."""
    train, accelerator = learner.run.train, learner.accelerator
    return Share(train.batch_size, train.accumulation_steps, accelerator.process_index, accelerator.num_processes)


def _own_tensors(said: DraftOutput) -> list[Tensor]:
    """What the draft computed; markov_VR is a parameter."""
    return [x for x in (said.hidden_AKD, said.mixed_AKR, said.confidence_logits_AK) if x is not None]
