"""What the tests of recording share: a table target, sequences of it, and their record."""

import hashlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from toy import TableTarget

from dspark.data.chat import Encoded, add_to_digest
from dspark.record.capture import capture, take_turns
from dspark.record.format import Manifest, plan_shards
from dspark.record.leases import Leases
from dspark.record.reader import RecordReader
from dspark.record.writer import ShardWriter, missing_shards, start_record
from dspark.types import Target

VOCAB_SIZE, WIDTH, TAPS = 13, 5, (1, 3)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """The checksum of tensors [T] one after another."""
    sha256 = hashlib.sha256()
    for tensor in tensors:
        add_to_digest(sha256, tensor.numpy())
    return sha256.hexdigest()


def make_target(dtype: torch.dtype = torch.float32) -> TableTarget:
    """Its last hidden state is a one-hot of the last id modulo 5; its taps tell token and position apart."""
    generator = torch.Generator().manual_seed(7)
    logits_SV = torch.randn(WIDTH, VOCAB_SIZE, generator=generator).to(dtype)
    tables = [torch.randn(9, size, WIDTH, generator=generator).to(dtype) for size in (VOCAB_SIZE, 8)]
    return TableTarget(logits_SV, lambda state, new_id: new_id % WIDTH, (tables[0], tables[1]), TAPS)


def make_sequences(lengths: tuple[int, ...] = (9, 4, 30, 7, 12, 2, 8)) -> list[Encoded]:
    """Two supervised runs in longer sequences, one in shorter ones."""
    generator = torch.Generator().manual_seed(8)
    sequences = []
    for row, length in enumerate(lengths):
        places = torch.arange(length)
        loss_mask_T = (places >= length - 2 + (length == 2)) | ((places > 2) & (places < 6))
        ids_T = torch.randint(VOCAB_SIZE, (length,), generator=generator)
        sequences.append(Encoded(ids_T, loss_mask_T, f"talk.jsonl:{row + 1}"))
    return sequences


def describe(sequences: list[Encoded], **changes: Any) -> Manifest:
    """The manifest of a record of these sequences, 20 tokens a shard."""
    values = {
        "target": "table",
        "target_fingerprint": "1" * 64,
        "tokenizer_fingerprint": "2" * 64,
        "template_fingerprint": "3" * 64,
        "target_layer_ids": TAPS,
        "hidden_size": WIDTH,
        "vocab_size": VOCAB_SIZE,
        "dtype": "float32",
        "answers": "target",
        "thinking": (False,),
        "temperatures": (1.0,),
        "text_sha256": digest(part for sequence in sequences for part in (sequence.ids_T, sequence.loss_mask_T)),
        "shard_tokens": 20,
        "versions": {"torch": "2"},
    }
    values |= changes
    sizes = [len(each.ids_T) for each in sequences], [each.num_supervised for each in sequences]
    return Manifest(**values, shards=plan_shards(*sizes, values["shard_tokens"]))


def record(folder: Path, target: Target[Any], sequences: list[Encoded], /, **changes: Any) -> RecordReader:
    """Record, or go on with a record."""
    manifest, leases, heard = describe(sequences, **changes), Leases(folder), list[int]()
    start_record(folder, manifest)
    done = sum(manifest.shards[number].num_sequences for number in range(len(manifest.shards))
               if number not in (missing_shards(folder, manifest) or ()))  # fmt: skip
    turns = take_turns(lambda: missing_shards(folder, manifest), leases, 0.01)
    capture(
        target,
        sequences,
        manifest,
        turns,
        partial(ShardWriter, folder, manifest, leases),
        lambda n, _: heard.append(n),
    )
    assert done + sum(heard) == len(sequences)
    return RecordReader(folder)


def record_everything(folder: Path, **changes: Any) -> int:
    """Record, or go on with a record; returns how many sequences the target had to read."""
    target, num_read = make_target(), 0
    prefill = target.prefill

    def counted(ids: Any) -> Any:
        nonlocal num_read
        num_read += len(ids)
        return prefill(ids)

    target.prefill = counted  # type: ignore[method-assign]
    record(folder, target, make_sequences(), **changes)
    return num_read


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_head_says_what_was_recorded(reader: RecordReader, head_VD: torch.Tensor) -> None:
    """The labels' log-probabilities and entropies that the head gives on the recorded states stand there."""
    found, recorded = [], []
    for index in range(len(reader)):
        fields = reader.fields(index)
        logprobs_MV = (fields["last_hidden_MD"].float() @ head_VD.float().T).log_softmax(-1)
        labels_M = fields["ids_T"].long()[1:][fields["loss_mask_T"][1:]]
        entropies_M = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
        found.append(torch.stack((logprobs_MV.gather(1, labels_M[:, None])[:, 0], entropies_M)))
        recorded.append(torch.stack((fields["label_logprobs_M"], fields["entropies_M"])))
    errors_2M = (torch.cat(found, 1) - torch.cat(recorded, 1)).abs()
    assert errors_2M.mean() < (0.2 if reader.manifest.dtype == "bfloat16" else 2e-3)
