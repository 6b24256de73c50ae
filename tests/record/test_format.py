"""A manifest says only what can be true, and no name in it leads out of its folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from recorded import describe, make_sequences, record_everything

from dspark.errors import RecordError
from dspark.record.format import MANIFEST_FILE, Manifest, Shard, group_by_tokens, plan_shards, read_manifest, shard_name


def test_groups_follow_the_budget_and_never_split_a_sequence() -> None:
    lengths = [9, 4, 30, 7, 12, 2, 8]
    groups = group_by_tokens(lengths, 20)
    assert groups == [range(0, 2), range(2, 3), range(3, 5), range(5, 7)]
    assert group_by_tokens(lengths, 1) == [range(index, index + 1) for index in range(7)]
    assert group_by_tokens(lengths, 72) == [range(7)]
    assert group_by_tokens([], 5) == []


def test_shards_are_planned_by_their_sequences() -> None:
    sequences = make_sequences()
    sizes = [len(each.ids_T) for each in sequences], [each.num_supervised for each in sequences]
    shards = plan_shards(*sizes, 20)
    assert [shard.num_tokens for shard in shards] == [13, 30, 19, 10]
    assert sum(shard.num_supervised for shard in shards) == sum(sizes[1])
    manifest = describe(sequences)
    assert (manifest.total[:2], manifest.starts) == ((7, 72), [0, 2, 3, 5, 7])


@pytest.mark.parametrize("taps", ["target", "float8"])
def test_the_size_of_a_record_is_known_beforehand(tmp_path: Path, taps: str) -> None:
    record_everything(tmp_path, taps=taps)
    manifest = read_manifest(tmp_path)
    assert manifest.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("shard*"))


FLASH = {"dtype": "bfloat16", "hidden_size": 2560, "target_layer_ids": (1, 11, 23, 29, 35)}


@pytest.mark.parametrize(("taps", "prompt_kb", "supervised_kb"), [("target", 26, 31), ("float8", 12.9, 18)])
def test_a_token_of_ling_flash_takes_no_more_than_published(taps: str, prompt_kb: float, supervised_kb: float) -> None:
    manifest = describe(make_sequences(), **FLASH, taps=taps)
    size = manifest.sequence_bytes
    for supervised, kilobytes in ((0, prompt_kb), (1000, supervised_kb)):
        assert 0.98 * kilobytes < size(1000, supervised) / 1e6 <= kilobytes
    # A shard of one sequence of that size adds its header and index.
    one = Manifest(**(manifest.model_dump() | {"shards": [(1, 1000, 900)]}))
    assert size(1000, 900) < one.num_bytes < size(1000, 900) + 1000


def test_fields_follow_each_other_and_begin_where_their_kind_may_begin() -> None:
    for dtype in ("bfloat16", "float32", "float64"):
        for taps in ("target", "float8"):
            manifest = describe(make_sequences(), dtype=dtype, taps=taps)
            end = 0
            for span in manifest.fields(7, 3).values():
                assert span.begin == end
                assert span.begin % span.dtype.itemsize == 0
                end = span.end
            assert end == manifest.sequence_bytes(7, 3)


def change(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    node: Any = tree
    for parent in parents:
        node = node[int(parent) if isinstance(node, list) else parent]
    node[int(leaf) if isinstance(node, list) else leaf] = value


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("shards.1", [1, 2], "shards.1"),
        ("shards.1.0", -1, "shards.1"),
        ("shards.1.0", 10**30, "shards.1"),
        ("shards.1.2", 30, "shards.1: [1, 30, 30] are no numbers of sequences, tokens, predicted ones"),
        ("shards.0.0", 0, "shards.0: [0, 13, "),
        ("shards", [], "shards"),
        ("shards.1", "../elsewhere.safetensors", "shards.1"),
        ("taps", "int4", "taps"),
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


def test_shards_have_names_of_their_own() -> None:
    assert shard_name(12) == "shard-00012.safetensors"
    assert shard_name(123_456) == "shard-123456.safetensors"
    assert Shard(1, 2, 1) == (1, 2, 1)
