"""Draws are inverse CDFs of one tensor, and rows have random numbers of their own."""

import pytest
import torch

from dspark.decode.sampling import Sampling, draw, row_uniforms, sample, token_probs


def test_a_draw_is_the_first_id_whose_cumulative_probability_exceeds_the_uniform() -> None:
    probs = torch.tensor([0.25, 0.0, 0.5, 0.25])
    uniforms = [0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 0.9999]
    assert draw(probs.expand(7, 4), uniforms).tolist() == [0, 0, 2, 2, 2, 3, 3]


def test_an_id_of_probability_zero_is_never_drawn_even_at_the_ends() -> None:
    probs = torch.zeros(500, 1000)
    probs[:, 100:900] = torch.rand(500, 800, generator=torch.Generator().manual_seed(0)) * 3.0
    assert set(draw(probs, [0.0] * 500).tolist()) == {100}
    assert set(draw(probs, [1.0 - 2.0**-53] * 500).tolist()) == {899}


def test_a_row_that_does_not_sum_to_one_is_drawn_in_proportion() -> None:
    assert draw(torch.tensor([[0.1, 0.3], [10.0, 30.0]]), [0.24, 0.26]).tolist() == [0, 1]


def test_ids_behind_a_likely_one_keep_their_small_probabilities() -> None:
    """A float32 running sum near 1 moves in steps of 6e-8 and would lose them."""
    probs = torch.full((1, 1001), 1e-9)
    probs[0, 0] = 1.0
    total = probs.double().sum().item()
    ids = list(range(1, 1001, 99))
    assert draw(probs.expand(len(ids), -1), [(1.0 + (i - 0.5) * 1e-9) / total for i in ids]).tolist() == ids


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_a_temperature_below_the_bound_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 2.9]])
    sampling = Sampling(temperature, max_new_tokens=1)
    assert token_probs(logits, sampling).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert sample(logits, sampling, [0.99, 0.99]).tolist() == [1, 0]


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    probs = token_probs(logits, Sampling(2.0, max_new_tokens=1))
    torch.testing.assert_close(probs, torch.softmax(torch.tensor([[0.0, 1.0, 0.5]]), -1))


@pytest.mark.parametrize(("temperature", "max_new_tokens"), [(-0.1, 4), (float("nan"), 4), (1.0, 0)])
def test_a_sampling_that_means_nothing_is_refused(temperature: float, max_new_tokens: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        Sampling(temperature, max_new_tokens)


def test_rows_of_a_run_have_reproducible_and_different_random_numbers() -> None:
    def stream(seed: int, row: int) -> list[float]:
        uniforms = row_uniforms(seed, row)
        return [uniforms() for _ in range(4)]

    assert stream(7, 3) == stream(7, 3)
    pairs = [(seed, row) for seed in (0, 1, 2**32, 2**33) for row in range(50)]
    assert len({stream(*pair)[0] for pair in pairs}) == len(pairs)
    assert all(0.0 <= number < 1.0 for number in stream(0, 0))
