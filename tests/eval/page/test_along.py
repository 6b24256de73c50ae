"""Acceptance along the answer: rounds go where they start, texts where they end."""

import torch

from dspark.decode.round import Round
from dspark.eval.page.along import by_length, by_start, step_width
from dspark.eval.timing import DecodedText


def text(num_tokens: int, *lengths: int) -> DecodedText:
    rounds = tuple(Round(8, length - 1, length, False, ()) for length in lengths)
    return DecodedText(torch.arange(num_tokens), rounds, 1.0, False, 0.5, {"prefill": 1.0})


def test_a_round_counts_where_it_starts() -> None:
    """Starts: 1, 5, 10 and 1, 4."""
    buckets = by_start([text(12, 4, 5, 2), text(7, 3, 3)], 5)
    assert [(b.low, b.high, b.count, b.mean_acceptance_length) for b in buckets] == [
        (0, 5, 3, 10 / 3),
        (5, 10, 1, 5.0),
        (10, 15, 1, 2.0),
    ]


def test_a_text_counts_by_its_length_with_all_its_rounds() -> None:
    texts = [text(10, 4, 5), text(11, 5, 5), text(49, *[6] * 8), text(1), text(30, *[1] * 29)]
    assert step_width(texts) == 10
    buckets = by_length(texts)
    assert [(b.low, b.high, b.count) for b in buckets] == [(10, 20, 2), (30, 40, 1), (40, 50, 1)]
    assert [b.mean_acceptance_length for b in buckets] == [19 / 4, 1.0, 6.0]
    assert all(b.interval[0] <= b.mean_acceptance_length <= b.interval[1] for b in buckets)
    assert buckets[1].interval == (1.0, 1.0)
    assert by_length([text(1)]) == []


def test_stretches_are_of_a_round_number_of_tokens_and_some_five() -> None:
    widths = {num_tokens: step_width([text(num_tokens)]) for num_tokens in (1, 5, 24, 49, 77, 100, 512, 4096)}
    assert widths == {1: 1, 5: 1, 24: 5, 49: 10, 77: 20, 100: 20, 512: 200, 4096: 1000}
