"""Drafting a block from the context cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden_draft import CASES, DTYPES, GoldenCase, close, golden_case
from torch import Tensor

from dspark.draft.model import DraftModel
from dspark.draft.proposal import ContextCache, extend, propose


def greedy(logits_V: Tensor) -> int:
    return int(logits_V.argmax())


def dictate(ids: list[int]) -> Callable[[Tensor], int]:
    left = iter(ids)
    return lambda _logits_V: next(left)


def filled(case: GoldenCase, num_tokens: int, sequence: int = 0) -> ContextCache:
    cache = ContextCache(case.draft)
    extend(case.draft, cache, case.taps()[sequence, :num_tokens])
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_rounds_with_the_context_cache_are_deepspecs(
    dspark_golden: dict[str, Any], name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = golden_case(dspark_golden, name, dtype)
    inference = case.expected["inference"]
    hidden: list[Tensor] = []
    blocks = DraftModel.blocks
    monkeypatch.setattr(DraftModel, "blocks", lambda *given: hidden.append(blocks(*given)[0]) or hidden[-1][None])
    cache = filled(case, inference["prompt_tokens"])
    for expected in inference["rounds"]:
        assert cache.num_tokens == expected["context_rows_in_cache"] == expected["anchor_position"]
        proposal = propose(case.draft, cache, expected["anchor_token"], greedy)
        assert proposal.ids_K.tolist() == expected["draft_tokens"]
        close(proposal.logits_KV, expected["step_logits"])
        if "hidden" in expected:
            close(hidden[-1], expected["hidden"])
        confidence_K = proposal.confidence_logits_K
        assert confidence_K is not None
        close(confidence_K, expected["confidence_logits"])
        for threshold, kept in expected["draft_tokens_kept_at_threshold"].items():
            assert (confidence_K.sigmoid() >= float(threshold)).long().cumprod(0).sum() == kept
        if "context_rows_appended" in expected:
            first, last = expected["context_rows_appended"]
            extend(case.draft, cache, case.taps()[0, first : last + 1])
    for layer, rows in enumerate(inference.get("cache_after_last_round", [])):
        close(cache.keys[layer][: cache.num_tokens].transpose(0, 1), rows["keys_after_norm_and_rope"])
        close(cache.values[layer][: cache.num_tokens].transpose(0, 1), rows["values"])


@pytest.mark.parametrize("mistake", ["one_row_short", "block_positions_one_early", "rows_of_rejected_drafts_kept"])
@pytest.mark.parametrize("name", CASES)
def test_a_planted_cache_mistake_gives_the_wrong_number_and_we_do_not(
    dspark_golden: dict[str, Any], name: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = golden_case(dspark_golden, name, torch.float64)
    expected = case.expected["inference"]["rounds"][1]
    wrong = expected[f"wrong_{mistake}"]
    anchor, position = expected["anchor_token"], expected["anchor_position"]
    right = propose(case.draft, filled(case, position), anchor, greedy)
    wrong_V = torch.tensor(wrong["slot0_logits"]).double()
    assert (right.logits_KV[0] - wrong_V).abs().max() > 0.1
    rows = {"one_row_short": position - 1, "rows_of_rejected_drafts_kept": position + 1}.get(mistake, position)
    blocks = DraftModel.blocks
    shift = position - rows - (mistake == "block_positions_one_early")
    monkeypatch.setattr(
        DraftModel, "blocks", lambda draft, ids, places, *rest: blocks(draft, ids, places + shift, *rest)
    )
    planted = propose(case.draft, filled(case, rows), anchor, greedy)
    torch.testing.assert_close(planted.logits_KV[0], wrong_V, rtol=1e-6, atol=1e-6)
    assert planted.ids_K.tolist() == wrong["tokens"]


@pytest.mark.parametrize("name", CASES)
def test_drafting_the_text_itself_equals_the_training_pass(dspark_golden: dict[str, Any], name: str) -> None:
    case = golden_case(dspark_golden, name, torch.float64)
    output, logits_BAKV = case.forward(), case.logits()
    for sequence, block in ((0, 1), (0, 3), (1, 0)):
        anchor = int(case.anchors_BA[sequence, block])
        text = case.ids_BT[sequence, anchor : anchor + 6].tolist()
        proposal = propose(case.draft, filled(case, anchor, sequence), text[0], dictate(text[1:]))
        assert proposal.ids_K.tolist() == text[1:]
        torch.testing.assert_close(proposal.logits_KV, logits_BAKV[sequence, block])
        assert output.confidence_logits_AK is not None
        confidence_BAK = case.on_grid(output.confidence_logits_AK)
        torch.testing.assert_close(proposal.confidence_logits_K, confidence_BAK[sequence, block])


def test_a_cache_grown_by_random_rounds_equals_one_filled_at_once(dspark_golden: dict[str, Any]) -> None:
    case = golden_case(dspark_golden, "gqa_vanilla", torch.float64)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        cache = filled(case, 1)
        while cache.num_tokens < 22:
            propose(case.draft, cache, 5, greedy)
            count = min(int(torch.randint(0, 7, (), generator=generator)), 22 - cache.num_tokens)
            extend(case.draft, cache, case.taps()[0, cache.num_tokens : cache.num_tokens + count])
        found = propose(case.draft, cache, 5, greedy)
        fresh = propose(case.draft, filled(case, 22), 5, greedy)
        torch.testing.assert_close(found.logits_KV, fresh.logits_KV)


def test_drafting_commits_nothing_and_reads_no_stale_row(dspark_golden: dict[str, Any]) -> None:
    case = golden_case(dspark_golden, "mha_vanilla", torch.float64)
    cache = filled(case, 9)
    first = propose(case.draft, cache, 36, greedy)
    propose(case.draft, cache, 1, dictate([1, 2, 3, 4, 5]))
    again = propose(case.draft, cache, 36, greedy)
    assert cache.num_tokens == 9
    assert torch.equal(first.logits_KV, again.logits_KV)


def test_a_draft_without_the_head_proposes_without_confidence(dspark_golden: dict[str, Any]) -> None:
    whole = golden_case(dspark_golden, "mha_vanilla", torch.float64)
    draft = DraftModel(whole.draft.config.model_copy(update={"enable_confidence_head": False})).double()
    draft.load_state_dict({k: v for k, v in whole.draft.state_dict().items() if not k.startswith("confidence_head")})
    assert whole.draft.embedding_VD is not None
    assert whole.draft.head_VD is not None
    draft.bind(whole.draft.embedding_VD, whole.draft.head_VD)
    proposal = propose(draft, filled(whole, 9), 36, greedy)
    assert proposal.confidence_logits_K is None
    assert torch.equal(proposal.logits_KV, propose(whole.draft, filled(whole, 9), 36, greedy).logits_KV)


def test_picked_logits_are_float32_for_a_bfloat16_draft(dspark_golden: dict[str, Any]) -> None:
    case = golden_case(dspark_golden, "mha_vanilla", torch.bfloat16)
    seen: list[Tensor] = []
    proposal = propose(case.draft, filled(case, 9), 36, lambda logits_V: seen.append(logits_V) or 3)
    assert all(logits_V.dtype == torch.float32 for logits_V in seen)
    assert torch.equal(torch.stack(seen), proposal.logits_KV)


@pytest.mark.parametrize("name", CASES)
def test_fewer_drafts_are_the_first_ones_of_the_whole_block(dspark_golden: dict[str, Any], name: str) -> None:
    case = golden_case(dspark_golden, name, torch.float64)
    whole = propose(case.draft, filled(case, 9), 36, greedy)
    assert whole.confidence_logits_K is not None
    for num_drafts in range(1, len(whole.ids_K) + 1):
        cache = filled(case, 9)
        fewer = propose(case.draft, cache, 36, greedy, num_drafts)
        assert fewer.ids_K.tolist() == whole.ids_K[:num_drafts].tolist()
        close(fewer.logits_KV, whole.logits_KV[:num_drafts])
        assert fewer.confidence_logits_K is not None
        close(fewer.confidence_logits_K, whole.confidence_logits_K[:num_drafts])
        assert cache.num_tokens == 9
