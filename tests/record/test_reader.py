"""What was recorded comes back exactly, and a byte that changed on disk is noticed before it is used."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from recorded import TAPS, WIDTH, describe, make_sequences, make_target, record_everything

from dspark.errors import RecordError
from dspark.record.capture import capture
from dspark.record.format import MANIFEST_FILE
from dspark.record.reader import RecordReader
from dspark.record.writer import open_writer


def test_threads_that_read_at_once_open_a_shard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_everything(tmp_path)
    reader, opened, plain = RecordReader(tmp_path), [], RecordReader._open

    def slowly(self: RecordReader, number: int) -> object:
        opened.append(number)
        time.sleep(0.05)
        return plain(self, number)

    monkeypatch.setattr(RecordReader, "_open", slowly)
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(reader.text, [0, 1, 0, 1, 6, 6]))
    assert sorted(opened) == sorted(set(opened))
    for index, (ids_T, loss_mask_T) in zip([0, 1, 0, 1, 6, 6], texts, strict=True):
        assert torch.equal(ids_T, reader[index].ids_T)
        assert torch.equal(loss_mask_T, reader[index].loss_mask_T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_sequence_comes_back_as_the_target_said_it(tmp_path: Path, dtype: torch.dtype) -> None:
    target, sequences = make_target(dtype), make_sequences()
    description = describe(sequences, dtype=str(dtype).removeprefix("torch."))
    capture(target, sequences, open_writer(tmp_path, description), lambda: None)
    reader = RecordReader(tmp_path)
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


@pytest.mark.parametrize("place", [0.0, 0.4, 0.7, 0.999])
def test_one_flipped_bit_anywhere_in_a_shard_is_noticed(record: Path, place: float) -> None:
    path = record / "shard-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 0b1000
    path.write_bytes(content)
    reader = RecordReader(record)
    assert len(reader[0].ids_T) == 9
    with pytest.raises(RecordError) as error:
        reader[3]
    entry = reader.manifest.shards[2]
    for words in (f"{path}: found sha256 ", f"expected {entry.sha256}", "delete it and run dspark record again"):
        assert words in str(error.value)


def test_a_truncated_or_missing_shard_is_noticed(record: Path) -> None:
    path = record / "shard-00001.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(RecordError, match=rf"shard-00001.*\({size - 1} bytes\), expected .*\({size} bytes\)"):
        RecordReader(record)[2]
    path.unlink()
    with pytest.raises(RecordError, match=r"shard-00001.*found sha256 no file"):
        RecordReader(record)[2]


def test_another_shard_under_the_name_is_noticed(record: Path) -> None:
    (record / "shard-00001.safetensors").write_bytes((record / "shard-00000.safetensors").read_bytes())
    with pytest.raises(RecordError, match="shard-00001"):
        RecordReader(record)[2]


def test_an_unfinished_record_is_refused(tmp_path: Path) -> None:
    open_writer(tmp_path, describe(make_sequences()))
    with pytest.raises(RecordError, match="0 of 7 sequences are recorded; run dspark record again to finish"):
        RecordReader(tmp_path)
    (tmp_path / MANIFEST_FILE).unlink()
    with pytest.raises(RecordError, match="run dspark record first"):
        RecordReader(tmp_path)
