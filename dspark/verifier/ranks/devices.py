"""Ranks as GPUs of one machine: sums and gathers over peer memory, in captured graphs, without the host."""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.distributed_c10d import Store
from torch.nn import functional

from dspark.kernels import MAX_TOKENS, exchange
from dspark.verifier.ranks.processes import Processes, silence


class Devices(Processes):
    """Ranks that write to each other's memory; the processes' sockets are used only to meet before the first sum."""

    def __init__(self, store: Store, rank: int, world_size: int, limit_seconds: float) -> None:
        super().__init__(store, rank, world_size, limit_seconds)
        self._exchanges: dict[int, exchange.Exchange] = {}
        self._kept: list[object] = []

    def reserve(self, width: int) -> None:
        if width not in self._exchanges:
            # Torch would make a multicast object at the rendezvous, which not every machine can bear; we use none.
            os.putenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            device = torch.device("cuda", torch.cuda.current_device())
            size = exchange.NUM_TURNS * self.world_size * MAX_TOKENS * width
            memory = symmetric_memory.empty(size, dtype=torch.float32, device=device)
            assert dist.group.WORLD is not None
            handle = symmetric_memory.rendezvous(memory, dist.group.WORLD)
            self._kept += [memory, handle]
            peers = [handle.get_buffer(rank, (size,), torch.float32).data_ptr() for rank in range(self.world_size)]
            self._exchanges[width] = exchange.Exchange(
                self.rank,
                torch.tensor(peers, device=device),
                exchange.empty_slots(memory, self.world_size, MAX_TOKENS, width),
                torch.zeros(MAX_TOKENS, dtype=torch.int32, device=device),
                torch.zeros(MAX_TOKENS, dtype=torch.int32, pin_memory=True),
                self.limit_seconds,
            )
            torch.cuda.synchronize(device)
        super().reserve(width)

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
        """See ``Ranks``; more than 16 tokens in pieces of 16."""
        memory = self._exchanges[residual_TD.shape[1]]
        pieces = []
        for start in range(0, len(residual_TD), MAX_TOKENS):
            rows = slice(start, start + MAX_TOKENS)
            weights = None if weights_TK is None else weights_TK[rows]
            tensors = (parts_TKD[rows], weights, residual_TD[rows], norm_weight_D)
            pieces.append(exchange.add_norm(*tensors, eps, memory, is_chained=is_chained))
        if len(pieces) == 1:
            return pieces[0]
        residuals, normed = zip(*pieces, strict=True)
        return torch.cat(residuals), torch.cat(normed)

    def gather(self, values: Tensor, *, is_chained: bool = False) -> Tensor:
        """See ``Ranks``; as four-byte numbers, in rows of the slots' width."""
        memory = next(iter(self._exchanges.values()))
        words_N, width = values.contiguous().view(-1).view(torch.int32), memory.slots_SRPD.shape[-1]
        size = len(words_N)
        if size > width:
            words_N = functional.pad(words_N, (0, -size % width))
        rows = torch.split(words_N.view(-1, min(size, width)), MAX_TOKENS)
        found = [exchange.gather(rows_TC, memory, is_chained=is_chained).flatten(1) for rows_TC in rows]
        words_RN = found[0] if len(found) == 1 else torch.cat(found, 1)
        return words_RN[:, :size].contiguous().view(values.dtype).view(self.world_size, *values.shape)
