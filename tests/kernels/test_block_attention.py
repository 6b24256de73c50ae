"""A draft block's attention against float64 and the draft's own layer, and what its launches leave alone."""

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from kernels.compiling import compile_sm90
from kernels.test_mla_verify import DTYPES, EPS, IS_GPU, assert_near, gpu_only

from dspark.config import DraftConfig
from dspark.draft.backbone import DraftAttention
from dspark.kernels import block_attention
from dspark.kernels.anchor_attention import attend as attend_all
from dspark.kernels.block_attention import kernel, reference
from dspark.kernels.rotary import rotary_angles


@dataclass(frozen=True)
class Case:
    """One block of one rank: slots, query heads a key-value head, heads, width, rows before, capacity, splits."""

    num_tokens: int = 5
    group: int = 2
    num_heads: int = 2
    width: int = 16
    length: int = 100
    num_rows: int = 200
    num_splits: int = 3

    @property
    def num_query_heads(self) -> int:
        return self.group * self.num_heads


@dataclass(frozen=True)
class Inputs:
    """What the launches read. Rows of the cache past the committed ones are NaN."""

    case: Case
    qkv_TC: torch.Tensor
    q_norm_E: torch.Tensor
    k_norm_E: torch.Tensor
    angles_JE2: torch.Tensor
    length_1: torch.Tensor
    keys_HJE: torch.Tensor
    values_HJE: torch.Tensor

    def cast(self, dtype: torch.dtype, device: torch.device) -> "Inputs":
        wide = torch.promote_types(dtype, torch.float32)
        names = ("qkv_TC", "q_norm_E", "k_norm_E", "keys_HJE", "values_HJE")
        cast = {name: getattr(self, name).to(dtype).to(device) for name in names}
        cast |= {"angles_JE2": self.angles_JE2.to(wide).to(device), "length_1": self.length_1.to(device)}
        return Inputs(self.case, **cast)


def random_inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    angles = rotary_angles(torch.arange(case.num_rows), case.width, 1e4, torch.float32)
    keys_HJE, values_HJE = (normal(case.num_heads, case.num_rows, case.width) for _ in range(2))
    keys_HJE[:, case.length :] = values_HJE[:, case.length :] = torch.nan
    return Inputs(
        case,
        normal(case.num_tokens, (case.num_query_heads + 2 * case.num_heads) * case.width),
        normal(case.width),
        normal(case.width),
        torch.stack(angles, -1),
        torch.tensor([case.length]),
        keys_HJE,
        values_HJE,
    )


def write(x: Inputs, run: ModuleType, **options: bool) -> torch.Tensor:
    heads = x.case.num_query_heads
    cache = (x.angles_JE2, x.length_1, x.keys_HJE, x.values_HJE)
    q_THE: torch.Tensor = run.write(x.qkv_TC, x.q_norm_E, x.k_norm_E, EPS, *cache, heads, **options)
    return q_THE


def attend(x: Inputs, q_THE: torch.Tensor, run: ModuleType, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.case.width**-0.5
    context, lse = run.attend(q_THE, x.keys_HJE, x.values_HJE, x.length_1, scale, x.case.num_splits, **options)
    return context, lse


def step(x: Inputs, run: ModuleType, **options: bool) -> torch.Tensor:
    o_TC: torch.Tensor = run.merge(*attend(x, write(x, run, **options), run, **options), x.qkv_TC.dtype, **options)
    return o_TC


ODD_CASES = [
    Case(num_tokens=1, group=1, length=0, num_rows=70),
    Case(num_tokens=8, group=1, num_heads=3, width=20, length=63, num_rows=80, num_splits=5),
    Case(num_tokens=9, group=3, length=187, num_splits=2),
    Case(num_tokens=16, group=5, num_heads=1, width=12, length=120, num_splits=1),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ODD_CASES, ids=lambda case: f"T{case.num_tokens}G{case.group}")
def test_each_launch_is_as_near_to_the_truth_as_torch(
    case: Case, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    x, plain, before = (random_inputs(case).cast(dtype, kernel_device) for _ in range(3))
    exact = before.cast(torch.float64, kernel_device)
    q_THE, plain_q_THE, exact_q_THE = write(x, kernel), write(plain, reference), write(exact, reference)
    assert_near(q_THE, plain_q_THE, exact_q_THE, dtype)
    new = slice(case.length, case.length + case.num_tokens)
    assert_near(x.keys_HJE[:, new], plain.keys_HJE[:, new], exact.keys_HJE[:, new], dtype)
    assert torch.equal(x.values_HJE[:, new], plain.values_HJE[:, new])
    for rows, old in ((x.keys_HJE, before.keys_HJE), (x.values_HJE, before.values_HJE)):
        assert torch.equal(rows[:, : new.start], old[:, : new.start])
        assert rows[:, new.stop :].isnan().all()

    wide = plain.cast(torch.float64, kernel_device)  # the same rounded cache and queries from here on
    wide_context, wide_lse = attend(wide, plain_q_THE.double(), reference)
    context_STHE, lse_STH = attend(plain, plain_q_THE, kernel)
    plain_context, plain_lse = attend(plain, plain_q_THE, reference)
    is_seen_STH = wide_lse > -torch.inf
    assert torch.equal(lse_STH > -torch.inf, is_seen_STH)
    seen = [x[is_seen_STH] for x in (lse_STH, plain_lse, wide_lse, context_STHE, plain_context, wide_context)]
    assert_near(*seen[:3], torch.float32)
    assert_near(*seen[3:], dtype if IS_GPU else torch.float32)
    plain_context[~is_seen_STH] = torch.nan
    o_TC, plain_o_TC = (run.merge(plain_context, plain_lse, dtype) for run in (kernel, reference))
    exact_o_TC = reference.merge(plain_context.double(), plain_lse.double(), torch.float64)
    assert_near(o_TC, plain_o_TC, exact_o_TC, dtype)


@pytest.mark.parametrize("length", [0, 1, 59, 60, 63, 64, 123, 124, 131])
def test_every_slot_sees_the_context_and_the_whole_block(length: int, kernel_device: torch.device) -> None:
    case = Case(num_tokens=5, num_heads=1, width=4, length=length, num_rows=140, num_splits=2)
    x = random_inputs(case).cast(torch.float32, kernel_device)
    q_THE = write(x, kernel)
    x.values_HJE[0, : length + 5, 0] = torch.arange(length + 5)
    context_STHE, lse_STH = attend(x, q_THE * 0, kernel)
    counts_TH = lse_STH.exp().sum(0)
    assert counts_TH.round().eq(length + 5).all()
    mean_TH = kernel.merge(context_STHE, lse_STH, torch.float32).view(5, 2, 4)[..., 0]
    torch.testing.assert_close(mean_TH, torch.full_like(mean_TH, (length + 4) / 2), rtol=1e-5, atol=1e-5)


def test_context_rows_are_those_of_a_block_without_its_queries(kernel_device: torch.device) -> None:
    case = Case(num_tokens=40, length=90)  # more rows than a block has slots
    x, other = (random_inputs(case).cast(torch.float32, kernel_device) for _ in range(2))
    write(x, kernel)
    rows_TC = other.qkv_TC[:, case.num_query_heads * case.width :]
    context = Inputs(**other.__dict__ | {"case": Case(num_tokens=40, group=0, length=90), "qkv_TC": rows_TC})
    assert write(context, kernel).shape == (40, 0, 16)
    assert torch.equal(other.keys_HJE.nan_to_num(7), x.keys_HJE.nan_to_num(7))
    assert torch.equal(other.values_HJE.nan_to_num(7), x.values_HJE.nan_to_num(7))


def test_rows_past_the_capacity_are_dropped(kernel_device: torch.device) -> None:
    case = Case(num_tokens=4, length=68, num_rows=70)
    for run in (kernel, reference):
        x = random_inputs(case).cast(torch.float32, kernel_device)
        guarded = torch.full((2, 2, 80, 16), 5.0, device=kernel_device)
        guarded[:, :, :70] = torch.nan
        keys_HJE, values_HJE = (rows_HJE[:, :70] for rows_HJE in guarded)
        write(Inputs(**x.__dict__ | {"keys_HJE": keys_HJE, "values_HJE": values_HJE}), run)
        assert not guarded[:, :, 68:70].isnan().any()
        assert guarded[:, :, 70:].eq(5).all()


def test_the_result_does_not_depend_on_the_capacity(kernel_device: torch.device) -> None:
    small = random_inputs(Case(num_rows=107)).cast(torch.float32, kernel_device)
    large = random_inputs(Case(num_rows=200)).cast(torch.float32, kernel_device)
    large.keys_HJE[:, :107], large.values_HJE[:, :107] = small.keys_HJE, small.values_HJE
    large = Inputs(**small.__dict__ | {name: getattr(large, name) for name in ("angles_JE2", "keys_HJE", "values_HJE")})
    assert torch.equal(step(small, kernel), step(large, kernel))


def test_scores_far_apart_do_not_overflow(kernel_device: torch.device) -> None:
    x = random_inputs(Case(length=150, num_splits=2)).cast(torch.float32, kernel_device)
    q_THE = write(x, kernel) * 1e3
    parts, expected = attend(x, q_THE, kernel), attend(x, q_THE, reference)
    torch.testing.assert_close(parts[1], expected[1], rtol=1e-5, atol=1e-2)
    o_TC, expected_TC = kernel.merge(*parts, torch.float32), reference.merge(*expected, torch.float32)
    torch.testing.assert_close(o_TC, expected_TC, rtol=1e-2, atol=1e-2)  # scores in the thousands


def test_the_three_launches_equal_the_drafts_layer(kernel_device: torch.device) -> None:
    config = DraftConfig(
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=EPS,
        rope_theta=1e4,
        max_position_embeddings=64,
        block_size=6,
        num_target_layers=2,
        target_layer_ids=(0,),
        mask_token_id=0,
        vocab_size=50,
        markov_rank=4,
    )
    torch.manual_seed(0)
    layer = DraftAttention(config).requires_grad_(False)
    for norm in (layer.q_norm, layer.k_norm):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    case = Case(6, 2, 2, config.head_dim, length=37, num_rows=64)
    hidden_TD = torch.randn(43, config.hidden_size)
    rotary = rotary_angles(torch.arange(64), config.head_dim, config.rope_theta, torch.float32)
    own = (rotary[0][:43], rotary[1][:43])
    block = (rotary[0][37:43], rotary[1][37:43])
    keys, values = layer.keys_values(hidden_TD, own)
    expected_TD = layer(hidden_TD[37:], block, lambda _, q_NHE, *own: attend_all(q_NHE, keys, values, None))

    weights = [x.weight for x in (layer.q_proj, layer.k_proj, layer.v_proj)]
    x = Inputs(
        case,
        hidden_TD[37:] @ torch.cat(weights).T,
        layer.q_norm.weight,
        layer.k_norm.weight,
        torch.stack(rotary, -1),
        torch.tensor([37]),
        *torch.full((2, 2, 64, config.head_dim), torch.nan),
    ).cast(torch.float32, kernel_device)
    context_TC = (hidden_TD[:37] @ torch.cat(weights[1:]).T).to(kernel_device)
    start_1 = torch.zeros_like(x.length_1)
    block_attention.write(
        context_TC, x.q_norm_E, x.k_norm_E, EPS, x.angles_JE2, start_1, x.keys_HJE, x.values_HJE, 0
    )  # fmt: skip
    o_TC = step(x, kernel)
    torch.testing.assert_close(layer.o_proj(o_TC.cpu()), expected_TD, rtol=1e-4, atol=1e-5)


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    x = random_inputs(Case())
    x = Inputs(**x.__dict__ | {"angles_JE2": x.angles_JE2.double()})
    assert step(x, block_attention).shape == (5, 64)
    wrong = [
        {"qkv_TC": x.qkv_TC[:, :50]},
        {"k_norm_E": x.k_norm_E.float()},
        {"angles_JE2": x.angles_JE2[:5]},
        {"keys_HJE": x.keys_HJE.float()},
        {"values_HJE": x.values_HJE[:, 1:]},
        {"length_1": x.length_1.int()},
    ]
    for change in wrong:
        name = next(iter(change)).replace("length_1", "start_1")
        with pytest.raises(ValueError, match=f"{name}: expected .* found"):
            write(Inputs(**x.__dict__ | change), block_attention)
    q_THE = write(x, block_attention)
    for q, says in ((q_THE[:, :3], "a multiple of 2 query heads"), (q_THE.repeat(4, 1, 1), "1 to 16 tokens")):
        with pytest.raises(ValueError, match=f"q_THE: expected .*{says}"):
            attend(x, q, block_attention)
    with pytest.raises(ValueError, match="context_STHE"):
        block_attention.merge(*attend(x, q_THE, block_attention), torch.float32)


def test_flash_shapes_compile_for_sm90_without_spills_and_wait_before_they_write() -> None:
    bf16 = dict.fromkeys(("qkv", "q_norm", "k_norm", "q", "keys", "values", "o"), "*bf16")
    kinds = bf16 | dict.fromkeys(("angles", "context", "lse"), "*fp32") | {"start": "*i64", "length": "*i64"}
    kinds |= {"eps": "fp32", "scale_log2": "fp32"} | dict.fromkeys(("num_tokens", "num_rows", "num_splits"), "i32")
    sizes = {"QKV_STRIDE": 3072, "QUERIES": 8, "GROUP": 1, "WIDTH": 128, "TILE": 16, "HEADS": 8}
    sizes |= dict.fromkeys(("KEYS_STRIDE", "VALUES_STRIDE"), 32784 * 128) | {"BLOCK": kernel.BLOCK_ROWS}
    sizes |= {"IS_CHAINED": True, "SPLITS": 33, "COLUMNS": 32}
    kernels = [
        {
            "name": function.__name__,
            "signature": {name: kinds.get(name, "constexpr") for name in function.arg_names},
            "constexprs": {name: size for name, size in sizes.items() if name in function.arg_names},
            "num_warps": warps,
            "num_stages": 3,
        }
        for function, warps in ((kernel.write_kernel, 1), (kernel.attend_kernel, 4), (kernel.merge_kernel, 4))
    ]
    compiled = compile_sm90("dspark.kernels.block_attention.kernel", kernels)
    for each in compiled:
        assert each.spill_bytes == 0
        assert each.ptx.index("griddepcontrol.wait") < each.ptx.index("st.global")
    assert compiled[1].shared_bytes <= 113 * 1024, "two programs a multiprocessor"
    assert "wgmma" in compiled[1].ptx
    assert "cp.async" in compiled[1].ptx
    assert "prefetch.global.L2" in compiled[1].ptx.split("griddepcontrol.wait")[0]


@gpu_only
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("length", [0, 100, 8184])
def test_gpu_check_flash_quarter(group: int, length: int, kernel_device: torch.device) -> None:
    case = Case(8, group, 8 // group, 128, length, 8192, 33)
    x, plain, chained = (random_inputs(case).cast(torch.bfloat16, kernel_device) for _ in range(3))
    truth = step(random_inputs(case).cast(torch.bfloat16, kernel_device).cast(torch.float64, kernel_device), reference)
    together = step(x, block_attention)
    assert_near(together, step(plain, reference), truth, torch.bfloat16)
    assert torch.equal(step(chained, block_attention, is_chained=True), together)
    assert torch.equal(chained.keys_HJE.nan_to_num(7), x.keys_HJE.nan_to_num(7))


@gpu_only
def test_gpu_check_the_length_may_change_under_one_graph(kernel_device: torch.device) -> None:
    x = random_inputs(Case(8, 1, 8, 128, 3000, 8192, 33)).cast(torch.bfloat16, kernel_device)
    x.keys_HJE.nan_to_num_(0.5)
    x.values_HJE.nan_to_num_(0.5)
    step(x, block_attention)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o_TC = step(x, block_attention, is_chained=True)
    for length in (3000, 0, 8184, 64):
        x.length_1.fill_(length)
        graph.replay()
        replayed = o_TC.clone()
        assert torch.equal(step(x, block_attention), replayed)
