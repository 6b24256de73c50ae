"""The three launches of latent attention against float64, and what a token may not see."""

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from kernels.compiling import compile_sm90
from tiny import TINY_LING

from dspark.kernels import mla
from dspark.kernels.mla import kernel, reference
from dspark.kernels.rotary import rotary_angles
from dspark.target.cache import Layout, View
from dspark.target.config import parse_target_config
from dspark.target.latent_attention import LatentAttention

EPS = 1e-6
IS_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, *[torch.bfloat16] * IS_GPU]  # bfloat16 stores are cut off in the interpreter
CEILING = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
gpu_only = pytest.mark.skipif(not IS_GPU, reason="real sizes and PDL need a GPU")


@dataclass(frozen=True)
class Case:
    """One step of one rank: tokens, heads, widths, committed rows, capacity, splits."""

    num_tokens: int = 9
    num_heads: int = 2
    nope: int = 16
    rope: int = 8
    latent: int = 16
    value: int = 16
    length: int = 100
    num_rows: int = 200
    num_splits: int = 3

    @property
    def scale(self) -> float:
        return float((self.nope + self.rope) ** -0.5)


@dataclass(frozen=True)
class Inputs:
    """What the three launches read. Rows of the cache past the committed ones are NaN."""

    case: Case
    projected_TC: torch.Tensor
    norm_weight_C: torch.Tensor
    kv_b_HGC: torch.Tensor
    angles_JE2: torch.Tensor
    rows_JC: torch.Tensor
    length_1: torch.Tensor

    def cast(self, dtype: torch.dtype, device: torch.device) -> "Inputs":
        wide = torch.promote_types(dtype, torch.float32)
        names = ("projected_TC", "norm_weight_C", "kv_b_HGC", "rows_JC")
        cast = {name: getattr(self, name).to(dtype).to(device) for name in names}
        return Inputs(
            self.case, **cast, angles_JE2=self.angles_JE2.to(wide).to(device), length_1=self.length_1.to(device)
        )

    def some(self, first: int, count: int) -> "Inputs":
        """The step of ``count`` tokens from token ``first`` on, on the same cache memory."""
        changed = {"projected_TC": self.projected_TC[first : first + count], "length_1": self.length_1 + first}
        return Inputs(**self.__dict__ | changed)


def random_inputs(case: Case, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    width = case.latent + case.rope
    rows_JC = normal(case.num_rows, width)
    rows_JC[case.length :] = torch.nan
    cos_JE, sin_JE = rotary_angles(torch.arange(case.num_rows), case.rope, 1e4, torch.float32)
    return Inputs(
        case,
        normal(case.num_tokens, case.num_heads * (case.nope + case.rope) + width + case.num_heads),
        normal(case.latent),
        normal(case.num_heads, case.nope + case.value, case.latent) * case.latent**-0.5,
        torch.stack((cos_JE, sin_JE), -1),
        rows_JC,
        torch.tensor([case.length]),
    )


def absorb(x: Inputs, run: ModuleType, **options: bool) -> torch.Tensor:
    keys_HEC = x.kv_b_HGC[:, : x.case.nope]
    cache = (x.angles_JE2, x.rows_JC, x.length_1)
    q_THC: torch.Tensor = run.absorb(x.projected_TC, x.norm_weight_C, EPS, keys_HEC, *cache, **options)
    return q_THC


def attend(x: Inputs, q_THC: torch.Tensor, run: ModuleType, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
    latent, scale, num_splits = x.case.latent, x.case.scale, x.case.num_splits
    context_STHC, lse_STH = run.attend(q_THC, x.rows_JC, x.length_1, latent, scale, num_splits, **options)
    return context_STHC, lse_STH


def finish(
    x: Inputs, context_STHC: torch.Tensor, lse_STH: torch.Tensor, run: ModuleType, **options: bool
) -> torch.Tensor:
    gate_TH = x.projected_TC[:, -x.case.num_heads :]
    o_THF: torch.Tensor = run.finish(context_STHC, lse_STH, x.kv_b_HGC[:, x.case.nope :], gate_TH, **options)
    return o_THF


def step(x: Inputs, run: ModuleType, **options: bool) -> torch.Tensor:
    return finish(x, *attend(x, absorb(x, run, **options), run, **options), run, **options)


def assert_near(actual: torch.Tensor, torch_says: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> None:
    assert not actual.isnan().any()
    ceiling = CEILING[dtype]
    error, allowed = (((x.double() - truth).norm() / truth.norm()).item() for x in (actual, torch_says))
    assert error <= max(1.5 * allowed, ceiling / 4), (error, allowed)
    assert error < ceiling


ODD_CASES = [
    Case(num_tokens=1, length=0, num_rows=70, num_splits=2),
    Case(num_tokens=3, num_heads=3, nope=20, rope=12, latent=24, value=10, length=63, num_rows=80, num_splits=5),
    Case(num_tokens=9, length=187, num_splits=2),
    Case(num_tokens=16, num_heads=4, rope=10, latent=40, length=120, num_splits=1),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ODD_CASES, ids=lambda case: f"T{case.num_tokens}H{case.num_heads}")
def test_each_launch_is_as_near_to_the_truth_as_torch(
    case: Case, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    def fresh() -> Inputs:
        return random_inputs(case).cast(dtype, kernel_device)

    x, plain = fresh(), fresh()
    exact = fresh().cast(torch.float64, kernel_device)
    q_THC, plain_q_THC, exact_q_THC = absorb(x, kernel), absorb(plain, reference), absorb(exact, reference)
    assert_near(q_THC, plain_q_THC, exact_q_THC, dtype)
    end = case.length + case.num_tokens
    assert_near(x.rows_JC[case.length : end], plain.rows_JC[case.length : end], exact.rows_JC[case.length : end], dtype)
    before = fresh().rows_JC
    assert torch.equal(x.rows_JC[: case.length], before[: case.length])
    assert x.rows_JC[end:].isnan().all()

    wide = plain.cast(torch.float64, kernel_device)  # the same rounded cache and queries from here on
    wide_context, wide_lse = attend(wide, plain_q_THC.double(), reference)
    context_STHC, lse_STH = attend(plain, plain_q_THC, kernel)
    plain_context, plain_lse = attend(plain, plain_q_THC, reference)
    is_seen_STH = wide_lse > -torch.inf
    assert torch.equal(lse_STH > -torch.inf, is_seen_STH)
    assert_near(lse_STH[is_seen_STH], plain_lse[is_seen_STH], wide_lse[is_seen_STH], torch.float32)
    assert_near(context_STHC[is_seen_STH], plain_context[is_seen_STH], wide_context[is_seen_STH], dtype)
    plain_context[~is_seen_STH] = torch.nan
    o_THF = finish(plain, plain_context, plain_lse, kernel)
    plain_o_THF = finish(plain, plain_context, plain_lse, reference)
    assert_near(o_THF, plain_o_THF, finish(wide, plain_context.double(), plain_lse.double(), reference), dtype)


@pytest.mark.parametrize("length", [0, 1, 62, 63, 64, 65, 119, 127, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # one block held, and two
def test_a_token_sees_the_rows_up_to_its_own(length: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    case = Case(num_tokens=9, num_heads=1, nope=4, rope=2, latent=5, length=length, num_rows=140, num_splits=2)
    x = random_inputs(case).cast(dtype, kernel_device)
    q_THC = absorb(x, kernel)
    x.rows_JC[:, 0] = torch.arange(140)  # a row's first number is its place
    context_STHC, lse_STH = attend(x, q_THC * 0, kernel)
    weights_STH = lse_STH.exp()
    assert torch.equal(weights_STH.sum(0)[:, 0].round().long().cpu(), length + 1 + torch.arange(9))
    is_seen_STH = weights_STH > 0
    mean_TH = (weights_STH * context_STHC[..., 0].float().where(is_seen_STH, 0)).sum(0) / weights_STH.sum(0)
    rtol = 1e-5 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(mean_TH[:, 0].cpu(), (length + torch.arange(9)) / 2, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize(("length", "dtype"), [(0, torch.float16), (60, DTYPES[-1]), (124, torch.float32)], ids=str)
def test_tokens_at_once_give_the_bits_of_tokens_one_by_one(
    length: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    case = Case(num_tokens=9 if length == 60 else 5, num_heads=4, length=length, num_rows=140)
    together, one_by_one = (random_inputs(case).cast(dtype, kernel_device) for _ in range(2))
    o_THF = step(together, kernel)
    for t in range(case.num_tokens):
        assert torch.equal(step(one_by_one.some(t, 1), kernel)[0], o_THF[t])
    assert torch.equal(one_by_one.rows_JC.nan_to_num(7), together.rows_JC.nan_to_num(7))


def test_splits_change_nothing_but_rounding(kernel_device: torch.device) -> None:
    outputs = []
    for num_splits in (1, 2, 3, 7):
        x = random_inputs(Case(length=150, num_rows=400, num_splits=num_splits)).cast(torch.float32, kernel_device)
        outputs.append(step(x, kernel))
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=1e-4, atol=1e-5)


def test_rows_past_the_capacity_are_dropped(kernel_device: torch.device) -> None:
    case = Case(num_tokens=4, length=68, num_rows=70)
    for run in (kernel, reference):
        x = random_inputs(case).cast(torch.float32, kernel_device)
        guarded = torch.full((80, 24), 5.0, device=kernel_device)
        guarded[:70] = x.rows_JC
        x = Inputs(**x.__dict__ | {"rows_JC": guarded[:70]})
        absorb(x, run)
        assert not guarded[68:70].isnan().any()
        assert guarded[70:].eq(5).all()
    x.length_1.fill_(72)
    queries_THC = torch.ones(4, 2, 24, device=kernel_device)
    for actual, expected in zip(attend(x, queries_THC, kernel), attend(x, queries_THC, reference), strict=True):
        torch.testing.assert_close(actual[:2], expected[:2])


def test_scores_far_apart_do_not_overflow(kernel_device: torch.device) -> None:
    x = random_inputs(Case(length=150, num_splits=2)).cast(torch.float32, kernel_device)
    q_THC = absorb(x, kernel) * 1e3
    context_STHC, lse_STH = attend(x, q_THC, kernel)
    expected, expected_lse = attend(x, q_THC, reference)
    torch.testing.assert_close(lse_STH, expected_lse, rtol=1e-5, atol=1e-2)
    assert context_STHC[lse_STH > -torch.inf].isfinite().all()
    o_THF, expected_THF = finish(x, context_STHC, lse_STH, kernel), finish(x, expected, expected_lse, reference)
    torch.testing.assert_close(o_THF, expected_THF, rtol=1e-2, atol=1e-2)  # scores in the thousands


@pytest.mark.parametrize(
    ("context", "values", "expected"),
    [
        ((1 + 2.0**-10, -1.0, 1.0, -1.0), (1.0, 1.0), 0.0),  # the merged context is rounded: 1 + 2 ** -11 is a tie
        ((1.0, 1.0, 1.0, 1.0), (2048.0, 1.0), 1536.0),  # the value is rounded: 2049 is a tie; a gate of 0.75
    ],
)
def test_context_and_value_are_rounded_one_by_one(
    context: tuple[float, ...], values: tuple[float, ...], expected: float, kernel_device: torch.device
) -> None:
    context_STHC = torch.tensor(context, dtype=torch.float16, device=kernel_device).view(2, 1, 1, 2)
    values_HFC = torch.tensor(values, dtype=torch.float16, device=kernel_device).view(1, 1, 2)
    gate_TH = torch.tensor([[3.0]], device=kernel_device).log().half()
    for run in (kernel, reference):
        lse_STH = torch.zeros(2, 1, 1, device=kernel_device)
        assert run.finish(context_STHC, lse_STH, values_HFC, gate_TH).eq(expected).all()


def test_the_gate_is_rounded(kernel_device: torch.device) -> None:
    gate_TH = torch.linspace(-3, 3, 256, device=kernel_device).half().view(16, 16)
    context_STHC = torch.full((1, 16, 16, 1), 3.0, dtype=torch.float16, device=kernel_device)
    ones_HFC = torch.ones(16, 1, 1, dtype=torch.float16, device=kernel_device)
    o_THF = kernel.finish(context_STHC, context_STHC[..., 0].float(), ones_HFC, gate_TH)[..., 0]
    rounded = 3 * gate_TH.float().sigmoid().half()
    assert o_THF.eq(rounded).float().mean() > 0.99
    assert (3 * gate_TH.float().sigmoid()).half().eq(rounded).float().mean() < 0.9


def test_the_three_launches_equal_the_models_block(kernel_device: torch.device) -> None:
    config = parse_target_config(TINY_LING)
    torch.manual_seed(0)
    block = LatentAttention(config).requires_grad_(False)
    length, tokens, width = 37, 5, config.kv_lora_rank + config.qk_rope_head_dim
    x_ND = torch.randn(tokens, config.hidden_size)
    rows_JC = torch.randn(64, width)
    positions = torch.arange(64)
    cos_JE, sin_JE = rotary_angles(positions, config.qk_rope_head_dim, config.rope_theta, torch.float32)
    slots_BT = torch.arange(length, length + tokens)[None]
    bias_BTJ = torch.where(positions > slots_BT[..., None], -torch.inf, 0.0)
    layout = Layout.of([tokens], x_ND.device)
    view = View(layout=layout, sequences_B1=torch.zeros(1, 1, dtype=torch.long), slots_BT=slots_BT, bias_BTJ=bias_BTJ)
    angles = (cos_JE[slots_BT[0]], sin_JE[slots_BT[0]])
    staged_BJC = rows_JC.clone()[None]
    expected_ND = block.stage(x_ND, angles, view, staged_BJC)

    weights = (block.q_proj.weight, block.kv_a_proj_with_mqa.weight, block.g_proj.weight)
    heads = config.num_attention_heads
    case = Case(
        tokens,
        heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.kv_lora_rank,
        config.v_head_dim,
        length,
        64,
    )
    x = Inputs(
        case,
        x_ND @ torch.cat(weights).T,
        block.kv_a_layernorm.weight,
        block.kv_b_proj.weight.unflatten(0, (heads, -1)),
        torch.stack((cos_JE, sin_JE), -1),
        rows_JC,
        torch.tensor([length]),
    ).cast(torch.float32, kernel_device)
    o_THF = step(x, kernel)
    torch.testing.assert_close(block.dense(o_THF.flatten(1).cpu()), expected_ND, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.rows_JC.cpu(), staged_BJC[0], rtol=1e-4, atol=1e-5)


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    x = random_inputs(Case(num_rows=128))
    x = Inputs(**x.__dict__ | {"angles_JE2": x.angles_JE2.double()})
    assert step(x, mla).shape == (9, 2, 16)
    wrong = [
        {"projected_TC": x.projected_TC[:, :50]},
        {"projected_TC": x.projected_TC.repeat(2, 1)},
        {"norm_weight_C": x.norm_weight_C.float()},
        {"angles_JE2": x.angles_JE2[:5]},
        {"rows_JC": x.rows_JC.float()},
        {"length_1": x.length_1.int()},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(change))}: expected .* found"):
            absorb(Inputs(**x.__dict__ | change), mla)
    q_THC = absorb(x, mla)
    with pytest.raises(ValueError, match="value_width 25"):
        mla.attend(q_THC, x.rows_JC, x.length_1, 25, 1.0, 2)
    with pytest.raises(ValueError, match="rows_JC"):
        mla.attend(q_THC, x.rows_JC[:, :-1], x.length_1, 16, 1.0, 2)
    context_STHC, lse_STH = attend(x, q_THC, mla)
    with pytest.raises(ValueError, match="gate_TH"):
        mla.finish(context_STHC, lse_STH, x.kv_b_HGC[:, 16:], x.projected_TC[:8, -2:])
    with pytest.raises(ValueError, match="lse_STH"):
        mla.finish(context_STHC, lse_STH[:2], x.kv_b_HGC[:, 16:], x.projected_TC[:, -2:])


def test_flash_shapes_compile_for_sm90_without_spills_and_wait_before_they_write() -> None:
    heads = {"HEADS": 8, "IS_CHAINED": True}
    bf16 = dict.fromkeys(("projected", "norm_weight", "keys", "rows", "q", "values", "gate", "context", "o"), "*bf16")
    kinds = bf16 | dict.fromkeys(("angles", "lse"), "*fp32") | {"length": "*i64"}
    kinds |= {"eps": "fp32", "scale_log2": "fp32"} | dict.fromkeys(
        ("num_tokens", "num_rows", "num_splits", "share", "count"), "i32"
    )

    def signature(names: str) -> dict[str, str]:
        return {name: kinds[name] for name in names.split()}

    absorb_sizes = {"PROJECTED_STRIDE": 2120, "KEYS_STRIDE": 256 * 512, "ROWS_STRIDE": 576, "NOPE": 128, "ROPE": 64}
    absorb_sizes |= {"LATENT": 512, "COLUMNS": 32}
    attend_sizes = {"ROWS_STRIDE": 576, "VALUE": 512, "ROPE": 64}
    tiles = [kernel.attend_tiles(torch.bfloat16, num_steps) for num_steps in (2, 3)]
    finish_sizes = {"GATE_STRIDE": 2120, "VALUES_STRIDE": 256 * 512, "WIDTH": 128, "LATENT": 512, "SPLITS": 66}
    finish_sizes |= {"COLUMNS": 128}
    kernels = [
        {
            "name": "absorb_kernel",
            "signature": signature("projected norm_weight keys angles rows length q eps num_tokens num_rows"),
            "constexprs": absorb_sizes | heads,
            "num_warps": 4,
        },
        *(
            {
                "name": "attend_kernel",
                "signature": signature("q rows length context lse scale_log2 num_tokens num_rows num_splits share"),
                "constexprs": attend_sizes | heads | {"TILE": tile, "HELD": held, "IS_LONG": is_long},
                "num_warps": 8,
                "num_stages": num_stages,
            }
            for (tile, held, num_stages), is_long in zip(tiles, (False, True), strict=True)
        ),
        {
            "name": "finish_kernel",
            "signature": signature("context lse values gate o count"),
            "constexprs": finish_sizes | heads,
            "num_warps": kernel.FINISH_WARPS,
        },
    ]
    compiled = compile_sm90("dspark.kernels.mla.kernel", kernels)
    for each in compiled:
        assert each.spill_bytes == 0
        assert each.ptx.index("griddepcontrol.wait") < each.ptx.index("st.global")
        assert each.shared_bytes <= 227 * 1024
    for branch in compiled[0].ptx.split("griddepcontrol.wait")[:-1]:
        assert "ld.global" in branch, "both kinds of program read their weights before the wait"
    assert compiled[0].ptx.count("griddepcontrol.wait") == 2
    for each in compiled[1:3]:
        assert "wgmma" in each.ptx
        assert each.ptx.index("ld.global.cg") < each.ptx.index("griddepcontrol.wait"), "rows are read before the wait"
    assert "cp.async" in compiled[2].ptx


@gpu_only
@pytest.mark.parametrize(
    ("num_heads", "num_rows", "num_splits"), [(8, 8192, 66), (8, 16384, 44), (16, 8192, 26), (32, 8192, 14)]
)
@pytest.mark.parametrize("length", [0, 100, 8000])
def test_gpu_check_flash_ranks(
    num_heads: int, num_rows: int, num_splits: int, length: int, kernel_device: torch.device
) -> None:
    case = Case(9, num_heads, 128, 64, 512, 128, length, num_rows, num_splits)
    x, plain, chained = (random_inputs(case).cast(torch.bfloat16, kernel_device) for _ in range(3))
    truth = step(random_inputs(case).cast(torch.bfloat16, kernel_device).cast(torch.float64, kernel_device), reference)
    together = step(x, mla)
    assert_near(together, step(plain, reference), truth, torch.bfloat16)
    assert torch.equal(step(chained, mla, is_chained=True), together)
    assert torch.equal(chained.rows_JC.nan_to_num(7), x.rows_JC.nan_to_num(7))
    one_by_one = random_inputs(case).cast(torch.bfloat16, kernel_device)
    for t in range(9):
        assert torch.equal(step(one_by_one.some(t, 1), mla)[0], together[t])


@gpu_only
def test_gpu_check_the_length_may_change_under_one_graph(kernel_device: torch.device) -> None:
    case = Case(9, 8, 128, 64, 512, 128, 3000, 8192, 66)
    x = random_inputs(case).cast(torch.bfloat16, kernel_device)
    x.rows_JC.nan_to_num_(0.5)
    step(x, mla)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o_THF = step(x, mla, is_chained=True)
    for length in (3000, 0, 8183, 64):
        x.length_1.fill_(length)
        graph.replay()
        replayed = o_THF.clone()
        assert torch.equal(step(x, mla), replayed)
