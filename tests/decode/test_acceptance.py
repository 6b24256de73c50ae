"""The acceptance rule against golden numbers, and against the distribution it promises."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden_draft import DTYPES, exact
from toy import chi_square_p_value

from dspark.decode.round import accept
from dspark.decode.sampling import Sampling, Uniforms, draw, row_uniforms, token_probs

Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Uniforms], tuple[int, int]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", range(10))
def test_the_rule_gives_the_golden_tokens(dspark_golden: dict[str, Any], number: int, dtype: torch.dtype) -> None:
    case = dspark_golden["verify_rule"]["cases"][number]
    sampling = Sampling(case["temperature"], max_new_tokens=1)
    target_probs = token_probs(exact(case["target_logits"], dtype), sampling)
    draft_probs = target_probs[:0]
    if case["draft_logits"]:
        draft_probs = token_probs(exact(case["draft_logits"], dtype), sampling)
    if case["name"] == "draft_probability_zero_is_clamped":
        draft_probs = torch.tensor(case["draft_probs"], dtype=dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(target_probs, torch.tensor(case["target_probs"], dtype=dtype), atol=tolerance, rtol=1e-5)
    uniforms = iter([*case["accept_uniforms"], case["final_uniform"]])
    ids = torch.tensor(case["draft_tokens"], dtype=torch.int64)
    accepted, final = accept(ids, draft_probs, target_probs, uniforms.__next__)
    if case["terminated_by_stop_token"]:
        assert accepted >= case["accepted_drafts"]
    else:
        assert (accepted, final) == (case["accepted_drafts"], case["final_token"])
    assert list(uniforms) == []


def test_a_residual_without_mass_gives_way_to_the_target(dspark_golden: dict[str, Any]) -> None:
    case = dspark_golden["verify_rule"]["residual_fallback"]
    probs = torch.tensor([case["p"], case["p"]])
    uniforms = iter([1.0, case["uniform"]])
    assert accept(torch.tensor([2]), probs[:1], probs, uniforms.__next__) == (0, case["token"])


def test_a_token_is_refused_when_the_uniform_equals_the_ratio() -> None:
    draft_probs, target_probs = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    for uniform, accepted in ((0.5, 0), (0.4999, 1)):
        assert accept(torch.tensor([0]), draft_probs, target_probs, iter([uniform, 0.0]).__next__)[0] == accepted


SIZE, SLOTS, DRAWS = 4, 2, 1500


def first_three_tokens_p_value(rule: Rule) -> float:
    """Draft and verify blocks of two, then go on with the target alone to three tokens: how likely are their counts?

    Both distributions depend on the previous token, so an error in one slot shows in the next.
    """
    generator = torch.Generator().manual_seed(3)
    target_VV = torch.softmax(1.5 * torch.randn(SIZE, SIZE, generator=generator), -1)
    draft_VV = torch.softmax(1.5 * torch.randn(SIZE, SIZE, generator=generator), -1)
    counts = torch.zeros(SIZE, SIZE, SIZE)
    for number in range(DRAWS):
        uniforms = row_uniforms(5, number)
        previous, ids = 0, []
        for _ in range(SLOTS):
            ids.append(int(draw(draft_VV[previous][None], [uniforms()])))
            previous = ids[-1]
        rows = [0, *ids]
        accepted, final = rule(torch.tensor(ids), draft_VV[rows[:-1]], target_VV[rows], uniforms)
        text = [*ids[:accepted], final]
        while len(text) < 3:
            text.append(int(draw(target_VV[text[-1]][None], [uniforms()])))
        counts[tuple(text)] += 1
    probs = target_VV[0][:, None, None] * target_VV[:, :, None] * target_VV[None]
    return chi_square_p_value(counts.flatten(), probs.flatten())


def always_accept(ids_K: torch.Tensor, draft: torch.Tensor, target: torch.Tensor, uniforms: Uniforms) -> Any:
    return len(ids_K), accept(ids_K[:0], draft[:0], target[-1:], uniforms)[1]


def ratio_upside_down(ids_K: torch.Tensor, draft: torch.Tensor, target: torch.Tensor, uniforms: Uniforms) -> Any:
    accepted, _ = accept(ids_K, target[:-1], torch.cat((draft, draft[:1])), uniforms)
    row = (target[accepted] - draft[accepted]).clamp(min=0) if accepted < len(ids_K) else target[accepted]
    return accepted, int(draw(row[None], [uniforms()]))


def final_from_the_target_after_a_refusal(
    ids_K: torch.Tensor, draft: torch.Tensor, target: torch.Tensor, uniforms: Uniforms
) -> Any:
    accepted, _ = accept(ids_K, draft, target, uniforms)
    return accepted, int(draw(target[accepted][None], [uniforms()]))


def residual_of_the_next_row(ids_K: torch.Tensor, draft: torch.Tensor, target: torch.Tensor, uniforms: Uniforms) -> Any:
    accepted, final = accept(ids_K, draft, target, uniforms)
    if accepted + 1 < len(ids_K):
        final = int(draw((target[accepted + 1] - draft[accepted + 1]).clamp(min=0)[None], [uniforms()]))
    return accepted, final


def test_what_is_committed_is_distributed_as_the_target() -> None:
    assert first_three_tokens_p_value(accept) > 1e-3


@pytest.mark.parametrize(
    "rule", [always_accept, ratio_upside_down, final_from_the_target_after_a_refusal, residual_of_the_next_row]
)
def test_a_wrong_rule_is_detected_by_the_same_count(rule: Rule) -> None:
    assert first_three_tokens_p_value(rule) < 1e-9
