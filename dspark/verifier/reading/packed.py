"""A target that only reads: packs of whole sequences over ranks, of which nothing is kept."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from dspark.target.config import load_target_config
from dspark.target.loading import check_taps
from dspark.types import TargetOutput
from dspark.verifier.plan import check_device, free_bytes, make_reading_plan
from dspark.verifier.ranks import ALONE, Ranks
from dspark.verifier.reading.passes import read_packed, wide_product
from dspark.verifier.sharding import load_weights
from dspark.verifier.weights import Dtypes, Shard, VerifierWeights


class PackedReader:
    """A ``Reading`` of the target, for recording. Several sequences are one pass, and there is no cache to go on from.

    With all its ``ranks`` it is the whole target on each of them, and every rank makes every call, with the same
    arguments. A rank of several, alone, adds its own partial sums only: its output means nothing, its time does.
    With several ranks every call waits for the GPU, so that a lost rank is named instead of its numbers used.
    Raises: ConfigError for a GPU before sm_90, or tapped layers that are not there; ValueError for the weights of
    another rank.
    """

    def __init__(self, weights: VerifierWeights, target_layer_ids: tuple[int, ...] = (), ranks: Ranks = ALONE) -> None:
        check_device(weights.device)
        if ranks.world_size > 1 and weights.shard != Shard(ranks.rank, ranks.world_size):
            raise ValueError(f"rank {ranks.rank} of {ranks.world_size} was given the weights of {weights.shard}")
        check_taps(target_layer_ids, weights.config.num_hidden_layers)
        self.weights, self.ranks, self.target_layer_ids = weights, ranks, target_layer_ids
        self.vocab_size, self.hidden_size = weights.config.vocab_size, weights.config.hidden_size
        self.num_layers, self.embedding_VD = weights.config.num_hidden_layers, weights.embedding_VD
        ranks.reserve(self.hidden_size)

    @classmethod
    def load(
        cls, folder: Path | str, num_tokens: int, target_layer_ids: tuple[int, ...] = (),
        dtype: Dtypes = torch.bfloat16, device: torch.device | str = "cuda", ranks: Ranks = ALONE,
    ) -> Self:  # fmt: skip
        """Plan packs of ``num_tokens``, then read a rank's slices.
        Raises: ConfigError when the memory is missing; as ``load_weights``.
        """
        check_device(torch.device(device))
        shard, config = Shard(ranks.rank, ranks.world_size), load_target_config(folder)
        plan = make_reading_plan(config, shard, num_tokens, dtype, device, len(target_layer_ids))
        plan.check(free_bytes(device), str(device))
        return cls(load_weights(folder, shard, dtype, device), target_layer_ids, ranks)

    @cached_property
    def head_VD(self) -> torch.Tensor:
        """The whole head, gathered at the first use, which all ranks make together, and kept beside the rank's part."""
        return self.ranks.gather(self.weights.head_VD).flatten(0, 1)

    @torch.no_grad()
    def prefill(self, ids: Sequence[torch.Tensor]) -> tuple[Any, TargetOutput]:
        """``read_packed``, without a cache. Raises: as that; RankError for a lost rank."""
        self.ranks.begin_step()
        output = read_packed(self.weights, ids, self.target_layer_ids, ranks=self.ranks)
        self._settle()
        return None, output

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Every rank's part of the head, gathered, of any number of rows. Of a rank alone its own V / world."""
        logits_RNV = self.ranks.gather(wide_product(hidden.reshape(-1, self.hidden_size), self.weights.head_VD))
        self._settle()
        return logits_RNV.transpose(0, 1).reshape(*hidden.shape[:-1], -1)

    def _settle(self) -> None:
        if self.ranks.world_size > 1 and self.weights.device.type == "cuda":
            torch.cuda.synchronize(self.weights.device)
        self.ranks.check()
