"""Draft against teacher over a vocabulary: definition, kernel, and gradients made in the forward pass."""

from typing import Any

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import agreement
from dspark.kernels.agreement import Figures, Piece, Scales, Slopes, Weights, kernel, reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a real vocabulary in bf16 needs a GPU")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CEILING = {FP32: 5e-6, FP16: 2e-3, BF16: 2e-2}


def random_rows(
    num_rows: int, vocab_size: int, device: torch.device, dtype: torch.dtype, spread: float = 2.0
) -> list[torch.Tensor]:
    """Logits of a draft and of fewer teacher rows, which rows share, and labels."""
    generator = torch.Generator().manual_seed(num_rows * vocab_size)
    num_teachers = max(1, num_rows * 2 // 3)
    logits = [
        (spread * torch.randn(n, vocab_size, generator=generator)).to(device, dtype) for n in (num_rows, num_teachers)
    ]
    rows_P = torch.randint(num_teachers, (num_rows,), generator=generator)
    return [*logits, rows_P.to(device), torch.randint(vocab_size, (num_rows,), generator=generator).to(device)]


def random_slopes(num_rows: int, device: torch.device, dtype: torch.dtype) -> Slopes:
    generator = torch.Generator().manual_seed(num_rows)
    return Slopes(*torch.randn(3, num_rows, generator=generator).to(device, dtype))


def by_autograd(draft_PV: torch.Tensor, teacher_MV: torch.Tensor, rows_P: torch.Tensor, labels_P: torch.Tensor) -> Any:
    """The figures with gradients."""
    q_PV, p_PV = draft_PV.log_softmax(1), teacher_MV.log_softmax(1)[rows_P]
    labels = [x_PV.gather(1, labels_P[:, None])[:, 0] for x_PV in (q_PV, p_PV)]
    divergence_P = (p_PV.exp() * (p_PV - q_PV)).sum(1)
    return Figures(*labels, divergence_P, torch.minimum(p_PV.exp(), q_PV.exp()).sum(1), torch.zeros_like(divergence_P))


def far(actual: torch.Tensor, truth: torch.Tensor, floor: float = 1e-2) -> float:
    return float((actual.double() - truth).norm() / truth.norm().clamp(min=floor))


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 257])
def test_the_definition_is_autograds(vocab_size: int) -> None:
    draft_PV, *others = random_rows(7, vocab_size, torch.device("cpu"), torch.float64)
    draft_PV.requires_grad_()
    expected = by_autograd(draft_PV, *others)
    slopes = random_slopes(7, torch.device("cpu"), torch.float64)
    (gradient_PV,) = torch.autograd.grad(
        (slopes.logprobs_P * expected[0] + slopes.divergence_P * expected[2] + slopes.acceptance_P * expected[3]).sum(),
        draft_PV,
    )
    figures, kept = reference.compare(draft_PV.detach(), *others)
    for found, right in zip(figures[:4], expected[:4], strict=True):
        torch.testing.assert_close(found, right.detach(), rtol=1e-12, atol=1e-13)
    assert torch.equal(figures.agrees, (draft_PV.argmax(1) == others[0].argmax(1)[others[1]]).double())
    torch.testing.assert_close(reference.gradient(kept, slopes), gradient_PV, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("figure", [0, 2, 3])
def test_every_slope_is_a_finite_difference(figure: int) -> None:
    draft_PV, *others = random_rows(2, 9, torch.device("cpu"), torch.float64)
    weights = [torch.tensor([1.0, -2.0]).double() if i == figure else torch.zeros(2).double() for i in (0, 2, 3)]

    def value(logits_PV: torch.Tensor) -> float:
        return float((torch.tensor([1.0, -2.0]) * reference.compare(logits_PV, *others)[0][figure]).sum())

    found_PV = reference.gradient(reference.compare(draft_PV, *others)[1], Slopes(*weights))
    for index in range(draft_PV.numel()):
        step_PV = torch.zeros_like(draft_PV)
        step_PV.view(-1)[index] = 1e-6
        difference = (value(draft_PV + step_PV) - value(draft_PV - step_PV)) / 2e-6
        assert float(found_PV.reshape(-1)[index]) == pytest.approx(difference, rel=1e-5, abs=1e-8)


def check(draft_PV: torch.Tensor, teacher_MV: torch.Tensor, rows_P: torch.Tensor, labels_P: torch.Tensor) -> None:
    """Kernel: about as near to the float64 definition as torch in float32, and under the ceiling."""
    dtype, slopes = draft_PV.dtype, random_slopes(len(draft_PV), draft_PV.device, FP32)
    exact, kept = reference.compare(draft_PV.double(), teacher_MV.double(), rows_P, labels_P)
    exact_PV = reference.gradient(kept, Slopes(*(x.double() for x in slopes)))
    theirs, kept = reference.compare(draft_PV, teacher_MV, rows_P, labels_P)
    theirs_PV = reference.gradient(kept, slopes).to(dtype)
    found, kept = kernel.compare(draft_PV, teacher_MV, rows_P, labels_P)
    found_PV = kernel.gradient(kept, slopes)
    assert found_PV.data_ptr() == draft_PV.data_ptr()
    assert found_PV.dtype == dtype
    for name, ours, torchs, right in zip(Figures._fields, found, theirs, exact, strict=True):
        assert ours.dtype == FP32
        if name == "agrees":
            assert torch.equal(ours.double(), right)
        else:
            allowed = min(max(1.5 * far(torchs, right, floor=1.0), 1e-6), CEILING[FP32])
            assert far(ours, right, floor=1.0) <= allowed, name
    slack = 1.5 if draft_PV.is_cuda or dtype != BF16 else 3.0  # the interpreter cuts bfloat16 off where a GPU rounds
    assert far(found_PV, exact_PV) <= min(max(slack * far(theirs_PV, exact_PV), 1e-6), CEILING[dtype])


@pytest.mark.parametrize("spread", [0.1, 2.0, 30.0])
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 256, 257, 5000])
def test_the_kernel_is_the_definition(
    vocab_size: int, spread: float, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "LANES", 64)
    check(*random_rows(5, vocab_size, kernel_device, FP32, spread))


@pytest.mark.parametrize(("draft", "teacher"), [(BF16, FP32), (FP32, BF16), (BF16, BF16), (FP16, FP32)])
def test_the_kernel_takes_each_side_in_its_own_dtype(
    draft: torch.dtype, teacher: torch.dtype, kernel_device: torch.device
) -> None:
    draft_PV, teacher_MV, rows_P, labels_P = random_rows(16, 300, kernel_device, FP32)
    check(draft_PV.to(draft), teacher_MV.to(teacher), rows_P, labels_P)


@pytest.mark.parametrize("vocab_size", [256, 300])
def test_labels_and_largest_logits_at_both_ends_are_found(
    vocab_size: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "LANES", 32)
    draft_PV, teacher_MV, *_ = random_rows(4, vocab_size, kernel_device, FP32)
    rows_P, ends_P = (torch.tensor(x, device=kernel_device) for x in ([0, 1, 0, 1], [0, vocab_size - 1] * 2))
    teacher_MV[[0, 1], [0, vocab_size - 1]] = draft_PV[[0, 1, 2], [0, vocab_size - 1, 0]] = 8.0
    assert kernel.compare(draft_PV, teacher_MV, rows_P, ends_P)[0].agrees.tolist() == [1, 1, 1, 0]
    check(draft_PV, teacher_MV, rows_P, ends_P)


def test_agreement_is_of_the_teachers_first_most_likely_token(kernel_device: torch.device) -> None:
    draft_PV = torch.tensor([[1.0, 3, 3, 0], [3, 1, 3, 0], [0, 1, 2, 3]], device=kernel_device)
    teacher_MV = torch.tensor([[0.0, 5, 5, 1], [5, 5, 0, 1]], device=kernel_device)
    rows_P, labels_P = (torch.tensor(x, device=kernel_device) for x in ([0, 0, 1], [0, 0, 0]))
    for form in (reference, kernel):
        figures, _ = form.compare(draft_PV, teacher_MV, rows_P, labels_P)
        assert figures.agrees.tolist() == [1, 0, 0]


def test_of_equally_likely_tokens_far_apart_the_first_counts(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "LANES", 16)  # tiles of 64
    pairs = [(3, 7), (7, 3 + 64), (5, 64 + 2), (130, 299), (64 + 9, 128 + 2), (2, 16 + 1)]
    teacher_PV = torch.zeros(len(pairs), 300, device=kernel_device)
    firsts, lasts = zip(*pairs, strict=True)
    rows = torch.arange(len(pairs))
    teacher_PV[rows, firsts] = teacher_PV[rows, lasts] = 4.0
    rows_P = rows.to(kernel_device)
    for columns, agrees in ((firsts, 1.0), (lasts, 0.0)):
        draft_PV = torch.zeros_like(teacher_PV)
        draft_PV[rows, columns] = torch.nextafter(torch.tensor(1.7), torch.tensor(2.0)).item()
        draft_PV[rows, lasts if agrees else firsts] = 1.7  # the next smaller number
        for form in (reference, kernel):
            figures, _ = form.compare(draft_PV, teacher_PV, rows_P, rows_P)
            assert figures.agrees.tolist() == [agrees] * len(pairs)


def test_equal_laws_have_no_distance_and_ties_no_slope(kernel_device: torch.device) -> None:
    draft_PV, _, _, labels_P = random_rows(4, 100, kernel_device, FP32)
    rows_P = torch.arange(4, device=kernel_device)
    for form in (reference, kernel):
        figures, kept = form.compare(draft_PV.clone(), draft_PV, rows_P, labels_P)
        torch.testing.assert_close(figures.acceptance, torch.ones_like(figures.acceptance))
        torch.testing.assert_close(figures.divergence, torch.zeros_like(figures.divergence), atol=1e-6, rtol=0)
        assert figures.agrees.all()
        zero_P, one_P = torch.zeros_like(figures[0]), torch.ones_like(figures[0])
        assert form.gradient(kept, Slopes(zero_P, zero_P, one_P)).abs().max() < 1e-6


@pytest.mark.parametrize(
    "weights",
    [
        Weights(0.3, 1.0, 0.7, 4.0, True, True),
        Weights(0.3, 1.0, 0.7, 4.0, True, False),
        Weights(0.0, 0.5, 2.0, 1.5, False, True),
    ],
)
@pytest.mark.parametrize(("num_blocks", "num_slots"), [(1, 1), (5, 8), (33, 3), (100, 5)])
def test_slopes_of_blocks_are_the_definitions(
    num_blocks: int, num_slots: int, weights: Weights, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_blocks)
    counts_A = torch.randint(num_slots + 1, (num_blocks,), generator=generator)
    counts_A[num_blocks // 2] = num_slots
    rows_A1 = torch.cat((torch.zeros(1).long(), counts_A.cumsum(0))) + 7
    num_rows = int(counts_A.sum())
    figures = Figures(*torch.rand(5, num_rows, generator=generator).to(kernel_device))
    scales = Scales(*torch.tensor([37.5, 0.02]).to(kernel_device))
    found = kernel.slopes(figures, rows_A1.to(kernel_device), 7, num_slots, scales, weights)
    double = (
        Figures(*(x.double().cpu() for x in figures)),
        rows_A1,
        7,
        num_slots,
        Scales(*(x.double().cpu() for x in scales)),
    )
    for ours, right in zip(found, reference.slopes(*double, weights), strict=True):
        torch.testing.assert_close(ours.cpu().double(), right, rtol=2e-6, atol=1e-9)


def test_a_teacher_that_is_not_a_number_makes_its_own_row_so_and_no_other(kernel_device: torch.device) -> None:
    draft_PV, teacher_MV, rows_P, labels_P = random_rows(6, 5000, kernel_device, FP32)
    rows_P = torch.tensor([0, 1, 2, 0, 1, 3], device=kernel_device)
    teacher_MV[3] = torch.nan
    figures, _ = kernel.compare(draft_PV, teacher_MV, rows_P, labels_P)
    for figure_P in (figures.teacher_logprobs, figures.divergence, figures.acceptance):
        assert figure_P.isnan().tolist() == [False] * 5 + [True]
    assert not figures.draft_logprobs.isnan().any()
    assert figures.agrees[5] == 0


def weigh(rows: slice, figures: Figures) -> Slopes:
    """Slopes of sum_n w_n (2 logprob - divergence) acceptance: they depend on the figures."""
    weight_P = torch.linspace(0.5, 1.5, 11, dtype=figures[0].dtype, device=figures[0].device)[rows]
    logprobs_P, _, divergence_P, acceptance_P, _ = figures
    both_P = 2 * logprobs_P - divergence_P
    return Slopes(2 * weight_P * acceptance_P, -weight_P * acceptance_P, weight_P * both_P)


def problem(dtype: torch.dtype, head_dtype: torch.dtype) -> tuple[list[torch.Tensor], list[Piece]]:
    """Eleven rows in three pieces, two of which share a teacher row."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = [normal(11, 8), normal(11, 5), normal(37, 8).to(head_dtype), normal(37, 5), normal(7, 8)]
    tensors.append(torch.randint(37, (11,), generator=generator))
    rows = [torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 1, 0]), torch.tensor([1, 0, 1])]
    cuts = [(slice(0, 4), slice(0, 3)), (slice(4, 8), slice(3, 5)), (slice(8, 11), slice(5, 7))]
    return tensors, [Piece(*cut, rows_P) for cut, rows_P in zip(cuts, rows, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_made_in_the_forward_pass_are_autograds(dtype: torch.dtype) -> None:
    (hidden_ND, mixed_NR, head_VD, markov_VR, teacher_MD, labels_N), pieces = problem(dtype, dtype)
    leaves = [x.requires_grad_() for x in (hidden_ND, mixed_NR, markov_VR)]
    draft_NV = hidden_ND @ head_VD.T + mixed_NR @ markov_VR.T
    teachers_N = torch.cat([piece.teachers.start + piece.teacher_rows_P for piece in pieces])
    found = by_autograd(draft_NV, teacher_MD @ head_VD.T, teachers_N, labels_N)
    weight_N = torch.linspace(0.5, 1.5, 11, dtype=dtype)
    loss = (weight_N * (2 * found.draft_logprobs - found.divergence) * found.acceptance).sum()
    expected = torch.autograd.grad(3 * loss, leaves)
    pull, figures = agreement.judge(hidden_ND, mixed_NR, head_VD, markov_VR, teacher_MD, labels_N, pieces, weigh)
    assert float(pull.detach()) == 0.0
    assert not any(x_N.requires_grad for x_N in figures)
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for ours, right in zip(figures[:4], found[:4], strict=True):
        torch.testing.assert_close(ours, right.detach(), **tolerance)
    for ours, right in zip(torch.autograd.grad(3 * pull, leaves), expected, strict=True):
        torch.testing.assert_close(ours, right, **tolerance)


def test_without_a_row_there_are_no_figures_and_zero_gradients() -> None:
    (hidden_ND, mixed_NR, head_VD, markov_VR, teacher_MD, labels_N), _ = problem(torch.float32, torch.float32)
    leaves = [x.requires_grad_() for x in (hidden_ND[:0], mixed_NR[:0], markov_VR)]
    pull, figures = agreement.judge(*leaves[:2], head_VD, markov_VR, teacher_MD, labels_N[:0], [], weigh)
    assert all(len(x_N) == 0 for x_N in figures)
    assert all(not x.any() for x in torch.autograd.grad(pull, leaves))


@pytest.mark.parametrize(("head", "is_low"), [(torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_low_precision_stays_near_the_truth_and_keeps_the_dtypes_of_the_gradients(
    head: torch.dtype, is_low: bool
) -> None:
    (hidden_ND, mixed_NR, head_VD, markov_VR, teacher_MD, labels_N), pieces = problem(torch.float32, head)
    leaves = [x.requires_grad_() for x in (hidden_ND, mixed_NR, markov_VR)]
    truth, exact = agreement.judge(
        *(x.double() for x in (hidden_ND, mixed_NR, head_VD, markov_VR, teacher_MD)), labels_N, pieces, weigh
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_low):
        low, figures = agreement.judge(hidden_ND, mixed_NR, head_VD, markov_VR, teacher_MD, labels_N, pieces, weigh)
    assert figures.acceptance.dtype == torch.float32
    if head == torch.float32:  # the teacher's logits are never rounded to autocast's dtype
        torch.testing.assert_close(figures.teacher_logprobs.double(), exact.teacher_logprobs, rtol=1e-5, atol=1e-5)
    for ours, right in zip(torch.autograd.grad(low, leaves), torch.autograd.grad(truth, leaves), strict=True):
        assert ours.dtype == torch.float32
        assert 1e-4 < far(ours, right.double()) < 5e-2


def test_the_gradient_of_the_markov_table_is_summed_wider_than_its_own_sixteen_bits() -> None:
    generator = torch.Generator().manual_seed(5)
    shapes = ((512, 8), (512, 5), (37, 8), (37, 5), (512, 8))
    tensors = [torch.randn(*shape, generator=generator).bfloat16() for shape in shapes]
    labels_N = torch.randint(37, (512,), generator=generator)
    pieces = [Piece(slice(n, n + 4), slice(n, n + 4), torch.arange(4)) for n in range(0, 512, 4)]

    def price(rows: slice, figures: Figures) -> Slopes:
        return Slopes(*(torch.ones_like(figures[0]) for _ in range(3)))

    found = []
    for kind in (torch.float64, torch.bfloat16):
        inputs = [x.to(kind) for x in tensors]
        pull, _ = agreement.judge(*inputs[:3], inputs[3].requires_grad_(), inputs[4], labels_N, pieces, price)
        found.append(torch.autograd.grad(pull, inputs[3])[0])
    assert far(found[1], found[0]) < 7e-3


def test_the_kernels_compile_for_sm90_without_spills() -> None:
    logits = {"draft": "*bf16", "teacher": "*bf16", "teacher_rows": "*i64", "labels": "*i64", "figures": "*fp32"}
    shape = {"V": 157184, "GROUP": kernel.GROUP, "LANES": kernel.LANES}
    slopes = dict.fromkeys(("by_logprob", "by_divergence", "by_acceptance"), "*fp32")
    kernels: list[dict[str, Any]] = [
        {"name": name, "signature": logits | more | {"P": "i32"}, "constexprs": shape, "num_warps": kernel.WARPS}
        for name, more in (("compare_kernel", {}), ("gradient_kernel", slopes))
    ]
    inputs = dict.fromkeys(("draft_logprobs", "teacher_logprobs", "acceptances"), "*fp32") | {"block_rows": "*i64"}
    inputs |= {"weight": "*fp32", "length": "*fp32", "num_blocks": "i32", "first_row": "i32"}
    inputs |= dict.fromkeys(("cross_entropy", "forward_kl", "total_variation", "rate"), "fp32")
    forms = {"K": 8, "HAS_LENGTH": True, "IS_RATIO": True, "BLOCKS": kernel.BLOCKS}
    (prices,) = compile_sm90(
        "dspark.kernels.agreement.kernel",
        [{"name": "slopes_kernel", "signature": slopes | inputs, "constexprs": forms, "num_warps": 1}],
    )
    assert prices.spill_bytes == 0
    for compiled in compile_sm90("dspark.kernels.agreement.kernel", kernels):
        assert compiled.spill_bytes == 0
        assert "ld.global.v4" in compiled.ptx


@needs_gpu
@pytest.mark.parametrize("vocab_size", [157184, 100257])
@pytest.mark.parametrize(("draft", "teacher"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)])
def test_gpu_check_at_real_vocabularies(
    vocab_size: int, draft: torch.dtype, teacher: torch.dtype, kernel_device: torch.device
) -> None:
    draft_PV, teacher_MV, rows_P, labels_P = random_rows(300, vocab_size, kernel_device, BF16)
    check(draft_PV.to(draft), teacher_MV.to(teacher), rows_P, labels_P)


@needs_gpu
def test_gpu_check_of_gradients_made_by_the_kernels() -> None:
    """Several pieces of 157184 logits, on the GPU in bf16 against the CPU in float32 on the same rounded numbers."""
    generator = torch.Generator().manual_seed(4)
    shapes = {
        "hidden": (300, 64),
        "mixed": (300, 32),
        "head": (157184, 64),
        "markov": (157184, 32),
        "teacher": (201, 64),
    }
    tensors = [(0.5 * torch.randn(*shape, generator=generator)).to(BF16) for shape in shapes.values()]
    labels_N = torch.randint(157184, (300,), generator=generator)
    rows_P = torch.arange(100) * 2 // 3
    cuts = [(slice(n, n + 100), slice(67 * i, 67 * i + 67)) for i, n in enumerate((0, 100, 200))]

    def price(rows: slice, figures: Figures) -> Slopes:
        return Slopes(-figures.acceptance, torch.ones_like(figures[0]), figures.draft_logprobs)

    found = []
    for device, dtype in (("cuda", BF16), ("cpu", FP32)):
        inputs = [x.to(device, dtype) for x in tensors]
        leaves = [inputs[i].requires_grad_() for i in (0, 1, 3)]
        pieces = [Piece(*cut, rows_P.to(device)) for cut in cuts]
        pull, _ = agreement.judge(*inputs, labels_N.to(device), pieces, price)
        found.append(torch.autograd.grad(pull, leaves))
    for ours, right in zip(*found, strict=True):
        assert far(ours.cpu(), right.double()) < CEILING[BF16]
