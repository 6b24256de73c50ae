"""Ranks as GPUs of one machine: sums and gathers over peer memory, in captured graphs, without the host."""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.distributed_c10d import Store
from torch.nn import functional

from dspark.kernels import MAX_TOKENS, exchange, residual
from dspark.kernels.residual.reference import partial_sum
from dspark.verifier.ranks.processes import Processes, silence

LONG_ROWS = 2048
"""Rows of a longer sum that lie open to the other ranks at a time."""


class Devices(Processes):
    """Ranks that reach each other's memory; the processes' sockets are used only to meet before the first sum.

    A window's rows are sent to every rank (``kernels.exchange``). More rows, those of a prompt, are laid open in two
    memories in turn: all ranks meet, then each reads every other's. So one meeting a sum is enough: who writes the same
    memory again has met all the others since, and they had read it before they came.
    """

    def __init__(self, store: Store, rank: int, world_size: int, limit_seconds: float) -> None:
        super().__init__(store, rank, world_size, limit_seconds)
        self._exchanges: dict[int, exchange.Exchange] = {}
        self._laid_open: dict[int, list[Tensor]] = {}
        self._turn, self._kept = 0, list[object]()

    def reserve(self, width: int) -> None:
        if width not in self._exchanges:
            num_slots = exchange.NUM_TURNS * self.world_size * MAX_TOKENS * width
            every = self.share(num_slots + 2 * LONG_ROWS * width)
            own, device, is_gpu = every[self.rank][:num_slots], every[self.rank].device, every[self.rank].is_cuda
            self._exchanges[width] = exchange.Exchange(
                self.rank,
                torch.tensor([memory.data_ptr() for memory in every], device=device),
                exchange.empty_slots(own, self.world_size, MAX_TOKENS, width),
                torch.zeros(MAX_TOKENS, dtype=torch.int32, device=device),
                torch.zeros(MAX_TOKENS, dtype=torch.int32, pin_memory=is_gpu),
                self.limit_seconds,
            )
            self._laid_open[width] = [memory[num_slots:].view(2, LONG_ROWS, width) for memory in every]
            if is_gpu:
                torch.cuda.synchronize(device)
        super().reserve(width)

    def share(self, size: int) -> list[Tensor]:
        """Memory of ``size`` float32 of every rank, which all of them can read and write."""
        # Torch would make a multicast object at the rendezvous, which not every machine can bear; we use none.
        os.putenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        device = torch.device("cuda", torch.cuda.current_device())
        memory = symmetric_memory.empty(size, dtype=torch.float32, device=device)
        assert dist.group.WORLD is not None
        handle = symmetric_memory.rendezvous(memory, dist.group.WORLD)
        self._kept += [memory, handle]
        return [handle.get_buffer(rank, (size,), torch.float32) for rank in range(self.world_size)]

    def check(self) -> None:
        """See ``Ranks``: reads, in pinned memory, whether the device waited for a rank in vain."""
        for memory in self._exchanges.values():
            missed = int(memory.errors_P.max())
            if missed:
                raise self.lost(missed - 1, silence(self.limit_seconds))

    def add_norm(
        self, parts_TKD: Tensor, weights_TK: Tensor | None, residual_TD: Tensor, norm_weight_D: Tensor, eps: float,
        *, is_chained: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if len(residual_TD) <= MAX_TOKENS:
            tensors = (parts_TKD, weights_TK, residual_TD, norm_weight_D)
            return exchange.add_norm(*tensors, eps, self._exchanges[residual_TD.shape[1]], is_chained=is_chained)
        found = []
        for start in range(0, len(residual_TD), LONG_ROWS):
            rows = slice(start, start + LONG_ROWS)
            weights = None if weights_TK is None else weights_TK[rows]
            every = self._lay_open(partial_sum(parts_TKD[rows], weights), residual_TD.shape[1])
            found.append(residual.add_norm(torch.stack(every, 1), None, residual_TD[rows], norm_weight_D, eps))
        residuals, normed = zip(*found, strict=True)
        return torch.cat(residuals), torch.cat(normed)

    def _lay_open(self, values: Tensor, width: int) -> list[Tensor]:
        """Every rank's values, of one shape, at most LONG_ROWS * width; the second call from this one replaces them."""
        self._turn = 1 - self._turn
        every = [memory_2ND[self._turn].view(-1)[: values.numel()] for memory_2ND in self._laid_open[width]]
        every[self.rank].copy_(values.flatten())
        self.gather(torch.zeros(1, dtype=torch.int32, device=values.device))
        return [memory_N.view(values.shape) for memory_N in every]

    def gather(self, values: Tensor, *, is_chained: bool = False) -> Tensor:
        """See ``Ranks``; as four-byte numbers, in rows of the slots' width, or laid open where they are more than these
        hold and not a window's. Not those: the replays of a captured graph would not take turns.
        """
        memory = next(iter(self._exchanges.values()))
        words_N, width = values.contiguous().view(-1).view(torch.int32), memory.slots_SRPD.shape[-1]
        size = len(words_N)
        if size > MAX_TOKENS * width and len(values) > MAX_TOKENS:
            pieces = torch.split(words_N.view(torch.float32), LONG_ROWS * width)
            every_RN = torch.cat([torch.stack(self._lay_open(piece_N, width)) for piece_N in pieces], 1)
            return every_RN.view(values.dtype).view(self.world_size, *values.shape)
        if size > width:
            words_N = functional.pad(words_N, (0, -size % width))
        rows = torch.split(words_N.view(-1, min(size, width)), MAX_TOKENS)
        found = [exchange.gather(rows_TC, memory, is_chained=is_chained).flatten(1) for rows_TC in rows]
        words_RN = found[0] if len(found) == 1 else torch.cat(found, 1)
        return words_RN[:, :size].contiguous().view(values.dtype).view(self.world_size, *values.shape)
