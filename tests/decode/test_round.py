"""One round against golden numbers: what is verified, counted and committed."""

from typing import Any

import pytest
import torch
from golden_draft import exact
from toy import TableCache, TableTarget

from dspark.decode.round import Block, num_confident, verify_blocks
from dspark.decode.sampling import Sampling, token_probs


@pytest.mark.parametrize("number", range(10))
def test_a_round_counts_and_commits_what_is_golden(dspark_golden: dict[str, Any], number: int) -> None:
    case = dspark_golden["verify_rule"]["cases"][number]
    sampling = Sampling(case["temperature"], 100, tuple(case["stop_token_ids"] or ()))
    target_logits = exact(case["target_logits"], torch.float64)
    draft_probs = (
        token_probs(exact(case["draft_logits"], torch.float64), sampling) if case["draft_logits"] else target_logits[:0]
    )
    if case["name"] == "draft_probability_zero_is_clamped":
        draft_probs = torch.tensor(case["draft_probs"])
    ids = torch.tensor(case["draft_tokens"], dtype=torch.int64)
    target = TableTarget(torch.cat((target_logits[:1], target_logits)), step=lambda state, _: state + 1)
    cache = TableCache([0], [[]], [[]])
    uniforms = iter([*case["accept_uniforms"], case["final_uniform"]])
    laps: list[str] = []
    blocks, numbers = {0: Block(6, ids, draft_probs, ())}, [uniforms.__next__]
    verified = verify_blocks(target, cache, blocks, sampling, numbers, laps.append)[0]
    counts = verified.counts
    kept = case["draft_tokens"][: case["accepted_drafts"]]
    assert verified.ids == kept + [case["final_token"]] * (not case["terminated_by_stop_token"])
    assert counts.accepted_drafts == case["accepted_drafts"]
    assert counts.acceptance_length == case["acceptance_length"]
    assert counts.num_proposed == case["counted_proposal_tokens"]
    assert counts.is_cut == case["terminated_by_stop_token"]
    assert cache.ids[0] == [6, *kept], "the anchor and the accepted tokens are committed, the next anchor is not"
    assert len(verified.taps_TLD) == 1 + len(kept)
    assert list(uniforms) == []
    assert laps == ["verify", "commit"]


def test_a_block_ends_before_the_first_confidence_below_the_threshold() -> None:
    confidences = [0.9, 0.5, 0.8, 0.2, 0.99]
    assert [num_confident(confidences, threshold) for threshold in (0.1, 0.4, 0.5, 0.6, 0.95)] == [5, 3, 3, 1, 0]
    assert num_confident([0.9, float("nan"), 0.9], 0.5) == 1
