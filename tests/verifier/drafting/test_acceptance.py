"""Accepting on the device is the rule as one would write it down, uniform for uniform."""

import pytest
import torch

from dspark.decode.sampling import Sampling, draw, token_probs
from dspark.verifier.drafting.acceptance import SMALLEST_RESIDUAL, accept


def plain_rule(
    ids: list[int], draft_KV: torch.Tensor, target_TV: torch.Tensor, uniforms: list[float]
) -> tuple[int, int]:
    """One draft after the other: how many stay, and the id behind them."""
    kept = 0
    while kept < len(ids) and uniforms[kept] < float(target_TV[kept, ids[kept]] / draft_KV[kept, ids[kept]]):
        kept += 1
    final_V = target_TV[kept]
    if kept < len(ids) and (left_V := (final_V - draft_KV[kept]).clamp(min=0)).sum() > SMALLEST_RESIDUAL:
        final_V = left_V
    return kept, int(draw(final_V[None], uniforms[-1:]))


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_every_uniform_gives_the_count_and_the_token_of_the_plain_rule(
    num_drafts: int, temperature: float, kernel_device: torch.device
) -> None:
    generator, sampling, size = torch.Generator().manual_seed(num_drafts), Sampling(temperature, 1), 5
    inverse_1, counts = torch.full((1,), 1 / temperature), set()
    for number in range(150):
        draft_KV, target_TV = (torch.randn(n, size, generator=generator) for n in (num_drafts, num_drafts + 1))
        if number % 3 == 0:
            draft_KV = target_TV[:-1].clone()  # nothing is left of p - q
        ids_T = torch.randint(size, (num_drafts + 1,), generator=generator)
        uniforms_T = torch.randint(1000, (num_drafts + 1,), generator=generator).double() / 1000
        probs = (token_probs(logits, sampling) for logits in (draft_KV, target_TV))
        expected = plain_rule(ids_T[1:].tolist(), *probs, uniforms_T.tolist())
        tensors = (ids_T, draft_KV, target_TV, inverse_1, uniforms_T)
        count_1, next_id_1 = accept(*(tensor.to(kernel_device) for tensor in tensors))
        assert (int(count_1) - 1, int(next_id_1)) == expected
        assert count_1.shape == next_id_1.shape == (1,)
        counts.add(expected[0])
    assert counts == set(range(num_drafts + 1))


def test_committed_tokens_have_the_law_of_the_target_exactly() -> None:
    """All drafts of one token times a grid of uniforms, against p."""
    generator, size, grid = torch.Generator().manual_seed(1), 4, 200
    target_TV, draft_KV = torch.randn(2, size, generator=generator), 2 * torch.randn(1, size, generator=generator)
    levels = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    found_V, draft_V = torch.zeros(size, dtype=torch.float64), draft_KV[0].softmax(0)
    for drafted in range(size):
        ids_T = torch.tensor([0, drafted])
        for u in levels:
            for v in levels[::10]:
                count_1, next_id_1 = accept(ids_T, draft_KV, target_TV, torch.ones(1), torch.stack((u, v)))
                first = drafted if int(count_1) == 2 else int(next_id_1)
                found_V[first] += draft_V[drafted] / (grid * grid / 10)
    torch.testing.assert_close(found_V, target_TV[0].double().softmax(0), rtol=0, atol=0.03)


def test_numbers_that_are_none_choose_an_id_of_the_vocabulary() -> None:
    nan_TV = torch.full((3, 5), torch.nan)
    count_1, next_id_1 = accept(torch.tensor([1, 2, 3]), nan_TV[:2], nan_TV, torch.ones(1), torch.rand(3).double())
    assert int(count_1) == 1
    assert 0 <= int(next_id_1) < 5
