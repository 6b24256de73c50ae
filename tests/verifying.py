"""What the verifier's tests share."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from dspark.kernels import residual
from dspark.kernels.residual.reference import partial_sum
from dspark.verifier.ranks import Ranks

CAPACITY_TOKENS = 256


def random_ids(vocab_size: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


class Pair(Ranks):
    """Two ranks, or more, as threads of this process, on the CPU."""

    def __init__(self, world_size: int = 2) -> None:
        self.world_size, self.given, self.own = world_size, [None] * world_size, threading.local()
        self.barrier = threading.Barrier(world_size, timeout=60)

    @property
    def rank(self) -> int:  # type: ignore[override]
        """That of the thread that asks."""
        return int(getattr(self.own, "rank", 0))

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What ``work(rank)`` returns on every rank."""
        found = [None] * self.world_size

        def of(rank: int) -> None:
            self.own.rank = rank
            found[rank] = work(rank)

        threads = [threading.Thread(target=of, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert None not in found, "a rank failed"
        return found

    def exchange(self, value: Any) -> list[Any]:
        self.given[self.own.rank] = value
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def add_norm(
        self, parts_TKD: torch.Tensor, weights_TK: torch.Tensor | None, *others: Any, is_chained: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums = self.exchange(partial_sum(parts_TKD, weights_TK))
        return residual.add_norm(torch.stack(sums, 1), None, *others)

    def gather(self, values: torch.Tensor, *, is_chained: bool = False) -> torch.Tensor:
        return torch.stack(self.exchange(values))
