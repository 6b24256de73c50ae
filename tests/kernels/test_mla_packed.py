"""Causal attention of packed sequences: the kernel against the definition, ragged ends, what a row may see."""

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import mla
from dspark.kernels.chunks import lay_out
from dspark.kernels.mla import packed, reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes in bf16 need a GPU")
CEILING = {torch.float32: 3e-6, torch.bfloat16: 6e-3}
Sizes = tuple[int, int, int, int]
"""Heads, own width of a key, rotated width, width of a value."""


def random_inputs(
    num_rows: int, past: int, sizes: Sizes, device: torch.device, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Queries, rotated queries, keys, rotated keys, values and gates; all but keys and values lie in wider rows."""
    heads, width, rope, value_width = sizes
    generator = torch.Generator().manual_seed(num_rows + past)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q_NHE = normal(num_rows, heads, width + rope)
    turned = normal(num_rows, heads + 1, rope)[:, :-1], normal(num_rows + past, 24 + rope)[:, 24:]
    k_JHE, v_JHF = normal(num_rows + past, heads, width), normal(num_rows + past, heads, value_width)
    return [q_NHE[..., :width], turned[0], k_JHE, turned[1], v_JHF, normal(num_rows, heads + 5)[:, :heads]]


def distance(actual: torch.Tensor, truth: torch.Tensor) -> float:
    return float((actual.double() - truth).norm() / truth.norm())


def check(lengths: list[int], past: int, sizes: Sizes, device: torch.device, dtype: torch.dtype, rows: int) -> None:
    """No further from the float64 definition than torch in the working dtype, and under the ceiling."""
    inputs, chunks = random_inputs(sum(lengths), past, sizes, device, dtype), lay_out(lengths, device, rows)
    found_NHF = packed.attend_packed(*inputs, chunks, 0.3)
    truth_NHF = reference.attend_packed(*(x.double() for x in inputs), chunks, 0.3)
    torchs = distance(reference.attend_packed(*inputs, chunks, 0.3), truth_NHF)
    slack = 0.0 if dtype == torch.bfloat16 else 2e-6 if device.type == "cuda" else 5e-7  # a GPU sums in one chain
    assert distance(found_NHF, truth_NHF) <= min(max(1.1 * torchs, slack), CEILING[dtype])


@pytest.mark.parametrize(
    ("lengths", "past"), [([1], 0), ([1, 15, 16, 17], 0), ([63, 2], 0), ([5], 1), ([33], 17), ([1], 63)], ids=str
)
@pytest.mark.parametrize("sizes", [(2, 16, 8, 16), (1, 24, 16, 8)], ids=str)
def test_packed_attention_equals_its_definition(
    lengths: list[int], past: int, sizes: Sizes, kernel_device: torch.device
) -> None:
    check(lengths, past, sizes, kernel_device, torch.float32, 16)


def test_a_row_sees_its_own_sequence_up_to_itself_and_nothing_else(kernel_device: torch.device) -> None:
    lengths = [20, 37, 9]
    inputs, chunks = random_inputs(66, 0, (2, 16, 8, 16), kernel_device), lay_out(lengths, kernel_device, 16)
    clean_NHF = packed.attend_packed(*inputs, chunks, 0.3)
    inputs[2][30] = inputs[3][30] = torch.nan
    inputs[4][30] = 9
    dirty_NHF = packed.attend_packed(*inputs, chunks, 0.3)
    sees_it_N = torch.arange(66).ge(30) & torch.arange(66).lt(57)
    assert torch.equal(clean_NHF[~sees_it_N], dirty_NHF[~sees_it_N])
    assert dirty_NHF[sees_it_N].isnan().all()
    inputs[4][20:57] = torch.nan
    of_others_N = torch.arange(66).lt(20) | torch.arange(66).ge(57)
    assert torch.equal(packed.attend_packed(*inputs, chunks, 0.3)[of_others_N], clean_NHF[of_others_N])


def test_large_scores_neither_overflow_nor_drown_the_rest(kernel_device: torch.device) -> None:
    inputs, chunks = random_inputs(40, 0, (1, 16, 16, 16), kernel_device), lay_out([40], kernel_device, 16)
    inputs[0].mul_(300)
    found_NHF = packed.attend_packed(*inputs, chunks, 0.3)
    truth_NHF = reference.attend_packed(*(x.double() for x in inputs), chunks, 0.3)
    assert distance(found_NHF, truth_NHF) < 1e-4


def test_what_does_not_fit_is_refused() -> None:
    cpu = torch.device("cpu")
    inputs = random_inputs(6, 2, (2, 16, 8, 16), cpu)
    assert mla.attend_packed(*inputs, lay_out([6], cpu), 0.3).shape == (6, 2, 16)
    for lengths in ([5], [3, 3]):
        with pytest.raises(ValueError, match="as many rows and keys as the sequences have"):
            mla.attend_packed(*inputs, lay_out(lengths, cpu), 0.3)
    for number, name in enumerate(("q_NHE", "turned_NHR", "k_JHE", "turned_JR", "v_JHF", "gate_NH")):
        wrong = [x.double() if i == number else x for i, x in enumerate(inputs)]
        with pytest.raises(ValueError, match="expected" if number == 0 else name):
            mla.attend_packed(*wrong, lay_out([6], cpu), 0.3)


def test_the_kernel_compiles_for_sm90_without_spills() -> None:
    names = ("outputs", "queries", "turned_queries", "keys", "turned_keys", "values", "gates")
    signature = dict.fromkeys(names, "*bf16") | {"chunks": "*i32", "past": "i32", "scale": "fp32"}
    row = 8 * 192 + 512 + 64 + 8  # one of four ranks of flash
    sizes = {"Q_STRIDE": row, "Q_HEAD": 192, "TURNED_STRIDE": 9 * 64, "TURNED_K_STRIDE": 576, "GATE_STRIDE": row}
    sizes |= {"HEADS": 8, "E": 128, "R": 64, "F": 128}
    sizes |= {"ROWS": mla.PACKED_ROWS, "KEYS": packed.SHAPE["KEYS"]}
    shape = {name: packed.SHAPE[name] for name in ("num_warps", "num_stages")}
    kernel = {"name": "packed_kernel", "signature": signature, "constexprs": sizes, **shape}
    (compiled,) = compile_sm90("dspark.kernels.mla.packed", [kernel])
    assert compiled.spill_bytes == 0
    assert compiled.shared_bytes <= 227 * 1024
    assert "wgmma" in compiled.ptx


@needs_gpu
@pytest.mark.parametrize(("lengths", "past"), [([1], 0), ([257, 100, 63, 1], 0), ([300], 1000), ([2048], 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_check_at_a_quarter_of_flash(
    lengths: list[int], past: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    check(lengths, past, (8, 128, 64, 128), kernel_device, dtype, mla.PACKED_ROWS)
