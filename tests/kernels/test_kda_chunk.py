"""Reading packed sequences with Kimi Delta Attention: the kernel against the recurrence, borders, continuations."""

from typing import Any, NamedTuple

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import kda_chunk
from dspark.kernels.chunks import Chunks, lay_out
from dspark.kernels.kda import reference as kda
from dspark.kernels.kda_chunk import kernel, reference

LOWER_BOUND, EPS = -5.0, 1e-6
CEILING = {torch.float32: 3e-6, torch.bfloat16: 6e-3}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes in bf16 need a GPU")


class Inputs(NamedTuple):
    """What ``read`` takes before the lower bound."""

    projected_NC: torch.Tensor
    history_BWC: torch.Tensor
    conv_CJ: torch.Tensor
    a_log_H: torch.Tensor
    dt_bias_HE: torch.Tensor
    norm_F: torch.Tensor
    state_BHEF: torch.Tensor

    def copy(self) -> "Inputs":
        return Inputs(*(x.clone() for x in self))

    def double(self) -> "Inputs":
        return Inputs(*(x.double() for x in self))


def random_inputs(
    lengths: list[int], heads: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Inputs:
    generator = torch.Generator().manual_seed(1000 * sum(lengths) + width)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    inner = heads * width
    return Inputs(
        normal(sum(lengths), 5 * inner + heads),
        normal(len(lengths), 3, 3 * inner),
        normal(3 * inner, 4) / 2,
        (torch.rand(heads, generator=generator) * 3 + 1).log().to(device),
        normal(heads, width, dtype=torch.float32) - 1,
        normal(width) / 4 + 1,
        normal(len(lengths), heads, width, width, dtype=torch.float32),
    )


def by_recurrence(inputs: Inputs, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and states token by token in float64."""
    outputs, states, double = [], [], inputs.double()
    for b, projected_TC in enumerate(double.projected_NC.split(lengths)):
        prepared_TC = kda.prepare(projected_TC, double.history_BWC[b], *double[2:5], -5.0)
        rule = kda._replay(prepared_TC, double.state_BHEF[b])
        gate_THF = projected_TC[:, 4 * (inner := rule.o_BTHF[0, 0].numel()) : 5 * inner].view_as(rule.o_BTHF[0])
        outputs.append(kda.gated_rms_norm(rule.o_BTHF[0], double.norm_F, gate_THF, EPS))
        states.append(rule.state_BHEF[0])
    return torch.cat(outputs), torch.stack(states)


def error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    assert actual.isfinite().all()
    return float((actual.double() - truth).norm() / truth.norm())


def check(inputs: Inputs, lengths: list[int], chunk_tokens: int = 16) -> None:
    """About as near to the recurrence as the chunked form in float32 (bfloat16: see below), and under a ceiling."""
    dtype, chunks = inputs.projected_NC.dtype, lay_out(lengths, inputs.state_BHEF.device, chunk_tokens)
    ours, theirs = inputs.copy(), inputs.copy()
    o_NHF = kernel.read(*ours, LOWER_BOUND, EPS, chunks)
    expected_NHF = reference.read(*theirs, LOWER_BOUND, EPS, chunks)
    assert o_NHF.dtype == dtype
    assert all(map(torch.equal, ours[:-1], inputs[:-1]))
    truths = by_recurrence(inputs, lengths)
    pairs = ((o_NHF, expected_NHF), (ours.state_BHEF, theirs.state_BHEF))
    for (actual, other), truth in zip(pairs, truths, strict=True):
        allowed = max(4 * error(other, truth), 1e-6) if dtype == torch.float32 else CEILING[dtype]
        assert error(actual, truth) <= min(allowed, CEILING[dtype])


@pytest.mark.parametrize(
    ("lengths", "width", "chunk_tokens"),
    [([1, 15, 16, 17], 16, 16), ([65], 16, 32), ([63, 2], 24, 64), ([100], 16, 64), ([33, 1], 32, 32)],
    ids=str,
)
def test_the_kernel_is_as_near_to_the_recurrence_as_the_reference(
    lengths: list[int], width: int, chunk_tokens: int, kernel_device: torch.device
) -> None:
    check(random_inputs(lengths, 2, width, kernel_device), lengths, chunk_tokens)


@pytest.mark.parametrize("form", [kernel.read, reference.read], ids=["kernel", "reference"])
def test_a_sequence_sees_nothing_of_its_neighbours(form: Any, kernel_device: torch.device) -> None:
    lengths = [5, 18, 3]
    inputs = random_inputs(lengths, 1, 16, kernel_device)
    together = inputs.copy()
    o_NHF = form(*together, LOWER_BOUND, EPS, lay_out(lengths, kernel_device, 16))
    for b, (o_THF, projected_TC) in enumerate(
        zip(o_NHF.split(lengths), inputs.projected_NC.split(lengths), strict=True)
    ):
        alone = Inputs(projected_TC, inputs.history_BWC[b : b + 1], *inputs[2:6], inputs.state_BHEF[b : b + 1].clone())
        assert torch.equal(form(*alone, LOWER_BOUND, EPS, lay_out([lengths[b]], kernel_device, 16)), o_THF)
        assert torch.equal(alone.state_BHEF[0], together.state_BHEF[b])


@pytest.mark.parametrize("form", [kernel.read, reference.read], ids=["kernel", "reference"])
def test_reading_in_pieces_is_reading_the_whole(form: Any, kernel_device: torch.device) -> None:
    inputs = random_inputs([41], 1, 16, kernel_device)
    whole, pieces = inputs.copy(), inputs.copy()
    o_NHF = form(*whole, LOWER_BOUND, EPS, lay_out([41], kernel_device, 16))
    outputs, history_BWC = [], pieces.history_BWC
    for projected_TC in pieces.projected_NC.split([2, 17, 1, 21]):
        chunks = lay_out([len(projected_TC)], kernel_device, 16)
        outputs.append(form(projected_TC, history_BWC, *pieces[2:], LOWER_BOUND, EPS, chunks))
        history_BWC = torch.cat((history_BWC, projected_TC[None, :, :48]), 1)[:, -3:].contiguous()
    torch.testing.assert_close(torch.cat(outputs), o_NHF, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pieces.state_BHEF, whole.state_BHEF, rtol=1e-5, atol=1e-6)


def test_extreme_decays_and_equal_keys_stay_exact(kernel_device: torch.device) -> None:
    inputs = random_inputs([70], 1, 16, kernel_device)
    inputs.projected_NC[:40, 48:56] = 60  # the strongest decay
    inputs.projected_NC[:, 56:64] = -60  # none
    inputs.projected_NC[40:, 16:32] = 1  # the same key again and again, wholly rewritten
    inputs.projected_NC[40:, 80:] = 20
    check(inputs, [70], 64)


def test_what_does_not_fit_is_refused_with_what_was_found() -> None:
    cpu = torch.device("cpu")
    inputs, chunks = random_inputs([3], 1, 16, cpu), lay_out([3], cpu)
    with pytest.raises(ValueError, match=r"lengths \[3, 0\], expected at least one token each"):
        lay_out([3, 0], cpu)
    with pytest.raises(ValueError, match=r"projected_NC: expected \[4, 81\] .* found \[3, 81\]"):
        kda_chunk.read(*inputs, LOWER_BOUND, EPS, lay_out([4], cpu))
    with pytest.raises(ValueError, match=r"state_BHEF: expected .* torch\.float32.* found .* torch\.bfloat16"):
        kda_chunk.read(*inputs[:6], inputs.state_BHEF.bfloat16(), LOWER_BOUND, EPS, chunks)
    with pytest.raises(ValueError, match=r"state_BHEF: expected \[1, .* found \[2, "):  # another batch
        kda_chunk.read(*inputs[:6], inputs.state_BHEF.repeat(2, 1, 1, 1), LOWER_BOUND, EPS, chunks)
    assert torch.equal(
        kda_chunk.read(*inputs.copy(), LOWER_BOUND, EPS, chunks), reference.read(*inputs, LOWER_BOUND, EPS, chunks)
    )


def test_the_kernels_fit_the_registers_and_the_shared_memory_of_sm90() -> None:
    """One of four ranks of flash: 8 heads of 128 in bf16."""
    exact = {"mixed_ptr", "a_log_ptr", "dt_bias_ptr", "u_ptr", "g_ptr", "state_ptr"}
    kinds = dict.fromkeys(exact, "*fp32") | dict.fromkeys(("chunks_ptr", "ends_ptr"), "*i32")
    kinds |= dict.fromkeys(("lower_bound", "scale", "eps"), "fp32")
    sizes = {"H": 8, "E": 128, "WIDTH": 128, "C": 64}
    projection, products = {"STRIDE": 5128}, {"PRECISION": "tf32"}

    def launched(name: str, arguments: str, num_warps: int, num_stages: int, **constexprs: Any) -> dict[str, Any]:
        signature = {argument: kinds.get(argument, "*bf16") for argument in arguments.split()}
        shape = {"num_warps": num_warps, "num_stages": num_stages}
        return {"name": name, "signature": signature, "constexprs": sizes | constexprs, **shape}

    mix = "mixed_ptr projected_ptr history_ptr conv_ptr a_log_ptr dt_bias_ptr chunks_ptr lower_bound scale"
    prepare = "q_ptr w_ptr k_ptr p_ptr mixed_ptr projected_ptr chunks_ptr"
    scan = "delta_ptr held_ptr w_ptr u_ptr k_ptr g_ptr state_ptr ends_ptr"
    output = "o_ptr q_ptr held_ptr p_ptr delta_ptr projected_ptr norm_ptr chunks_ptr eps"
    part = {"PART": kernel.PREPARE_PART, "PRECISION": "tf32"}
    columns = {"COLUMNS": kernel.SCAN_COLUMNS}
    kernels = [
        launched("mix_kernel", mix, kernel.MIX_WARPS, 3, **projection, J=4),
        launched("prepare_kernel", prepare, kernel.PREPARE_WARPS, 1, **projection, **part),
        launched("scan_kernel", scan, kernel.SCAN_WARPS, kernel.SCAN_STAGES, **products, **columns),
        launched("output_kernel", output, 4, 1, **projection, **products),
    ]
    for compiled in compile_sm90("dspark.kernels.kda_chunk.kernel", kernels):
        assert compiled.spill_bytes == 0
        assert compiled.shared_bytes <= 227 * 1024


@needs_gpu
@pytest.mark.parametrize("lengths", [[1], [63, 1000, 65], [300] * 8], ids=str)
def test_gpu_check_of_one_of_four_ranks(lengths: list[int], kernel_device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check(random_inputs(lengths, 8, 128, kernel_device, dtype), lengths, 64)


def test_chunks_cover_every_row_once() -> None:
    chunks: Chunks = lay_out([1, 64, 65], torch.device("cpu"), 64)
    assert chunks.chunks_M4.tolist() == [[0, 1, 0, 0], [1, 64, 1, 0], [65, 64, 2, 0], [129, 1, 2, 64]]
    assert chunks.ends_B.tolist() == [1, 2, 4]
