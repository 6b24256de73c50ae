"""What the clocks of texts add up to, and that a predicted gain and its explanation give the measured one."""

import pytest
import torch

from dspark.eval.timing import DecodedText, Spread, speedup, spread, timing_statistics


def text(num_tokens: int, first: float, last: float, **phases: float) -> DecodedText:
    return DecodedText(torch.arange(num_tokens), (), last, False, first, phases)


def test_time_per_token_is_a_texts_own_and_the_rate_is_everybodys() -> None:
    texts = [
        text(11, 0.5, 1.5, prefill=0.5, verify=1.0),
        text(1, 0.3, 0.3, prefill=0.3),
        text(3, 0.1, 0.9, prefill=0.1, verify=0.6, other=0.2),
    ]
    found = timing_statistics(texts)
    assert found.first_token == Spread(pytest.approx(0.3), 0.3, 0.5)
    assert found.time_per_token == Spread(pytest.approx(0.25), pytest.approx(0.25), 0.4)
    assert found.output_tokens_per_second == pytest.approx(15 / 2.7)
    assert found.phase_seconds == pytest.approx({"prefill": 0.9, "verify": 1.6, "other": 0.2})
    assert timing_statistics(texts[1:2]).time_per_token is None


def test_the_99th_percentile_is_the_largest_until_there_are_enough_texts() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 2.0, 3.0)
    many = spread([float(n) for n in range(1000)])
    assert (many.median, many.p99) == (499.5, pytest.approx(989.5, abs=1.5))


def test_a_gain_is_what_was_predicted_times_what_explains_the_gap() -> None:
    plain = [text(101, 1.0, 3.0, prefill=1.0, verify=1.9, other=0.1), text(1, 1.0, 1.0, prefill=1.0)]
    drafted = [
        text(101, 1.0, 2.0, prefill=1.0, draft=0.2, verify=0.6, commit=0.1, other=0.1),
        text(2, 1.0, 1.0, prefill=1.0),
    ]
    found = speedup(plain, drafted, num_committed=120)
    assert found is not None
    assert found.predicted == pytest.approx((2.0 / 100) / (0.9 / 120))
    assert found.measured == pytest.approx((2.0 / 100) / (1.0 / 101))
    assert found.kept_share == pytest.approx(101 / 120)
    assert found.working_share == pytest.approx(0.9)
    assert found.measured == pytest.approx(found.predicted * found.kept_share * found.working_share)
    assert speedup(plain[1:], drafted, 120) is None
    assert speedup(plain, drafted, 0) is None
