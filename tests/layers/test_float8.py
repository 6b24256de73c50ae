"""States in eight bits: how near they come back, that only the cast rounds, and rows at the ends of the range."""

import pytest
import torch

from dspark.layers.float8 import from_float8, to_float8

DTYPES = [torch.bfloat16, torch.float32]


def there_and_back(states_NLD: torch.Tensor) -> torch.Tensor:
    return from_float8(*to_float8(states_NLD), states_NLD.dtype)


def rows(dtype: torch.dtype) -> torch.Tensor:
    """Rows of every size that the dtype has, some of them with one element that is a thousand times the others."""
    generator = torch.Generator().manual_seed(0)
    states_NLD = torch.randn(254, 3, 64, generator=generator, dtype=torch.float64)
    states_NLD[:, 1, 5] *= 1000
    sizes_N = 2.0 ** torch.arange(-140, 114, dtype=torch.float64)
    return (states_NLD * sizes_N[:, None, None]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_comes_back_within_its_bound(dtype: torch.dtype) -> None:
    states_NLD = rows(dtype)
    values_NLD, scales_NL = to_float8(states_NLD)
    assert (values_NLD.dtype, values_NLD.shape) == (torch.float8_e4m3fn, states_NLD.shape)
    assert (scales_NL.dtype, scales_NL.shape) == (torch.float32, states_NLD.shape[:2])
    largest_NL = states_NLD.double().abs().amax(-1)
    assert bool((scales_NL.double() <= (largest_NL / 224).clamp(min=2.0**-126)).all())
    assert bool((largest_NL / scales_NL.double() <= 448).all())
    error_NLD = (from_float8(values_NLD, scales_NL, dtype).double() - states_NLD.double()).abs()
    near_zero_NLD = scales_NL.double()[..., None] * 2.0**-10
    assert bool((error_NLD <= torch.maximum(states_NLD.double().abs() / 16, near_zero_NLD)).all())
    assert bool((error_NLD <= largest_NL[..., None].clamp(min=2.0**-118) / 16).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cast_is_the_only_rounding(dtype: torch.dtype) -> None:
    states_NLD = rows(dtype)
    values_NLD, scales_NL = to_float8(states_NLD)
    assert bool((scales_NL.double().log2() % 1 == 0).all())
    exact_NLD = (states_NLD.double() / scales_NL.double()[..., None]).float()
    assert torch.equal(values_NLD.float(), exact_NLD.to(torch.float8_e4m3fn).float())
    back_NLD = from_float8(values_NLD, scales_NL, dtype).double()
    assert torch.equal(back_NLD, values_NLD.double() * scales_NL.double()[..., None])
    assert torch.equal(there_and_back(back_NLD.to(dtype)).double(), back_NLD), "a second time changes nothing"


def test_all_that_eight_bits_hold_is_kept_at_every_scale() -> None:
    bits_D = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    held_D = bits_D[bits_D.float().isfinite()]
    assert float(held_D.float().max()) == 448
    sizes_N = 2.0 ** torch.arange(-120, 119, dtype=torch.float32)
    states_NLD = (held_D.float() * sizes_N[:, None])[:, None].bfloat16()
    values_NLD, scales_NL = to_float8(states_NLD)
    assert torch.equal(scales_NL[:, 0], sizes_N)
    assert torch.equal(values_NLD.float(), held_D.float().expand_as(states_NLD))
    assert torch.equal(there_and_back(states_NLD), states_NLD)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_subnormal_and_huge_rows(dtype: torch.dtype) -> None:
    smallest = 2.0**-133  # of bfloat16
    for largest in (0.0, smallest, 5 * smallest, 2.0**-126, 448.0, 449.0, 1e38, 3.28e38):
        states_NLD = torch.tensor([[[largest, -largest / 2, 0.0]]]).to(dtype)
        values_NLD, scales_NL = to_float8(states_NLD)
        assert bool(values_NLD.float().isfinite().all())
        assert float(scales_NL) >= torch.finfo(torch.float32).tiny
        back_NLD = there_and_back(states_NLD)
        torch.testing.assert_close(back_NLD.double(), states_NLD.double(), rtol=1 / 16, atol=2.0**-136)
    assert not to_float8(torch.zeros(1, 1, 2, dtype=dtype))[0].float().any()


def test_a_row_knows_no_other_row() -> None:
    states_NLD = rows(torch.bfloat16)
    alone = [to_float8(states_LD[None]) for states_LD in states_NLD[::50]]
    together = to_float8(states_NLD[::50])
    for which, whole in enumerate(together):
        assert torch.equal(torch.cat([found[which] for found in alone]).float(), whole.float())
