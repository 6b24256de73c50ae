"""Speculative text is the target's own text: golden runs, greedy equality, and the exact law on a toy vocabulary."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_draft import CASES, DTYPES, exact, golden_case
from speculating import Generation, speculate
from tiny import MASK_TOKEN_ID, STOP_TOKEN_ID, VOCAB_SIZE, write_tiny_ling
from toy import SIZE, TableTarget, chi_square_p_value, move, sure, toy_draft, toy_pair

from dspark.decode import round as round_module
from dspark.decode.generation import generate
from dspark.decode.round import accept, draw_block, num_confident
from dspark.decode.sampling import Sampling, Uniforms, row_uniforms
from dspark.draft.model import DraftModel
from dspark.draft.proposal import ContextCache, extend
from dspark.errors import DraftMismatchError
from dspark.target.loading import load_target
from dspark.types import Proposal


def golden_loop(golden: dict[str, Any], dtype: torch.dtype) -> tuple[TableTarget, DraftModel, torch.Tensor]:
    run = golden["decode_end_to_end"]
    draft = golden_case(golden, "mha_vanilla", dtype).draft
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.mul_(8)
    target = TableTarget(
        exact(run["logit_table"], dtype),
        taps=(exact(run["token_table"], dtype), exact(run["position_table"], dtype)),
        target_layer_ids=draft.config.target_layer_ids,
    )
    return target, draft, torch.tensor(run["prompt"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", range(5))
def test_the_whole_loop_is_golden(dspark_golden: dict[str, Any], number: int, dtype: torch.dtype) -> None:
    target, draft, prompt = golden_loop(dspark_golden, dtype)
    run = dspark_golden["decode_end_to_end"]["runs"][number]
    sampling = Sampling(run["temperature"], run["max_new_tokens"], tuple(run["stop_token_ids"] or ()))
    uniforms = iter(exact(dspark_golden["decode_end_to_end"]["uniforms"], torch.float64).tolist())
    text = speculate(target, sure(draft, run["confidence_threshold"]), prompt, sampling, uniforms.__next__)
    assert [*prompt.tolist(), *text.ids_T.tolist()] == run["output_ids"]
    assert [counts.acceptance_length for counts in text.rounds] == run["acceptance_lengths"]
    assert [counts.num_proposed for counts in text.rounds] == run["proposal_lengths"]
    assert [counts.accepted_drafts for counts in text.rounds] == run["accepted_drafts"]
    assert 400 - len(list(uniforms)) == run["uniforms_used"]
    is_cut = 1 + sum(run["acceptance_lengths"]) > run["max_new_tokens"] or run["name"] == "sampled_stop_token_accepted"
    assert [counts.is_cut for counts in text.rounds] == [False] * (len(text.rounds) - 1) + [is_cut]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_drafting_with_a_context_is_golden(dspark_golden: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    case = golden_case(dspark_golden, name, dtype)
    draft, taps, inference = case.draft, case.taps()[0], case.expected["inference"]
    greedy, context, end = Sampling(0.0, 1), ContextCache(draft), inference["prompt_tokens"]
    start = 0
    with torch.no_grad():
        for golden in inference["rounds"]:
            extend(draft, context, taps[start:end])
            assert context.num_tokens == golden["context_rows_in_cache"]
            block = draw_block(draft, context, golden["anchor_token"], greedy, iter([]).__next__)
            assert block.ids_K.tolist() == golden["draft_tokens"]
            assert block.confidence_logits == pytest.approx(golden["confidence_logits"], abs=5e-5)
            for threshold, kept in golden["draft_tokens_kept_at_threshold"].items():
                assert num_confident(block.confidences, float(threshold)) == kept
            if "context_rows_appended" in golden:
                start, end = golden["context_rows_appended"][0], golden["context_rows_appended"][1] + 1


def test_greedy_text_is_plain_text_wherever_it_ends(dspark_golden: dict[str, Any]) -> None:
    """Every stop token, so also in the middle of a block, and every length."""
    target, draft, prompt = golden_loop(dspark_golden, torch.float64)
    numbers = row_uniforms(0, 0)
    stops = [(Sampling(0.0, 26, (new_id,)), 0.0) for new_id in range(61)]
    lengths = [(Sampling(0.0, length), 0.55) for length in range(1, 27)]
    for sampling, threshold in stops + lengths:
        (plain,) = generate(target, [prompt], sampling, [numbers])
        assert speculate(target, sure(draft, threshold), prompt, sampling, numbers).ids_T.tolist() == plain.tolist()


def knowing_propose(text: torch.Tensor, prompt_tokens: int, errors: random.Random) -> Callable[..., Proposal]:
    """A ``propose`` that knows the text and errs from a random slot on."""

    def propose(
        draft: DraftModel, context: ContextCache, anchor_id: int, pick: Callable[..., int], _: None
    ) -> Proposal:
        block_size, start = draft.config.block_size, context.num_tokens - prompt_tokens
        assert start >= len(text) or text[start] == anchor_id
        ids_K = torch.cat((text[start + 1 :], torch.zeros(block_size, dtype=torch.int64)))[:block_size]
        ids_K[errors.randrange(block_size + 1) :] = MASK_TOKEN_ID
        logits_KV = torch.nn.functional.one_hot(ids_K, VOCAB_SIZE).double()
        return Proposal(torch.tensor([pick(row_V) for row_V in logits_KV]), logits_KV, None)

    return propose


def test_greedy_text_of_a_tiny_ling_is_plain_text_for_every_accepted_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taps = (0, 3)
    target = load_target(write_tiny_ling(tmp_path), target_layer_ids=taps, dtype=torch.float64)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_target_layers": 6, "target_layer_ids": taps}
    draft = toy_draft(sizes | {"mask_token_id": MASK_TOKEN_ID}, 2, torch.float64)
    draft.bind(target.embedding_VD, target.head_VD)
    prompts = [torch.arange(3, 3 + length) for length in (1, 5, 40)]
    sampling = Sampling(0.0, 40, (STOP_TOKEN_ID,))
    plain = generate(target, prompts, sampling, [row_uniforms(0, row) for row in range(3)])
    accepted, errors = set(), random.Random(0)
    for prompt, text in zip(prompts, plain, strict=True):
        monkeypatch.setattr(round_module, "propose", knowing_propose(text, len(prompt), errors))
        spoken = speculate(target, draft, prompt, sampling, row_uniforms(0, 0))
        assert spoken.ids_T.tolist() == text.tolist()
        accepted |= {counts.accepted_drafts for counts in spoken.rounds}
    assert accepted == {0, 1, 2, 3}


NUM_TOKENS = 3


def law_p_value(write: Callable[[TableTarget, DraftModel, Uniforms], torch.Tensor], num_draws: int = 600) -> float:
    """How well written texts agree with the target's own law, computed by going through all of them."""
    target, draft = toy_pair()
    counts = torch.zeros(SIZE**NUM_TOKENS, dtype=torch.float64)
    for number in range(num_draws):
        text = write(target, draft, row_uniforms(11, number)).tolist()
        counts[sum(new_id * SIZE**place for place, new_id in enumerate(reversed(text)))] += 1
    probs_SV = torch.softmax(target.logits_SV.double(), -1)
    law = []
    for text in itertools.product(range(SIZE), repeat=NUM_TOKENS):
        state, prob = move(move(0, 2), 1), 1.0
        for new_id in text:
            prob *= float(probs_SV[state, new_id])
            state = move(state, new_id)
        law.append(prob)
    return chi_square_p_value(counts, torch.tensor(law))


def spoken(threshold: float) -> Callable[[TableTarget, DraftModel, Uniforms], torch.Tensor]:
    def write(target: TableTarget, draft: DraftModel, uniforms: Uniforms) -> torch.Tensor:
        return speculate(
            target, sure(draft, threshold), torch.tensor([2, 1]), Sampling(1.0, NUM_TOKENS), uniforms
        ).ids_T

    return write


@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_speculative_text_has_the_law_of_the_target(threshold: float) -> None:
    assert law_p_value(spoken(threshold)) > 1e-3


def test_plain_text_has_the_law_of_the_target() -> None:
    def write(target: TableTarget, draft: DraftModel, uniforms: Uniforms) -> torch.Tensor:
        return generate(target, [torch.tensor([2, 1])], Sampling(1.0, NUM_TOKENS), [uniforms])[0]

    assert law_p_value(write) > 1e-3


def test_a_wrong_rule_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(ids_K: torch.Tensor, draft: torch.Tensor, target: torch.Tensor, uniforms: Uniforms) -> Any:
        return len(ids_K), accept(ids_K[:0], draft[:0], target[-1:], uniforms)[1]

    monkeypatch.setattr(round_module, "accept", always)
    assert law_p_value(spoken(0.0), num_draws=200) < 1e-6


def test_a_commit_of_one_token_too_few_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = TableTarget.commit
    less = lambda self, cache, counts_B: commit(self, cache, (counts_B - 1).clamp(min=1))  # noqa: E731
    monkeypatch.setattr(TableTarget, "commit", less)
    assert law_p_value(spoken(0.0), num_draws=200) < 1e-6


def test_a_block_without_confidence_verifies_the_anchor_alone(dspark_golden: dict[str, Any]) -> None:
    target, draft, prompt = golden_loop(dspark_golden, torch.float64)
    text = speculate(target, sure(draft, 1.0), prompt, Sampling(0.0, 8), row_uniforms(0, 0))
    assert target.verified_tokens == [1] * 8
    assert [(counts.num_proposed, counts.acceptance_length) for counts in text.rounds] == [(0, 1)] * 8
    assert all(len(counts.confidence_logits) == 5 for counts in text.rounds)


def test_a_text_that_stops_with_its_first_token_has_no_rounds(dspark_golden: dict[str, Any]) -> None:
    target, draft, prompt = golden_loop(dspark_golden, torch.float64)
    text = speculate(target, draft, prompt, Sampling(0.0, 26, (45,)), row_uniforms(0, 0))
    assert (text.ids_T.tolist(), text.rounds) == ([45], ())


def test_a_row_of_a_batch_says_what_it_says_alone() -> None:
    target, _ = toy_pair()
    prompts = [torch.tensor(ids) for ids in ([1], [2, 3, 0], [0, 0], [3, 2])]
    sampling = Sampling(1.0, 40, stop_token_ids=(3,))
    together = generate(target, prompts, sampling, [row_uniforms(9, row) for row in range(4)])
    assert len(target.commits[1:]) == max(map(len, together)) - 1, "the last row to end ends the pass"
    for row, prompt in enumerate(prompts):
        (alone,) = generate(target, [prompt], sampling, [row_uniforms(9, row)])
        assert alone.tolist() == together[row].tolist()
    lengths = [len(text) for text in together]
    assert len(set(lengths)) > 1, "the rows end at different times"
    assert all(text[-1] == 3 and 3 not in text[:-1] for text in together if len(text) < 40)
    assert generate(target, [], sampling, []) == []


def test_a_draft_of_other_taps_and_a_threshold_without_its_head_are_refused() -> None:
    target, draft = toy_pair()
    prompt, sampling = torch.tensor([1]), Sampling(0.0, 4)
    other = TableTarget(target.logits_SV, move, (target.token_table, target.position_table), target_layer_ids=(1, 5))
    with pytest.raises(DraftMismatchError, match=r"layers \[1, 4\].*\[1, 5\]"):
        speculate(other, draft, prompt, sampling, row_uniforms(0, 0))
    with pytest.raises(DraftMismatchError, match=r"layers \[1, 4\].*\[1, 5\]"):
        speculate(other, sure(draft, 0.5), prompt, sampling, row_uniforms(0, 0))
    headless = toy_draft(
        draft.config.model_dump() | {"enable_confidence_head": False, "confidence_head_with_markov": False}, seed=4
    )
    headless.bind(torch.randn(SIZE, 4), torch.randn(SIZE, 4))
    with pytest.raises(DraftMismatchError, match="confidence head"):
        speculate(target, sure(headless, 0.5), prompt, sampling, row_uniforms(0, 0))
    text = speculate(target, headless, prompt, sampling, row_uniforms(0, 0))
    assert isinstance(text, Generation)
    assert text.rounds[0].confidence_logits == ()
