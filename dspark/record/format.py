"""How a record lies on disk: its manifest, the bytes of a shard, the names of its files.

A record is a folder: ``manifest.json``, which is written first and never again, and ``shard-00000.safetensors``, ...
Which sequences a shard holds is known from the beginning, so a shard that is there is whole. Each holds S sequences:

    num_tokens_S        int32   T of each
    num_supervised_S    int32   M of each: how many tokens are to be predicted
    checksums_S         int64   XXH3 over the bytes of each
    sequences_X         uint8   the sequences, one after another: whoever wants one reads one range

The fields of a sequence, wide numbers first, so that each begins where its kind may begin:

    label_logprobs_M    float32   the target's log-probability of the predicted token, as it said it
    entropies_M         float32   of the distribution from which that token was to come, in nats
    ids_T               int32
    tap_scales_TL       float32   only where taps are float8: what to multiply them by
    taps_TLD            outputs of the tapped layers, as the target said them or as float8_e4m3fn
    last_hidden_MD      after the final norm, of the positions before predicted ones: the head on it gives the
                        target's distribution
    loss_mask_T         bool      true at positions to predict, never the first

Numbers of float64 come before those of float32.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from xxhash import xxh3_64_hexdigest

from dspark.config import Section, read_back
from dspark.errors import RecordError

MANIFEST_FILE = "manifest.json"
Count = Annotated[int, Field(ge=0, lt=2**48)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
HEADER_BYTES, INDEX_BYTES = 512, 16
"""What stands before the numbers of a shard, and how many of them, before the sequences, each sequence adds."""


class Shard(NamedTuple):
    """How much a shard holds."""

    num_sequences: Count
    num_tokens: Count
    num_supervised: Count


class Span(NamedTuple):
    """Where a field lies in a sequence, in bytes, and what it holds."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Manifest(Section):
    """What a record is made from, and what its shards will hold."""

    format: Literal["dspark-record-2"] = "dspark-record-2"
    target: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    template_fingerprint: str | None = None
    target_layer_ids: tuple[Count, ...]
    hidden_size: Count
    vocab_size: Count
    dtype: Literal["bfloat16", "float32", "float64"]
    taps: Literal["target", "float8"] = "target"
    """How the tapped outputs are kept: as the target says them, or rounded, with a scale for each."""
    answers: Literal["target", "given"]
    """Whether the supervised words are the target's own, or stood in the data."""
    thinking: tuple[bool, ...]
    temperatures: tuple[float, ...]
    """At which the target's own words were drawn, without top-p or top-k; none where they stood in the data."""
    text_sha256: Sha256
    """Over the ids and loss masks of all sequences, as the responses hold them."""
    seed: Count = 0
    """Draws the order in which the record holds the sequences."""
    shard_tokens: Count
    shards: Annotated[tuple[Shard, ...], Field(min_length=1)]
    versions: dict[str, str] = Field(default_factory=dict)
    """Of the packages that began the record."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for index, shard in enumerate(self.shards):
            if not 0 < shard.num_sequences <= shard.num_supervised < shard.num_tokens:
                raise ValueError(f"shards.{index}: {list(shard)} are no numbers of sequences, tokens, predicted ones")
        return self

    @cached_property
    def starts(self) -> list[int]:
        """The number of the first sequence of every shard, and that of all."""
        return [0, *accumulate(shard.num_sequences for shard in self.shards)]

    @cached_property
    def total(self) -> Shard:
        """How much all shards hold."""
        return Shard(*map(sum, zip(*self.shards, strict=True)))

    @property
    def num_bytes(self) -> int:
        """What the shards of the whole record take."""
        return sum(self.shard_bytes(index) for index in range(len(self.shards)))

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[self.dtype]

    @cached_property
    def identity(self) -> str:
        """What the states of this record depend on, in 16 letters, which stand in every shard."""
        return xxh3_64_hexdigest(self.model_dump_json(exclude={"target", "versions"}).encode())

    def shard_bytes(self, index: int) -> int:
        """The size of a shard's file."""
        num_sequences, num_tokens, num_supervised = self.shards[index]
        return front_bytes(num_sequences) + self.sequence_bytes(num_tokens, num_supervised)

    def sequence_bytes(self, num_tokens: int, num_supervised: int) -> int:
        """Of a sequence, or of several together."""
        return num_tokens * self._bytes_per[0] + num_supervised * self._bytes_per[1]

    def fields(self, num_tokens: int, num_supervised: int) -> dict[str, Span]:
        """The fields of a sequence, as they lie."""
        width, num_taps = self.hidden_size, len(self.target_layer_ids)
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "label_logprobs_M": (torch.float32, (num_supervised,)),
            "entropies_M": (torch.float32, (num_supervised,)),
            "ids_T": (torch.int32, (num_tokens,)),
            "taps_TLD": (self.torch_dtype, (num_tokens, num_taps, width)),
            "last_hidden_MD": (self.torch_dtype, (num_supervised, width)),
            "loss_mask_T": (torch.bool, (num_tokens,)),
        }
        if self.taps == "float8":
            shapes["taps_TLD"] = (torch.float8_e4m3fn, shapes["taps_TLD"][1])
            shapes["tap_scales_TL"] = (torch.float32, (num_tokens, num_taps))
        fields, end = {}, 0
        for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
            begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
            fields[name] = Span(begin, end, dtype, shape)
        return fields

    @cached_property
    def _bytes_per(self) -> tuple[int, int]:
        """Of a token, and of a predicted one in addition."""
        bare, more = (max(field.end for field in self.fields(1, number).values()) for number in (0, 1))
        return bare, more - bare


def front_bytes(num_sequences: int) -> int:
    """What stands in a shard before its sequences: the header, and the numbers of each of them."""
    return HEADER_BYTES + INDEX_BYTES * num_sequences


def shard_header(manifest: Manifest, index: int, index_checksum: str) -> bytes:
    """The first HEADER_BYTES of a shard, which say all that there is to check: a reader asks for these very bytes.
    Source: the safetensors format (length, JSON, padding; tensors lie as their data_offsets say).
    """
    num_sequences, num_tokens, num_supervised = manifest.shards[index]
    tensors = {"checksums_S": ("I64", 8), "num_tokens_S": ("I32", 4), "num_supervised_S": ("I32", 4)}
    metadata = {"record": manifest.identity, "shard": str(index), "index_checksum": index_checksum}
    fields: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, size) in tensors.items():
        begin, end = end, end + size * num_sequences
        fields[name] = {"dtype": dtype, "shape": [num_sequences], "data_offsets": [begin, end]}
    num_bytes = manifest.sequence_bytes(num_tokens, num_supervised)
    fields["sequences_X"] = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [end, end + num_bytes]}
    text = json.dumps(fields, separators=(",", ":")).encode().ljust(HEADER_BYTES - 8)
    assert len(text) == HEADER_BYTES - 8
    return len(text).to_bytes(8, "little") + text


def shard_name(index: int) -> str:
    """The file of shard ``index``. Manifests name no file, so no path leads out of the folder."""
    return f"shard-{index:05d}.safetensors"


def group_by_tokens(lengths: Iterable[int], budget_tokens: int) -> list[range]:
    """Cut a list of sequences into runs of at most ``budget_tokens`` tokens; a longer sequence stands alone."""
    ends, start, groups = [0, *accumulate(lengths)], 0, list[range]()
    while start < len(ends) - 1:
        groups.append(range(start, max(start + 1, bisect_right(ends, ends[start] + budget_tokens) - 1)))
        start = groups[-1].stop
    return groups


def plan_shards(num_tokens: Sequence[int], num_supervised: Sequence[int], shard_tokens: int) -> tuple[Shard, ...]:
    """What the shards of sequences of so many tokens, in this order, will hold."""
    parts = [slice(group.start, group.stop) for group in group_by_tokens(num_tokens, shard_tokens)]
    return tuple(Shard(p.stop - p.start, sum(num_tokens[p]), sum(num_supervised[p])) for p in parts)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a record. Raises: RecordError when it is missing or damaged."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise RecordError(f"{path}: no such file; run dspark record first, or mend record.folder")
    return read_back(Manifest, path.read_bytes(), path, "restore it, or run dspark record again")
