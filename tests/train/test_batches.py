"""Which sequences a step reads, with which anchors, and that neither depends on how the work is split."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from training_run import LENGTHS, make_run, make_sequences

from dspark.train.batches import Draw, Share, read_batch, read_window, read_windows, window_draws


def stream(num_sequences: int, seed: int, count: int) -> list[Draw]:
    return [window_draws(num_sequences, seed, place, Share(1, 1, 0, 1))[0][0] for place in range(count)]


def test_every_pass_reads_each_sequence_once_and_in_another_order() -> None:
    draws = stream(7, 0, 21)
    passes = [[draw.index for draw in draws if draw.epoch == epoch] for epoch in range(3)]
    assert all(sorted(each) == list(range(7)) for each in passes)
    assert len({tuple(each) for each in passes}) == 3
    assert stream(7, 1, 7) != draws[:7]


@pytest.mark.parametrize(
    ("batch_size", "accumulation_steps", "world_size"), [(1, 4, 3), (3, 4, 1), (2, 1, 6), (12, 1, 1)]
)
def test_a_step_reads_the_same_sequences_however_it_is_split(
    batch_size: int, accumulation_steps: int, world_size: int
) -> None:
    shares = [Share(batch_size, accumulation_steps, rank, world_size) for rank in range(world_size)]
    assert {share.sequences_per_step for share in shares} == {12}
    found = [draw for share in shares for micro in window_draws(7, 0, 24, share) for draw in micro]
    assert Counter(found) == Counter(stream(7, 0, 36)[24:])


def test_anchors_depend_on_seed_pass_and_sequence_only(tmp_path: Path) -> None:
    sequences = make_sequences()
    train = make_run(tmp_path).train
    alone = read_batch(sequences, [Draw(0, 3)], train, 4, seed=1)
    among = read_batch(sequences, [Draw(0, 1), Draw(0, 3)], train, 4, seed=1)
    assert torch.equal(among.anchors_A[among.starts_A > 0] - LENGTHS[1], alone.anchors_A)
    for draw, seed in ((Draw(1, 3), 1), (Draw(0, 3), 2)):
        assert not torch.equal(read_batch(sequences, [draw], train, 4, seed).anchors_A, alone.anchors_A)


def test_a_batch_holds_its_sequences_in_one_row_without_padding(tmp_path: Path) -> None:
    sequences, train = make_sequences(), make_run(tmp_path).train
    alone = [read_batch(sequences, [Draw(0, index)], train, 4, seed=1) for index in (0, 1)]
    batch = read_batch(sequences, [Draw(0, 0), Draw(0, 1)], train, 4, seed=1)
    assert batch.indices == (0, 1)
    for name in ("ids_T", "taps_TLD", "last_hidden_TD"):
        assert torch.equal(getattr(batch, name), torch.cat([getattr(sequence, name) for sequence in sequences[:2]]))
    assert batch.positions_T.tolist() == [*range(LENGTHS[0]), *range(LENGTHS[1])]
    assert batch.starts_A.tolist() == [0] * len(alone[0].anchors_A) + [LENGTHS[0]] * len(alone[1].anchors_A)
    assert torch.equal(batch.anchors_A, torch.cat([alone[0].anchors_A, LENGTHS[0] + alone[1].anchors_A]))
    for name in ("label_ids_AK", "valid_AK"):
        assert torch.equal(getattr(batch.targets, name), torch.cat([getattr(each.targets, name) for each in alone]))
    # The short sequence supervises six tokens: five may follow an anchor.
    assert len(alone[0].anchors_A) == 5
    assert len(alone[1].anchors_A) == train.num_anchors


def test_sequences_without_an_anchor_give_one_block_that_counts_nothing(tmp_path: Path) -> None:
    sequences = make_sequences()
    for sequence in sequences:
        sequence.loss_mask_T[:] = False
    batch = read_batch(sequences, [Draw(0, 0), Draw(0, 2)], make_run(tmp_path).train, 4, seed=1)
    assert (batch.starts_A.tolist(), batch.anchors_A.tolist()) == ([0], [0])
    assert batch.targets.valid_AK.tolist() == [[False] * 4]


def test_windows_read_ahead_are_the_windows_of_their_steps_in_order(tmp_path: Path) -> None:
    run, sequences, share = make_run(tmp_path), make_sequences(), Share(2, 2, 0, 1)
    starts = share.starts(8, num_steps=11)
    assert (starts[0], starts[-1], len(starts)) == (8, 48, 11)
    for start, window in zip(starts, read_windows(sequences, run, share, starts), strict=True):
        alone = read_window(sequences, run, start, share)
        assert [batch.indices for batch in window] == [batch.indices for batch in alone]
        assert all(torch.equal(a.anchors_A, b.anchors_A) for a, b in zip(window, alone, strict=True))
