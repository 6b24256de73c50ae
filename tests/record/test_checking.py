"""A record that the target said passes; each way in which a shard can be wrong is found, and is that shard's alone."""

from pathlib import Path

import pytest
import torch
from recorded import make_sequences, make_target, record, record_everything
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from dspark.data.chat import Encoded
from dspark.record.checking import ShardCheck, check_shards
from dspark.record.format import HEADER_BYTES, INDEX_BYTES, shard_header
from dspark.record.reader import RecordReader


def found(folder: Path, sequences: list[Encoded] | None = None, dtype: torch.dtype = torch.float32) -> list[ShardCheck]:
    reader = RecordReader(folder)
    checks = list(check_shards(reader, make_target(dtype), sequences or make_sequences()))
    assert len(checks) == len(reader.manifest.shards) > 2
    return checks


def alter(folder: Path, number: int, name: str, factor: float) -> None:
    """Other numbers in a shard, with checksums that believe them."""
    reader, path = RecordReader(folder), folder / f"shard-{number:05d}.safetensors"
    content = bytearray(path.read_bytes())
    num_sequences = len(reader.members(number))
    begin = HEADER_BYTES + INDEX_BYTES * num_sequences
    for row, index in enumerate(reader.members(number)):
        fields = reader.fields(index)
        span = reader.manifest.fields(len(fields["ids_T"]), len(fields["entropies_M"]))
        changed = (fields[name] * factor).to(fields[name].dtype).reshape(-1).view(torch.uint8).numpy().tobytes()
        content[begin + span[name].begin : begin + span[name].end] = changed
        end = begin + max(each.end for each in span.values())
        checksum = xxh3_64_intdigest(bytes(content[begin:end]))
        content[HEADER_BYTES + 8 * row : HEADER_BYTES + 8 * row + 8] = checksum.to_bytes(8, "little")
        begin = end
    index_checksum = xxh3_64_hexdigest(bytes(content[HEADER_BYTES : HEADER_BYTES + INDEX_BYTES * num_sequences]))
    content[:HEADER_BYTES] = shard_header(reader.manifest, number, index_checksum)
    path.write_bytes(content)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_was_recorded_is_what_the_target_says(tmp_path: Path, dtype: torch.dtype) -> None:
    reader = record(tmp_path, make_target(dtype), make_sequences(), dtype=str(dtype).removeprefix("torch."))
    checks = found(tmp_path, dtype=dtype)
    assert [(check.fault, check.states_error) for check in checks] == [(None, 0.0)] * len(checks)
    fields = reader.fields(2)
    assert checks[1].nats == pytest.approx(-float(fields["label_logprobs_M"].mean()))
    assert checks[1].entropy == pytest.approx(float(fields["entropies_M"].mean()))
    unread = list(check_shards(reader, None, []))
    assert [(check.nats, check.states_error) for check in unread] == [(check.nats, None) for check in checks]


@pytest.mark.parametrize(
    ("name", "factor", "words"),
    [
        ("taps_TLD", 1.01, "its states are not those of the target: 0.01 of their norm away"),
        ("taps_TLD", float("nan"), "its states are not those of the target: nan"),
        ("last_hidden_MD", 1.5, "its log-probabilities lie"),
        ("label_logprobs_M", 1.1, "its log-probabilities lie"),
        ("entropies_M", 1.1, "its log-probabilities lie"),
        ("ids_T", 0, "the record holds another text"),
        ("loss_mask_T", 0, "the record holds another text"),
    ],
)
def test_a_shard_with_other_numbers_is_found(tmp_path: Path, name: str, factor: float, words: str) -> None:
    record_everything(tmp_path)
    alter(tmp_path, 1, name, factor)
    faults = [check.fault for check in found(tmp_path)]
    assert [fault is None for fault in faults] == [number != 1 for number in range(len(faults))]
    assert faults[1] is not None
    assert any(word in faults[1] for word in words.split("|")), faults[1]


def test_a_byte_that_changed_and_a_file_that_is_gone_are_found(tmp_path: Path) -> None:
    record_everything(tmp_path)
    path, reader = tmp_path / "shard-00000.safetensors", RecordReader(tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (tmp_path / "shard-00002.safetensors").unlink()
    for target in (make_target(), None):
        faults = [check.fault for check in check_shards(reader, target, make_sequences())]
        assert faults[0] is not None
        assert "sequence 1 has not the bytes that were written" in faults[0]
        assert faults[1:] == [None, "no such file; dspark record --repair records it anew", None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float8_taps_that_the_target_said_pass_and_others_do_not(tmp_path: Path, dtype: str) -> None:
    target = make_target(getattr(torch, dtype))
    reader = record(tmp_path, target, make_sequences(), dtype=dtype, taps="float8")
    assert [check.states_error for check in check_shards(reader, target, make_sequences())] == [0.0] * 4
    alter(tmp_path, 1, "tap_scales_TL", 1.125)
    reader = RecordReader(tmp_path)
    faults = [check.fault for check in check_shards(reader, target, make_sequences())]
    assert "its states are not those of the target" in str(faults[1])


def test_rounding_of_another_device_is_no_fault(tmp_path: Path) -> None:
    record_everything(tmp_path)
    alter(tmp_path, 1, "taps_TLD", 1 + 1e-5)
    assert [check.fault for check in found(tmp_path)] == [None] * len(found(tmp_path))
