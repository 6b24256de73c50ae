"""The verifier as a ``Target``: one sequence, static buffers, a captured pass for every window length."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from dspark.errors import ConfigError
from dspark.kernels import MAX_TOKENS, kda, projection, router
from dspark.target.config import load_target_config
from dspark.target.loading import check_taps
from dspark.types import TargetOutput
from dspark.verifier.blocks import Chain
from dspark.verifier.buffers import allocate_buffers
from dspark.verifier.calls import Caller, call
from dspark.verifier.capture import Captured
from dspark.verifier.plan import free_bytes, make_plan
from dspark.verifier.sharding import load_weights
from dspark.verifier.weights import Shard, VerifierWeights
from dspark.verifier.window import Window, read_window

WHOLE = Shard()


@dataclass(frozen=True)
class VerifierCache:
    """The sequence that a verifier holds since its ``number``-th prefill; a later prefill takes its place."""

    number: int


class Verifier:
    """One rank's engine over one sequence at a time.

    Raises: ConfigError for a GPU before sm_90, or tapped layers that are not there.

    With a world of one it is a whole ``Target``. A rank of several, alone, adds its own partial sums only: its output
    means nothing, its time does. Memory for ``capacity_tokens`` is allocated here; a longer sequence is refused.
    """

    def __init__(
        self,
        weights: VerifierWeights,
        capacity_tokens: int,
        target_layer_ids: tuple[int, ...] = (),
        is_chained: bool = True,
    ) -> None:
        _check_device(weights.device)
        check_taps(target_layer_ids, weights.config.num_hidden_layers)
        self.weights, self.config, self.is_chained = weights, weights.config, is_chained
        self.target_layer_ids = target_layer_ids
        self.buffers = allocate_buffers(weights.config, weights.shard, capacity_tokens, weights.dtype, weights.device)
        self.ids_T = torch.zeros(MAX_TOKENS, dtype=torch.int64, device=weights.device)
        self.count_1 = torch.zeros(1, dtype=torch.int64, device=weights.device)
        self.most_tokens = 0
        """At least the committed length; exact unless device-resident steps ran since it was last read."""
        self._windows: dict[int, Captured[Window]] = {}
        self._dense: dict[int, router.Dispatch] = {}
        self._number = 0
        self._staged: Window | None = None

    @classmethod
    def load(
        cls,
        folder: Path | str,
        capacity_tokens: int,
        target_layer_ids: tuple[int, ...] = (),
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        shard: Shard = WHOLE,
    ) -> Self:
        """Plan, then read a rank's slices.

        Raises: ConfigError when the memory is missing, before it is allocated; as ``load_weights``.
        """
        plan = make_plan(load_target_config(folder), shard, capacity_tokens, dtype, device)
        plan.check(free_bytes(device), str(device))
        return cls(load_weights(folder, shard, dtype, device), capacity_tokens, target_layer_ids)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def embedding_VD(self) -> torch.Tensor:
        return self.weights.embedding_VD

    @property
    def head_VD(self) -> torch.Tensor:
        return self.weights.head_VD

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rank's part of the head on last hidden states [..., D]: float32 [..., V / world]."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        rows = [
            projection.project(part_TD, self.head_VD, self.buffers.counters, out_dtype=wide)
            for part_TD in torch.split(hidden.reshape(-1, self.hidden_size), MAX_TOKENS)
        ]
        return torch.cat(rows).reshape(*hidden.shape[:-1], -1)

    @torch.no_grad()
    def prefill(self, ids: Sequence[torch.Tensor]) -> tuple[VerifierCache, TargetOutput]:
        """See ``dspark.types.Target``: one sequence, read in windows of 16 tokens. An earlier sequence is forgotten.

        Raises: ConfigError for several sequences, or one that exceeds the capacity.
        """
        _check_single(len(ids))
        self._check_capacity(0, len(ids[0]))
        self._number += 1
        self.buffers.clear()
        self._staged, self.most_tokens = None, 0
        cache = VerifierCache(self._number)
        outputs = []
        for ids_T in torch.split(ids[0], MAX_TOKENS):
            outputs.append(self.verify(ids_T[None], cache))
            self.commit(cache, torch.tensor([len(ids_T)]))
        taps_NLD = torch.cat([output.taps_NLD for output in outputs])
        return cache, TargetOutput(taps_NLD, torch.cat([output.last_hidden_ND for output in outputs]))

    @torch.no_grad()
    def verify(self, ids_BT: torch.Tensor, cache: VerifierCache) -> TargetOutput:
        """See ``dspark.types.Target``. Raises: ConfigError for more than 16 tokens or past the capacity."""
        self._check(cache)
        num_sequences, num_tokens = ids_BT.shape
        _check_single(num_sequences)
        self.make_room(num_tokens)
        self.ids_T[:num_tokens].copy_(ids_BT[0])
        if num_tokens not in self._windows:
            self.dense(num_tokens)
            self._windows[num_tokens] = Captured(lambda: self.read(num_tokens), self.weights.device)
        self._staged = window = self._windows[num_tokens]()
        return TargetOutput(window.taps_TLD.clone(), window.hidden_TD.clone())

    @torch.no_grad()
    def commit(self, cache: VerifierCache, counts_B: torch.Tensor) -> None:
        """See ``dspark.types.Target``."""
        self._check(cache)
        counts, num_staged = counts_B.tolist(), 0 if self._staged is None else len(self._staged.hidden_TD)
        if len(counts) != 1 or not 0 <= counts[0] <= num_staged:
            raise ValueError(f"expected one count in 0..{num_staged} (the staged tokens), got {counts}")
        if self._staged is not None:
            self.count_1.copy_(counts_B)
            self.commit_window(self._staged, self.count_1)
        self.most_tokens += counts[0]
        self._staged = None

    def read(self, num_tokens: int, call: Caller = call) -> Window:
        """One pass over the first ``num_tokens`` of ids_T."""
        chain = Chain(call, self.config, self.buffers, self.is_chained)
        return read_window(self.ids_T[:num_tokens], self.weights, self.target_layer_ids, self.dense(num_tokens), chain)

    def commit_window(self, window: Window, count_1: torch.Tensor, call: Caller = call) -> None:
        """Make the first count_1 tokens of a window permanent."""
        if window.projected_LTC is not None:
            linear, buffers = self.weights.linear, self.buffers
            assert linear is not None
            call(
                "KDA commit",
                kda.commit,
                window.projected_LTC,
                buffers.history_LWC,
                linear.conv_LCJ,
                linear.a_log_LH,
                linear.dt_bias_LHE,
                buffers.state_LHEF,
                self.config.kda_lower_bound,
                count_1,
                is_chained=self.is_chained,
            )
        call("Length", self.buffers.length_1.add_, count_1)

    def drop_stage(self) -> None:
        """Forget the staged tokens: a commit of them is refused from now on."""
        self._staged = None

    def dense(self, num_tokens: int) -> router.Dispatch:
        """The constant dispatch of a dense MLP, made once."""
        if num_tokens not in self._dense:
            self._dense[num_tokens] = router.dense_dispatch(num_tokens, self.weights.device)
        return self._dense[num_tokens]

    def make_room(self, num_tokens: int) -> None:
        """Raises: ConfigError when ``num_tokens`` more would not fit a window or the memory."""
        if not 1 <= num_tokens <= MAX_TOKENS:
            raise ConfigError(f"the verifier reads 1 to {MAX_TOKENS} tokens at a time, got {num_tokens}")
        if self.most_tokens + num_tokens > self.buffers.capacity_tokens:
            self.most_tokens = int(self.buffers.length_1)
        self._check_capacity(self.most_tokens, num_tokens)

    def _check_capacity(self, held_tokens: int, num_tokens: int) -> None:
        capacity = self.buffers.capacity_tokens
        if held_tokens + num_tokens > capacity:
            raise ConfigError(
                f"the verifier has room for {capacity} tokens and holds {held_tokens}: {num_tokens} more do not fit; "
                f"give it a larger capacity"
            )

    def _check(self, cache: VerifierCache) -> None:
        if cache.number != self._number:
            raise ValueError("this sequence was replaced: the verifier holds only that of its last prefill")


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        raise ConfigError(
            f"the verifier's kernels need compute capability 9.0, found {torch.cuda.get_device_name(device)}"
        )


def _check_single(num_sequences: int) -> None:
    if num_sequences != 1:
        raise ConfigError(f"the verifier reads one sequence at a time, got {num_sequences}; read them one by one")
