"""The verifier as a ``Target``: one sequence, static buffers, a captured pass for every window length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from dspark.errors import ConfigError
from dspark.kernels import MAX_TOKENS, kda, projection, router
from dspark.target.config import load_target_config
from dspark.target.loading import check_ids
from dspark.types import TargetOutput
from dspark.verifier.blocks import Chain, Window, read_window
from dspark.verifier.buffers import allocate_buffers
from dspark.verifier.calls import Caller, call, named
from dspark.verifier.capture import Captured
from dspark.verifier.plan import PIECE_TOKENS, check_device, free_bytes, make_plan
from dspark.verifier.ranks import ALONE, Ranks
from dspark.verifier.reading import PackedReader, read_packed
from dspark.verifier.sharding import load_weights
from dspark.verifier.weights import Dtypes, Shard, VerifierWeights


class VerifierCache:
    """The sequence that a verifier holds since the prefill that gave this; a later prefill takes its place."""


class Verifier(PackedReader):
    """One rank's engine over one sequence at a time: a ``Target``, whole on each rank as a ``PackedReader`` is.

    Memory for ``capacity_tokens`` is allocated here; a longer sequence is refused.
    Raises: ConfigError for a GPU before sm_90, room for no token, or tapped layers that are not there.
    """

    def __init__(
        self, weights: VerifierWeights, capacity_tokens: int, target_layer_ids: tuple[int, ...] = (),
        ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        super().__init__(weights, target_layer_ids, ranks)
        if weights.device.type == "cuda":
            from dspark.kernels.launch import keep_shared_memory  # Triton, which a CPU may lack

            keep_shared_memory()
        self.config, self.is_chained = weights.config, True
        self.buffers = allocate_buffers(weights.config, weights.shard, capacity_tokens, weights.dtype, weights.device)
        self.ids_T = torch.zeros(MAX_TOKENS, dtype=torch.int64, device=weights.device)
        self.count_1 = torch.zeros(1, dtype=torch.int64, device=weights.device)
        self.most_tokens = 0
        """At least the committed length; exact unless device-resident steps ran since it was last read."""
        self._windows: dict[int, Captured[Window]] = {}
        self.dense = {n: router.dense_dispatch(n, weights.device) for n in range(1, MAX_TOKENS + 1)}
        """By window length: the constant dispatch of a dense MLP."""
        self.forced: dict[int, Sequence[router.Dispatch]] = {}
        """By window length: what the mixture layers' experts get, one a layer, in passes captured from then on."""
        self._cache = VerifierCache()
        self._staged: Window | None = None

    @classmethod
    def load(
        cls, folder: Path | str, capacity_tokens: int, target_layer_ids: tuple[int, ...] = (),
        dtype: Dtypes = torch.bfloat16, device: torch.device | str = "cuda", ranks: Ranks = ALONE,
    ) -> Self:  # fmt: skip
        """Plan, then read a rank's slices. Raises: ConfigError when the memory is missing; as ``load_weights``."""
        check_device(torch.device(device))
        shard = Shard(ranks.rank, ranks.world_size)
        plan = make_plan(load_target_config(folder), shard, capacity_tokens, dtype, device)
        plan.check(free_bytes(device), str(device))
        weights = load_weights(folder, shard, dtype, device)
        return cls(weights, capacity_tokens, target_layer_ids, ranks=ranks)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Every rank's part of the head, gathered. Of a rank alone its own V / world."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        rows = [
            projection.project(part_TD, self.weights.head_VD, self.buffers.counters, out_dtype=wide)
            for part_TD in torch.split(hidden.reshape(-1, self.hidden_size), MAX_TOKENS)
        ]
        logits_RNV = self.ranks.gather(torch.cat(rows))
        return logits_RNV.transpose(0, 1).reshape(*hidden.shape[:-1], -1)

    @torch.no_grad()
    def prefill(self, ids: Sequence[torch.Tensor]) -> tuple[VerifierCache, TargetOutput]:
        """One sequence, whose predecessor is forgotten: up to 16 tokens as a window, more by ``read_packed``.
        Raises: ConfigError for several sequences, an empty one, one that exceeds the capacity, or ids that are none of
        the target's; then the earlier one is still there.
        """
        _check_single(len(ids))
        if ids[0].dim() != 1 or not len(ids[0]):
            raise ConfigError(f"a prompt is a row of at least one token id, found shape {list(ids[0].shape)}")
        check_ids(ids[0], self.vocab_size)
        self._check_capacity(0, len(ids[0]))
        self.buffers.clear()
        self._staged, self.most_tokens = None, 0
        self._cache = cache = VerifierCache()
        if len(ids[0]) <= MAX_TOKENS:
            output = self.verify(ids[0][None], cache)
            self.commit(cache, torch.tensor([len(ids[0])]))
            return cache, output
        outputs = []
        for ids_T in torch.split(ids[0], PIECE_TOKENS):
            self.ranks.begin_step()
            held = (self.buffers, self.most_tokens, self.ranks)
            outputs.append(read_packed(self.weights, [ids_T], self.target_layer_ids, *held))
            self.most_tokens += len(ids_T)
        taps_NLD = torch.cat([output.taps_NLD for output in outputs])
        return cache, TargetOutput(taps_NLD, torch.cat([output.last_hidden_ND for output in outputs]))

    @torch.no_grad()
    def verify(self, ids_BT: torch.Tensor, cache: VerifierCache) -> TargetOutput:
        """Raises: ConfigError for more than 16 tokens, past the capacity, or wrong ids.
        Ids that lie on a GPU are taken as they are: looking at them would wait for it.
        """
        self.check_held(cache)
        num_sequences, num_tokens = ids_BT.shape
        _check_single(num_sequences)
        if not ids_BT.is_cuda:
            check_ids(ids_BT, self.vocab_size)
        self.make_room(num_tokens)
        self.ids_T[:num_tokens].copy_(ids_BT[0])
        self._staged = window = self._window(num_tokens)()
        return TargetOutput(window.taps_TLD.clone(), window.hidden_TD.clone())

    @torch.no_grad()
    def commit(self, cache: VerifierCache, counts_B: torch.Tensor) -> None:
        self.check_held(cache)
        counts, num_staged = counts_B.tolist(), 0 if self._staged is None else len(self._staged.hidden_TD)
        if len(counts) != 1 or not isinstance(counts[0], int) or not 0 <= counts[0] <= num_staged:
            raise ValueError(f"expected one count in 0..{num_staged} (the staged tokens), got {counts}")
        self.ranks.check()
        if self._staged is not None:
            self.count_1.copy_(counts_B)
            self.commit_window(self._staged, self.count_1)
        self.most_tokens += counts[0]
        self._staged = None

    def read(self, num_tokens: int, call: Caller = call) -> Window:
        """One pass over the first ``num_tokens`` of ids_T."""
        run = named("", call, is_chained=self.is_chained)
        chain = Chain(call, run, self.config, self.buffers, self.forced.get(num_tokens, ()))
        ids_T, dense = self.ids_T[:num_tokens], self.dense[num_tokens]
        return read_window(ids_T, self.weights, self.target_layer_ids, dense, chain, self.ranks)

    def commit_window(self, window: Window, count_1: torch.Tensor, call: Caller = call) -> None:
        """Make the first count_1 tokens of a window permanent."""
        if window.staged is not None:
            memory = (self.buffers.history_LWC, self.buffers.state_LHEF)
            call("KDA commit", kda.commit, *window.staged, *memory, count_1, is_chained=self.is_chained)
        call("Length", self.buffers.length_1.add_, count_1)

    def capture(self, most_tokens: int) -> None:
        """Make rounds of 1 to ``most_tokens`` tokens ready beforehand; what is staged is forgotten."""
        for num_tokens in range(1, most_tokens + 1):
            self.make_room(num_tokens)
            self.commit_window(self._window(num_tokens)(), self.count_1.zero_())
        self.drop_stage()

    def _window(self, num_tokens: int) -> Captured[Window]:
        if num_tokens not in self._windows:
            self._windows[num_tokens] = Captured(lambda: self.read(num_tokens), self.weights.device)
        return self._windows[num_tokens]

    def drop_stage(self) -> None:
        """Forget the staged tokens: a commit of them is refused from now on."""
        self._staged = None

    def make_room(self, num_tokens: int) -> None:
        """Raises: ConfigError when ``num_tokens`` more do not fit a window or the memory; RankError for a lost rank."""
        if not 1 <= num_tokens <= MAX_TOKENS:
            raise ConfigError(f"the verifier reads 1 to {MAX_TOKENS} tokens at a time, got {num_tokens}")
        if self.most_tokens + num_tokens > self.buffers.capacity_tokens:
            self.most_tokens = int(self.buffers.length_1)
        self._check_capacity(self.most_tokens, num_tokens)
        self.ranks.begin_step()

    def _check_capacity(self, held: int, more: int) -> None:
        capacity = self.buffers.capacity_tokens
        if held + more > capacity:
            raise ConfigError(f"the verifier has room for {capacity} tokens and holds {held}: {more} more do not fit")

    def check_held(self, cache: VerifierCache) -> None:
        """Raises: ValueError unless this is the sequence of the last prefill."""
        if cache is not self._cache:
            raise ValueError("this sequence was replaced: the verifier holds only that of its last prefill")


def _check_single(num_sequences: int) -> None:
    if num_sequences != 1:
        raise ConfigError(f"the verifier reads one sequence at a time, got {num_sequences}; read them one by one")
