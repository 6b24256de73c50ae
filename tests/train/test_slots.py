"""How valid slots are cut into pieces, and which target rows teach them."""

import pytest
import torch
from torch import Tensor

from dspark.draft.anchors import BlockTargets, slot_positions
from dspark.kernels.agreement.reference import length_slopes
from dspark.train.batches import Slots, lay_out
from dspark.train.objective import _expected_length

VOCAB_SIZE, NUM_TOKENS = 11, 30


def cut(valid_AK: Tensor, anchors_A: Tensor, numbers: int) -> Slots:
    labels_AK = torch.arange(valid_AK.numel()).view(valid_AK.shape)
    return lay_out(BlockTargets(labels_AK, valid_AK), anchors_A, numbers, VOCAB_SIZE)


def random_blocks(seed: int) -> tuple[Tensor, Tensor]:
    """Validity of 18 blocks of three slots, a prefix of each, and their anchors in a row of two texts."""
    generator = torch.Generator().manual_seed(seed)
    anchors_BA = torch.randint(0, NUM_TOKENS - 1, (2, 9), generator=generator).sort(1).values
    lengths_BA = torch.randint(0, 4, (2, 9), generator=generator).minimum(NUM_TOKENS - 1 - anchors_BA)
    return torch.arange(3) < lengths_BA.view(18, 1), (anchors_BA + torch.tensor([[0], [NUM_TOKENS]])).flatten()


@pytest.mark.parametrize("numbers", [1, 70, 200, 10**6])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_hold_every_valid_slot_once_and_whole_blocks(numbers: int, seed: int) -> None:
    valid_AK, anchors_A = random_blocks(seed)
    slots = cut(valid_AK, anchors_A, numbers)
    assert torch.equal(slots.places_N, valid_AK.flatten().nonzero()[:, 0])
    assert torch.equal(slots.labels_N, slots.places_N)
    assert torch.equal(slots.valid_AK, valid_AK)
    blocks_N = (slots.places_N // 3).tolist()
    assert slots.block_rows_A1.tolist() == [sum(block < a for block in blocks_N) for a in range(19)]
    end = teacher_end = 0
    for rows, teachers, blocks in slots.pieces:
        assert (rows.start, teachers.start) == (end, teacher_end)
        end, teacher_end = rows.stop, teachers.stop
        assert rows.start < rows.stop
        assert {*blocks_N[rows]} <= {*range(18)[blocks]}
        assert not {*blocks_N[: rows.start], *blocks_N[rows.stop :]} & {*range(18)[blocks]}
        assert blocks.stop - blocks.start <= max(1, numbers // (3 * VOCAB_SIZE))
    assert (end, teacher_end) == (len(slots.places_N), len(slots.teachers_M))


@pytest.mark.parametrize("seed", range(4))
def test_a_slot_is_taught_by_the_state_at_its_position_and_rows_are_shared(seed: int) -> None:
    valid_AK, anchors_A = random_blocks(seed)
    slots = cut(valid_AK, anchors_A, 200)
    expected_N = slot_positions(anchors_A, 3)[valid_AK]
    for rows, teachers, _ in slots.pieces:
        rows_M = slots.teachers_M[teachers]
        assert torch.equal(rows_M[slots.teacher_rows_N[rows]], expected_N[rows])
        assert len(rows_M.unique()) == len(rows_M)  # type: ignore[no-untyped-call]


def test_nothing_valid_gives_no_piece() -> None:
    slots = cut(torch.zeros(4, 3, dtype=torch.bool), torch.zeros(4, dtype=torch.long), 100)
    assert (slots.pieces, slots.block_rows_A1.tolist(), len(slots.teachers_M)) == ([], [0] * 5, 0)


@pytest.mark.parametrize("seed", range(3))
def test_the_slopes_of_the_acceptance_length_are_autograds(seed: int) -> None:
    valid_AK, _ = random_blocks(seed)
    generator = torch.Generator().manual_seed(seed)
    step_AK, go_on_AK = (torch.rand(18, 3, generator=generator).double().requires_grad_() for _ in range(2))
    expected = torch.autograd.grad(_expected_length(step_AK, go_on_AK, valid_AK), (step_AK, go_on_AK))
    found = length_slopes(*(x.detach() * valid_AK for x in (step_AK, go_on_AK)))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[valid_AK], theirs[valid_AK], rtol=1e-12, atol=1e-14)
