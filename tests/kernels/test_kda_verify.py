"""verify and commit of Kimi Delta Attention: kernels against reference, and one against the other, bit for bit."""

from typing import Any, NamedTuple

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import kda
from dspark.kernels.kda import kernel, reference

CEILING = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes in bf16 need a GPU")


class Layers(NamedTuple):
    """The arguments of ``commit`` up to the state."""

    projected_LTC: torch.Tensor
    prepared_LTC: torch.Tensor
    history_LWC: torch.Tensor
    state_LHEF: torch.Tensor

    def tokens(self, tokens: slice) -> "Layers":
        prepared_LTC = self.prepared_LTC[:, tokens].contiguous()
        return self._replace(projected_LTC=self.projected_LTC[:, tokens], prepared_LTC=prepared_LTC)

    def copy(self) -> "Layers":
        return Layers(*(x.clone() for x in self))

    def double(self) -> "Layers":
        return Layers(*(x.double() for x in self))


class Parameters(NamedTuple):
    """What else ``prepare`` takes of a layer."""

    conv_CJ: torch.Tensor
    a_log_H: torch.Tensor
    dt_bias_HE: torch.Tensor
    lower_bound: float = -5.0


def random_layers(
    layers: int, tokens: int, heads: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Layers, list[Parameters]]:
    generator = torch.Generator().manual_seed(1000 * tokens + width)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    inner, wide = heads * width, torch.float32
    projected_LTC, history_LWC = normal(layers, tokens, 5 * inner + heads), normal(layers, 3, 3 * inner)
    parameters = [
        Parameters(
            normal(3 * inner, 4) / 2,
            (torch.rand(heads, generator=generator) * 3 + 1).log().to(device),
            normal(heads, width, dtype=wide) - 1,
        )
        for _ in range(layers)
    ]
    prepared = [
        reference.prepare(*pair, *own) for *pair, own in zip(projected_LTC, history_LWC, parameters, strict=True)
    ]
    state_LHEF = normal(layers, heads, width, width, dtype=wide)
    return Layers(projected_LTC, torch.stack(prepared), history_LWC, state_LHEF), parameters


def error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    assert actual.isfinite().all()
    return float((actual.double() - truth).norm() / truth.norm())


def verify(inputs: Layers, layer: int = 0, **options: Any) -> torch.Tensor:
    return kernel.verify(inputs.prepared_LTC[layer], inputs.state_LHEF[layer], inputs.projected_LTC.dtype, **options)


def check_verify(inputs: Layers) -> None:
    """No further from the truth than the reference in the working dtype, and under a ceiling."""
    dtype = inputs.projected_LTC.dtype
    before = inputs.copy()
    o_THF = verify(inputs, -1)
    assert o_THF.dtype == dtype
    assert all(map(torch.equal, inputs, before))
    prepared_TC, state_HEF = inputs.prepared_LTC[-1], inputs.state_LHEF[-1]
    truth_THF = reference.verify(prepared_TC.double(), state_HEF.double(), torch.float64)
    allowed = error(reference.verify(prepared_TC, state_HEF, dtype), truth_THF)
    assert error(o_THF, truth_THF) <= min(max(2 * allowed, 2e-7), CEILING[dtype])


def check_commit(inputs: Layers, count: int) -> None:
    count_1 = torch.tensor([count], device=inputs.state_LHEF.device)
    after, single, truth = inputs.copy(), inputs.copy(), inputs.double()
    kernel.commit(*after, count_1)
    reference.commit(*single, count_1)
    reference.commit(*truth, count_1)
    assert torch.equal(after.history_LWC, single.history_LWC)
    assert torch.equal(after.history_LWC, inputs.history_LWC) == (count == 0)
    assert torch.equal(after.state_LHEF, inputs.state_LHEF) == (count == 0)
    allowed = error(single.state_LHEF, truth.state_LHEF)
    assert error(after.state_LHEF, truth.state_LHEF) <= min(max(2 * allowed, 2e-7), CEILING[torch.float32])


def commit(inputs: Layers, count: int, **options: Any) -> None:
    kernel.commit(*inputs, torch.tensor([count], device=inputs.state_LHEF.device), **options)


def check_one_by_one(inputs: Layers) -> None:
    """verify and commit of single tokens give the bits of verify and commit of all of them."""
    tokens = inputs.projected_LTC.shape[1]
    together, single = inputs.copy(), inputs.copy()
    o_THF = verify(together)
    commit(together, tokens)
    for t in range(tokens):
        now = single.tokens(slice(t, t + 1))
        assert torch.equal(verify(now)[0], o_THF[t])
        commit(now, 1)
    assert torch.equal(single.state_LHEF, together.state_LHEF)
    assert torch.equal(single.history_LWC, together.history_LWC)


@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 2, 16), (2, 1, 40), (9, 1, 16), (16, 1, 6)])
def test_verify_is_as_near_to_the_truth_as_the_reference(
    tokens: int, heads: int, width: int, kernel_device: torch.device
) -> None:
    check_verify(random_layers(2, tokens, heads, width, kernel_device)[0])


@pytest.mark.parametrize(("warps", "columns"), [(2, 4), (1, 2)])
def test_the_bits_do_not_depend_on_the_tiling(warps: int, columns: int, kernel_device: torch.device) -> None:
    inputs, _ = random_layers(1, 3, 1, 40, kernel_device)
    assert torch.equal(verify(inputs, num_warps=warps, columns=columns), verify(inputs))
    after, expected = inputs.copy(), inputs.copy()
    commit(after, 2, num_warps=warps, columns=columns)
    commit(expected, 2)
    assert all(map(torch.equal, after, expected))


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "count"),
    [(1, 2, 16, 1), (3, 1, 40, 0), (3, 1, 40, 1), (9, 2, 16, 2), (9, 1, 16, 4), (16, 1, 6, 16)],
)
def test_commit_takes_the_first_tokens_and_no_others(
    tokens: int, heads: int, width: int, count: int, kernel_device: torch.device
) -> None:
    inputs, _ = random_layers(2, tokens, heads, width, kernel_device)
    inputs.projected_LTC[:, count:] = torch.nan
    inputs.prepared_LTC[:, count:] = torch.nan
    check_commit(inputs, count)


def test_tokens_one_by_one_give_the_same_bits(kernel_device: torch.device) -> None:
    check_one_by_one(random_layers(1, 3, 1, 16, kernel_device)[0])


def test_the_projection_may_be_a_view_of_wider_rows(kernel_device: torch.device) -> None:
    inputs, _ = random_layers(1, 3, 1, 16, kernel_device)
    wide_LTC = torch.full((1, 5, inputs.projected_LTC.shape[2] + 7), torch.nan, device=kernel_device)
    view_LTC = wide_LTC[:, 1:4, 3:-4]
    view_LTC.copy_(inputs.projected_LTC)
    after, expected = inputs.copy()._replace(projected_LTC=view_LTC), inputs.copy()
    commit(after, 3)
    commit(expected, 3)
    assert torch.equal(after.history_LWC, expected.history_LWC)


def test_the_strongest_and_the_weakest_decay_are_exact(kernel_device: torch.device) -> None:
    inputs, _ = random_layers(1, 9, 1, 16, kernel_device)
    inputs.prepared_LTC[..., 48:56] = torch.tensor(-5.0).exp()
    inputs.prepared_LTC[..., 56:64] = 1
    check_verify(inputs)
    check_commit(inputs, 9)


def test_the_public_functions_are_the_plain_layer_of_the_model(kernel_device: torch.device) -> None:
    inputs, (parameters,) = random_layers(1, 5, 2, 16, kernel_device)
    projected_TC, prepared_TC, history_WC, state_HEF = (x[0] for x in inputs)
    conv_CJ, a_log_H, dt_bias_HE, lower_bound = parameters
    window_BWC = torch.cat((history_WC, projected_TC[:, :96]))[None]
    q, k, v = reference.short_conv(window_BWC, conv_CJ).unflatten(-1, (3, 2, 16)).unbind(2)
    decay = reference.log_decay(projected_TC[None, :, 96:128].unflatten(-1, (2, 16)), a_log_H, dt_bias_HE, lower_bound)
    beta_BTH = projected_TC[None, :, 160:].sigmoid()
    rule = reference.chunked(reference.l2norm(q), reference.l2norm(k), v, decay, beta_BTH, state_HEF[None])
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(kda.verify(prepared_TC, state_HEF, torch.float32), rule.o_BTHF[0], **close)
    kda.commit(*inputs, torch.tensor([5], device=kernel_device))
    torch.testing.assert_close(inputs.state_LHEF, rule.state_BHEF, **close)
    assert torch.equal(inputs.history_LWC, window_BWC[:, 5:])


def test_what_does_not_fit_is_refused_with_what_was_found() -> None:
    inputs, _ = random_layers(1, 2, 1, 8, torch.device("cpu"))
    prepared_TC, state_HEF, dtype = inputs.prepared_LTC[0], inputs.state_LHEF[0], torch.float32
    with pytest.raises(ValueError, match=r"prepared_TC: expected \[2, 41\] .* found \[2, 40\]"):
        kda.verify(prepared_TC[:, 1:], state_HEF, dtype)
    with pytest.raises(ValueError, match=r"state_HEF: expected .* torch\.float32 .* found .* torch\.bfloat16"):
        kda.verify(prepared_TC, state_HEF.bfloat16(), dtype)
    with pytest.raises(ValueError, match=r"state_HEF: expected .* contiguous, found .* with strides"):
        kda.verify(prepared_TC, state_HEF.transpose(1, 2), dtype)
    with pytest.raises(ValueError, match="prepared_TC: expected 1 to 16 tokens, found 17"):
        kda.verify(prepared_TC[:1].expand(17, -1), state_HEF, dtype)
    count_1 = torch.tensor([1])
    with pytest.raises(ValueError, match=r"count_1: expected \[1\] torch\.int64"):
        kda.commit(*inputs, count_1.int())
    with pytest.raises(ValueError, match=r"projected_LTC: expected \[1, 2, 41\] .* found \[1, 1, 41\]"):
        kda.commit(inputs.projected_LTC[:, 1:], *inputs[1:], count_1)
    with pytest.raises(ValueError, match=r"projected_LTC: expected .* torch\.bfloat16"):
        kda.commit(*inputs._replace(history_LWC=inputs.history_LWC.bfloat16()), count_1)


def flash_kernels() -> list[dict[str, Any]]:
    """One of four ranks of flash: 8 heads of 128, bf16, chained; verify also of one of two."""
    pointers = {"prepared_ptr": "*fp32", "state_ptr": "*fp32"}
    sizes = {"H": 8, "E": 128, "WARPS": 4, "IS_CHAINED": True}
    strides = {"J": 4, "T": 9, "STRIDE": 5128, "LAYER_STRIDE": 9 * 5128}
    inputs = {"projected_ptr": "*bf16", "history_ptr": "*bf16", "count_ptr": "*i64"}
    verify = {
        "name": "verify_kernel",
        "signature": pointers | {"o_ptr": "*bf16", "scale": "fp32", "num_tokens": "i32"},
        "constexprs": sizes | {"COLUMNS": kernel.VERIFY_COLUMNS},
        "num_warps": 4,
        "maxnreg": kernel.VERIFY_REGISTERS,
    }
    half = {"constexprs": verify["constexprs"] | {"H": 16, "WARPS": 8}, "num_warps": 8}
    return [
        verify,
        verify | half,
        {
            "name": "commit_kernel",
            "signature": pointers | inputs,
            "constexprs": sizes | strides | {"COLUMNS": kernel.COMMIT_COLUMNS},
            "num_warps": 4,
        },
    ]


def test_the_kernels_fit_the_registers_of_sm90_and_wait_before_they_write() -> None:
    for compiled in compile_sm90("dspark.kernels.kda.kernel", flash_kernels()):
        assert compiled.spill_bytes == 0
        assert compiled.registers <= 64  # eight programs of four warps on an SM
        assert compiled.shared_bytes == 0  # no vector changes its layout, no sum leaves its warp
        assert compiled.ptx.index("griddepcontrol.wait") < compiled.ptx.index("st.global")
        assert compiled.ptx.index("griddepcontrol.wait") < compiled.ptx.index("griddepcontrol.launch_dependents")


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 9, 16])
@pytest.mark.parametrize("heads", [8, 16])
def test_gpu_check_verify_of_one_of_four_or_two_ranks(heads: int, tokens: int, kernel_device: torch.device) -> None:
    inputs, _ = random_layers(2, tokens, heads, 128, kernel_device, torch.bfloat16)
    check_verify(inputs)
    plain_THF = verify(inputs)
    torch.cuda.synchronize()
    for options in ({"is_chained": True}, {"num_warps": 8}, {"num_warps": 4}, {"columns": 4}, {"columns": 1}):
        assert torch.equal(verify(inputs, **options), plain_THF)


@needs_gpu
@pytest.mark.parametrize("count", [0, 1, 5, 9])
def test_gpu_check_commit_of_all_layers_of_one_of_four_ranks(count: int, kernel_device: torch.device) -> None:
    inputs, _ = random_layers(35, 9, 8, 128, kernel_device, torch.bfloat16)
    inputs.projected_LTC[:, count:] = torch.nan
    inputs.prepared_LTC[:, count:] = torch.nan
    check_commit(inputs, count)
    chained, plain = inputs.copy(), inputs.copy()
    commit(chained, count, is_chained=True)
    commit(plain, count)
    assert torch.equal(chained.state_LHEF, plain.state_LHEF)
    assert torch.equal(chained.history_LWC, plain.history_LWC)


@needs_gpu
def test_gpu_check_tokens_one_by_one_give_the_same_bits(kernel_device: torch.device) -> None:
    check_one_by_one(random_layers(3, 9, 8, 128, kernel_device, torch.bfloat16)[0])
