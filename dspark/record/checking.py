"""A finished record held against its target again: what every shard holds, and whether the target still says it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dspark.data.chat import Encoded
from dspark.errors import RecordError
from dspark.record.capture import TOKENS_PER_CALL, label_logprobs
from dspark.record.format import group_by_tokens
from dspark.record.reader import RecordReader
from dspark.types import Target

STATES_TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-3, torch.float64: 1e-6}
"""How far recorded states may lie from those of now, of their norm: another device or library rounds otherwise."""
LOGPROB_TOLERANCE = {torch.bfloat16: 0.2, torch.float32: 2e-3, torch.float64: 2e-3}
"""How far, in the mean, a label's log-probability may lie from what the head says of the recorded state."""


@dataclass(frozen=True)
class ShardCheck:
    """A shard, and what is wrong with it (None: nothing). ``nats`` is the mean negative log-probability of what is to
    be predicted; ``states_error`` the largest distance of recorded states, taps or last, from those of now, of their
    norm. Both are those of the sequences that were derived again, None where the shard cannot be read.
    """

    file: str
    num_tokens: int
    num_supervised: int
    nats: float | None = None
    states_error: float | None = None
    fault: str | None = None


@torch.no_grad()
def check_shards(
    target: Target[Any], sequences: Sequence[Encoded], reader: RecordReader, on_shard: Callable[[], None]
) -> Iterator[ShardCheck]:
    """Verify every shard's checksum, its text, and the rows of the first sequences that the target read together."""
    manifest = reader.manifest
    starts = accumulate((entry.num_sequences for entry in manifest.shards), initial=0)
    for start, entry in zip(starts, manifest.shards, strict=False):
        known = (entry.file, entry.num_tokens, entry.num_supervised)
        members = sequences[start : start + entry.num_sequences]
        pack = group_by_tokens([len(sequence.ids_T) for sequence in members], TOKENS_PER_CALL)[0]
        try:
            nats, error = _derive(target, members[: pack.stop], reader, start)
            is_far = not error <= STATES_TOLERANCE[manifest.torch_dtype]
            fault = f"its states are not those of the target: {error:.2g} of their norm away" if is_far else None
            yield ShardCheck(*known, nats, error, fault)
        except RecordError as error:
            yield ShardCheck(*known, fault=str(error).removeprefix(f"{reader.folder / entry.file}: "))
        on_shard()


def _derive(target: Target[Any], sequences: Sequence[Encoded], reader: RecordReader, start: int) -> tuple[float, float]:
    """Nats and states_error of sequences that are read together. Raises: RecordError for another text, a damaged shard,
    or log-probabilities that the recorded states do not give.
    """
    recorded = [reader[start + row] for row in range(len(sequences))]
    for sequence, found in zip(sequences, recorded, strict=True):
        if not (torch.equal(sequence.ids_T, found.ids_T) and torch.equal(sequence.loss_mask_T, found.loss_mask_T)):
            raise RecordError(f"{sequence.place}: the record holds another text in its place")
    _, output = target.prefill([sequence.ids_T for sequence in sequences])
    is_next_N = torch.cat([found.loss_mask_T for found in recorded]).roll(-1)
    recorded_MD = torch.cat([found.last_hidden_TD for found in recorded])[is_next_N]
    derived_MD = output.last_hidden_ND[is_next_N.to(output.last_hidden_ND.device)]
    labels_M = torch.cat([found.ids_T for found in recorded]).roll(-1)[is_next_N]
    said_M = torch.cat([reader.label_logprobs(start + row) for row in range(len(sequences))])
    given_M = label_logprobs(target, recorded_MD.to(derived_MD.device), labels_M)
    difference = float((given_M - said_M).abs().mean())
    if not difference <= LOGPROB_TOLERANCE[reader.manifest.torch_dtype]:
        raise RecordError(f"its log-probabilities lie {difference:.3g} nats from what the target's head says of it")
    taps = (torch.cat([found.taps_TLD for found in recorded]), output.taps_NLD)
    return -float(said_M.mean()), max(_distance(*taps), _distance(recorded_MD, derived_MD))


def _distance(recorded: Tensor, derived: Tensor) -> float:
    wide = derived.cpu().double()
    return float((recorded.double() - wide).norm() / wide.norm().clamp(min=1e-30))
