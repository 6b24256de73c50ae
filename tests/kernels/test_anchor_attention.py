"""The attention that trains a draft: definition and kernels against a dense mask, outputs and all five gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.compiling import compile_sm90
from torch import Tensor

from dspark.kernels.anchor_attention import anchor_attention, kernel, reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes in bf16 need a GPU")
CEILING = {torch.float64: 1e-14, torch.float32: 3e-6, torch.bfloat16: 2e-2}
NAMES = ("o", "dq", "dcontext_k", "dcontext_v", "dk", "dv")
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Shape:
    """Documents by their lengths and anchors; slots of a block, query heads, key-value heads, width."""

    lengths: tuple[int, ...]
    anchors: tuple[tuple[int, ...], ...]
    num_slots: int = 8
    heads: tuple[int, int] = (1, 1)
    width: int = 16

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        starts, anchors, start = [], [], 0
        for length, of_one in zip(self.lengths, self.anchors, strict=True):
            assert all(0 <= anchor <= length for anchor in of_one)
            starts += [start] * len(of_one)
            anchors += [start + anchor for anchor in of_one]
            start += length
        return torch.tensor(starts, device=device), torch.tensor(anchors, device=device)


SHAPES = {
    "one_block": Shape((5,), ((3,),), num_slots=1),
    "nothing_before_the_block": Shape((1,), ((0,),), num_slots=5, heads=(2, 1)),
    "no_context_at_all": Shape((0,), ((0, 0, 0),), num_slots=3),
    "equal_anchors": Shape((63,), ((0, 4, 4, 4, 20, 50, 63),), num_slots=3, heads=(2, 2), width=24),
    "rows_nobody_reads": Shape((100,), ((1, 2, 3, 17, 18, 30, 31),), num_slots=8, heads=(4, 2), width=24),
    "whole_tiles": Shape((100,), ((70, 71, 80, 90, 91, 95, 100),), num_slots=8, heads=(2, 1)),
    "documents": Shape((20, 7, 40, 33), ((0, 5, 20), (7,), (), (1, 30, 33)), num_slots=5, heads=(3, 1), width=64),
    "documents_of_a_tile": Shape((3, 4, 5, 2), ((1, 3), (0, 4), (2, 2, 5), (1,)), num_slots=1, heads=(2, 2)),
    "long_blocks": Shape((37,), ((12, 37),), num_slots=40, heads=(2, 1)),
}


def dense(
    q_NHE: Tensor, context_k_TGE: Tensor, context_v_TGE: Tensor, k_NGE: Tensor, v_NGE: Tensor, starts_A: Tensor,
    anchors_A: Tensor,
) -> Tensor:  # fmt: skip
    """The visibility rule word for word, over all keys at once."""
    num_rows, (num_heads, num_tokens) = len(q_NHE), (q_NHE.shape[1], len(context_k_TGE))
    block_N = torch.arange(num_rows, device=q_NHE.device) // (num_rows // len(starts_A))
    place_T = torch.arange(num_tokens, device=q_NHE.device)
    of_context_NT = (starts_A[block_N, None] <= place_T) & (place_T < anchors_A[block_N, None])
    is_read_NJ = torch.cat((of_context_NT, block_N[:, None] == block_N), 1)
    group = num_heads // k_NGE.shape[1]
    keys_JHE = torch.cat((context_k_TGE, k_NGE)).repeat_interleave(group, 1)
    values_JHE = torch.cat((context_v_TGE, v_NGE)).repeat_interleave(group, 1)
    scores_HNJ = torch.einsum("nhe,jhe->hnj", q_NHE, keys_JHE) * q_NHE.shape[2] ** -0.5
    p_HNJ = scores_HNJ.masked_fill(~is_read_NJ, -torch.inf).softmax(2)
    return torch.einsum("hnj,jhe->nhe", p_HNJ, values_JHE)


def random_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """The seven arguments, and a gradient of the output."""
    generator = torch.Generator().manual_seed(sum(shape.lengths) + shape.num_slots)
    starts_A, anchors_A = shape.places(device)
    (num_heads, num_kv_heads), num_rows = shape.heads, len(starts_A) * shape.num_slots

    def normal(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, shape.width, generator=generator).to(device, dtype)

    context = [normal(sum(shape.lengths), num_kv_heads) for _ in range(2)]
    own = [normal(num_rows, num_kv_heads) for _ in range(2)]
    return [normal(num_rows, num_heads), *context, *own, starts_A, anchors_A], normal(num_rows, num_heads)


def results(attention: Attention, inputs: list[Tensor], do_NHE: Tensor) -> list[Tensor]:
    """The output and the five gradients."""
    floats = [x.detach().clone().requires_grad_() for x in inputs[:5]]
    o_NHE = attention(*floats, *inputs[5:])
    return [o_NHE.detach(), *torch.autograd.grad(o_NHE, floats, do_NHE)]


def distance(actual: Tensor, truth: Tensor) -> float:
    return float((actual.double() - truth).norm() / truth.norm().clamp(min=1e-300))


def check(attention: Attention, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    """No further from the dense float64 result than the definition in the working dtype, and under the ceiling."""
    inputs, do_NHE = random_inputs(shape, device, dtype)
    found = results(attention, inputs, do_NHE)
    truth = results(dense, [*(x.double() for x in inputs[:5]), *inputs[5:]], do_NHE.double())
    torchs = results(reference.anchor_attention, inputs, do_NHE)
    slack = {torch.float64: 1e-14, torch.float32: 2e-6 if device.type == "cuda" else 6e-7, torch.bfloat16: 3e-3}[dtype]
    for name, ours, theirs, right in zip(NAMES, found, torchs, truth, strict=True):
        assert ours.dtype == dtype, name
        assert ours.shape == right.shape, name
        bound = min(max(1.1 * distance(theirs, right), slack), CEILING[dtype])
        assert distance(ours, right) <= bound, (name, distance(ours, right), bound)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_definition_equals_a_dense_mask(shape: Shape, dtype: torch.dtype) -> None:
    check(anchor_attention, shape, torch.device("cpu"), dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernels_equal_a_dense_mask(shape: Shape, kernel_device: torch.device) -> None:
    check(kernel.anchor_attention, shape, kernel_device, torch.float32)


@pytest.mark.parametrize("attention", [reference.anchor_attention, kernel.anchor_attention], ids=["torch", "triton"])
def test_a_row_nobody_reads_gets_a_gradient_of_exactly_zero(attention: Attention, kernel_device: torch.device) -> None:
    shape = SHAPES["rows_nobody_reads"]
    _, _, *dcontext, _, _ = results(attention, *random_inputs(shape, kernel_device, torch.float32))
    for gradient_TGE in dcontext:
        assert gradient_TGE[31:].eq(0).all()
        assert gradient_TGE[:31].ne(0).any(2).all()


@st.composite
def packings(draw: st.DrawFn) -> Shape:
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    anchors = [tuple(sorted(draw(st.lists(st.integers(0, length), max_size=6)))) for length in lengths]
    anchors[0] = anchors[0] or (0,)
    num_kv_heads = draw(st.integers(1, 2))
    heads = (num_kv_heads * draw(st.integers(1, 2)), num_kv_heads)
    return Shape(tuple(lengths), tuple(anchors), draw(st.integers(1, 9)), heads)


def decoded(
    q_NHE: Tensor, context_k_TGE: Tensor, context_v_TGE: Tensor, k_NGE: Tensor, v_NGE: Tensor, starts_A: Tensor,
    anchors_A: Tensor,
) -> Tensor:  # fmt: skip
    """Block by block behind a cache of the text before its anchor, as a draft decodes."""
    num_slots, read = len(q_NHE) // len(starts_A), []
    for block, (start, anchor) in enumerate(zip(starts_A.tolist(), anchors_A.tolist(), strict=True)):
        own = slice(block * num_slots, (block + 1) * num_slots)
        cached = [torch.cat((x[start:anchor], y[own])) for x, y in ((context_k_TGE, k_NGE), (context_v_TGE, v_NGE))]
        read.append(reference.attend(q_NHE[own], *cached, None))
    return torch.cat(read)


@settings(max_examples=8, deadline=None)
@given(shape=packings())
def test_training_on_either_device_and_decoding_read_the_same_rows_of_any_packing(shape: Shape) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs, do_NHE = random_inputs(shape, device, torch.float32)
    truth = results(dense, [*(x.double() for x in inputs[:5]), *inputs[5:]], do_NHE.double())
    for attention in (reference.anchor_attention, kernel.anchor_attention, decoded):
        for name, ours, right in zip(NAMES, results(attention, inputs, do_NHE), truth, strict=True):
            torch.testing.assert_close(
                ours.double(), right, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.parametrize("attention", [reference.anchor_attention, kernel.anchor_attention], ids=["torch", "triton"])
def test_a_slot_reads_context_strictly_before_its_anchor_and_its_own_block(
    attention: Attention, kernel_device: torch.device
) -> None:
    shape = Shape((20, 30), ((4, 9), (0, 12, 30)), num_slots=2, heads=(1, 1))
    inputs, _ = random_inputs(shape, kernel_device, torch.float32)
    clean_NHE = attention(*inputs)

    def rows_that_change(argument: int, row: int) -> list[int]:
        dirty = [x.clone() for x in inputs]
        dirty[argument][row] += 3
        return (attention(*dirty) - clean_NHE).abs().amax((1, 2)).gt(1e-4).nonzero().flatten().tolist()

    assert rows_that_change(2, 3) == [0, 1, 2, 3]
    assert rows_that_change(2, 4) == [2, 3]
    assert rows_that_change(2, 9) == []
    assert rows_that_change(2, 20) == [6, 7, 8, 9]
    assert rows_that_change(2, 31) == [6, 7, 8, 9]
    assert rows_that_change(2, 32) == [8, 9]
    assert rows_that_change(4, 4) == [4, 5]
    assert rows_that_change(4, 9) == [8, 9]


def test_large_scores_neither_overflow_nor_drown_the_rest(kernel_device: torch.device) -> None:
    inputs, do_NHE = random_inputs(SHAPES["whole_tiles"], kernel_device, torch.float32)
    inputs[0].mul_(100)
    found = results(kernel.anchor_attention, inputs, do_NHE)
    truth = results(dense, [*(x.double() for x in inputs[:5]), *inputs[5:]], do_NHE.double())
    for name, ours, right in zip(NAMES, found, truth, strict=True):
        assert distance(ours, right) < 2e-4, name


def test_rows_and_gradients_may_be_strided(kernel_device: torch.device) -> None:
    inputs, do_NHE = random_inputs(SHAPES["equal_anchors"], kernel_device, torch.float32)
    right = results(kernel.anchor_attention, inputs, do_NHE[:1].expand_as(do_NHE).contiguous())

    def strided(*arguments: Tensor) -> Tensor:
        wide = [torch.cat((x, x), 2)[..., : x.shape[2]] for x in arguments[:5]]
        return kernel.anchor_attention(*wide, *arguments[5:])

    for ours, theirs in zip(results(strided, inputs, do_NHE[:1].expand_as(do_NHE)), right, strict=True):
        assert torch.equal(ours, theirs)


def test_no_block_is_no_row() -> None:
    inputs, _ = random_inputs(Shape((9,), ((),)), torch.device("cpu"), torch.float32)
    assert anchor_attention(*inputs[:5], inputs[5].long(), inputs[6].long()).shape == (0, 1, 16)


def test_what_does_not_fit_is_refused() -> None:
    inputs, _ = random_inputs(SHAPES["documents"], torch.device("cpu"), torch.float32)
    names = ("q_NHE", "context_k_TGE", "context_v_TGE", "k_NGE", "v_NGE", "starts_A", "anchors_A")
    for number, name in enumerate(names[1:], 1):
        wrong = [x.half() if i == number else x for i, x in enumerate(inputs)]
        with pytest.raises(ValueError, match=name):
            anchor_attention(*wrong)
    with pytest.raises(ValueError, match="blocks of 1 to 256 slots"):
        anchor_attention(*inputs[:5], inputs[5][:4], inputs[6][:4])
    with pytest.raises(ValueError, match="blocks of 1 to 256 slots"):
        anchor_attention(*inputs[:5], inputs[5][:0], inputs[6][:0])
    with pytest.raises(ValueError, match="a multiple of k_NGE's heads"):
        anchor_attention(inputs[0], *(x.repeat(1, 2, 1) for x in inputs[1:5]), *inputs[5:])


def test_the_operation_keeps_torchs_rules(kernel_device: torch.device) -> None:
    inputs, _ = random_inputs(SHAPES["documents_of_a_tile"], kernel_device, torch.float32)
    torch.library.opcheck(kernel.attend, [x.requires_grad_() if x.is_floating_point() else x for x in inputs])


def test_a_graph_is_not_broken(kernel_device: torch.device) -> None:
    inputs, do_NHE = random_inputs(SHAPES["documents"], kernel_device, torch.float32)

    def around(*arguments: Tensor) -> Tensor:
        return 2 * kernel.anchor_attention(arguments[0] * 0.5, *arguments[1:])

    backend = "inductor" if kernel_device.type == "cuda" else "aot_eager"
    compiled = torch.compile(around, fullgraph=True, backend=backend)
    for ours, theirs in zip(results(compiled, inputs, do_NHE), results(around, inputs, do_NHE), strict=True):
        assert distance(ours, theirs.double()) < 1e-6


FLOATS = {
    "forward_kernel": ("o", "q", "context_k", "context_v", "k", "v"),
    "queries_kernel": ("dq", "o", "do", "q", "context_k", "context_v", "k", "v"),
    "keys_kernel": ("dcontext_k", "dcontext_v", "dk", "dv", "q", "do", "context_k", "context_v", "k", "v"),
}
OTHERS = {"lse": "*fp32", "delta": "*fp32", "starts": "*i64", "anchors": "*i64", "num_tokens": "i32"}
OTHERS |= {"num_rows": "i32", "scale": "fp32", "out_scale": "fp32"}


@pytest.mark.parametrize("kv_heads", [32, 8])
@pytest.mark.parametrize("width", [64, 128])
def test_the_kernels_compile_for_sm90_with_next_to_no_spills(kv_heads: int, width: int) -> None:
    kernels = []
    tables = zip(FLOATS, (kernel.FORWARD, kernel.QUERIES, kernel.KEYS), strict=True)
    for name, table in tables:
        arguments = dict.fromkeys(FLOATS[name], "*bf16")
        kinds = OTHERS if name == "keys_kernel" else {k: v for k, v in OTHERS.items() if k != "num_tokens"}
        if name == "forward_kernel":
            kinds = {k: v for k, v in kinds.items() if k not in ("delta", "out_scale")}
        sizes = {"HEADS": 32, "GROUP": 32 // kv_heads, "E": width, "K": 8, "AT_ONCE": 8}
        sizes |= {size: table[size] for size in ("ROWS", "SIZE")}
        shape = {option: table[option] for option in ("num_warps", "num_stages")}
        kernels.append({"name": name, "signature": arguments | kinds, "constexprs": sizes, **shape})
    for name, one in zip(FLOATS, compile_sm90("dspark.kernels.anchor_attention.kernel", kernels), strict=True):
        assert one.spill_bytes <= (128 if name == "keys_kernel" else 0)  # its tiles that spill nothing are slower
        assert one.shared_bytes <= 227 * 1024
        assert "wgmma" in one.ptx


def spread(num_tokens: int, num_anchors: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(num_tokens)
    return tuple(torch.randperm(num_tokens, generator=generator)[:num_anchors].sort().values.tolist())


@needs_gpu
@pytest.mark.parametrize("lengths", [(4096,), (1000, 63, 3033), (64,) * 40 + (1536,)], ids=["one", "three", "many"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("width", [64, 128])
def test_gpu_check_at_the_size_of_training(lengths: tuple[int, ...], heads: tuple[int, int], width: int) -> None:
    """A few heads of the real number: the dense float64 mask of one fills gigabytes."""
    anchors = tuple(spread(length, length // 8) for length in lengths)
    check(kernel.anchor_attention, Shape(lengths, anchors, 8, heads, width), torch.device("cuda"), torch.bfloat16)


@needs_gpu
@pytest.mark.parametrize(("num_slots", "width"), [(1, 24), (7, 16), (100, 256), (256, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_check_of_odd_sizes(num_slots: int, width: int, dtype: torch.dtype) -> None:
    shape = Shape((257, 100), (spread(257, 20), spread(100, 3)), num_slots, (4, 2), width)
    check(kernel.anchor_attention, shape, torch.device("cuda"), dtype)


@needs_gpu
def test_gpu_check_the_same_bits_every_time() -> None:
    inputs, do_NHE = random_inputs(
        Shape((4096,), (spread(4096, 512),), 8, (8, 2), 128), torch.device("cuda"), torch.bfloat16
    )
    first = results(kernel.anchor_attention, inputs, do_NHE)
    for _ in range(3):
        for ours, theirs in zip(results(kernel.anchor_attention, inputs, do_NHE), first, strict=True):
            assert torch.equal(ours, theirs)
