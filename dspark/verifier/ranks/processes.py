"""Ranks as processes on CPUs, and how the others find out which one is lost."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from dspark.errors import RankError
from dspark.kernels.residual.reference import add_norm, partial_sum
from dspark.verifier.ranks.alone import Ranks

START_SECONDS = 600.0
"""How long ranks wait for each other before the first sum, while they read weights."""
GRACE_SECONDS = 0.5
"""How long a rank that misses another one listens to whom that one misses."""


class Processes(Ranks):
    """Ranks that send each other their partial sums over sockets (gloo) and add them in the order of the ranks.

    A rank that is waited for longer than ``limit_seconds``, or whose connection closes, ends the others: each writes
    whom it misses to the store, and the one at the end of the chain of those who miss each other is the one named.
    """

    def __init__(self, store: Store, rank: int, world_size: int, limit_seconds: float) -> None:
        self.rank, self.world_size, self.limit_seconds = rank, world_size, limit_seconds
        self.store, self.num_steps = store, 0
        if not dist.is_initialized():
            start = timedelta(seconds=START_SECONDS)
            group = PrefixStore("group", store)
            dist.init_process_group("gloo", store=group, rank=rank, world_size=world_size, timeout=start)

    def reserve(self, width: int) -> None:
        self._gather(torch.zeros(1), START_SECONDS)

    def begin_step(self) -> None:
        """See ``Ranks``: counts a step in the store."""
        self.num_steps += 1
        try:
            self.store.set(f"step/{self.rank}", str(self.num_steps))
        except RuntimeError as error:
            raise RankError("the process that started the ranks has ended, and its store with it") from error
        self.check()

    def add_norm(
        self, parts_TKD: Tensor, weights_TK: Tensor | None, residual_TD: Tensor, norm_weight_D: Tensor, eps: float,
        *, is_chained: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        partials_RTD = self.gather(partial_sum(parts_TKD, weights_TK))
        return add_norm(partials_RTD.transpose(0, 1), None, residual_TD, norm_weight_D, eps)

    def gather(self, values: Tensor, *, is_chained: bool = False) -> Tensor:
        return self._gather(values, self.limit_seconds)

    def lost(self, peer: int, how: str) -> RankError:
        """What to raise when ``peer`` is missed: the rank that it, or the one that it misses, waits for in vain."""
        seen = {self.rank}
        try:
            self.store.set(f"misses/{self.rank}", f"{peer} {how}")
            time.sleep(GRACE_SECONDS)
            while peer not in seen and self.store.check([f"misses/{peer}"]):
                seen.add(peer)
                other, how = self.store.get(f"misses/{peer}").decode().split(" ", 1)
                peer = int(other)
            step = last_step(self.store, peer)
        except RuntimeError:
            step = "unknown: the process that started the ranks has ended too"
        return RankError(f"rank {peer} {how}; it last reported step {step}")

    def _gather(self, values: Tensor, limit_seconds: float) -> Tensor:
        values = values.contiguous()
        found = values.new_empty(self.world_size, *values.shape)
        found[self.rank] = values
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        works, began = [], time.monotonic()
        try:
            for other in peers:
                works += [(other, dist.irecv(found[other], other)), (other, dist.isend(values, other))]
            for other, work in works:  # noqa: B007
                assert work is not None
                work.wait(timedelta(seconds=limit_seconds))
        except RuntimeError as error:
            is_late = time.monotonic() - began >= limit_seconds
            raise self.lost(other, silence(limit_seconds) if is_late else "has ended") from error
        return found


def silence(seconds: float) -> str:
    """What a rank is said to have done that was waited for so long."""
    return f"has not answered for {seconds:g} s"


def last_step(store: Store, rank: int) -> str:
    """The last step that a rank reported."""
    return store.get(f"step/{rank}").decode() if store.check([f"step/{rank}"]) else "0"
