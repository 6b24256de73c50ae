"""A finished record: what its shards hold, and whether its target still says it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.data.chat import Encoded
from dspark.errors import RecordError
from dspark.layers.float8 import from_float8, to_float8
from dspark.record.capture import TOKENS_PER_CALL, judge
from dspark.record.format import Manifest, group_by_tokens, shard_name
from dspark.record.reader import RecordReader
from dspark.types import Reading

STATES_TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-3, torch.float64: 1e-6}
"""How far recorded states may lie from those of now, of their norm: another device or library rounds otherwise."""
FLOAT8_TOLERANCE = 5e-2
"""In addition where taps are float8: what rounds otherwise falls on the other side of a coarse step now and then."""
LOGPROB_TOLERANCE = {torch.bfloat16: 0.2, torch.float32: 2e-3, torch.float64: 2e-3}
"""How far, in the mean, a label's log-probability and the distribution's entropy may lie from what the head says of
the recorded state."""
Texts = Sequence[Encoded] | Mapping[int, Encoded]
"""The sequences of a record, or some of them, by their places in it."""


@dataclass(frozen=True)
class ShardCheck:
    """A shard, and what is wrong with it (None: nothing). ``nats`` and ``entropy`` are the means, over what is to be
    predicted, of the negative log-probability and of the distribution's entropy; ``states_error`` is the largest
    distance of recorded states, taps or last, from those of now, of their norm, in the sequences that were derived
    again. None where the shard cannot be read, or nothing was derived.
    """

    index: int
    nats: float | None = None
    entropy: float | None = None
    states_error: float | None = None
    fault: str | None = None


@torch.no_grad()
def check_shards(
    reader: RecordReader, target: Reading | None, sequences: Texts, shards: Sequence[int] | None = None
) -> Iterator[ShardCheck]:
    """Read every sequence of ``shards`` (None: all), and with it verify its checksum. Where a target is given, hold
    against it the text and what it said of the first sequences of every shard, which it read together.
    """
    for index in range(len(reader.manifest.shards)) if shards is None else shards:
        try:
            logprobs, entropies = zip(*(_scores(reader.fields(place)) for place in reader.members(index)), strict=True)
            means = -float(torch.cat(logprobs).mean()), float(torch.cat(entropies).mean())
            error = _derive(target, sequences, reader, index) if target else None
            is_far = error is not None and not error <= tolerance(reader.manifest)
            fault = f"its states are not those of the target: {error:.2g} of their norm away" if is_far else None
            yield ShardCheck(index, *means, error, fault)
        except RecordError as error:
            yield ShardCheck(index, fault=str(error).removeprefix(f"{reader.folder / shard_name(index)}: "))


def tolerance(manifest: Manifest) -> float:
    """How far recorded states may lie from those of now, of their norm."""
    return STATES_TOLERANCE[manifest.torch_dtype] + (FLOAT8_TOLERANCE if manifest.taps == "float8" else 0)


def _scores(fields: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return fields["label_logprobs_M"], fields["entropies_M"]


def _derive(target: Reading, sequences: Texts, reader: RecordReader, index: int) -> float:
    """states_error of a shard's first sequences. Raises: RecordError for another text, or log-probabilities and
    entropies that the recorded states do not give.
    """
    places = reader.members(index)
    lengths = [len(sequences[place].ids_T) for place in places]
    pack = [places[row] for row in group_by_tokens(lengths, TOKENS_PER_CALL)[0]]
    members, found = [sequences[place] for place in pack], [reader.fields(place) for place in pack]
    for sequence, fields in zip(members, found, strict=True):
        text = {"ids_T": sequence.ids_T.int(), "loss_mask_T": sequence.loss_mask_T}
        if not all(torch.equal(text[name], fields[name]) for name in text):
            raise RecordError(f"{sequence.place}: the record holds another text in its place")
    recorded = {name: torch.cat([fields[name] for fields in found]) for name in found[0]}
    _, output = target.prefill([sequence.ids_T for sequence in members])
    rows_M, device = recorded["loss_mask_T"].roll(-1).nonzero()[:, 0], output.last_hidden_ND.device
    derived_MD, labels_M = output.last_hidden_ND[rows_M.to(device)], recorded["ids_T"].long()[rows_M + 1]
    given = judge(target, recorded["last_hidden_MD"].to(device), labels_M.to(device))
    difference = max(float((given[name].cpu() - recorded[name]).abs().mean()) for name in given)
    if not difference <= LOGPROB_TOLERANCE[reader.manifest.torch_dtype]:
        raise RecordError(f"its log-probabilities lie {difference:.3g} nats from what the target's head says of it")
    taps, derived_NLD = recorded["taps_TLD"], output.taps_NLD
    if reader.manifest.taps == "float8":
        dtype = reader.manifest.torch_dtype
        taps = from_float8(taps, recorded["tap_scales_TL"], dtype)
        derived_NLD = from_float8(*to_float8(derived_NLD), dtype)
    return max(distance(taps, derived_NLD), distance(recorded["last_hidden_MD"], derived_MD))


def distance(recorded: Tensor, derived: Tensor) -> float:
    """The norm of the difference as a part of the second one's; NaN where one holds what is no number."""
    wide = derived.cpu().double()
    return float((recorded.cpu().double() - wide).norm() / wide.norm().clamp(min=1e-30))
