"""How a record lies on disk: its manifest, the tensors of a shard, the names of its files.

A record is a folder: ``manifest.json`` and ``shard-00000.safetensors``, ... Each shard holds whole sequences, one after
the other. N tokens, M of them predicted (M <= N), S sequences:

    offsets_S1          int64     where each sequence begins, and N
    ids_N               int32
    loss_mask_N         bool      true at positions to predict; row t of a sequence has a last hidden state exactly
                                  when its position t+1 is to be predicted
    taps_NLD            as target outputs of the tapped layers
    last_hidden_MD      as target after the final norm: the head on it gives the target's distribution
    label_logprobs_M    float32   the target's log-probability of the predicted token, as it said it
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, ValidationError, model_validator

from dspark.config import Section, describe_validation
from dspark.errors import RecordError

MANIFEST_FILE = "manifest.json"
LABEL_LOGPROB_BYTES, OTHER_TOKEN_BYTES = 4, 5
Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ShardEntry(Section):
    """One shard as the manifest knows it."""

    file: str
    sha256: Sha256
    num_bytes: Count
    num_sequences: Count
    num_tokens: Count
    num_supervised: Count


class Manifest(Section):
    """What a record was made from, and its shards so far. Everything but ``shards`` is known before the first one."""

    format: Literal["dspark-record-1"] = "dspark-record-1"
    target: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    template_fingerprint: str | None = None
    target_layer_ids: tuple[Count, ...]
    hidden_size: Count
    vocab_size: Count
    dtype: Literal["bfloat16", "float32", "float64"]
    answers: Literal["target", "given"]
    """Whether the supervised words are the target's own, or stood in the data."""
    thinking: tuple[bool, ...]
    temperatures: tuple[float, ...]
    """At which the target's own words were drawn, without top-p or top-k; none where they stood in the data."""
    text_sha256: Sha256
    """Over the ids and loss masks of all sequences."""
    num_sequences: Annotated[int, Field(ge=1)]
    num_tokens: Count
    num_supervised: Count
    shard_tokens: Count
    versions: dict[str, str] = Field(default_factory=dict)
    """Of the packages that began the record."""
    shards: tuple[ShardEntry, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        for index, shard in enumerate(self.shards):
            if shard.file != shard_name(index):
                raise ValueError(f"shards.{index}.file must be {shard_name(index)}, got {shard.file!r}")
        for count in ("num_sequences", "num_tokens", "num_supervised"):
            held = sum(getattr(shard, count) for shard in self.shards)
            whole = getattr(self, count)
            if held > whole or (self.is_complete and held != whole):
                raise ValueError(f"{count} is {whole}, but the shards add up to {held}")
        return self

    @property
    def is_complete(self) -> bool:
        return sum(shard.num_sequences for shard in self.shards) == self.num_sequences

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[self.dtype]

    @property
    def num_bytes(self) -> int:
        """About how many bytes the whole record takes (the tensors; headers are a few hundred bytes a shard)."""
        vector = self.hidden_size * self.torch_dtype.itemsize
        taps = self.num_tokens * (len(self.target_layer_ids) * vector + OTHER_TOKEN_BYTES)
        return taps + self.num_supervised * (vector + LABEL_LOGPROB_BYTES)


def shard_name(index: int) -> str:
    """The file of shard ``index``. Manifests may name nothing else, so no path leads out of the folder."""
    return f"shard-{index:05d}.safetensors"


def group_by_tokens(lengths: Sequence[int], budget_tokens: int) -> list[range]:
    """Cut a list of sequences into runs of at most ``budget_tokens`` tokens; a longer sequence stands alone."""
    groups: list[range] = []
    start = total = 0
    for index, length in enumerate(lengths):
        if index > start and total + length > budget_tokens:
            groups.append(range(start, index))
            start, total = index, 0
        total += length
    return [*groups, range(start, len(lengths))] if lengths else []


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a record. Raises: RecordError when it is missing, damaged, or names a file of its own choice."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise RecordError(f"{path}: no such file; run dspark record first, or mend record.folder")
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise RecordError(f"{path}: {describe_validation(error)}; restore it, or run dspark record again") from error
