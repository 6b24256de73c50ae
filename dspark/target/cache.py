"""What the target keeps of the tokens it has read, how sequences lie in a batch, and staging."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dspark.kernels.kda.reference import history_after, state_after


class Layout(NamedTuple):
    """How N rows, sequence after sequence, become B padded rows of T tokens and back.
    Shapes: positions_N int64. For sequences of one length the three index tensors are None and both ways are views.
    """

    num_sequences: int
    num_tokens: int
    positions_N: torch.Tensor
    lengths_B: torch.Tensor
    padded_BT: torch.Tensor | None = None
    packed_N: torch.Tensor | None = None
    is_true_BT: torch.Tensor | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Layout":
        """The layout of sequences of these lengths that start at position 0."""
        longest = max(lengths)
        lengths_B, steps_T = torch.tensor(lengths, device=device), torch.arange(longest, device=device)
        if min(lengths) == longest:
            return cls(len(lengths), longest, steps_T.repeat(len(lengths)), lengths_B)
        starts_B = lengths_B.cumsum(0) - lengths_B
        padded_BT = starts_B[:, None] + torch.minimum(steps_T, lengths_B[:, None] - 1)
        is_true_BT = steps_T < lengths_B[:, None]
        packed_N = is_true_BT.flatten().nonzero()[:, 0]
        return cls(len(lengths), longest, packed_N % longest, lengths_B, padded_BT, packed_N, is_true_BT)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [B, T, ...]; padding repeats a sequence's last row."""
        if self.padded_BT is None:
            return torch.unflatten(x, 0, (self.num_sequences, self.num_tokens))
        return x[self.padded_BT]

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] -> [N, ...]."""
        x = x.flatten(0, 1)
        return x if self.packed_N is None else x.index_select(0, self.packed_N)


class LinearMemory(NamedTuple):
    """What a linear attention layer keeps: its state and the last inputs of the short convolution."""

    state_BHEF: torch.Tensor
    history_BWC: torch.Tensor


class LinearStage(NamedTuple):
    """What T staged tokens would do to a linear attention layer's memory (shapes as ``kda.state_after`` takes them)."""

    window_BWC: torch.Tensor
    k_BTHE: torch.Tensor
    log_decay_BTHE: torch.Tensor
    deltas_BTHF: torch.Tensor
    state_BHEF: torch.Tensor


class View(NamedTuple):
    """How T further tokens of every sequence meet the cache.
    Shapes: sequences_B1 and slots_BT say where the tokens' rows go; bias_BTJ is 0 where token t may see cached row j
    and -inf elsewhere, in float32 or higher.
    """

    layout: Layout
    sequences_B1: torch.Tensor
    slots_BT: torch.Tensor
    bias_BTJ: torch.Tensor


class LingCache:
    """Committed memory of B sequences, and the stage of the last verify.

    Linear layers hold one state each, and their histories stacked over layers (M). Latent layers (every model has one)
    hold a row a token in a buffer that grows by doubling; staged rows lie behind the committed ones.
    """

    def __init__(self, lengths: Sequence[int], linear: Sequence[LinearMemory], latent: Sequence[torch.Tensor]) -> None:
        self.lengths = list(lengths)
        self.rows_MBJC = torch.stack(list(latent))
        nothing = self.rows_MBJC.new_empty(0)
        self.states = [memory.state_BHEF for memory in linear]
        self.histories_MBWC = torch.stack([memory.history_BWC for memory in linear]) if linear else nothing
        self.num_staged = 0
        self._stages: list[LinearStage] = []

    def view(self, num_tokens: int) -> View:
        """Where ``num_tokens`` more tokens of every sequence go and what they see; makes room for them."""
        missing = max(self.lengths) + num_tokens - self.rows_MBJC.shape[2]
        if missing > 0:
            shape = list(self.rows_MBJC.shape)
            shape[2] = max(missing, shape[2])
            self.rows_MBJC = torch.cat((self.rows_MBJC, self.rows_MBJC.new_zeros(shape)), 2)
        device, wide = self.rows_MBJC.device, torch.promote_types(self.rows_MBJC.dtype, torch.float32)
        starts_B1 = torch.tensor(self.lengths, device=device)[:, None]
        slots_BT = starts_B1 + torch.arange(num_tokens, device=device)
        rows_J = torch.arange(max(self.lengths) + num_tokens, device=device)
        bias_BTJ = torch.zeros(*slots_BT.shape, len(rows_J), device=device, dtype=wide)
        bias_BTJ.masked_fill_(rows_J > slots_BT[..., None], -torch.inf)
        lengths_B = torch.full((len(self.lengths),), num_tokens, device=device)
        layout = Layout(len(self.lengths), num_tokens, slots_BT.flatten(), lengths_B)
        return View(layout, torch.arange(len(self.lengths), device=device)[:, None], slots_BT, bias_BTJ)

    def memory(self, linear_layer: int) -> LinearMemory:
        """What one linear attention layer has committed; ``linear_layer`` counts these layers only."""
        return LinearMemory(self.states[linear_layer], self.histories_MBWC[linear_layer])

    def stage(self, stages: list[LinearStage], num_tokens: int) -> None:
        """Remember what ``num_tokens`` verified tokens would do; the latent layers' rows are written already."""
        self._stages, self.num_staged = stages, num_tokens

    def commit(self, counts_B: torch.Tensor) -> None:
        """Make the first counts_B[b] staged tokens of sequence b permanent and drop the rest.
        Raises: ValueError for counts outside 0..T or of the wrong number, T being 0 when nothing is staged.
        """
        counts, expected = counts_B.tolist(), len(self.lengths)
        if len(counts) != expected or not all(0 <= count <= self.num_staged for count in counts):
            raise ValueError(f"expected {expected} counts in 0..{self.num_staged} (the staged tokens), got {counts}")
        if self._stages and any(counts):
            self._commit_linear(counts_B.to(self.rows_MBJC.device), is_whole=min(counts) == self.num_staged)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.stage([], 0)

    def _commit_linear(self, counts_B: torch.Tensor, is_whole: bool) -> None:
        windows, keys, log_decays, deltas, states = zip(*self._stages, strict=True)
        num_layers = len(states)
        counts_MB, num_history = counts_B.expand(num_layers, -1), self.histories_MBWC.shape[2]
        self.histories_MBWC = history_after(torch.stack(windows), counts_MB, num_history)
        if is_whole:
            self.states = list(states)
            return
        flat = (torch.cat([*parts]) for parts in (keys, log_decays, deltas, self.states))
        after = state_after(counts_B.repeat(num_layers), *flat)
        self.states = list(after.chunk(num_layers))
