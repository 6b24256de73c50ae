"""Anchors, slots, labels and visibility."""

from typing import Any

import pytest
import torch
from golden_draft import GoldenCase, golden_case

from dspark.draft.anchors import (
    anchor_candidates,
    block_targets,
    block_visibility,
    gather_positions,
    sample_anchors,
    slot_positions,
)


@pytest.fixture
def case(dspark_golden: dict[str, Any]) -> GoldenCase:
    return golden_case(dspark_golden, "mha_vanilla", torch.float64)


def test_candidates_labels_validity_and_previous_tokens_are_deepspecs(case: GoldenCase) -> None:
    candidates_BT = anchor_candidates(case.loss_mask_BT, case.lengths_B)
    assert candidates_BT[:, :-1].int().tolist() == case.shared["anchor_candidates"]
    assert not candidates_BT[:, -1].any()
    targets = case.targets()
    assert targets.valid_BAK.int().tolist() == case.shared["eval_mask"]
    assert torch.equal(targets.label_ids_BAK[case.keep_BA], torch.tensor(case.shared["target_ids"])[case.keep_BA])
    previous_BAK = gather_positions(case.ids_BT, slot_positions(case.anchors_BA, 5))
    expected_BAK = torch.tensor(case.shared["markov_previous_ids"])
    assert torch.equal(previous_BAK[case.valid_BAK], expected_BAK[case.valid_BAK])


def test_visible_keys_are_deepspecs_and_a_padding_block_sees_itself(case: GoldenCase) -> None:
    visible_B1NT = block_visibility(case.anchors_BA, case.keep_BA, case.ids_BT.shape[1], 5)
    for b, blocks in enumerate(case.shared["visible_keys_per_block"]):
        for a, keys in enumerate(blocks):
            for row_T in visible_B1NT[b, 0, 5 * a : 5 * a + 5]:
                expected = keys if case.keep_BA[b, a] else list(range(23 + 5 * a, 28 + 5 * a))
                assert row_T.nonzero().flatten().tolist() == expected


def test_a_padding_block_never_reads_text_whatever_its_anchor() -> None:
    visible_B1NT = block_visibility(torch.tensor([[7, 9]]), torch.tensor([[True, False]]), 12, 3)
    assert visible_B1NT[0, 0, :3, :12].sum(-1).tolist() == [7, 7, 7]
    assert not visible_B1NT[0, 0, 3:, :12].any()


def test_a_slot_past_the_sequences_own_length_or_in_a_padding_block_is_not_valid() -> None:
    ids_BT, mask_BT = torch.arange(20).view(2, 10), torch.ones(2, 10, dtype=torch.bool)
    lengths_B, anchors_BA = torch.tensor([10, 6]), torch.tensor([[3, 8], [3, 4]])
    targets = block_targets(ids_BT, mask_BT, lengths_B, anchors_BA, torch.ones(2, 2, dtype=torch.bool), 4)
    assert targets.valid_BAK.sum(-1).tolist() == [[4, 1], [2, 1]]
    assert targets.label_ids_BAK[1, 0, :2].tolist() == [14, 15]
    assert not anchor_candidates(mask_BT, lengths_B)[1, 5:].any()
    keep_BA = torch.tensor([[True, False], [False, True]])
    dropped = block_targets(ids_BT, mask_BT, lengths_B, anchors_BA, keep_BA, 4)
    assert dropped.valid_BAK.sum(-1).tolist() == [[4, 0], [0, 1]]


def test_all_candidates_are_drawn_when_there_are_fewer_than_asked(case: GoldenCase) -> None:
    anchors_BA, keep_BA = sample_anchors(case.loss_mask_BT, case.lengths_B, 512, torch.Generator().manual_seed(1))
    candidates_BT = anchor_candidates(case.loss_mask_BT, case.lengths_B)
    for anchors_A, keep_A, candidates_T in zip(anchors_BA, keep_BA, candidates_BT, strict=True):
        assert anchors_A[keep_A].tolist() == candidates_T.nonzero().flatten().tolist()
    assert anchors_BA.shape[1] == int(candidates_BT.sum(1).max())
    assert not anchors_BA[~keep_BA].any()


def test_anchors_are_distinct_sorted_reproducible_and_uniform() -> None:
    mask_BT = torch.zeros(4000, 12, dtype=torch.bool)
    mask_BT[:, 3:11] = True
    lengths_B = torch.full((4000,), 12)
    anchors_BA, keep_BA = sample_anchors(mask_BT, lengths_B, 3, torch.Generator().manual_seed(5))
    again_BA, _ = sample_anchors(mask_BT, lengths_B, 3, torch.Generator().manual_seed(5))
    assert torch.equal(anchors_BA, again_BA)
    assert anchors_BA.shape == (4000, 3)
    assert keep_BA.all()
    assert (anchors_BA.diff(dim=1) > 0).all()
    counts_T = anchors_BA.flatten().bincount(minlength=12)
    assert counts_T[:3].sum() == counts_T[10:].sum() == 0
    expected = 4000 * 3 / 7
    assert ((counts_T[3:10] - expected) ** 2 / expected).sum() < 22.5  # chi-square, 6 degrees, p = 0.001


def test_a_batch_without_a_candidate_gets_one_padding_block() -> None:
    mask_BT = torch.zeros(2, 7, dtype=torch.bool)
    mask_BT[0, 4] = True
    anchors_BA, keep_BA = sample_anchors(mask_BT, torch.tensor([7, 1]), 4, torch.Generator().manual_seed(0))
    assert anchors_BA.tolist() == [[0], [0]]
    assert not keep_BA.any()
