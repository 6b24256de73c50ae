"""The experts against the golden numbers and a dense sum."""

from typing import Any

import pytest
import torch

from dspark.kernels import moe

TOLERANCE = {torch.float64: {"rtol": 1e-12, "atol": 1e-14}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def close(actual: torch.Tensor, expected: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize("limit", [None, 4, 5, 7])
def test_swiglu_clamps_after_silu(ling_golden: dict, dtype: torch.dtype, limit: int | None) -> None:
    case = ling_golden["swiglu_clamp"]
    gate, up = torch.tensor(case["gate"], dtype=dtype), torch.tensor(case["up"], dtype=dtype)
    y = moe.swiglu(gate, up, limit)
    close(y, case[f"limit_{limit}" if limit else "no_limit"], dtype)
    assert (y - torch.tensor(case["wrong_limit_4_clamp_before_silu"], dtype=dtype)).abs().max() > 1e-2


def experts(num_rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, ids, weights, gate_up and down of 6 experts, 2 a row, of which the last is never chosen."""
    generator = torch.Generator().manual_seed(num_rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    ids_NK = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(num_rows)])
    return [normal(num_rows, 8), ids_NK, normal(num_rows, 2).abs(), normal(6, 8, 8), normal(6, 8, 4)]


def dense(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, limit: float
) -> torch.Tensor:
    gate, up = torch.einsum("nd,xid->nxi", x, gate_up).chunk(2, -1)
    every = torch.einsum("nxi,xdi->nxd", moe.swiglu(gate, up, limit), down)
    return torch.einsum("nxd,nx->nd", every, x.new_zeros(len(x), 6).scatter(1, ids, weights))


@pytest.mark.parametrize("num_rows", [1, 63])
def test_experts_and_their_gradients_equal_a_dense_sum(
    dtype: torch.dtype, num_rows: int, kernel_device: torch.device
) -> None:
    outputs = []
    for run in (moe.run_experts, dense):
        inputs = [x.to(kernel_device) for x in experts(num_rows, dtype)]
        leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
        y = run(*inputs, 0.7)
        outputs.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for actual, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 1e-11)


def test_experts_run_in_the_dtype_of_autocast_and_are_summed_in_float32() -> None:
    inputs = experts(9, torch.float32)
    exact = moe.run_experts(*inputs, None)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = moe.run_experts(*inputs, None)
    assert rounded.dtype == torch.float32
    assert 1e-4 < (rounded - exact).norm() / exact.norm() < 2e-2
