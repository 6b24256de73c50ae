"""A slot of the sequential head: the kernel against its definition and float64, ties, noise, and what is no number."""

import re
from collections.abc import Callable

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import markov
from dspark.kernels.markov import kernel, reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes need a GPU")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def zero(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


Slot = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def slot(num_rows: int, rank: int, dtype: torch.dtype, device: torch.device) -> Slot:
    """Base logits, W1 of seven tokens, the token before, and W2."""
    base_V = normal(num_rows, dtype=torch.float32, device=device)
    w1_NR, w2_VR = (normal(n, rank, seed=n, dtype=dtype, device=device) for n in (7, num_rows))
    return base_V, w1_NR, torch.tensor([5], device=device), w2_VR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "rank"), [(257, 32), (100, 24), (1, 4), (1040, 256), (63, 300)])
def test_the_logits_are_float32s_and_the_choice_is_their_largest(
    num_rows: int, rank: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    base_V, w1_NR, row_1, w2_VR = slot(num_rows, rank, dtype, kernel_device)
    truth_V = base_V.double() + w2_VR.double() @ w1_NR[5].double()
    logits_V, counters = torch.full_like(base_V, torch.nan), zero(kernel_device)
    best_1, id_1 = kernel.step(base_V, w1_NR, row_1, w2_VR, 1000, counters, logits_V=logits_V)
    error = 3e-6 * (base_V.abs() + w2_VR.double().norm(dim=1) * w1_NR[5].double().norm())
    assert ((logits_V - truth_V).abs() <= error).all()
    assert torch.equal(best_1, logits_V.amax(0, keepdim=True))
    assert id_1.tolist() == [int(logits_V.argmax()) + 1000]
    assert not counters.any()
    again = kernel.step(base_V, w1_NR[5:6].contiguous(), None, w2_VR, 1000, counters)
    assert torch.equal(again[0], best_1)
    assert torch.equal(again[1], id_1)
    expected = reference.step(base_V, w1_NR, row_1, w2_VR, 1000)
    assert torch.equal(expected[1], id_1)
    torch.testing.assert_close(expected[0], best_1, rtol=1e-5, atol=1e-5)


def test_the_logits_may_take_the_place_of_the_base(kernel_device: torch.device) -> None:
    base_V, w1_NR, row_1, w2_VR = slot(150, 16, torch.float32, kernel_device)
    apart_V, in_place_V = torch.empty_like(base_V), base_V.clone()
    options = {"rows": 16}
    apart = kernel.step(base_V, w1_NR, row_1, w2_VR, 0, zero(kernel_device), logits_V=apart_V, **options)
    same = kernel.step(in_place_V, w1_NR, row_1, w2_VR, 0, zero(kernel_device), logits_V=in_place_V, **options)
    assert torch.equal(apart_V, in_place_V)
    assert all(map(torch.equal, apart, same))


@pytest.mark.parametrize("rows", [4, 16, 64])
def test_of_equal_logits_the_smaller_id_wins(rows: int, kernel_device: torch.device) -> None:
    base_V, w1_NR, row_1, w2_VR = slot(650, 8, torch.float32, kernel_device)
    for pair in ((3, 19), (0, 649), (70, 71), (626, 630), (15, 16)):
        twins_V = base_V.clone()
        twins_V[list(pair)] = 50 * w1_NR[5].norm()
        w2 = w2_VR.clone()
        w2[list(pair)] = w1_NR[5]
        _, id_1 = kernel.step(twins_V, w1_NR, row_1, w2, 7, zero(kernel_device), rows=rows)
        assert id_1.tolist() == [pair[0] + 7]


def test_undefined_and_infinite_logits_never_win(kernel_device: torch.device) -> None:
    base_V, w1_NR, row_1, w2_VR = slot(90, 8, torch.float32, kernel_device)
    one_V = torch.full_like(base_V, torch.nan)
    one_V[80] = -1e9
    for base in (one_V, torch.full_like(base_V, torch.nan), torch.full_like(base_V, -torch.inf), -base_V.abs() - 1e3):
        found = kernel.step(base, w1_NR, row_1, w2_VR, 5, zero(kernel_device), rows=16)
        expected = reference.step(base, w1_NR, row_1, w2_VR, 5)
        torch.testing.assert_close(found, expected)


def test_noise_and_temperature_change_the_choice_and_not_the_logits(kernel_device: torch.device) -> None:
    base_V, w1_NR, row_1, w2_VR = slot(150, 16, torch.float32, kernel_device)
    noise_V = -(-torch.rand(150, generator=torch.Generator().manual_seed(3)).log()).log().to(kernel_device)
    inverse_1 = torch.tensor([0.25], device=kernel_device)
    plain_V, logits_V = torch.empty_like(base_V), torch.empty_like(base_V)
    _, greedy_id_1 = kernel.step(base_V, w1_NR, row_1, w2_VR, 0, zero(kernel_device), logits_V=plain_V)
    given = (noise_V, inverse_1, logits_V)
    best_1, id_1 = kernel.step(base_V, w1_NR, row_1, w2_VR, 0, zero(kernel_device), *given)
    assert torch.equal(logits_V, plain_V)
    scores_V = plain_V * 0.25 + noise_V
    torch.testing.assert_close(best_1, scores_V.amax(0, keepdim=True))
    assert id_1.tolist() == [int(scores_V.argmax())]
    assert not torch.equal(id_1, greedy_id_1)
    torch.testing.assert_close(reference.step(base_V, w1_NR, row_1, w2_VR, 0, noise_V, inverse_1), (best_1, id_1))


def test_gumbel_noise_samples_the_softmax() -> None:
    generator = torch.Generator().manual_seed(1)
    base_V, inverse_1 = torch.tensor([2.0, 0.0, -1.0, 1.0]), torch.tensor([0.5])
    zero_R, w2_VR, counts_V = torch.zeros(1, 2), torch.ones(4, 2), torch.zeros(4)
    for _ in range(4000):
        noise_V = -(-torch.rand(4, generator=generator).log()).log()
        counts_V[reference.step(base_V, zero_R, None, w2_VR, 0, noise_V, inverse_1)[1]] += 1
    torch.testing.assert_close(counts_V / 4000, (base_V / 2).softmax(0), rtol=0, atol=0.03)


def test_the_public_function_checks_and_picks_by_device(kernel_device: torch.device) -> None:
    base_V, w1_NR, row_1, w2_VR = slot(40, 8, torch.float32, kernel_device)
    counters = zero(kernel_device)
    expected = reference.step(base_V, w1_NR, row_1, w2_VR, 3)
    torch.testing.assert_close(markov.step(base_V, w1_NR, row_1, w2_VR, 3, counters), expected)
    wrong: list[Callable[[], object]] = [
        lambda: markov.step(base_V[1:], w1_NR, row_1, w2_VR, 0, counters),
        lambda: markov.step(base_V.double(), w1_NR, row_1, w2_VR, 0, counters),
        lambda: markov.step(base_V, w1_NR.half(), row_1, w2_VR, 0, counters),
        lambda: markov.step(base_V, w1_NR, None, w2_VR, 0, counters),
        lambda: markov.step(base_V, w1_NR, row_1.int(), w2_VR, 0, counters),
        lambda: markov.step(base_V, w1_NR, row_1, w2_VR, 0, counters[:0]),
        lambda: markov.step(base_V, w1_NR, row_1, w2_VR, 0, counters, noise_V=base_V[1:]),
        lambda: markov.step(base_V, w1_NR, row_1, w2_VR, 0, counters, inverse_temperature_1=base_V[:2]),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match=r"expected .*found"):
            call()


def test_a_quarter_of_the_vocabulary_fits_in_registers_for_sm90() -> None:
    pointers = dict.fromkeys(("mixed", "w2"), "*bf16") | {"row": "*i64", "ids": "*i64"}
    pointers |= dict.fromkeys(("base", "noise", "inverse_temperature", "logits", "best"), "*fp32")
    pointers |= {"partial": "*i64", "counters": "*i32", "first_id": "i32"}
    sizes = {"V": 39296, "RANK": 256, "CHUNK": 64, "ROWS": kernel.HELD[2] // 256, "IS_CHAINED": True}
    kernels = []
    for absent in (("noise", "inverse_temperature", "logits"), ()):
        constexprs = sizes | dict.fromkeys(absent)
        given = {name: kind for name, kind in pointers.items() if name not in absent}
        signature = {name: given.get(name, "constexpr") for name in kernel.step_kernel.arg_names}
        one = {"name": "step_kernel", "signature": signature, "constexprs": constexprs, "num_warps": 4, "maxnreg": 96}
        kernels.append(one)
    for compiled in compile_sm90("dspark.kernels.markov.kernel", kernels):
        assert compiled.spill_bytes == 0
        assert 5 * 128 * compiled.registers <= 65536, "five programs a multiprocessor, all at once"
        before, after = compiled.ptx.split("griddepcontrol.wait", 1)
        assert len(re.findall(r"ld\.global\S*\.v4", before)) == 16, "all of a program's W2 before the wait"
        assert not re.search(r"(st|atom|red)\.global", before)
        assert "st.global" in after


@needs_gpu
def test_a_ranks_slots_are_right_on_a_gpu(kernel_device: torch.device) -> None:
    base_V, _, _, w2_VR = slot(39296, 256, torch.bfloat16, kernel_device)
    w1_NR = normal(500, 256, seed=1, dtype=torch.bfloat16, device=kernel_device)
    for i in range(20):
        row_1 = torch.tensor([i * 17], device=kernel_device)
        logits_V = torch.full_like(base_V, torch.nan)
        best_1, id_1 = kernel.step(base_V, w1_NR, row_1, w2_VR, 0, zero(kernel_device), logits_V=logits_V)
        truth_V = base_V.double() + w2_VR.double() @ w1_NR[i * 17].double()
        torch.testing.assert_close(logits_V.double(), truth_V, rtol=1e-5, atol=1e-4)
        assert id_1.item() == logits_V.argmax().item()
        chained = kernel.step(base_V, w1_NR, row_1, w2_VR, 0, zero(kernel_device), is_chained=True)
        assert torch.equal(chained[0], best_1)
        assert torch.equal(chained[1], id_1)
