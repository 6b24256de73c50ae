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


def test_anchors_depend_on_seed_pass_and_sequence_only() -> None:
    sequences = make_sequences()
    alone = read_batch(sequences, [Draw(0, 3)], 6, seed=1)
    among = read_batch(sequences, [Draw(0, 1), Draw(0, 3)], 6, seed=1)
    assert torch.equal(among.anchors_BA[1][among.keep_BA[1]], alone.anchors_BA[0])
    for draw, seed in ((Draw(1, 3), 1), (Draw(0, 3), 2)):
        assert not torch.equal(read_batch(sequences, [draw], 6, seed).anchors_BA, alone.anchors_BA)


def test_a_batch_holds_the_sequences_padded_with_nothing_supervised() -> None:
    sequences = make_sequences()
    batch = read_batch(sequences, [Draw(0, 0), Draw(0, 1)], 6, seed=1)
    assert batch.indices == (0, 1)
    assert batch.lengths_B.tolist() == list(LENGTHS[:2])
    for row, sequence in enumerate(sequences[:2]):
        length = LENGTHS[row]
        assert torch.equal(batch.ids_BT[row, :length], sequence.ids_T)
        assert torch.equal(batch.taps_BTLD[row, :length], sequence.taps_TLD)
        assert torch.equal(batch.last_hidden_BTD[row, :length], sequence.last_hidden_TD)
        assert torch.equal(batch.loss_mask_BT[row, :length], sequence.loss_mask_T)
        assert not batch.loss_mask_BT[row, length:].any()
        assert not batch.taps_BTLD[row, length:].any()
    # The short sequence supervises six tokens: five may follow an anchor.
    assert batch.keep_BA.sum(1).tolist() == [5, 6]


def test_a_sequence_without_an_anchor_gives_an_empty_block() -> None:
    [sequence, *_] = make_sequences()
    sequence.loss_mask_T[:] = False
    batch = read_batch([sequence], [Draw(0, 0)], 6, seed=1)
    assert not batch.keep_BA.any()


def test_windows_read_ahead_are_the_windows_of_their_steps_in_order(tmp_path: Path) -> None:
    run, sequences, share = make_run(tmp_path), make_sequences(), Share(2, 2, 0, 1)
    starts = share.starts(8, num_steps=11)
    assert (starts[0], starts[-1], len(starts)) == (8, 48, 11)
    for start, window in zip(starts, read_windows(sequences, run, share, starts), strict=True):
        alone = read_window(sequences, run, start, share)
        assert [batch.indices for batch in window] == [batch.indices for batch in alone]
        assert all(torch.equal(a.anchors_BA, b.anchors_BA) for a, b in zip(window, alone, strict=True))
