"""The residual stream's kernels against float64, at odd sizes, and their roundings one by one."""

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import residual
from dspark.kernels.residual import kernel, reference

EPS = 1e-6
IS_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, *[torch.bfloat16] * IS_GPU]  # bfloat16 stores are cut off in the interpreter
CEILING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
gpu_only = pytest.mark.skipif(not IS_GPU, reason="real sizes and PDL need a GPU")


def random_inputs(num_tokens: int, num_parts: int, width: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    return {
        "parts_TKD": torch.randn(num_tokens, num_parts, width, **draw),
        "weights_TK": torch.rand(num_tokens, num_parts, **draw),
        "residual_TD": torch.randn(num_tokens, width, **draw),
        "norm_weight_D": torch.randn(width, **draw),
    }


def inputs_as(
    inputs: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The inputs in a working dtype (weights in float32) and the same numbers in float64."""
    cast = {k: x.to(torch.float32 if k == "weights_TK" else dtype).to(device) for k, x in inputs.items()}
    return cast, {k: x.double() for k, x in cast.items()}


def assert_near(actual: torch.Tensor, torch_says: torch.Tensor, truth: torch.Tensor) -> None:
    ceiling = CEILING[actual.dtype]
    error, allowed = (((x.double() - truth).norm() / truth.norm()).item() for x in (actual, torch_says))
    assert error <= max(1.2 * allowed, 5e-7), (error, allowed)
    assert error < ceiling


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_parts", "width"), [(1, 1, 5), (3, 9, 100), (9, 3, 256), (16, 1, 257)])
def test_add_norm_is_as_near_to_the_truth_as_torch(
    num_tokens: int, num_parts: int, width: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    inputs, exact = inputs_as(random_inputs(num_tokens, num_parts, width), dtype, kernel_device)
    for is_weighted in (True, False):
        if not is_weighted:
            inputs["weights_TK"] = exact["weights_TK"] = None  # type: ignore[assignment]
        actual, torch_says = kernel.add_norm(**inputs, eps=EPS), reference.add_norm(**inputs, eps=EPS)
        for rows in zip(actual, torch_says, reference.add_norm(**exact, eps=EPS), strict=True):
            assert_near(*rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embed_norm_takes_the_rows_of_the_ids(dtype: torch.dtype, kernel_device: torch.device) -> None:
    inputs, exact = inputs_as(random_inputs(1, 30, 100), dtype, kernel_device)
    embedding_VD = inputs["parts_TKD"][0]
    for ids in ([29], [0, 7, 7], list(range(16))):
        ids_T = torch.tensor(ids, device=kernel_device)
        residual_TD, normed_TD = kernel.embed_norm(ids_T, embedding_VD, inputs["norm_weight_D"], EPS)
        torch_says = reference.embed_norm(ids_T, embedding_VD, inputs["norm_weight_D"], EPS)[1]
        truth = reference.embed_norm(ids_T, exact["parts_TKD"][0], exact["norm_weight_D"], EPS)[1]
        assert torch.equal(residual_TD, embedding_VD[ids_T])
        assert_near(normed_TD, torch_says, truth)


@pytest.mark.parametrize(
    ("parts", "residual_value", "expected"),
    [
        ((1.0, 2.0**-11), 2048.0, 2048.0),  # 1 + 2^-11 is rounded to 1 before it is added: 2049 is a tie
        ((2048.0, 1.0, 1.0), -2048.0, 2.0),  # no rounding between the parts
        ((60000.0, 30000.0, -60000.0), 0.0, 30000.0),
    ],
)
def test_the_sum_is_rounded_once_and_before_the_residual(
    parts: tuple[float, ...], residual_value: float, expected: float, kernel_device: torch.device
) -> None:
    parts_TKD = torch.tensor(parts, dtype=torch.float16, device=kernel_device)[None, :, None].repeat(2, 1, 7)
    residual_TD = torch.full((2, 7), residual_value, dtype=torch.float16, device=kernel_device)
    ones_D = torch.ones(7, dtype=torch.float16, device=kernel_device)
    for run in (kernel.add_norm, reference.add_norm):
        assert run(parts_TKD, None, residual_TD, ones_D, EPS)[0].eq(expected).all()


def test_parts_are_summed_in_their_order_and_the_residual_is_left_alone(kernel_device: torch.device) -> None:
    parts_TKD = torch.tensor([1e8, 1.0, -1e8, 3.0], device=kernel_device)[None, :, None].repeat(1, 1, 6)
    residual_TD = torch.zeros(1, 6, device=kernel_device)
    for run in (kernel.add_norm, reference.add_norm):
        assert run(parts_TKD, None, residual_TD, torch.ones(6, device=kernel_device), EPS)[0].eq(3).all()
        assert residual_TD.eq(0).all()


def test_the_norm_is_that_of_the_rounded_residual(kernel_device: torch.device) -> None:
    parts_TKD = torch.full((1, 1, 4), 0.9, dtype=torch.float16, device=kernel_device)
    residual_TD = torch.tensor([[2048.0, 4.0, 4.0, 4.0]], dtype=torch.float16, device=kernel_device)
    weight_D = torch.tensor([1.0, 500.0, 500.0, 500.0], dtype=torch.float16, device=kernel_device)
    residual_TD, normed_TD = kernel.add_norm(parts_TKD, None, residual_TD, weight_D, EPS)
    exact = torch.nn.functional.rms_norm(residual_TD.double(), (4,), weight_D.double(), EPS)
    torch.testing.assert_close(normed_TD.double(), exact, rtol=2**-11, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it(dtype: torch.dtype, kernel_device: torch.device) -> None:
    inputs, _ = inputs_as(random_inputs(9, 5, 100, seed=1), dtype, kernel_device)
    together = kernel.add_norm(**inputs, eps=EPS)
    for t in range(9):
        one = {k: x if k == "norm_weight_D" else x[t : t + 1] for k, x in inputs.items()}
        for rows, row in zip(together, kernel.add_norm(**one, eps=EPS), strict=True):
            assert torch.equal(rows[t : t + 1], row)


def test_float32_parts_may_feed_a_narrower_residual(kernel_device: torch.device) -> None:
    inputs, _ = inputs_as(random_inputs(2, 3, 40), torch.float16, kernel_device)
    inputs["parts_TKD"] = inputs["parts_TKD"].float() + 1e-4
    for actual, expected in zip(kernel.add_norm(**inputs, eps=EPS), reference.add_norm(**inputs, eps=EPS), strict=True):
        assert actual.dtype == expected.dtype == torch.float16
        torch.testing.assert_close(actual, expected, rtol=2**-9, atol=2**-10)


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    inputs = {k: x.float() for k, x in random_inputs(3, 2, 8).items()}
    assert residual.add_norm(**inputs, eps=EPS)[0].shape == (3, 8)
    wrong = {
        "parts_TKD": inputs["parts_TKD"][:2],
        "weights_TK": inputs["weights_TK"].double(),
        "norm_weight_D": inputs["norm_weight_D"][:7],
        "residual_TD": inputs["residual_TD"].half(),
    }
    for name, tensor in wrong.items():
        with pytest.raises(ValueError, match=r"expected .*found"):
            residual.add_norm(**inputs | {name: tensor}, eps=EPS)
    with pytest.raises(ValueError, match="parts_TKD"):
        residual.add_norm(**inputs | {"parts_TKD": inputs["parts_TKD"].transpose(0, 1)}, eps=EPS)
    with pytest.raises(ValueError, match="ids_T"):
        residual.embed_norm(torch.zeros(3, dtype=torch.int32), inputs["residual_TD"], inputs["norm_weight_D"], EPS)


def test_flash_rows_compile_for_sm90_without_spills_and_wait_before_they_write() -> None:
    pointers = dict.fromkeys(("residual", "norm_weight", "new_residual", "normed"), "*bf16") | {"eps": "fp32"}
    sizes = {"WIDTH": 2560, "IS_CHAINED": True}
    launched = {"num_warps": kernel.warps_for(2560), "maxnreg": kernel.registers_for(kernel.warps_for(2560))}
    name = {"name": "add_norm_kernel"}
    weighted = name | {"signature": {"parts": "*bf16", "weights": "*fp32"} | pointers} | launched
    add = name | {"signature": {"parts": "*bf16"} | pointers} | launched
    embed = name | {"signature": {"ids": "*i64"} | pointers} | launched
    moe, attention, first = compile_sm90(
        "dspark.kernels.residual.kernel",
        [
            weighted | {"constexprs": {"PARTS": 9, "ids": None} | sizes},
            add | {"constexprs": {"PARTS": 1, "weights": None, "ids": None} | sizes},
            embed | {"constexprs": {"PARTS": 0, "parts": None, "weights": None} | sizes},
        ],
    )
    for compiled, is_early in ((moe, True), (attention, True), (first, False)):
        assert compiled.spill_bytes == 0
        wait, write = compiled.ptx.index("griddepcontrol.wait"), compiled.ptx.index("st.global")
        assert compiled.ptx.index("ld.global") < wait < write
        signal = compiled.ptx.index("griddepcontrol.launch_dependents")
        assert (signal < wait) == is_early
        assert compiled.ptx[:wait].count("ld.global") == 1, "only the norm's weight is read before the wait"
    assert moe.registers >= 9 * 4 + 8, "the parts' loads are in flight together"


@gpu_only
@pytest.mark.parametrize("num_parts", [1, 9])
@pytest.mark.parametrize("num_tokens", [1, 9, 16])
def test_gpu_check_flash_rows(num_tokens: int, num_parts: int, kernel_device: torch.device) -> None:
    inputs, exact = inputs_as(random_inputs(num_tokens, num_parts, 2560), torch.bfloat16, kernel_device)
    actual = residual.add_norm(**inputs, eps=EPS)
    chained = residual.add_norm(**inputs, eps=EPS, is_chained=True)
    torch_says = reference.add_norm(**inputs, eps=EPS)
    for rows in zip(actual, torch_says, reference.add_norm(**exact, eps=EPS), strict=True):
        assert_near(*rows)
    for plain, other in zip(actual, chained, strict=True):
        assert torch.equal(plain, other)
