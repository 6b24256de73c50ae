"""What is recorded is what the target says, whatever is packed together and wherever a shard ends."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import TAPS, contents, make_sequences, make_target, record
from tiny import VOCAB_SIZE, write_tiny_ling

from dspark.errors import RecordError
from dspark.layers.float8 import from_float8, to_float8
from dspark.record import capture as module
from dspark.record.format import MANIFEST_FILE
from dspark.target.loading import load_target


def test_the_head_on_the_recorded_states_gives_the_full_distribution_of_a_ling_target(tmp_path: Path) -> None:
    write_tiny_ling(tmp_path / "target")
    target = load_target(tmp_path / "target", target_layer_ids=TAPS)
    generator = torch.Generator().manual_seed(1)
    sequences = [
        replace(sequence, ids_T=torch.randint(VOCAB_SIZE, sequence.ids_T.shape, generator=generator))
        for sequence in make_sequences()
    ]
    reader = record(tmp_path / "record", target, sequences, hidden_size=target.hidden_size, vocab_size=VOCAB_SIZE)
    for index, sequence in enumerate(sequences):
        recorded = reader[index]
        _, output = target.prefill([sequence.ids_T])
        expected_TV = torch.log_softmax(target.logits(output.last_hidden_ND), -1)
        found_TV = torch.log_softmax(recorded.last_hidden_TD @ target.head_VD.T, -1)
        rows = torch.nonzero(sequence.loss_mask_T[1:])[:, 0]
        torch.testing.assert_close(found_TV[rows], expected_TV[rows], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(recorded.taps_TLD, output.taps_NLD, atol=1e-5, rtol=1e-5)
        labels_M, fields = sequence.ids_T[rows + 1], reader.fields(index)
        torch.testing.assert_close(fields["label_logprobs_M"], expected_TV[rows, labels_M], atol=1e-5, rtol=1e-5)
        entropies_M = torch.distributions.Categorical(logits=expected_TV[rows]).entropy()
        torch.testing.assert_close(fields["entropies_M"], entropies_M, atol=1e-5, rtol=1e-5)


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
    assert calls[4:] == [[9], [30], [4], [7], [2, 8], [12]]  # of two shards in turn
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
    with pytest.raises(RecordError, match=r"talk.jsonl:4: .*not finite in this sequence or in the 1 read with it"):
        record(tmp_path, target, sequences)
    assert set(contents(tmp_path)) <= {MANIFEST_FILE, *(f"shard-{number:05d}.safetensors" for number in (0, 1, 3))}


def test_float8_taps_are_what_the_target_said_rounded_and_everything_else_is_kept(tmp_path: Path) -> None:
    target, sequences = make_target(torch.bfloat16), make_sequences()
    plain, rounded = (
        record(tmp_path / taps, target, sequences, dtype="bfloat16", taps=taps) for taps in ("target", "float8")
    )
    for index in range(len(sequences)):
        theirs, ours = plain.fields(index), rounded.fields(index)
        expected = to_float8(theirs["taps_TLD"])
        assert ours["taps_TLD"].float().equal(expected[0].float())
        assert ours["tap_scales_TL"].equal(expected[1])
        back_TLD = from_float8(ours["taps_TLD"], ours["tap_scales_TL"], torch.bfloat16)
        assert ((back_TLD - theirs["taps_TLD"]).abs() <= theirs["taps_TLD"].abs() / 16 + 1e-2).all()
        assert all(ours[name].equal(theirs[name]) for name in theirs if name != "taps_TLD")


def test_the_disk_never_falls_far_behind_and_the_target_does_not_wait_for_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is slow holds the target back after a few calls, so that memory does not grow."""
    target, num_read, behind = make_target(), 0, list[int]()
    prefill, write = target.prefill, module._write

    def slowly(*arguments: Any) -> None:
        time.sleep(0.02)
        write(*arguments)
        behind.append(num_read - len(behind))

    def noted(ids: Sequence[torch.Tensor]) -> Any:
        nonlocal num_read
        num_read += 1
        return prefill(ids)

    monkeypatch.setattr(module, "_write", slowly)
    monkeypatch.setattr(module, "TOKENS_PER_CALL", 1)
    monkeypatch.setattr(target, "prefill", noted)
    record(tmp_path, target, make_sequences(tuple(range(4, 24))))
    assert len(behind) == 20
    assert 1 < max(behind) <= module.PACKS_WAITING + 2  # one has been read just now, one is being waited for
