"""A manifest says only what can be true, and no name in it leads out of its folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import describe, make_sequences

from dspark.errors import RecordError
from dspark.files import file_sha256
from dspark.record.format import MANIFEST_FILE, group_by_tokens, read_manifest, shard_name


def test_groups_follow_the_budget_and_never_split_a_sequence() -> None:
    lengths = [9, 4, 30, 7, 12, 2, 8]
    groups = group_by_tokens(lengths, 20)
    assert groups == [range(0, 2), range(2, 3), range(3, 5), range(5, 7)]
    assert group_by_tokens(lengths, 1) == [range(index, index + 1) for index in range(7)]
    assert group_by_tokens(lengths, 72) == [range(7)]
    assert group_by_tokens([], 5) == []


def test_the_size_of_a_record_is_known_beforehand(record: Path) -> None:
    manifest = read_manifest(record)
    held = sum(shard.num_bytes for shard in manifest.shards)
    headers = len(manifest.shards) * 1000
    assert held - headers <= manifest.num_bytes <= held
    half = manifest.model_copy(update={"dtype": "bfloat16"})
    assert half.torch_dtype == torch.bfloat16
    assert manifest.num_bytes - half.num_bytes == 2 * 5 * (2 * 72 + manifest.num_supervised)


def test_a_description_without_shards_is_not_complete() -> None:
    assert not describe(make_sequences()).is_complete


def change(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    node: Any = tree
    for parent in parents:
        node = node[int(parent) if isinstance(node, list) else parent]
    node[leaf] = value


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "shards.1.file",
            "../elsewhere.safetensors",
            "shards.1.file must be shard-00001.safetensors, got '../elsewhere",
        ),
        ("shards.1.file", "/etc/passwd", "shards.1.file must be shard-00001.safetensors, got '/etc/passwd'"),
        ("shards.1.file", "shard-00000.safetensors", "shards.1.file must be shard-00001.safetensors"),
        ("shards.0.sha256", "abc", "shards.0.sha256"),
        ("shards.0.num_tokens", 14, "num_tokens is 72, but the shards add up to 73"),
        ("num_sequences", 5, "num_sequences is 5, but the shards add up to 7"),
        ("num_supervised", 3, "num_supervised is 3"),
        ("format", "dspark-record-9", "format"),
        ("dtype", "int8", "dtype"),
        ("hidden_size", -1, "hidden_size"),
        ("colour", "red", "colour is not a known key"),
    ],
)
def test_a_wrong_manifest_is_refused_by_key(record: Path, key: str, value: Any, words: str) -> None:
    path = record / MANIFEST_FILE
    tree = json.loads(path.read_text())
    change(tree, key, value)
    path.write_text(json.dumps(tree))
    with pytest.raises(RecordError) as error:
        read_manifest(record)
    assert words in str(error.value)
    assert f"{path}: " in str(error.value)
    assert "run dspark record again" in str(error.value)


def test_a_missing_or_torn_manifest_is_refused(record: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no such file; run dspark record first"):
        read_manifest(tmp_path)
    path = record / MANIFEST_FILE
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RecordError, match="Invalid JSON"):
        read_manifest(record)


def test_the_checksum_is_the_usual_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert file_sha256(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert shard_name(12) == "shard-00012.safetensors"
