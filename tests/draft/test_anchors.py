"""Anchors, slots, labels and visibility."""

from typing import Any

import pytest
import torch
from golden_draft import GoldenCase, golden_case

from dspark.draft.anchors import anchor_candidates, block_targets, gather_positions, sample_anchors, slot_positions


@pytest.fixture
def case(dspark_golden: dict[str, Any]) -> GoldenCase:
    return golden_case(dspark_golden, "mha_vanilla", torch.float64)


def test_candidates_labels_validity_and_previous_tokens_are_deepspecs(case: GoldenCase) -> None:
    for mask_T, expected in zip(case.loss_mask_BT, case.shared["anchor_candidates"], strict=True):
        candidates_T = anchor_candidates(mask_T)
        assert candidates_T[:-1].int().tolist() == expected
        assert not candidates_T[-1]
    targets = case.targets()
    assert case.on_grid(targets.valid_AK).int().tolist() == case.shared["eval_mask"]
    labels_BAK = case.on_grid(targets.label_ids_AK)
    assert torch.equal(labels_BAK[case.keep_BA], torch.tensor(case.shared["target_ids"])[case.keep_BA])
    previous_BAK = case.on_grid(gather_positions(case.ids_BT.flatten(), slot_positions(case.anchors_A, 5)))
    expected_BAK = torch.tensor(case.shared["markov_previous_ids"])
    assert torch.equal(previous_BAK[case.valid_BAK], expected_BAK[case.valid_BAK])


def test_a_slot_past_the_sequences_end_is_not_valid() -> None:
    targets = block_targets(torch.arange(10, 16), torch.ones(6, dtype=torch.bool), torch.tensor([3, 4]), 4)
    assert targets.valid_AK.sum(-1).tolist() == [2, 1]
    assert targets.label_ids_AK[0, :2].tolist() == [14, 15]


def test_all_candidates_are_drawn_when_there_are_fewer_than_asked(case: GoldenCase) -> None:
    for mask_T in case.loss_mask_BT:
        anchors_A = sample_anchors(mask_T, 512, torch.Generator().manual_seed(1))
        assert anchors_A.tolist() == anchor_candidates(mask_T).nonzero().flatten().tolist()


def test_anchors_are_distinct_sorted_reproducible_and_uniform() -> None:
    mask_T, generator = torch.zeros(12, dtype=torch.bool), torch.Generator().manual_seed(5)
    mask_T[3:11] = True
    anchors_NA = torch.stack([sample_anchors(mask_T, 3, generator) for _ in range(4000)])
    generator.manual_seed(5)
    assert torch.equal(anchors_NA, torch.stack([sample_anchors(mask_T, 3, generator) for _ in range(4000)]))
    assert anchors_NA.shape == (4000, 3)
    assert (anchors_NA.diff(dim=1) > 0).all()
    counts_T = anchors_NA.flatten().bincount(minlength=12)
    assert counts_T[:3].sum() == counts_T[10:].sum() == 0
    expected = 4000 * 3 / 7
    assert ((counts_T[3:10] - expected) ** 2 / expected).sum() < 22.5  # chi-square, 6 degrees, p = 0.001


def test_the_anchors_of_a_seed_never_change() -> None:
    mask_T = torch.arange(40) >= 9
    assert sample_anchors(mask_T, 5, torch.Generator().manual_seed(3)).tolist() == [14, 23, 33, 34, 37]


def test_a_sequence_without_a_candidate_gets_no_anchor() -> None:
    assert len(sample_anchors(torch.arange(7) == 4, 4, torch.Generator().manual_seed(0))) == 0
    assert len(sample_anchors(torch.ones(1, dtype=torch.bool), 4, torch.Generator().manual_seed(0))) == 0
