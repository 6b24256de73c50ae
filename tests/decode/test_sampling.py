"""Draws are inverse CDFs of one tensor, and rows have random numbers of their own."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def truncated(logits: list[float], sampling: Sampling) -> list[float]:
    """The definition, one token at a time in float64: sort, keep k, keep up to the mass, normalise."""
    scaled = [logit / sampling.temperature for logit in logits]
    kept = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))[: sampling.top_k or None]
    weights = {i: math.exp(scaled[i] - max(scaled)) for i in kept}
    total, mass, probs = math.fsum(weights.values()), 0.0, [0.0] * len(logits)
    for i in kept:
        if mass >= sampling.top_p and mass:
            break
        probs[i] = weights[i]
        mass += weights[i] / total
    whole = math.fsum(probs)
    return [prob / whole for prob in probs]


SAMPLINGS = [
    Sampling(temperature, 1, top_k=top_k, top_p=top_p)
    for temperature in (0.6, 1.0, 1.7)
    for top_k in (0, 1, 3, 40, 1000)
    for top_p in (1e-6, 0.31, 0.9, 1.0)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_truncation_is_its_definition(sampling: Sampling, dtype: torch.dtype) -> None:
    logits_NV = 3 * torch.randn(5, 97, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = torch.tensor([truncated(row, sampling) for row in logits_NV.tolist()], dtype=torch.float64)
    probs_NV = token_probs(logits_NV.to(dtype), sampling)
    assert probs_NV.dtype == dtype
    assert torch.equal(probs_NV > 0, expected > 0)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(probs_NV.double(), expected, atol=tolerance, rtol=tolerance)


LOGITS = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=1, max_size=24)  # ties are frequent
TOP_P = st.floats(0, 1, exclude_min=True)


@settings(max_examples=300, deadline=None)
@given(LOGITS, st.floats(0.2, 3.0), st.integers(0, 30), TOP_P)
def test_the_kept_tokens_are_the_fewest_that_reach_the_mass(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    sampling = Sampling(temperature, 1, top_k=top_k, top_p=top_p)
    logits_V = torch.tensor(logits, dtype=torch.float64)
    probs_V = token_probs(logits_V, sampling)
    kept = probs_V.nonzero().flatten().tolist()
    assert float(probs_V.sum()) == pytest.approx(1)
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert sorted(ranked[: len(kept)]) == kept, "the likeliest, and of equal ones the lower ids"
    assert 1 <= len(kept) <= (top_k or len(logits))
    whole_V = token_probs(logits_V, replace(sampling, top_p=1.0))
    assert float(whole_V[kept].sum()) >= top_p - 1e-9
    assert len(kept) == 1 or float(whole_V[ranked[: len(kept) - 1]].sum()) < top_p + 1e-9, "one fewer is too few"
    torch.testing.assert_close(probs_V[kept], whole_V[kept] / whole_V[kept].sum())


@given(LOGITS, st.integers(0, 30), TOP_P)
def test_a_row_says_the_same_alone_and_among_others(logits: list[float], top_k: int, top_p: float) -> None:
    sampling = Sampling(0.7, 1, top_k=top_k, top_p=top_p)
    rows_NV = torch.tensor([logits, logits[::-1], logits])
    assert torch.equal(token_probs(rows_NV, sampling), torch.stack([token_probs(row, sampling) for row in rows_NV]))


def test_equal_logits_at_the_edge_are_kept_lower_ids_first() -> None:
    logits_V = torch.tensor([0.0, 1.0, 1.0, 2.0, 1.0])
    assert token_probs(logits_V, Sampling(1.0, 1, top_k=3)).nonzero().flatten().tolist() == [1, 2, 3]
    assert token_probs(torch.zeros(4096), Sampling(1.0, 1, top_k=5)).nonzero().flatten().tolist() == [*range(5)]
    assert token_probs(torch.zeros(4), Sampling(1.0, 1, top_p=0.5)).nonzero().flatten().tolist() == [0, 1]


def test_without_truncation_rows_are_softmax_to_the_last_bit() -> None:
    logits_NV = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(token_probs(logits_NV, Sampling(0.7, 1)), torch.softmax(logits_NV / 0.7, -1))


def test_greedy_does_not_look_at_truncation() -> None:
    logits_V = torch.tensor([1.0, 3.0, 3.0, 2.0])
    assert token_probs(logits_V, Sampling(0.0, 1, top_k=2, top_p=0.5)).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"temperature": -0.1}, "temperature\n.* greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature\n"),
        ({"max_new_tokens": 0}, "max_new_tokens\n.* greater than or equal to 1"),
        ({"top_k": -1}, "top_k\n.* greater than or equal to 0"),
        ({"top_p": 0.0}, "top_p\n.* greater than 0"),
        ({"top_p": 1.01}, "top_p\n.* less than or equal to 1"),
        ({"top_p": float("nan")}, "top_p\n"),
    ],
    ids=str,
)
def test_a_sampling_that_means_nothing_is_refused(changes: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(Sampling(1.0, 4), **changes)


def test_rows_of_a_run_have_reproducible_and_different_random_numbers() -> None:
    def stream(seed: int, row: int) -> list[float]:
        uniforms = row_uniforms(seed, row)
        return [uniforms() for _ in range(4)]

    assert stream(7, 3) == stream(7, 3)
    pairs = [(seed, row) for seed in (0, 1, 2**32, 2**33) for row in range(50)]
    assert len({stream(*pair)[0] for pair in pairs}) == len(pairs)
    assert all(0.0 <= number < 1.0 for number in stream(0, 0))
