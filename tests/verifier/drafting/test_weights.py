"""A rank's part of a draft: its bytes at the released shape, and what cannot be divided."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dspark.config import load_run
from dspark.draft.model import DraftModel
from dspark.errors import ConfigError
from dspark.verifier import Shard
from dspark.verifier.calls import call
from dspark.verifier.drafting import BlockDrafter, draft_weights, random_draft

FLASH = Path(__file__).parents[3] / "configs" / "ling-3.0-flash.yaml"


def test_a_rank_of_four_holds_its_part_of_the_released_shape() -> None:
    config = load_run(FLASH).draft
    with torch.device("meta"):
        draft = DraftModel(config)
    weights = draft_weights(draft, Shard(3, 4), torch.bfloat16, "meta")
    width, rows = config.hidden_size, 32 // 4 * 128
    assert weights.fc_DC.shape == (width, 5 * width // 4)
    assert weights.context_CD.shape == (5 * 2 * rows, width)
    assert weights.markov.markov_w1.weight.shape == (157184, 256)
    assert weights.markov.markov_w2.weight.shape == (157184 // 4, 256)
    for layer in weights.layers:
        assert layer.qkv_CD.shape == (3 * rows, width)
        assert layer.out_DC.shape == (width, rows)
        assert layer.experts.gate_up_XCD.shape == (1, 2 * 6144 // 4, width)
        assert layer.experts.down_XDI.shape == (1, width, 6144 // 4)


def test_the_parts_of_the_ranks_are_the_whole(draft: DraftModel) -> None:
    whole, *parts = (draft_weights(draft, shard, torch.float32) for shard in (Shard(), Shard(0, 2), Shard(1, 2)))
    assert torch.equal(torch.cat([part.fc_DC for part in parts], 1), whole.fc_DC)
    layer, *halves = (weights.layers[2] for weights in (whole, *parts))
    for kind, rows in enumerate(layer.qkv_CD.chunk(3)):
        assert torch.equal(torch.cat([half.qkv_CD.chunk(3)[kind] for half in halves]), rows)
    for weights in (whole, *parts):
        assert torch.equal(
            weights.context_CD.chunk(5)[2], weights.layers[2].qkv_CD[len(weights.layers[2].qkv_CD) // 3 :]
        )
    assert draft.markov_head.markov_w2.weight.shape[0] == 4096, "the draft itself is left as it was"


def test_ranks_that_do_not_divide_the_draft_are_refused(draft: DraftModel) -> None:
    with pytest.raises(ConfigError, match="8 ranks do not divide the draft's num_attention_heads 4, num_key_value"):
        draft_weights(draft, Shard(0, 8), torch.float32)


@torch.no_grad()
def test_a_random_draft_drafts(draft: DraftModel, drafter_of: Callable[..., BlockDrafter]) -> None:
    made = [random_draft(draft.config, torch.float32, draft.fc.weight.device, seed) for seed in (0, 0, 1)]
    assert torch.equal(made[0].fc.weight, made[1].fc.weight)
    assert not torch.equal(made[0].fc.weight, made[2].fc.weight)
    confidence_K = drafter_of(made[0]).draft(None, call).confidence_K
    assert confidence_K is not None
    assert confidence_K.isfinite().all()
