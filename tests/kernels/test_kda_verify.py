"""verify and commit of Kimi Delta Attention: kernels against reference, and one against the other, bit for bit."""

from typing import Any, NamedTuple

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import kda
from dspark.kernels.kda import kernel, reference

LOWER_BOUND = -5.0
CEILING = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes in bf16 need a GPU")


class Layers(NamedTuple):
    """The arguments of ``commit`` up to the state, which are those of ``verify`` stacked."""

    projected_LTC: torch.Tensor
    history_LWC: torch.Tensor
    conv_LCJ: torch.Tensor
    a_log_LH: torch.Tensor
    dt_bias_LHE: torch.Tensor
    state_LHEF: torch.Tensor

    def layer(self, index: int, tokens: slice = slice(None)) -> list[torch.Tensor]:
        projected_TC, *rest = (x[index] for x in self)
        return [projected_TC[tokens], *rest]

    def tokens(self, tokens: slice) -> "Layers":
        return self._replace(projected_LTC=self.projected_LTC[:, tokens])

    def copy(self) -> "Layers":
        return Layers(*(x.clone() for x in self))

    def double(self) -> "Layers":
        return Layers(*(x.double() for x in self))


def random_layers(
    layers: int, tokens: int, heads: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Layers:
    generator = torch.Generator().manual_seed(1000 * tokens + width)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    inner, wide = heads * width, torch.float32
    return Layers(
        normal(layers, tokens, 5 * inner + heads),
        normal(layers, 3, 3 * inner),
        normal(layers, 3 * inner, 4) / 2,
        (torch.rand(layers, heads, generator=generator) * 3 + 1).log().to(device),
        normal(layers, heads, width, dtype=wide) - 1,
        normal(layers, heads, width, width, dtype=wide),
    )


def error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    assert actual.isfinite().all()
    return float((actual.double() - truth).norm() / truth.norm())


def check_verify(inputs: Layers) -> None:
    """No further from the truth than the reference in the working dtype, and under a ceiling."""
    dtype = inputs.projected_LTC.dtype
    before = inputs.copy()
    o_THF = kernel.verify(*inputs.layer(-1), LOWER_BOUND)
    assert o_THF.dtype == dtype
    assert all(map(torch.equal, inputs, before))
    truth_THF = reference.verify(*inputs.double().layer(-1), LOWER_BOUND)
    allowed = error(reference.verify(*inputs.layer(-1), LOWER_BOUND), truth_THF)
    assert error(o_THF, truth_THF) <= min(max(2 * allowed, 2e-7), CEILING[dtype])


def check_commit(inputs: Layers, count: int) -> None:
    count_1 = torch.tensor([count], device=inputs.state_LHEF.device)
    after, single, truth = inputs.copy(), inputs.copy(), inputs.double()
    kernel.commit(*after, LOWER_BOUND, count_1)
    reference.commit(*single, LOWER_BOUND, count_1)
    reference.commit(*truth, LOWER_BOUND, count_1)
    assert torch.equal(after.history_LWC, single.history_LWC)
    changed = {"history_LWC", "state_LHEF"} if count else set()
    assert {
        name for name in Layers._fields[1:] if not torch.equal(getattr(after, name), getattr(inputs, name))
    } == changed
    allowed = error(single.state_LHEF, truth.state_LHEF)
    assert error(after.state_LHEF, truth.state_LHEF) <= min(max(2 * allowed, 2e-7), CEILING[torch.float32])


def commit_kernel_of(inputs: Layers, count: int) -> None:
    kernel.commit(*inputs, LOWER_BOUND, torch.tensor([count], device=inputs.state_LHEF.device))


def check_one_by_one(inputs: Layers) -> None:
    """verify and commit of single tokens give the bits of verify and commit of all of them."""
    tokens = inputs.projected_LTC.shape[1]
    together, single = inputs.copy(), inputs.copy()
    o_THF = kernel.verify(*together.layer(0), LOWER_BOUND)
    commit_kernel_of(together, tokens)
    for t in range(tokens):
        now = slice(t, t + 1)
        assert torch.equal(kernel.verify(*single.layer(0, now), LOWER_BOUND)[0], o_THF[t])
        commit_kernel_of(single.tokens(now), 1)
    assert torch.equal(single.state_LHEF, together.state_LHEF)
    assert torch.equal(single.history_LWC, together.history_LWC)


@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 2, 16), (3, 1, 40), (9, 1, 16), (16, 1, 6)])
def test_verify_is_as_near_to_the_truth_as_the_reference(
    tokens: int, heads: int, width: int, kernel_device: torch.device
) -> None:
    check_verify(random_layers(2, tokens, heads, width, kernel_device))


@pytest.mark.parametrize(("warps", "groups"), [(2, 2), (1, 4)])
def test_the_bits_do_not_depend_on_the_tiling(warps: int, groups: int, kernel_device: torch.device) -> None:
    inputs = random_layers(1, 3, 1, 40, kernel_device).layer(0)
    other_THF = kernel.verify(*inputs, LOWER_BOUND, num_warps=warps, groups=groups)
    assert torch.equal(other_THF, kernel.verify(*inputs, LOWER_BOUND))


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "count"),
    [(1, 2, 16, 1), (3, 1, 40, 0), (3, 1, 40, 1), (9, 2, 16, 2), (9, 1, 16, 4), (16, 1, 6, 16)],
)
def test_commit_takes_the_first_tokens_and_no_others(
    tokens: int, heads: int, width: int, count: int, kernel_device: torch.device
) -> None:
    inputs = random_layers(2, tokens, heads, width, kernel_device)
    inputs.projected_LTC[:, count:] = torch.nan
    check_commit(inputs, count)


def test_tokens_one_by_one_give_the_same_bits(kernel_device: torch.device) -> None:
    check_one_by_one(random_layers(1, 3, 1, 16, kernel_device))


def test_the_projection_may_be_a_view_of_wider_rows(kernel_device: torch.device) -> None:
    inputs = random_layers(1, 3, 1, 16, kernel_device)
    wide_LTC = torch.full((1, 5, inputs.projected_LTC.shape[2] + 7), torch.nan, device=kernel_device)
    view_LTC = wide_LTC[:, 1:4, 3:-4]
    view_LTC.copy_(inputs.projected_LTC)
    check_verify(inputs._replace(projected_LTC=view_LTC))
    after, expected = inputs.copy()._replace(projected_LTC=view_LTC), inputs.copy()
    commit_kernel_of(after, 3)
    commit_kernel_of(expected, 3)
    assert torch.equal(after.state_LHEF, expected.state_LHEF)
    assert torch.equal(after.history_LWC, expected.history_LWC)


def test_the_strongest_and_the_weakest_decay_are_exact(kernel_device: torch.device) -> None:
    inputs = random_layers(1, 9, 1, 16, kernel_device)
    inputs.projected_LTC[..., 48:56] = 60
    inputs.projected_LTC[..., 56:64] = -60
    check_verify(inputs)
    check_commit(inputs, 9)


def test_the_public_functions_are_the_plain_layer_of_the_model(kernel_device: torch.device) -> None:
    inputs = random_layers(1, 5, 2, 16, kernel_device)
    projected_TC, history_WC, conv_CJ, a_log_H, dt_bias_HE, state_HEF = inputs.layer(0)
    window_BWC = torch.cat((history_WC, projected_TC[:, :96]))[None]
    q, k, v = kda.short_conv(window_BWC, conv_CJ).unflatten(-1, (3, 2, 16)).unbind(2)
    decay = kda.log_decay(projected_TC[None, :, 96:128].unflatten(-1, (2, 16)), a_log_H, dt_bias_HE, LOWER_BOUND)
    beta_BTH = projected_TC[None, :, 160:].sigmoid()
    rule = kda.chunked(kda.l2norm(q), kda.l2norm(k), v, decay, beta_BTH, state_HEF[None])
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(kda.verify(*inputs.layer(0), LOWER_BOUND), rule.o_BTHF[0], **close)
    kda.commit(*inputs, LOWER_BOUND, torch.tensor([5], device=kernel_device))
    torch.testing.assert_close(inputs.state_LHEF, rule.state_BHEF, **close)
    assert torch.equal(inputs.history_LWC, window_BWC[:, 5:])


def test_what_does_not_fit_is_refused_with_what_was_found() -> None:
    inputs = random_layers(1, 2, 1, 8, torch.device("cpu")).layer(0)
    with pytest.raises(ValueError, match=r"dt_bias: found shape \(8,\), expected \(1, 8\)"):
        kda.verify(*inputs[:4], inputs[4][0], inputs[5], LOWER_BOUND)
    with pytest.raises(ValueError, match=r"history and state: found torch\.float32 and torch\.bfloat16"):
        kda.verify(*inputs[:5], inputs[5].bfloat16(), LOWER_BOUND)
    with pytest.raises(ValueError, match="expected a contiguous tensor"):
        kda.verify(*inputs[:5], inputs[5].transpose(1, 2), LOWER_BOUND)
    with pytest.raises(ValueError, match="found 17 tokens, expected 1 to 16"):
        kda.verify(inputs[0][:1].expand(17, -1), *inputs[1:], LOWER_BOUND)
    with pytest.raises(ValueError, match=r"expected torch\.int64"):
        kda.commit(*(x[None] for x in inputs), LOWER_BOUND, torch.tensor([1], dtype=torch.int32))


def flash_kernels() -> list[dict[str, Any]]:
    """One of four ranks of flash: 8 heads of 128, bf16, chained."""
    pointers = dict.fromkeys(("projected_ptr", "history_ptr", "conv_ptr"), "*bf16")
    pointers |= dict.fromkeys(("staged_ptr", "a_log_ptr", "dt_bias_ptr", "state_ptr"), "*fp32")
    sizes = {"H": 8, "E": 128, "J": 4, "STRIDE": 5128, "WARPS": 4, "IS_CHAINED": True}
    history = {"HISTORY_ROWS": 4, "HISTORY_CHANNELS": 512, "LAYER_STRIDE": 9 * 5128}
    return [
        {
            "name": "verify_kernel",
            "signature": pointers | {"o_ptr": "*bf16", "lower_bound": "fp32", "scale": "fp32", "num_tokens": "i32"},
            "constexprs": sizes | {"GROUPS": kernel.VERIFY_GROUPS},
            "num_warps": 4,
        },
        {
            "name": "commit_kernel",
            "signature": pointers | {"count_ptr": "*i64", "lower_bound": "fp32"},
            "constexprs": sizes | history | {"T": 9, "GROUPS": kernel.COMMIT_GROUPS, "TILES": 2},
            "num_warps": 4,
        },
    ]


def test_the_kernels_fit_the_registers_of_sm90_and_wait_before_they_write() -> None:
    for compiled in compile_sm90("dspark.kernels.kda.kernel", flash_kernels()):
        assert compiled.spill_bytes == 0
        assert compiled.registers <= 168  # three programs of four warps on an SM
        assert compiled.shared_bytes == 0  # no vector changes its layout, no sum leaves its warp
        assert compiled.ptx.index("griddepcontrol.wait") < compiled.ptx.index("st.global")
        assert compiled.ptx.index("griddepcontrol.wait") < compiled.ptx.index("griddepcontrol.launch_dependents")


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 9, 16])
def test_gpu_check_verify_of_one_of_four_ranks(tokens: int, kernel_device: torch.device) -> None:
    inputs = random_layers(2, tokens, 8, 128, kernel_device, torch.bfloat16)
    check_verify(inputs)
    plain_THF = kernel.verify(*inputs.layer(0), LOWER_BOUND)
    torch.cuda.synchronize()
    for options in ({"is_chained": True}, {"num_warps": 8}, {"groups": 2}):
        assert torch.equal(kernel.verify(*inputs.layer(0), LOWER_BOUND, **options), plain_THF)


@needs_gpu
@pytest.mark.parametrize("count", [0, 1, 5, 9])
def test_gpu_check_commit_of_all_layers_of_one_of_four_ranks(count: int, kernel_device: torch.device) -> None:
    inputs = random_layers(35, 9, 8, 128, kernel_device, torch.bfloat16)
    inputs.projected_LTC[:, count:] = torch.nan
    check_commit(inputs, count)
    chained, plain = inputs.copy(), inputs.copy()
    kernel.commit(*chained, LOWER_BOUND, torch.tensor([count], device=kernel_device), is_chained=True)
    commit_kernel_of(plain, count)
    assert torch.equal(chained.state_LHEF, plain.state_LHEF)


@needs_gpu
def test_gpu_check_tokens_one_by_one_give_the_same_bits(kernel_device: torch.device) -> None:
    check_one_by_one(random_layers(3, 9, 8, 128, kernel_device, torch.bfloat16))
