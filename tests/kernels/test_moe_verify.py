"""One step's experts (up, down) against their definitions; the same tests on a GPU."""

from typing import Any

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import moe, router
from dspark.kernels.moe import kernel, reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LAW = (4, 2, 3, 2.5)
FLASH = (8, 4, 8, 2.5)
CEILING = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
SMALL = {"block_rows": 16, "min_rows": 16, "block_k": 64}
FORMS: dict[str, dict[str, Any]] = {
    "plain": SMALL | {"form": "plain", "num_stages": 3},
    "whole": SMALL | {"form": "whole", "num_stages": 1},
}


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_close(actual: torch.Tensor, torchs: torch.Tensor, truth: torch.Tensor) -> None:
    """No further from the truth than torch in the same dtype, and under the dtype's ceiling.

    The floor is for a GPU, whose float32 sums run in one chain and whose exponential is approximate (found: 2.8e-7).
    """
    assert actual.shape == truth.shape
    truth = truth.cpu().double()
    size = truth.square().mean().sqrt()

    def distance(x: torch.Tensor) -> float:
        return float((x.cpu().double() - truth).square().mean().sqrt() / size)

    assert distance(actual) <= CEILING[actual.dtype]
    assert distance(actual) <= max(1.1 * distance(torchs), 5e-7)


class Experts:
    """The tensors of one step in float64 and the working dtype; expert 1 and the shared one are clamped."""

    def __init__(self, num_tokens: int, dtype: torch.dtype, device: torch.device, *sizes: int) -> None:
        width, inner, num_experts = sizes or (84, 20, 8)
        law = FLASH if num_experts == 64 else LAW
        self.x_TD = normal(6, 16, width)[:num_tokens].to(dtype)
        gate = normal(7, num_experts, width).to(dtype)
        self.gate_up_XCD = (normal(8, num_experts + 1, 2 * inner, width) / width**0.5).to(dtype)
        self.down_XDI = (normal(9, num_experts + 1, width, inner) / inner**0.5).to(dtype)
        self.limits_X = torch.full((num_experts + 1,), torch.inf)
        self.limits_X[[1, num_experts]] = torch.tensor([0.5, 0.25])
        self.dispatch = router.reference.dispatch(self.x_TD.float(), gate.float(), torch.zeros(num_experts), law)
        self.device = device

    def on_device(self) -> list[Any]:
        dispatch = router.Dispatch(*(tensor.to(self.device) for tensor in self.dispatch))
        tensors = (self.x_TD, self.gate_up_XCD, self.down_XDI, self.limits_X)
        return [*(tensor.to(self.device) for tensor in tensors), dispatch]

    def definition(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        act_MI = reference.up(self.x_TD.to(dtype), self.gate_up_XCD.to(dtype), self.dispatch, self.limits_X)
        return act_MI, reference.down(self.x_of_down().to(dtype), self.down_XDI.to(dtype), self.dispatch)

    def x_of_down(self) -> torch.Tensor:
        return normal(10, self.dispatch.weights_TJ.numel(), self.down_XDI.shape[2]).to(self.x_TD.dtype)

    def run(self, form: dict[str, Any], is_chained: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate_up, down, limits, dispatch = self.on_device()
        act_MI = kernel.up(x, gate_up, dispatch, limits, is_chained=is_chained, **form)
        out_TJD = kernel.down(self.x_of_down().to(self.device), down, dispatch, is_chained=is_chained, **form)
        return act_MI, out_TJD

    def check(self, form: dict[str, Any]) -> None:
        working, truth = self.definition(self.x_TD.dtype), self.definition(torch.float64)
        for actual, torchs, exact in zip(self.run(form), working, truth, strict=True):
            assert_close(actual, torchs, exact)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_experts_equal_their_definition_in_every_form(form: dict[str, Any], kernel_device: torch.device) -> None:
    Experts(3, torch.float32, kernel_device).check(form)


@pytest.mark.parametrize(("num_tokens", "form"), [(1, "whole"), (8, "plain"), (9, "plain"), (16, "whole")])
def test_experts_serve_every_number_of_tokens(num_tokens: int, form: str, kernel_device: torch.device) -> None:
    Experts(num_tokens, torch.float32, kernel_device, 36, 24, 8).check(FORMS[form])


@pytest.mark.parametrize("form", ["plain", "whole"])
def test_experts_round_as_the_working_dtype_does(form: str, kernel_device: torch.device) -> None:
    Experts(9, torch.bfloat16, kernel_device, 40, 24, 8).check(FORMS[form])


def test_one_expert_and_all_tokens_are_a_dense_mlp(kernel_device: torch.device) -> None:
    dispatch = router.dense_dispatch(9, kernel_device)
    x, gate_up, down = (normal(11, 9, 36), normal(12, 1, 40, 36) / 6, normal(13, 1, 36, 20) / 4)
    gate, up = (x @ gate_up[0].T).chunk(2, -1)
    truth = moe.swiglu(gate, up) @ down[0].T
    x, gate_up, down = (tensor.float().to(kernel_device) for tensor in (x, gate_up, down))
    act_MI = kernel.up(x, gate_up, dispatch, torch.tensor([torch.inf], device=kernel_device), **FORMS["plain"])
    out_TJD = kernel.down(act_MI, down, dispatch, **FORMS["whole"])
    assert out_TJD.shape == (9, 1, 36)
    torch.testing.assert_close(out_TJD[:, 0].cpu(), truth.float(), rtol=1e-4, atol=1e-5)


def test_a_token_that_is_nan_touches_no_other(kernel_device: torch.device) -> None:
    step = Experts(9, torch.float32, kernel_device, 36, 24, 8)
    clean, _ = step.run(FORMS["plain"])
    step.x_TD[4] = torch.nan
    dirty, _ = step.run(FORMS["plain"])
    is_other_M = torch.arange(36) // 4 != 4
    assert torch.equal(clean[is_other_M], dirty[is_other_M])
    assert dirty[~is_other_M].isnan().all()


def test_the_public_functions_refuse_what_does_not_fit(kernel_device: torch.device) -> None:
    step = Experts(3, torch.float32, kernel_device)
    x, gate_up, down, limits, dispatch = step.on_device()
    assert moe.down(moe.up(x, gate_up, dispatch, limits), down, dispatch).shape == (3, 4, 84)
    for wrong in (
        lambda: moe.up(x[:2], gate_up, dispatch, limits),
        lambda: moe.up(x, gate_up[:, 1:], dispatch, limits),
        lambda: moe.up(x, gate_up, dispatch, limits[:8]),
        lambda: moe.down(x, down, dispatch),
    ):
        with pytest.raises(ValueError, match="expected"):
            wrong()


def flash_part(is_up: bool, choice: dict[str, Any], inner: int = 192, padded_tokens: int = 16) -> dict[str, Any]:
    """A launch of flash's experts at a quarter or half, 9 tokens or 1, bfloat16, as the compiler sees it."""
    constexprs = {
        "PAIRS_A_ROW": 9 if is_up else 1,
        "HALVES": 2 if is_up else 1,
        "R": inner if is_up else 2560,
        "K": 2560 if is_up else inner,
        "N": padded_tokens,
        "BLOCK_R": choice["block_rows"],
        "BLOCK_K": choice["block_k"],
        "STAGES": choice["num_stages"],
        "IS_WHOLE": choice["form"] == "whole",
        "LINES": 32 * choice["num_warps"],
        "IS_CHAINED": True,
    }
    signature = {"inputs": "*bf16", "weights": "*bf16", "limits": "*fp32", "experts": "*i32", "pairs": "*i32"}
    signature |= {"outputs": "*bf16", "last_expert": "i32"}
    if not is_up:
        del signature["limits"]
        constexprs["limits"] = None
    shape = {"num_warps": choice["num_warps"], "num_stages": choice["num_stages"]}
    return {"name": "_unit_kernel", "signature": signature, "constexprs": constexprs, **shape}


def test_the_kernels_compile_for_sm90_without_spills_and_write_after_the_wait() -> None:
    quarter = [flash_part(True, kernel.UP), flash_part(False, kernel.DOWN)]
    half = [flash_part(True, kernel.UP, 384), flash_part(False, kernel.DOWN_HALF, 384)]
    alone = [flash_part(True, kernel.UP_ONE | {"block_rows": 8}, 384, 8), flash_part(False, kernel.DOWN_ONE, 384, 8)]
    compiled = compile_sm90("dspark.kernels.moe.kernel", quarter + half + alone)
    up, down, *_, down_one = compiled
    asked = dict.fromkeys(compiled, "prefetch.global") | dict.fromkeys((down, down_one), "ld.global")
    for one, asks in asked.items():
        assert one.spill_bytes == 0
        assert one.registers <= 168
        assert one.shared_bytes <= 227 * 1024
        wait = one.ptx.index("griddepcontrol.wait")
        assert one.ptx.index(asks) < wait < one.ptx.index("griddepcontrol.launch_dependents")
        assert wait < one.ptx.index("st.global")
    assert "cp.async.cg" in up.ptx


GPU_FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "wide": ({"block_rows": 32, "min_rows": 32, "num_warps": 4}, {"block_rows": 128, "min_rows": 128, "num_warps": 8}),
    "plain": ({"block_rows": 8}, {"form": "plain", "num_stages": 4}),
}


@pytest.fixture(scope="module")
def flash() -> tuple[Experts, Any, Any]:
    """Real widths of a quarter of flash, an eighth of its experts; with the definition in bfloat16 and float64."""
    step = Experts(9, torch.bfloat16, torch.device("cuda"), 2560, 192, 64)
    return step, step.definition(torch.bfloat16), step.definition(torch.float64)


@needs_gpu
@pytest.mark.parametrize("changes", GPU_FORMS.values(), ids=GPU_FORMS)
def test_gpu_check_of_the_experts_at_a_quarter_of_flash(
    changes: tuple[dict[str, Any], dict[str, Any]], flash: tuple[Experts, Any, Any]
) -> None:
    step, working, truth = flash
    x, gate_up, down, limits, dispatch = step.on_device()
    act, results = step.x_of_down().cuda(), []
    for is_chained in (False, True):
        torch.cuda.synchronize()
        found = (
            kernel.up(x, gate_up, dispatch, limits, is_chained=is_chained, **changes[0]),
            kernel.down(act, down, dispatch, is_chained=is_chained, **changes[1]),
        )
        for actual, torchs, exact in zip(found, working, truth, strict=True):
            assert_close(actual, torchs, exact)
        results.append(found)
    assert all(torch.equal(plain, chained) for plain, chained in zip(*results, strict=True))
    alone = Experts(1, torch.bfloat16, step.device, 2560, 192, 64).on_device()[-1]
    assert torch.equal(kernel.up(x[:1], gate_up, alone, limits, **changes[0]), results[0][0][:9])
    assert torch.equal(kernel.down(act[:9], down, alone, **changes[1])[0], results[0][1][0])


@needs_gpu
@pytest.mark.parametrize("inner", [192, 384])
def test_gpu_check_that_a_token_keeps_its_bits_in_windows_of_any_length(inner: int) -> None:
    step = Experts(9, torch.bfloat16, torch.device("cuda"), 2560, inner, 64)
    x, gate_up, down, limits, dispatch = step.on_device()
    act_MI = kernel.up(x, gate_up, dispatch, limits)
    whole_TJD = kernel.down(act_MI, down, dispatch)
    for num_tokens in (1, 2, 4, 8):
        few = Experts(num_tokens, torch.bfloat16, step.device, 2560, inner, 64).on_device()[-1]
        found_MI = kernel.up(x[:num_tokens], gate_up, few, limits)
        assert torch.equal(found_MI, act_MI[: len(found_MI)])
        assert torch.equal(kernel.down(found_MI, down, few), whole_TJD[:num_tokens])
