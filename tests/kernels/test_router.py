"""The router against the golden numbers, and its kernel against its definition; the same tests on a GPU."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import router
from dspark.kernels.router import kernel, reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LAW = (4, 2, 3, 2.5)
FLASH = (8, 4, 8, 2.5)
TOLERANCE = {torch.float64: {"rtol": 1e-12, "atol": 1e-14}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def close(actual: torch.Tensor, expected: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=dtype), **TOLERANCE[dtype])


def law_of(case: dict[str, Any]) -> tuple[int, int, int, float]:
    return case["n_group"], case["topk_group"], case["num_experts_per_tok"], case["routed_scaling_factor"]


def test_the_router_picks_by_biased_groups_and_weighs_by_plain_scores(ling_golden: dict, dtype: torch.dtype) -> None:
    case = ling_golden["router_16e_4g_top4"]
    logits, bias = torch.tensor(case["logits"], dtype=dtype), torch.tensor(case["expert_bias"], dtype=dtype)
    ids, weights = router.route(logits, bias, law_of(case))
    assert ids.tolist() == case["expert_ids_by_falling_selection_score"]
    close(weights, case["weights_same_order"], dtype)
    for wrong in ("without_groups", "without_bias", "group_score_by_max"):
        assert ids.sort().values.tolist() != torch.tensor(case[f"wrong_ids_{wrong}"]).sort().values.tolist()
    assert (weights - torch.tensor(case["wrong_weights_from_biased_scores"])).abs().max() > 1e-2


def test_dropped_groups_never_win_and_ties_go_to_the_smaller_index(ling_golden: dict, dtype: torch.dtype) -> None:
    case = ling_golden["router_mask_value"]
    logits, bias = torch.tensor(case["logits"], dtype=dtype), torch.tensor(case["expert_bias"], dtype=dtype)
    ids, weights = router.route(logits, bias, law_of(case))
    assert ids.tolist() == case["expert_ids"]
    close(weights, case["weights"], dtype)
    assert ids[0].tolist() != case["wrong_ids_if_masked_with_zero"]


def test_the_router_of_512_experts_gives_the_golden_picks(ling_golden: dict, dtype: torch.dtype) -> None:
    case = ling_golden["router_512e_8g_top8"]
    logits = [[(e * 7919 + t * 104729 + 17) % 1009 / 1009 * 8 - 5 for e in range(512)] for t in range(3)]
    bias = [(e * 3571 + 11) % 257 / 257 * 0.2 - 0.1 for e in range(512)]
    ids, weights = router.route(torch.tensor(logits, dtype=dtype), torch.tensor(bias, dtype=dtype), law_of(case))
    assert ids.tolist() == case["expert_ids_by_falling_selection_score"]
    close(weights, case["weights_same_order"], dtype)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def routed(logits_TX: torch.Tensor, bias_X: torch.Tensor, law: router.Law, device: torch.device) -> router.Dispatch:
    """The kernel's choice for these very logits: x holds them and the gate is the identity."""
    gate_XX = torch.eye(logits_TX.shape[1], device=device)
    return kernel.dispatch(logits_TX.float().to(device), gate_XX, bias_X.float().to(device), law, counters(device))


def assert_same(actual: router.Dispatch, expected: router.Dispatch) -> None:
    for name in ("experts_P", "pairs_PN", "num_active_1"):
        assert getattr(actual, name).tolist() == getattr(expected, name).tolist(), name
    torch.testing.assert_close(actual.weights_TJ.cpu(), expected.weights_TJ.cpu().float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 9, 16])
def test_the_router_picks_and_lists_what_its_definition_does(
    num_tokens: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    x, gate, bias = normal(1, num_tokens, 600).to(dtype), normal(2, 24, 600) / 600**0.5, normal(3, 24) * 0.1
    expected = reference.dispatch(x.double(), gate, bias, LAW)
    working = [tensor.to(kernel_device) for tensor in (x.to(dtype), gate.float(), bias.float())]
    count = counters(kernel_device)
    for _ in range(2):
        assert_same(kernel.dispatch(*working, LAW, count), expected)
        assert count.item() == 0
    active = int(expected.num_active_1)
    assert expected.experts_P[active - 1] == 24
    assert (expected.pairs_PN[active - 1] >= 0).sum() == num_tokens
    assert (expected.pairs_PN >= 0).sum() == num_tokens * 4


def hard_logits() -> Iterator[tuple[str, torch.Tensor, torch.Tensor, router.Law]]:
    spread = normal(4, 9, 24)
    zero = torch.zeros(24)
    yield "all equal", torch.zeros(9, 24), zero, LAW
    yield "all tokens at the same experts", spread[:1].expand(9, 24), zero, LAW
    yield "saturated scores tie", spread.sign() * 200, zero, LAW
    yield "few values, many ties", (spread * 1.5).round() / 4, (normal(5, 24) * 2).round() / 8, LAW
    yield "negative biased scores", spread, torch.full((24,), -3.0), LAW
    yield "all in one group", spread + 9 * (torch.arange(24) // 6 == 2), zero, (4, 1, 6, 1.0)
    yield "no groups", spread, zero, (1, 1, 5, 2.5)
    yield "three groups of eight", spread, zero, (3, 2, 4, 2.5)
    yield "every expert of its groups", spread, zero, (12, 3, 6, 2.5)
    neighbours = torch.zeros(9, 4, 32)
    neighbours[:, :3, [0, 20]], neighbours[:, 3, :2] = 0.6, 1.0
    yield "the two largest are equal neighbours", neighbours.flatten(1), torch.zeros(128), (4, 1, 3, 2.5)
    yield "sixteen tokens, distinct picks", torch.eye(24)[:16] * 8, zero, (4, 4, 1, 2.5)
    yield "a whole list of eight", spread + 9 * (torch.arange(24) // 8 == 1), zero, (3, 1, 8, 2.5)
    yield "a whole list of equals", torch.zeros(16, 24), zero, (3, 1, 8, 2.5)
    yield "a whole list and the next one", spread, zero, (2, 1, 12, 2.5)
    yield "every expert", spread, zero, (4, 4, 24, 2.5)
    yield "the largest and the least numbers", spread.sign() * 3e38, zero, LAW
    yield "one token", spread[:1], zero, LAW
    yield "thirty-two groups", normal(18, 9, 64), normal(19, 64), (32, 20, 16, 2.5)
    yield "more lists than lanes of a warp", normal(20, 16, 264), torch.zeros(264), (1, 1, 8, 2.5)


@pytest.mark.parametrize(("logits", "bias", "law"), [pytest.param(*c[1:], id=c[0]) for c in hard_logits()])
def test_the_router_keeps_the_order_of_ties_and_the_bounds_of_groups(
    logits: torch.Tensor, bias: torch.Tensor, law: router.Law, kernel_device: torch.device
) -> None:
    gate = torch.eye(logits.shape[1], dtype=torch.float64)
    assert_same(routed(logits, bias, law, kernel_device), reference.dispatch(logits.float(), gate.float(), bias, law))


def test_scores_that_are_not_numbers_stay_inside_the_lists(kernel_device: torch.device) -> None:
    logits = normal(17, 9, 24)
    logits[[0, 5]] = torch.nan
    found = routed(logits, torch.zeros(24), LAW, kernel_device)
    assert 1 <= int(found.num_active_1) <= 25
    assert all(0 <= expert <= 24 for expert in found.experts_P[: int(found.num_active_1)].tolist())
    assert int(found.pairs_PN.min()) == -1
    assert int(found.pairs_PN.max()) < 36
    others = [t for t in range(9) if t not in (0, 5)]
    expected = routed(logits[others], torch.zeros(24), LAW, kernel_device).weights_TJ
    assert torch.equal(found.weights_TJ[others], expected)


def test_the_kernel_gives_the_golden_picks_of_512_experts(ling_golden: dict, kernel_device: torch.device) -> None:
    case = ling_golden["router_512e_8g_top8"]
    logits = [[(e * 7919 + t * 104729 + 17) % 1009 / 1009 * 8 - 5 for e in range(512)] for t in range(3)]
    bias = [(e * 3571 + 11) % 257 / 257 * 0.2 - 0.1 for e in range(512)]
    found = routed(torch.tensor(logits), torch.tensor(bias), law_of(case), kernel_device)
    picks = case["expert_ids_by_falling_selection_score"]
    by_pair = {
        pair: expert
        for expert, pairs in zip(found.experts_P.tolist(), found.pairs_PN.tolist(), strict=True)
        for pair in pairs
        if pair >= 0
    }
    assert [[by_pair[t * 9 + k] for k in range(9)] for t in range(3)] == [[*row, 512] for row in picks]
    expected = torch.tensor(case["weights_same_order"])
    torch.testing.assert_close(found.weights_TJ[:, :8].cpu(), expected.float(), rtol=1e-5, atol=0)


def test_the_public_function_refuses_what_does_not_fit(kernel_device: torch.device) -> None:
    x = normal(6, 3, 84).float().to(kernel_device)
    gate, bias, count = (
        torch.zeros(8, 84, device=kernel_device),
        torch.zeros(8, device=kernel_device),
        counters(kernel_device),
    )
    router.dispatch(x, gate, bias, LAW, count)
    for wrong in (
        lambda: router.dispatch(x.repeat(6, 1), gate, bias, LAW, count),
        lambda: router.dispatch(x[:, 1:], gate, bias, LAW, count),
        lambda: router.dispatch(x, gate, bias[:7], LAW, count),
        lambda: router.dispatch(x, gate, bias, (3, 2, 3, 2.5), count),
        lambda: router.dispatch(x, gate, bias, (4, 2, 5, 2.5), count),
        lambda: router.dispatch(x, gate.repeat(16, 1), bias.repeat(16), (64, 2, 2, 2.5), count),
    ):
        with pytest.raises(ValueError, match="expected"):
            wrong()


def flash_router(num_tokens: int, gate: str = "bf16") -> dict[str, Any]:
    num_warps = kernel.NUM_WARPS
    constexprs = {"T": num_tokens, "X": 512, "D": 2560, "GROUPS": 8, "KEPT": 4, "PICKS": 8}
    constexprs |= {
        "BLOCK_X": kernel.BLOCK_X,
        "LENGTH": 8,
        "LANES": 32,
        "SLICES": num_warps,
        "IS_CHAINED": True,
    }
    signature = {"x": "*bf16", "gate": f"*{gate}", "bias": "*fp32", "scratch": "*i32", "counters": "*i32"}
    signature |= {"weights": "*fp32", "pairs": "*i32", "scaling": "fp32"}
    constants = {"constexprs": constexprs, "num_warps": num_warps, "maxnreg": 128}
    return {"name": "_dispatch_kernel", "signature": signature, **constants}


@pytest.mark.parametrize("gate", ["bf16", "fp32"])
def test_the_router_compiles_for_sm90_without_spills_and_writes_after_the_wait(gate: str) -> None:
    (compiled,) = compile_sm90("dspark.kernels.router.kernel", [flash_router(9, gate)])
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 128  # a program of 16 warps on an SM
    wait = compiled.ptx.index("griddepcontrol.wait")
    assert compiled.ptx.index("prefetch.global") < compiled.ptx.index("ld.global") < wait
    assert wait < compiled.ptx.index("griddepcontrol.launch_dependents")
    assert wait < min(place.start() for place in re.finditer(r"(st|atom|red)\.global|atom\.", compiled.ptx))


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_the_choice_has_two_barriers_for_one_layout_holds_all_its_tiles(num_tokens: int) -> None:
    (compiled,) = compile_sm90("dspark.kernels.router.kernel", [flash_router(num_tokens)])
    logits, choice = compiled.ptx.split("griddepcontrol.launch_dependents")[1].split("atom.global")
    assert choice.count("bar.sync") == 2  # the last program knows that it is; every token's bitmap is written
    assert logits.count("bar.sync") <= 5
    assert logits.count("ld.global") >= 2
    assert "ld.global" not in logits[logits.index("st.shared") :]  # all are asked for before the first is waited for


@pytest.mark.parametrize(("num_experts", "law"), [(32, (4, 2, 3, 2.5)), (12, (2, 1, 2, 1.0)), (20, (1, 1, 4, 2.5))])
def test_the_kernel_chooses_what_route_chooses(num_experts: int, law: router.Law, kernel_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits_NX = torch.randn(9, num_experts, generator=generator).to(kernel_device)
    bias_X = (torch.randn(num_experts, generator=generator) / 4).to(kernel_device)
    (ids_NJ, weights_NJ), expected = (form.choose(logits_NX, bias_X, law) for form in (kernel, reference))
    assert ids_NJ.dtype == torch.int32
    assert torch.equal(ids_NJ, expected[0])
    torch.testing.assert_close(weights_NJ, expected[1], rtol=1e-6, atol=0)


def test_of_equal_experts_and_groups_the_smaller_index_wins(kernel_device: torch.device) -> None:
    logits_NX = torch.tensor([[0.0] * 16, [1.0, 2.0] * 8, [0.0] * 4 + [3.0] * 12], device=kernel_device)
    ids_NJ, _ = kernel.choose(logits_NX, torch.zeros(16, device=kernel_device), (4, 2, 3, 1.0))
    assert ids_NJ.tolist() == [[0, 1, 2, 16], [1, 3, 5, 16], [4, 5, 6, 16]]


def test_the_choice_of_many_rows_compiles_for_sm90_without_spills() -> None:
    signature = {"ids": "*i32", "weights": "*fp32", "logits": "*fp32", "bias": "*fp32", "scaling": "fp32"}
    constexprs = {"X": 512, "GROUPS": 8, "KEPT": 4, "PICKS": 8}
    choose = {"name": "choose_kernel", "signature": signature, "constexprs": constexprs, "num_warps": 1}
    (compiled,) = compile_sm90("dspark.kernels.router.kernel", [choose])
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 128


@needs_gpu
def test_gpu_check_the_choice_is_the_engines_where_the_scores_are_equal(kernel_device: torch.device) -> None:
    generator = torch.Generator(kernel_device).manual_seed(0)
    x_TD = torch.randint(-2, 3, (16, 256), generator=generator, device=kernel_device).bfloat16()
    gate_XD = torch.randint(-1, 2, (512, 256), generator=generator, device=kernel_device).bfloat16() / 8
    bias_X = torch.zeros(512, device=kernel_device)
    visits = router.dispatch(
        x_TD, gate_XD, bias_X, FLASH, counters(kernel_device)
    )  # sums of few bits: exact in any order
    ids_TJ, weights_TJ = router.choose(torch.mm(x_TD, gate_XD.T, out_dtype=torch.float32), bias_X, FLASH)
    torch.testing.assert_close(weights_TJ, visits.weights_TJ, rtol=1e-6, atol=1e-6)  # the sigmoid's last bit
    pairs = {
        (int(expert), int(pair) // 9)
        for expert, pairs_N in zip(visits.experts_P, visits.pairs_PN, strict=True)
        for pair in pairs_N
        if expert >= 0 and pair >= 0
    }
    assert pairs == {(int(expert), token) for token, ids_J in enumerate(ids_TJ) for expert in ids_J}


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 9, 16])
def test_gpu_check_of_the_router_at_full_size(num_tokens: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    x, gate = normal(14, num_tokens, 2560).to(torch.bfloat16), (normal(15, 512, 2560) / 50).to(dtype)
    bias, count = (normal(16, 512) * 0.02).float(), counters(kernel_device)
    tensors = [tensor.to(kernel_device) for tensor in (x, gate, bias)]
    expected = reference.dispatch(x.double(), gate.double(), bias.double(), FLASH)
    found = [kernel.dispatch(*tensors, FLASH, count, is_chained=chained) for chained in (False, True)]
    for one in found:
        assert_same(one, expected)
    assert torch.equal(found[0].weights_TJ, found[1].weights_TJ)
    alone = [kernel.dispatch(tensors[0][t : t + 1], *tensors[1:], FLASH, count) for t in range(num_tokens)]
    assert torch.equal(torch.cat([one.weights_TJ for one in alone]), found[0].weights_TJ)
