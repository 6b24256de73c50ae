"""KDA's in-projection cut evenly over the multiprocessors, against its definition and the general way."""

import pytest
import torch
from kernels.compiling import compile_sm90
from kernels.test_projection import LOWER_BOUND, prepared_inputs, zeros

from dspark.kernels import kda
from dspark.kernels.projection import even, kernel


def run(inputs: list[torch.Tensor], **options: int) -> tuple[torch.Tensor, torch.Tensor]:
    y_TC = inputs[0].new_full((len(inputs[0]), len(inputs[1])), torch.nan)
    out = (y_TC, torch.full_like(y_TC, torch.nan, dtype=torch.float32))
    even.project_prepared(*inputs, LOWER_BOUND, out, **options)
    return out


@pytest.mark.parametrize("num_multiprocessors", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_even_programs_say_what_others_say(
    dtype: torch.dtype, num_multiprocessors: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(even, "MULTIPROCESSORS", num_multiprocessors)
    inputs = prepared_inputs(9, 2, 8, 128, dtype, kernel_device)
    y_TC, prepared_TC = run(inputs, columns=64)
    general_TC = kernel.project(*inputs[:2], zeros(len(inputs[1]), kernel_device))
    torch.testing.assert_close(y_TC, general_TC, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    truth_TC = kda.prepare(*(x.double() for x in (y_TC, *inputs[2:])), LOWER_BOUND)
    torch.testing.assert_close(prepared_TC.double(), truth_TC, rtol=2e-6, atol=2e-6)


def test_a_token_does_not_depend_on_those_after_it(kernel_device: torch.device) -> None:
    inputs = prepared_inputs(9, 2, 8, 128, torch.float32, kernel_device)
    whole = run(inputs, columns=64)
    first = run([inputs[0][:4], *inputs[1:]], columns=64)
    assert all(torch.equal(few, many[:4]) for few, many in zip(first, whole, strict=True))


def test_pieces_hold_all_rows_of_a_rank() -> None:
    assert [even.pieces(num_rows) for num_rows in (100, 5128, 10256, 20512)] == [(16, 0), (32, 8), (64, 16), (128, 32)]
    for num_rows in range(1, 30000, 77):
        main, rest = even.pieces(num_rows)
        assert (main + rest) * even.MULTIPROCESSORS >= num_rows


def test_flash_compiles_for_sm90_without_spills() -> None:
    pointers = dict.fromkeys(("x", "weight", "y", "history", "conv"), "*bf16")
    pointers |= dict.fromkeys(("prepared", "a_log", "dt_bias"), "*fp32")
    scalars = {"num_tokens": "i32", "lower_bound": "fp32", "x_stride": "i32", "weight_stride": "i32"}
    cases = []
    for rows, heads in ((5128, 8), (10256, 16)):
        main, rest = even.pieces(rows)
        constexprs = {"C": rows, "D": 2560, "H": heads, "E": 128, "J": 4, "MAIN": main, "REST": rest}
        constexprs |= {"COLUMNS": even.COLUMNS, "SLICES": even.slices(rows), "MAIN_CHUNKS": 4, "MAIN_CHUNK": 640}
        constexprs |= {"REST_CHUNKS": 16, "REST_CHUNK": 160, "DOT": "tl.bfloat16", "IS_CHAINED": True}
        constexprs |= {"num_stages": even.NUM_STAGES}
        signature = {name: (pointers | scalars).get(name, "constexpr") for name in even.even_kernel.arg_names}
        shape = {"num_warps": even.slices(rows), "num_stages": even.NUM_STAGES}
        cases.append({"name": "even_kernel", "signature": signature, "constexprs": constexprs} | shape)
    for compiled in compile_sm90("dspark.kernels.projection.even", cases):
        assert compiled.spill_bytes == 0
        assert compiled.shared_bytes <= 227 * 1024
        assert "cp.async.cg" in compiled.ptx, "the weights arrive while others are worked on"
        wait = compiled.ptx.index("griddepcontrol.wait")
        assert compiled.ptx.index("cp.async.bulk.prefetch") < wait < compiled.ptx.index("cp.async.cg")
        assert wait < compiled.ptx.index("st.global")
