"""What was recorded comes back exactly, and a byte that changed on disk is noticed before it is used."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import TAPS, WIDTH, describe, make_sequences, make_target, record_everything
from recorded import record as record_sequences
from safetensors.torch import load_file

from dspark.errors import RecordError
from dspark.record import reader as module
from dspark.record.format import HEADER_BYTES, INDEX_BYTES, MANIFEST_FILE
from dspark.record.reader import RecordReader
from dspark.record.writer import start_record


def test_threads_that_read_at_once_open_a_shard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_everything(tmp_path)
    reader, opened, plain = RecordReader(tmp_path), list[int](), RecordReader._read_index

    def slowly(self: RecordReader, number: int, path: Path) -> object:
        opened.append(number)
        time.sleep(0.05)
        return plain(self, number, path)

    monkeypatch.setattr(RecordReader, "_read_index", slowly)
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(reader.text, [0, 1, 0, 1, 6, 6]))
    assert sorted(opened) == sorted(set(opened))
    for index, (ids_T, loss_mask_T) in zip([0, 1, 0, 1, 6, 6], texts, strict=True):
        assert torch.equal(ids_T, reader[index].ids_T)
        assert torch.equal(loss_mask_T, reader[index].loss_mask_T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_sequence_comes_back_as_the_target_said_it(tmp_path: Path, dtype: torch.dtype) -> None:
    target, sequences = make_target(dtype), make_sequences()
    reader = record_sequences(tmp_path, target, sequences, dtype=str(dtype).removeprefix("torch."))
    assert len(reader) == len(sequences)
    for index in (6, 0, 3, 2, 5, 1, 4):
        sequence, recorded = sequences[index], reader[index]
        _, output = target.prefill([sequence.ids_T])
        assert recorded.ids_T.dtype == torch.int64
        assert recorded.ids_T.tolist() == sequence.ids_T.tolist()
        assert recorded.loss_mask_T.tolist() == sequence.loss_mask_T.tolist()
        assert recorded.taps_TLD.shape == (len(sequence.ids_T), len(TAPS), WIDTH)
        assert recorded.taps_TLD.dtype == recorded.last_hidden_TD.dtype == dtype
        assert recorded.taps_TLD.equal(output.taps_NLD)
        is_next_T = torch.cat([sequence.loss_mask_T[1:], torch.tensor([False])])
        assert recorded.last_hidden_TD[is_next_T].equal(output.last_hidden_ND[is_next_T])
        assert not recorded.last_hidden_TD[~is_next_T].any()


@pytest.mark.parametrize("index", [-1, 7])
def test_an_index_outside_the_record_is_refused(record: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"sequence {index} of 7"):
        RecordReader(record)[index]


def read_shard(folder: Path, number: int) -> None:
    reader = RecordReader(folder)
    for index in reader.members(number):
        reader[index]


@pytest.mark.parametrize("place", [0.0, 0.1, 0.3, 0.35, 0.6, 0.9, 0.9999])
def test_one_flipped_bit_anywhere_in_a_shard_is_noticed_and_is_that_shards_alone(record: Path, place: float) -> None:
    path = record / "shard-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 0b1000
    path.write_bytes(content)
    read_shard(record, 1)
    with pytest.raises(RecordError, match=rf"{path}: .*; dspark record --repair records it anew"):
        read_shard(record, 2)


@pytest.mark.parametrize("row", [0, 1])
def test_a_damaged_sequence_does_not_keep_its_neighbours_from_being_read(record: Path, row: int) -> None:
    path, reader = record / "shard-00002.safetensors", RecordReader(record)
    content = bytearray(path.read_bytes())
    content[-1 if row else HEADER_BYTES + 2 * INDEX_BYTES] ^= 1
    path.write_bytes(content)
    good, bad = list(reader.members(2))[1 - row], list(reader.members(2))[row]
    assert len(reader[good].ids_T) > 1
    with pytest.raises(RecordError, match=f"sequence {bad} has not the bytes that were written"):
        reader[bad]


def test_a_truncated_or_missing_shard_is_an_unfinished_record(record: Path) -> None:
    path, reader = record / "shard-00001.safetensors", RecordReader(record)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(RecordError, match="3 of 4 shards are recorded; run dspark record again to finish"):
        RecordReader(record)
    with pytest.raises(RecordError, match=r"shard-00001.*its size, header or index"):
        reader[2]
    path.unlink()
    with pytest.raises(RecordError, match=r"shard-00001.*no such file"):
        reader[2]


def test_a_shard_that_shrinks_while_it_is_open_is_noticed(record: Path) -> None:
    reader = RecordReader(record)
    assert len(reader[3].ids_T) == 7
    os.truncate(record / "shard-00002.safetensors", 700)
    with pytest.raises(RecordError, match=r"shard-00002.*it is shorter than it was"):
        reader[4]


def test_a_shard_of_another_record_is_noticed(record: Path, tmp_path: Path) -> None:
    record_everything(tmp_path / "other", target_fingerprint="9" * 64)
    path = record / "shard-00001.safetensors"
    path.write_bytes((tmp_path / "other" / path.name).read_bytes())
    with pytest.raises(RecordError, match=r"shard-00001.*not what the manifest says"):
        RecordReader(record)[2]


def test_a_sequence_is_one_range_of_its_file(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, asked, preadv = RecordReader(record), [], os.preadv

    def noted(file: int, buffers: Any, offset: int) -> int:
        asked.append((offset, len(buffers[0])))
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    ends = []
    for index in range(len(reader)):
        recorded = reader[index]
        assert len(asked) == index + 1
        ends.append(sum(asked[-1]))
        assert asked[-1][1] == reader.manifest.sequence_bytes(len(recorded.ids_T), int(recorded.loss_mask_T.sum()))
    for number in range(len(reader.manifest.shards)):
        assert ends[reader.members(number)[-1]] == (record / f"shard-{number:05d}.safetensors").stat().st_size


def test_few_shards_are_open_at_a_time(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN_SHARDS", 2)
    reader = RecordReader(record)
    before = [reader[index].taps_TLD for index in range(len(reader))]
    assert list(reader._shards) == [2, 3]
    assert reader[0].taps_TLD.equal(before[0])
    assert list(reader._shards) == [3, 0]


@pytest.mark.parametrize("taps", ["target", "float8"])
def test_any_tool_for_safetensors_reads_a_shard(tmp_path: Path, taps: str) -> None:
    record_everything(tmp_path, taps=taps)
    tensors = load_file(tmp_path / "shard-00002.safetensors")
    assert {name: list(values.shape) for name, values in tensors.items()}["num_tokens_S"] == [2]
    assert tensors["num_tokens_S"].tolist() == [7, 12]
    manifest = RecordReader(tmp_path).manifest
    sizes = zip(tensors["num_tokens_S"].tolist(), tensors["num_supervised_S"].tolist(), strict=True)
    assert len(tensors["sequences_X"]) == sum(manifest.sequence_bytes(*size) for size in sizes)


def test_ten_million_sequences_take_less_than_200_megabytes_of_memory(tmp_path: Path) -> None:
    manifest = describe(make_sequences()).model_dump(mode="json")
    manifest["shards"] = [[256, 260_000, 200_000]] * 39_063  # a thousand tokens each
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(manifest))
    program = f"""
import torch
from pathlib import Path
from dspark.record.order import ReadingOrder
from dspark.record.reader import RecordReader
def peak_megabytes():  # getrusage would tell the parent's, if that is more
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1e3
before = peak_megabytes()
reader = RecordReader({str(tmp_path)!r}, lambda path: None)
order = ReadingOrder(reader.starts, 0)
places = [order.place(place) for place in (0, len(reader) // 2, len(reader) - 1, len(reader), 3 * len(reader) - 1)]
assert [epoch for epoch, _ in places] == [0, 0, 0, 1, 2]
assert len(reader) > 10_000_000
print(peak_megabytes() - before)
"""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, text=True, capture_output=True, check=True)
    assert 1 < float(done.stdout) < 200


def test_another_shard_under_the_name_is_noticed(tmp_path: Path) -> None:
    record_sequences(tmp_path, make_target(), make_sequences((12, 12)), shard_tokens=12)
    (tmp_path / "shard-00001.safetensors").write_bytes((tmp_path / "shard-00000.safetensors").read_bytes())
    with pytest.raises(RecordError, match=r"shard-00001"):
        RecordReader(tmp_path)[1]


def test_an_unfinished_record_is_refused(tmp_path: Path) -> None:
    start_record(tmp_path, describe(make_sequences()))
    with pytest.raises(RecordError, match="0 of 4 shards are recorded; run dspark record again to finish"):
        RecordReader(tmp_path)
    (tmp_path / MANIFEST_FILE).unlink()
    with pytest.raises(RecordError, match="run dspark record first"):
        RecordReader(tmp_path)
