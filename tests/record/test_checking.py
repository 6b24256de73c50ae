"""A record that the target said passes; each way in which a shard can be wrong is found, and is that shard's alone."""

from pathlib import Path

import pytest
import torch
from recorded import describe, make_sequences, make_target, record_everything
from safetensors.torch import load_file, save_file

from dspark.data.chat import Encoded
from dspark.files import file_sha256
from dspark.record.capture import capture
from dspark.record.checking import ShardCheck, check_shards
from dspark.record.format import MANIFEST_FILE, Manifest
from dspark.record.reader import RecordReader
from dspark.record.writer import open_writer


def found(folder: Path, sequences: list[Encoded] | None = None, dtype: torch.dtype = torch.float32) -> list[ShardCheck]:
    heard: list[None] = []
    reader = RecordReader(folder)
    checks = list(check_shards(make_target(dtype), sequences or make_sequences(), reader, lambda: heard.append(None)))
    assert len(heard) == len(checks) == len(reader.manifest.shards) > 2
    return checks


def alter(folder: Path, number: int, name: str, factor: float) -> None:
    """Other numbers in a shard, with a manifest that believes them."""
    path = folder / f"shard-{number:05d}.safetensors"
    tensors = load_file(path)
    tensors[name] = (tensors[name] * factor).to(tensors[name].dtype)
    save_file(tensors, path)
    manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
    changed = manifest.shards[number].model_copy(update={"sha256": file_sha256(path), "num_bytes": path.stat().st_size})
    shards = (*manifest.shards[:number], changed, *manifest.shards[number + 1 :])
    (folder / MANIFEST_FILE).write_text(manifest.model_copy(update={"shards": shards}).model_dump_json())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_was_recorded_is_what_the_target_says(tmp_path: Path, dtype: torch.dtype) -> None:
    sequences = make_sequences()
    description = describe(sequences, dtype=str(dtype).removeprefix("torch."))
    capture(make_target(dtype), sequences, open_writer(tmp_path, description), lambda: None)
    checks = found(tmp_path, dtype=dtype)
    assert [(check.fault, check.states_error) for check in checks] == [(None, 0.0)] * len(checks)
    assert sum(check.num_tokens for check in checks) == sum(len(sequence.ids_T) for sequence in sequences)
    said = [check.nats for check in checks]
    recorded = load_file(tmp_path / "shard-00001.safetensors")["label_logprobs_M"]
    assert said[1] == pytest.approx(-float(recorded.mean()))


@pytest.mark.parametrize(
    ("name", "factor", "words"),
    [
        ("taps_NLD", 1.01, "its states are not those of the target: 0.01 of their norm away"),
        ("taps_NLD", float("nan"), "its states are not those of the target: nan"),
        ("last_hidden_MD", 1.5, "its log-probabilities lie"),
        ("label_logprobs_M", 1.1, "its log-probabilities lie"),
        ("ids_N", 0, "the record holds another text"),
        ("loss_mask_N", 0, "not what the manifest says|another text"),
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
    path = tmp_path / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (tmp_path / "shard-00002.safetensors").unlink()
    faults = [check.fault for check in found(tmp_path)]
    assert ["sha256" in (fault or "") for fault in faults] == [number in (0, 2) for number in range(len(faults))]


def test_rounding_of_another_device_is_no_fault(tmp_path: Path) -> None:
    record_everything(tmp_path)
    alter(tmp_path, 1, "taps_NLD", 1 + 1e-5)
    assert [check.fault for check in found(tmp_path)] == [None] * len(found(tmp_path))
