"""Both rotary pairings against the golden numbers."""

import pytest
import torch

from dspark.kernels.rotary import rotary_angles, rotate_half_pairs, rotate_interleaved_pairs


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_both_pairings_give_the_golden_rotation(ling_golden: dict, dtype: torch.dtype, rtol: float) -> None:
    case = ling_golden["rope_interleaved_dim8"]
    x = torch.tensor(case["x"], dtype=dtype)
    cos, sin = rotary_angles(torch.tensor(case["positions"]), 8, case["theta"], dtype)
    adjacent = torch.tensor(case["y_adjacent_pairs"], dtype=dtype)
    torch.testing.assert_close(rotate_interleaved_pairs(x, cos, sin), adjacent, rtol=rtol, atol=rtol)
    halves = torch.cat((x[:, ::2], x[:, 1::2]), 1)
    deinterleaved = torch.tensor(case["y_deinterleaved"], dtype=dtype)
    torch.testing.assert_close(rotate_half_pairs(halves, cos, sin), deinterleaved, rtol=rtol, atol=rtol)
    assert (rotate_half_pairs(x, cos, sin) - adjacent).abs().max() > 0.1


def test_dot_products_depend_on_the_distance_only(ling_golden: dict) -> None:
    check = ling_golden["rope_interleaved_dim8"]["dot_check"]
    vectors = torch.tensor([check["q"], check["k"]], dtype=torch.float64)
    for positions in ([check["pos_q"], check["pos_k"]], [107, 103]):
        angles = rotary_angles(torch.tensor(positions), 8, 6e6, torch.float64)
        q, k = rotate_interleaved_pairs(vectors, *angles)
        torch.testing.assert_close(q @ k, torch.tensor(check["dot"], dtype=torch.float64), rtol=1e-12, atol=0)


def test_angles_use_the_real_frequencies_and_lose_nothing_at_long_context(ling_golden: dict) -> None:
    inverse = torch.tensor(ling_golden["rope_interleaved_dim8"]["inv_freq_dim64"], dtype=torch.float64)
    cos, sin = rotary_angles(torch.tensor([1, 262143]), 64, 6e6, torch.float64)
    torch.testing.assert_close(torch.atan2(sin[0], cos[0]), inverse, rtol=1e-12, atol=0)
    single, _ = rotary_angles(torch.tensor([262143]), 64, 6e6, torch.float32)
    assert (single.double() - cos[1]).abs().max() < 1e-7
