"""What is recorded is what the target says, whatever is packed together and wherever a shard ends."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import TAPS, contents, describe, make_sequences, make_target
from safetensors.torch import load_file
from tiny import VOCAB_SIZE, write_tiny_ling

from dspark.data.chat import Encoded
from dspark.errors import RecordError
from dspark.record import capture as module
from dspark.record.capture import capture
from dspark.record.reader import RecordReader
from dspark.record.writer import open_writer
from dspark.target.loading import load_target
from dspark.types import Target


def record(folder: Path, target: Target[Any], sequences: list[Encoded], **changes: Any) -> RecordReader:
    facts = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    description = describe(sequences, **(facts | changes))
    capture(target, sequences, open_writer(folder, description), lambda: None)
    return RecordReader(folder)


def test_the_head_on_the_recorded_states_gives_the_full_distribution_of_a_ling_target(tmp_path: Path) -> None:
    write_tiny_ling(tmp_path / "target")
    target = load_target(tmp_path / "target", target_layer_ids=TAPS)
    generator = torch.Generator().manual_seed(1)
    sequences = [
        replace(sequence, ids_T=torch.randint(VOCAB_SIZE, sequence.ids_T.shape, generator=generator))
        for sequence in make_sequences()
    ]
    reader = record(tmp_path / "record", target, sequences)
    recorded_M = torch.cat([load_file(path)["label_logprobs_M"] for path in sorted(reader.folder.glob("shard*"))])
    first = 0
    for index, sequence in enumerate(sequences):
        recorded = reader[index]
        _, output = target.prefill([sequence.ids_T])
        expected_TV = torch.log_softmax(target.logits(output.last_hidden_ND), -1)
        found_TV = torch.log_softmax(recorded.last_hidden_TD @ target.head_VD.T, -1)
        rows = torch.nonzero(sequence.loss_mask_T[1:])[:, 0]
        torch.testing.assert_close(found_TV[rows], expected_TV[rows], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(recorded.taps_TLD, output.taps_NLD, atol=1e-5, rtol=1e-5)
        labels_M = sequence.ids_T[rows + 1]
        found_M = recorded_M[first : first + len(rows)]
        torch.testing.assert_close(found_M, expected_TV[rows, labels_M], atol=1e-5, rtol=1e-5)
        first += len(rows)
    assert first == len(recorded_M)


def test_calls_are_packed_within_a_shard_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, calls = make_target(), []
    prefill = target.prefill

    def noted(ids: Sequence[torch.Tensor]) -> Any:
        calls.append([len(row) for row in ids])
        return prefill(ids)

    monkeypatch.setattr(target, "prefill", noted)
    record(tmp_path / "whole", target, make_sequences())
    assert calls == [[9, 4], [30], [7, 12], [2, 8]]
    monkeypatch.setattr(module, "TOKENS_PER_CALL", 10)
    monkeypatch.setattr(module, "LOGIT_ROWS", 2)
    record(tmp_path / "cut", target, make_sequences())
    assert calls[4:] == [[9], [4], [30], [7], [12], [2, 8]]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.parametrize("where", ["taps_NLD", "last_hidden_ND"])
def test_states_that_are_not_finite_end_the_recording_and_name_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    target, sequences = make_target(), make_sequences()
    prefill = target.prefill

    def broken(ids: Sequence[torch.Tensor]) -> Any:
        cache, output = prefill(ids)
        if len(ids[0]) == 7:
            getattr(output, where)[3] = float("inf")
        return cache, output

    monkeypatch.setattr(target, "prefill", broken)
    writer = open_writer(tmp_path, describe(sequences))
    with pytest.raises(RecordError, match=r"talk.jsonl:4: .*not finite in this sequence or in the 1 after it"):
        capture(target, sequences, writer, lambda: None)
    assert [shard.num_sequences for shard in writer.manifest.shards] == [2, 1]


def test_ids_of_another_tokenizer_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    sequences = make_sequences()
    sequences[5].ids_T[1] = 13
    with pytest.raises(RecordError, match=r"talk.jsonl:6: found token ids \d+..13, expected 0..12"):
        record(tmp_path, make_target(), sequences)
    assert not list(tmp_path.glob("shard*"))
