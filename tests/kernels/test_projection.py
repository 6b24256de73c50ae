"""Skinny projections: the kernel against float64 truth, for every way of cutting it, and compiled for sm_90."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import launch, projection
from dspark.kernels.kda import reference as kda
from dspark.kernels.projection import kernel, reference, ring
from dspark.kernels.projection.kernel import Tile

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes need a GPU")
LOWER_BOUND = -5.0
CEILING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
TILES = {
    "plain": Tile(16, 32, 1, 1, 0, 4, 2),
    "sliced": Tile(32, 64, 4, 1, 0, 4, 3),
    "split": Tile(16, 32, 1, 3, 0, 4, 2),
    "sliced and split": Tile(16, 64, 2, 2, 0, 4, 2),
    "held": Tile(16, 32, 1, 1, 128, 4, 2),
    "held, sliced and split": Tile(16, 32, 2, 2, 32, 4, 2),
}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def zeros(num_rows: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(-(-num_rows // 16), dtype=torch.int32, device=device)


def is_close(y: torch.Tensor, torch_y: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> None:
    """No further from the truth than torch (a quarter for another order of summation), and under a ceiling.

    The interpreter cuts off where a GPU rounds to bfloat16: twice the error.
    """
    factor = 2.5 if launch.IS_INTERPRETED and dtype == torch.bfloat16 else 1.25
    assert y.shape == truth.shape
    error, torch_error = ((a.double() - truth).square().mean().sqrt() for a in (y, torch_y))
    slack = 1e-7 if launch.IS_INTERPRETED else 1e-6  # a GPU's float32 chains are longer than torch's
    assert error <= factor * torch_error + slack * truth.square().mean().sqrt(), (error, torch_error)
    assert (y.double() - truth).abs().max() <= CEILING[dtype] * truth.abs().max()
    assert truth.abs().max() > 0.1


def check_project(
    tokens: int,
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    tile: Tile | None = None,
    weight_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    x_TD = normal(tokens, width + 3, dtype=dtype, device=device)[:, :width]
    weight_CD = normal(rows, width, seed=1, dtype=weight_dtype or dtype, device=device) * width**-0.5
    counters = zeros(rows, device)
    y_TC = kernel.project(x_TD, weight_CD, counters, tile=tile)
    assert y_TC.dtype == dtype
    assert not counters.any()
    is_close(y_TC, reference.project(x_TD, weight_CD), reference.project(x_TD.double(), weight_CD.double()), dtype)
    return y_TC


def gated_inputs(
    tokens: int, heads: int, width: int, rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """o, norm weight, a gate that is a view into wider rows, and the weight."""
    o_THF = 3 * normal(tokens, heads, width, dtype=dtype, device=device)
    norm_weight_F = 1 + 0.3 * normal(width, seed=2, dtype=dtype, device=device)
    rows_TC = 2 * normal(tokens, 5 + heads * width + 2, seed=3, dtype=dtype, device=device)
    gate_THF = rows_TC[:, 5 : 5 + heads * width].unflatten(1, (heads, width))
    weight_CD = normal(rows, heads * width, seed=4, dtype=dtype, device=device) * (heads * width) ** -0.5
    return o_THF, norm_weight_F, gate_THF, weight_CD


def check_gated(
    tokens: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    tile: Tile | None = None,
) -> torch.Tensor:
    o_THF, norm_weight_F, gate_THF, weight_CD = gated_inputs(tokens, *shape, dtype, device)
    counters = zeros(shape[2], device)
    y_TC = kernel.project_gated(o_THF, norm_weight_F, gate_THF, weight_CD, 1e-6, counters, tile=tile)
    assert not counters.any()
    wide = [x.double() for x in (o_THF, norm_weight_F, gate_THF, weight_CD)]
    truth = kda.gated_rms_norm(*wide[:3], 1e-6).flatten(1) @ wide[3].T
    is_close(y_TC, reference.project_gated(o_THF, norm_weight_F, gate_THF, weight_CD, 1e-6), truth, dtype)
    return y_TC


def prepared_inputs(
    tokens: int, heads: int, width: int, columns: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """x, the weight, history, taps, a_log and dt_bias."""
    inner, wide = heads * width, torch.float32
    weight_CD = 2 * normal(5 * inner + heads, columns, seed=1, dtype=dtype, device=device) * columns**-0.5
    x_TD = normal(tokens, columns, dtype=dtype, device=device)
    history_WC = 2 * normal(3, 3 * inner, seed=2, dtype=dtype, device=device)
    conv_CJ = normal(3 * inner, 4, seed=3, dtype=dtype, device=device) / 2
    a_log_H = normal(heads, seed=4, dtype=wide, device=device) / 2
    return [x_TD, weight_CD, history_WC, conv_CJ, a_log_H, normal(heads, width, seed=5, dtype=wide, device=device)]


def project_prepared(inputs: list[torch.Tensor], counters: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    y_TC = inputs[0].new_full((len(inputs[0]), len(inputs[1])), torch.nan)
    out = (y_TC, torch.full_like(y_TC, torch.nan, dtype=torch.float32))
    kernel.project_prepared(*inputs, LOWER_BOUND, counters, out, **options)
    return out


def check_prepared(
    tokens: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, tile: Tile | None = None
) -> None:
    """The raw values are those of ``project`` (or the ring's, as good); the prepared ones are right for them."""
    inputs = prepared_inputs(tokens, *shape, dtype, device)
    counters = zeros(len(inputs[1]), device)
    y_TC, prepared_TC = project_prepared(inputs, counters, tile=tile)
    assert not counters.any()
    plain_TC = kernel.project(*inputs[:2], counters, tile=tile)
    if tile is None and not launch.IS_INTERPRETED and ring.fits(*inputs[:2]):
        is_close(y_TC, plain_TC, inputs[0].double() @ inputs[1].double().T, dtype)
    else:
        assert torch.equal(y_TC, plain_TC)
    truth_TC = kda.prepare(*(x.double() for x in (y_TC, *inputs[2:])), LOWER_BOUND)
    torch.testing.assert_close(prepared_TC.double(), truth_TC, rtol=2e-6, atol=2e-6)


def check_prepared_one_by_one(inputs: list[torch.Tensor]) -> None:
    """Tokens of one window are prepared as those of windows of one, bit for bit."""
    x_TD, weight_CD, history_WC, *rest = inputs
    counters = zeros(len(weight_CD), x_TD.device)
    y_TC, prepared_TC = project_prepared(inputs, counters)
    for t in range(len(x_TD)):
        row_TC, row_prepared_TC = project_prepared([x_TD[t : t + 1], weight_CD, history_WC, *rest], counters)
        assert torch.equal(row_TC, y_TC[t : t + 1])
        assert torch.equal(row_prepared_TC, prepared_TC[t : t + 1])
        history_WC = torch.cat((history_WC[1:], row_TC[:, : history_WC.shape[1]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 16), (3, 3, 6), (9, 2, 8), (16, 1, 5)])
def test_project_prepared_is_project_and_prepare(
    tokens: int, heads: int, width: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    check_prepared(tokens, (heads, width, 40), dtype, kernel_device)


@pytest.mark.parametrize("name", TILES)
def test_every_way_of_cutting_a_prepared_projection_is_right(name: str, kernel_device: torch.device) -> None:
    check_prepared(9, (2, 6, 200), torch.bfloat16, kernel_device, TILES[name])


def test_tokens_are_prepared_alike_in_any_window(kernel_device: torch.device) -> None:
    check_prepared_one_by_one(prepared_inputs(6, 2, 6, 40, torch.float32, kernel_device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 9, 16])
def test_project_is_no_further_from_the_truth_than_torch(
    tokens: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    check_project(tokens, 37, 100, dtype, kernel_device)


@pytest.mark.parametrize("name", TILES)
def test_every_way_of_cutting_a_projection_is_right(name: str, kernel_device: torch.device) -> None:
    for rows, width in ((33, 200), (48, 128), (5, 17)):
        check_project(9, rows, width, torch.bfloat16, kernel_device, TILES[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 9, 16])
def test_project_gated_is_no_further_from_the_truth_than_torch(
    tokens: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    check_gated(tokens, (3, 24, 37), dtype, kernel_device)


@pytest.mark.parametrize("name", TILES)
def test_every_way_of_cutting_a_gated_projection_is_right(name: str, kernel_device: torch.device) -> None:
    for heads, width, rows in ((3, 32, 33), (5, 20, 16), (7, 8, 20)):
        check_gated(9, (heads, width, rows), torch.bfloat16, kernel_device, TILES[name])


@pytest.mark.parametrize("name", ["sliced", "held, sliced and split"])
def test_a_tokens_row_does_not_depend_on_the_tokens_beside_it(name: str, kernel_device: torch.device) -> None:
    x_TD = normal(9, 200, dtype=torch.float32, device=kernel_device)
    weight_CD = normal(40, 200, seed=1, dtype=torch.float32, device=kernel_device)
    counters = zeros(40, kernel_device)
    y_TC = kernel.project(x_TD, weight_CD, counters, tile=TILES[name])
    for t in (0, 8):
        assert torch.equal(kernel.project(x_TD[t : t + 1], weight_CD, counters, tile=TILES[name]), y_TC[t : t + 1])
    o_THF, norm_weight_F, gate_THF, weight_CD = gated_inputs(9, 5, 20, 40, torch.float32, kernel_device)
    y_TC = kernel.project_gated(o_THF, norm_weight_F, gate_THF, weight_CD, 1e-6, counters, tile=TILES[name])
    for t in (0, 8):
        row_THF, row_gate_THF = o_THF[t : t + 1], gate_THF[t : t + 1]
        row_TC = kernel.project_gated(row_THF, norm_weight_F, row_gate_THF, weight_CD, 1e-6, counters, tile=TILES[name])
        assert torch.equal(row_TC, y_TC[t : t + 1])


@pytest.mark.parametrize("name", [None, *TILES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_float32_result_of_bfloat16_is_not_rounded_nor_is_a_float32_weight(
    name: str | None, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    x_TD = normal(3, 100, dtype=torch.bfloat16, device=kernel_device)
    weight_CD = normal(20, 100, seed=1, dtype=dtype, device=kernel_device)
    tile = None if name is None else TILES[name]
    y_TC = kernel.project(x_TD, weight_CD, zeros(20, kernel_device), out_dtype=torch.float32, tile=tile)
    truth = x_TD.double() @ weight_CD.double().T
    assert y_TC.dtype == torch.float32
    is_close(y_TC, reference.project(x_TD, weight_CD, torch.float32), truth, torch.float32)


def test_values_past_the_end_of_a_row_are_not_read(kernel_device: torch.device) -> None:
    rows_CD = torch.full((20, 128), torch.nan, device=kernel_device)
    rows_CD[:, :100] = normal(20, 100, seed=1, dtype=torch.float32, device=kernel_device)
    x_TD = torch.full((4, 128), torch.nan, device=kernel_device)
    x_TD[:3, :100] = normal(3, 100, dtype=torch.float32, device=kernel_device)
    for tile in TILES.values():
        y_TC = kernel.project(x_TD[:3, :100], rows_CD[:, :100], zeros(20, kernel_device), tile=tile)
        truth = reference.project(x_TD[:3, :100].double(), rows_CD[:, :100].double())
        torch.testing.assert_close(y_TC.double(), truth, rtol=1e-5, atol=1e-4)


def test_the_public_functions_check_and_pick_by_device(kernel_device: torch.device) -> None:
    x_TD = normal(3, 48, dtype=torch.float32, device=kernel_device)
    weight_CD = normal(20, 48, seed=1, dtype=torch.float32, device=kernel_device)
    counters = zeros(20, kernel_device)
    torch.testing.assert_close(projection.project(x_TD, weight_CD, counters), x_TD @ weight_CD.T, rtol=1e-4, atol=1e-4)
    inputs = gated_inputs(3, 4, 12, 20, torch.float32, kernel_device)
    y_TC = projection.project_gated(*inputs, 1e-6, counters)
    torch.testing.assert_close(y_TC, reference.project_gated(*inputs, 1e-6), rtol=1e-4, atol=1e-4)
    own = prepared_inputs(3, 2, 4, 20, torch.float32, kernel_device)
    out = tuple(torch.empty(3, 42, device=kernel_device) for _ in range(2))
    counters = zeros(42, kernel_device)
    projection.project_prepared(*own, LOWER_BOUND, counters, out)
    torch.testing.assert_close(out[1], kda.prepare(out[0], *own[2:], LOWER_BOUND), rtol=1e-4, atol=1e-4)
    wrong: list[Callable[[], object]] = [
        lambda: projection.project(x_TD[:, :40], weight_CD, counters),
        lambda: projection.project(x_TD.double(), weight_CD, counters),
        lambda: projection.project(x_TD.repeat(6, 1), weight_CD, counters),
        lambda: projection.project(x_TD, weight_CD, counters[:1]),
        lambda: projection.project(x_TD, weight_CD, counters.long()),
        lambda: projection.project(x_TD, weight_CD.T.contiguous().T, counters),
        lambda: projection.project(x_TD, weight_CD, counters, out_dtype=torch.float16),
        lambda: projection.project_gated(inputs[0], inputs[1][:3], *inputs[2:], 1e-6, counters),
        lambda: projection.project_gated(inputs[0], inputs[1], inputs[2][:, :2], inputs[3], 1e-6, counters),
        lambda: projection.project_prepared(*own[:2], own[2][1:], *own[3:], LOWER_BOUND, counters, out),
        lambda: projection.project_prepared(*own, LOWER_BOUND, counters, (out[0], out[1].double())),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match=r"expected .*found"):
            call()


FLASH = {  # one rank of four, and shapes of the draft: rows, columns, width of a gated head
    "KDA in-projection": (5128, 2560, None),  # which also prepares
    "KDA output": (2560, 1024, 128),
    "KDA output of a half": (2560, 2048, 128),
    "MLA in-projection": (2120, 2560, None),
    "MLA output": (2560, 1024, None),
    "wide": (2560, 6144, None),
    "float32 head": (39296, 2560, None),
}


def compile_kernel(name: str) -> dict:
    rows, columns, width = FLASH[name]
    is_float32 = name == "float32 head"
    tile = kernel.tile_for(rows, columns, 4 if is_float32 else 2, width or 0)
    steps, splits = kernel.shares(tile, columns)
    share = tile.held + steps * tile.columns
    tensors = dict.fromkeys(("x", "weight", "y", "gate", "norm_weight", "history", "conv"), "*bf16")
    tensors |= dict.fromkeys(("a_log", "dt_bias", "prepared"), "*fp32")
    absent = () if width else ("gate", "norm_weight")
    absent += () if name == "KDA in-projection" else ("history", "conv", "a_log", "dt_bias", "prepared")
    tensors = {name: kind for name, kind in tensors.items() if name not in absent}
    if is_float32:
        tensors |= {"weight": "*fp32", "y": "*fp32"}
    scalars = {"num_tokens": "i32", "eps": "fp32", "lower_bound": "fp32"}
    strides = dict.fromkeys(("x_stride", "x_stride_head", "gate_stride", "gate_stride_head", "weight_stride"), "i32")
    sizes = {"C": rows, "D": columns, "WIDTH": width or columns, "PADDED_WIDTH": width or columns}
    sizes |= {"H": 8, "E": 128, "J": 4 if name == "KDA in-projection" else 0}
    cut = {"ROWS": tile.rows, "COLUMNS": tile.columns, "SLICES": tile.slices, "SPLITS": splits, "HELD": tile.held}
    num_chunks = 4 if steps and not is_float32 else 0
    prefetch = {"NUM_CHUNKS": num_chunks, "CHUNK": 256, "num_stages": tile.num_stages}
    flags = {"IS_WHOLE": splits * share == columns, "IS_CHAINED": True}
    constexprs = {**sizes, **cut, "STEPS": steps, **prefetch, **flags, **dict.fromkeys(absent)}
    signature = {**tensors, "partial": "*fp32", "counters": "*i32", **scalars, **strides}
    order = kernel.project_kernel.arg_names
    signature = {name: signature.get(name, "constexpr") for name in order}
    return {
        "name": "project_kernel",
        "signature": signature,
        "constexprs": constexprs,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def test_flash_shapes_compile_for_sm90_without_spills_and_wait_before_they_write() -> None:
    for name, compiled in zip(
        FLASH, compile_sm90("dspark.kernels.projection.kernel", [compile_kernel(name) for name in FLASH]), strict=True
    ):
        assert compiled.spill_bytes == 0, name
        limit = 227 if name == "KDA output of a half" else 113  # one program a multiprocessor, or two
        assert compiled.shared_bytes <= limit * 1024, name
        before, after = compiled.ptx.split("griddepcontrol.wait", 1)
        assert not re.search(r"(st|atom|red)\.global", before), name
        assert re.search(r"st\.global", after), name
        asks = re.search(r"ld\.global|bulk\.prefetch", before)
        assert asks or name == "float32 head", f"{name} asks for no weight before the wait"


@needs_gpu
@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("tokens", [1, 9, 16])
def test_flash_shapes_are_right_on_a_gpu(name: str, tokens: int, kernel_device: torch.device) -> None:
    rows, columns, width = FLASH[name]
    if width:
        check_gated(tokens, (columns // width, width, rows), torch.bfloat16, kernel_device)
    else:
        weight_dtype = torch.float32 if name == "float32 head" else torch.bfloat16
        check_project(tokens, rows, columns, torch.bfloat16, kernel_device, weight_dtype=weight_dtype)


@needs_gpu
def test_flash_shapes_are_prepared_right_on_a_gpu(kernel_device: torch.device) -> None:
    for tokens in (1, 9, 16):
        check_prepared(tokens, (8, 128, 2560), torch.bfloat16, kernel_device)
    check_prepared_one_by_one(prepared_inputs(9, 8, 128, 2560, torch.bfloat16, kernel_device))


@needs_gpu
def test_a_chain_gives_the_same_bits_as_single_launches(kernel_device: torch.device) -> None:
    first_CD = normal(5128, 2560, dtype=torch.bfloat16, device=kernel_device) * 2560**-0.5
    second_CD = normal(2560, 5128, seed=1, dtype=torch.bfloat16, device=kernel_device) * 5128**-0.5
    x_TD = normal(9, 2560, seed=2, dtype=torch.bfloat16, device=kernel_device)
    counters = zeros(5128, kernel_device)
    split = Tile(16, 512, 8, 4, 0, 8, 3)
    results = []
    for is_chained in (False, True):
        y_TD = x_TD
        for _ in range(50):
            y_TC = kernel.project(y_TD, first_CD, counters, is_chained=is_chained)
            y_TD = kernel.project(y_TC, second_CD, counters, is_chained=is_chained, tile=split)
        results.append(y_TD)
    assert torch.equal(*results)
    assert not counters.any()
