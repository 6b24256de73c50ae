"""The experts of any number of rows: the kernels against the definition, ragged ends, experts without a row."""

from typing import Any

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import moe
from dspark.kernels.moe import grouped, reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes in bf16 need a GPU")
CEILING = {torch.float32: 3e-6, torch.bfloat16: 1e-2}


def random_inputs(
    num_rows: int, sizes: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """x, ids, gate_up, down and limits. Expert 0 has all rows, the others a share, expert 1 and half of them none."""
    num_experts, num_picks, width, inner = sizes
    generator = torch.Generator().manual_seed(num_rows + width)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    ids_NK = torch.rand(num_rows, num_experts // 2 - 1, generator=generator).argsort(1)[:, : num_picks - 1] * 2 + 2
    ids_NJ = torch.cat((ids_NK, torch.zeros(num_rows, 1)), 1).to(device, torch.int32)
    limits_X = torch.full((num_experts,), torch.inf)
    limits_X[[0, 2]] = torch.tensor([0.5, 0.25])
    gate_up_XCD = normal(num_experts, 2 * inner, width) / width**0.5
    down_XDI = normal(num_experts, width, inner) / inner**0.5
    return [normal(num_rows, width), ids_NJ, gate_up_XCD, down_XDI, limits_X.to(device)]


def check(inputs: list[torch.Tensor], block_rows: int, changes: dict[str, int]) -> None:
    """No further from the float64 definition than torch in the working dtype, and under the ceiling."""
    x_ND, ids_NJ, gate_up_XCD, down_XDI, limits_X = inputs
    tiles = grouped.tile_rows(*moe.sort_by_expert(ids_NJ, len(limits_X)), block_rows)
    act_MI = grouped.multiply(x_ND, gate_up_XCD, limits_X, tiles, grouped.UP | changes)
    found_ND = grouped.multiply(act_MI, down_XDI, None, tiles, grouped.DOWN | changes).view(*ids_NJ.shape, -1).double()
    truth_ND = reference.run_each(x_ND.double(), ids_NJ, gate_up_XCD.double(), down_XDI.double(), limits_X)
    torchs_ND = reference.run_each(*inputs).double()

    def distance(actual: torch.Tensor) -> float:
        return float((actual - truth_ND).norm() / truth_ND.norm())

    assert distance(found_ND) <= min(
        max(1.1 * distance(torchs_ND), 2e-6 if x_ND.is_cuda else 5e-7), CEILING[x_ND.dtype]
    )


@pytest.mark.parametrize(
    ("num_rows", "sizes"),
    [(1, (4, 2, 16, 8)), (37, (8, 3, 40, 24)), (70, (6, 3, 72, 20)), (16, (4, 1, 32, 16))],
    ids=str,
)
def test_experts_equal_their_definition(
    num_rows: int, sizes: tuple[int, int, int, int], kernel_device: torch.device
) -> None:
    check(random_inputs(num_rows, sizes, kernel_device), 16, {"BLOCK_N": 32})
    assert moe.run_each(*random_inputs(num_rows, sizes, kernel_device)).shape == (num_rows, sizes[1], sizes[2])


def test_a_row_that_is_nan_touches_no_other(kernel_device: torch.device) -> None:
    inputs = random_inputs(37, (8, 3, 40, 24), kernel_device)
    clean_NJD = grouped.run_each(*inputs)
    inputs[0][5] = torch.nan
    dirty_NJD = grouped.run_each(*inputs)
    is_other_N = torch.arange(37) != 5
    assert torch.equal(clean_NJD[is_other_N], dirty_NJD[is_other_N])
    assert dirty_NJD[5].isnan().all()


def flash_quarter(choice: dict[str, int], halves: int) -> dict[str, Any]:
    signature = {"outputs": "*bf16", "inputs": "*bf16", "weights": "*bf16", "order": "*i64", "tiles": "*i32"}
    sizes = {"HALVES": halves, "J": 9, "WIDTH": 192, "K": 2560, "BLOCK_M": grouped.BLOCK_ROWS}
    if halves == 2:
        signature["limits"] = "*fp32"
    else:
        sizes |= {"J": 1, "WIDTH": 2560, "K": 192, "limits": None}
    sizes |= {"BLOCK_N": choice["BLOCK_N"], "BLOCK_K": choice["BLOCK_K"]}
    shape = {"num_warps": choice["num_warps"], "num_stages": choice["num_stages"]}
    order = grouped.product_kernel.arg_names
    signature = {name: signature.get(name, "constexpr") for name in order}
    return {"name": "product_kernel", "signature": signature, "constexprs": sizes, **shape}


def test_the_kernels_compile_for_sm90_without_spills() -> None:
    kernels = [flash_quarter(grouped.UP, 2), flash_quarter(grouped.DOWN, 1)]
    tile = {"name": "tile_kernel", "signature": {"tiles": "*i32", "ends": "*i32"}, "num_warps": 4}
    tile["constexprs"] = {"X": 513, "BLOCK_M": grouped.BLOCK_ROWS}
    for compiled in compile_sm90("dspark.kernels.moe.grouped", [*kernels, tile]):
        assert compiled.spill_bytes == 0
        assert compiled.shared_bytes <= 227 * 1024


@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 257, 2048])
def test_gpu_check_at_a_quarter_of_flash(num_rows: int, kernel_device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check(random_inputs(num_rows, (64, 9, 2560, 192), kernel_device, dtype), grouped.BLOCK_ROWS, {})
