"""The in-projection out of shared memory: how it is cut, what the compiler makes of it, and on a GPU what it says."""

import pytest
import torch
from kernels.compiling import compile_sm90
from kernels.test_projection import LOWER_BOUND, check_prepared, check_prepared_one_by_one, prepared_inputs

from dspark.kernels import residual
from dspark.kernels.kda import reference as kda
from dspark.kernels.projection import ring

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Gluon has no interpreter")


@pytest.mark.parametrize("num_rows", [5128, 10256, 4232, 10560])
def test_programs_have_all_rows_and_their_weights_fit(num_rows: int) -> None:
    cut = ring.shape(num_rows, 2560)
    assert sum(cut["PIECES"]) == cut["ROWS"]
    assert (cut["ROWS"] - 8) * ring.MULTIPROCESSORS < num_rows <= cut["ROWS"] * ring.MULTIPROCESSORS
    assert 1 <= cut["EARLY"] <= cut["STAGES"] <= 2560 // (ring.WARPS * ring.WIDE.value)
    assert cut["STAGES"] * cut["ROWS"] * ring.WARPS * ring.WIDE.value * 2 <= ring.RING_BYTES


@pytest.mark.parametrize(("num_rows", "heads", "most_spilled"), [(5128, 8, 0), (10256, 16, 256)])
def test_flash_compiles_for_sm90_and_asks_for_weights_before_it_waits(
    num_rows: int, heads: int, most_spilled: int
) -> None:
    pointers = dict.fromkeys(("x", "weight", "y", "history", "conv"), "*bf16")
    pointers |= dict.fromkeys(("prepared", "a_log", "dt_bias"), "*fp32")
    signature = pointers | {"num_tokens": "i32", "lower_bound": "fp32", "x_stride": "i32"}
    constexprs = {"C": num_rows, "D": 2560, "H": heads, "E": 128, "J": 4, "SLICES": ring.WARPS, "IS_CHAINED": True}
    constexprs |= ring.shape(num_rows, 2560)
    kernel = {"name": "ring_kernel", "signature": signature, "constexprs": constexprs}
    kernel |= {"num_warps": ring.WARPS, "maxnreg": ring.REGISTERS}
    (compiled,) = compile_sm90("dspark.kernels.projection.ring", [kernel])
    assert compiled.spill_bytes <= most_spilled, compiled.spill_bytes
    assert compiled.shared_bytes <= 227 * 1024
    before, after = compiled.ptx.split("griddepcontrol.wait", 1)
    assert before.count("cp.async.cg") == ring.shape(num_rows, 2560)["EARLY"] * sum(constexprs["PIECES"]) // 4
    assert "st.global" not in before
    assert "ld.global.v4" not in before, "tokens are there after the wait only"
    assert "ld.global.v4" in after
    assert "ld.shared.v4" in after


def test_what_does_not_fit_is_told_apart() -> None:
    x_TD, weight_CD = torch.empty(9, 2560, dtype=torch.bfloat16), torch.empty(5128, 2560, dtype=torch.bfloat16)
    assert ring.fits(x_TD, weight_CD)
    for x, weight in (
        (x_TD.float(), weight_CD.float()),
        (torch.empty(9 * 2560 + 1, dtype=torch.bfloat16)[1:].view(9, 2560), weight_CD),
        (x_TD, weight_CD[: 132 * 32]),
        (x_TD, torch.empty(132 * 80 + 1, 2560, dtype=torch.bfloat16)),
        (x_TD[:, :2056], torch.empty(5128, 2056, dtype=torch.bfloat16)),
        (x_TD, torch.empty(5128, 2568, dtype=torch.bfloat16)[:, :2560]),
    ):
        assert not ring.fits(x, weight)


@needs_gpu
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("tokens", [1, 4, 9, 16])
def test_it_is_right_on_a_gpu_and_a_chain_changes_no_bit(heads: int, tokens: int, kernel_device: torch.device) -> None:
    x_TD, *rest = prepared_inputs(tokens, heads, 128, 2560, torch.bfloat16, kernel_device)
    assert ring.fits(x_TD, rest[0])
    check_prepared(tokens, (heads, 128, 2560), torch.bfloat16, kernel_device)
    ones_D, results = torch.ones_like(x_TD[0]), []
    for is_chained in (False, True):
        residual_TD = x_TD
        y_NTC = torch.full((20, tokens, len(rest[0])), torch.nan, dtype=torch.bfloat16, device=kernel_device)
        found = list(zip(y_NTC, torch.full_like(y_NTC, torch.nan, dtype=torch.float32), strict=True))
        for out in found:  # every x is written by the launch before
            residual_TD, next_TD = residual.add_norm(
                x_TD[:, None], None, residual_TD, ones_D, 1e-6, is_chained=is_chained
            )
            ring.project_prepared(next_TD, *rest, LOWER_BOUND, out, is_chained=is_chained)
        results.append([tensor for out in found for tensor in out])
    assert all(torch.equal(plain, chained) for plain, chained in zip(*results, strict=True))
    truth_TC = kda.prepare(*(x.double() for x in (results[0][-2], *rest[1:])), LOWER_BOUND)
    torch.testing.assert_close(results[0][-1].double(), truth_TC, rtol=2e-6, atol=2e-6)


@needs_gpu
@pytest.mark.parametrize("heads", [8, 16])
def test_a_token_keeps_its_bits_whatever_comes_after_it(heads: int, kernel_device: torch.device) -> None:
    check_prepared_one_by_one(prepared_inputs(9, heads, 128, 2560, torch.bfloat16, kernel_device))
