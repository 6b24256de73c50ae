"""The greedy head and greedy acceptance: kernels against their definitions, ties and rows without a number included."""

import re
from collections.abc import Callable

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import head, launch
from dspark.kernels.head import kernel, reference
from dspark.kernels.head.kernel import Tile
from dspark.kernels.projection.kernel import project

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes need a GPU")
TILES = {
    "a program a tile": Tile(16, 32, 0, 4, 2),
    "shared": Tile(16, 64, 3, 4, 3),
    "more programs than a merge takes at a time": Tile(16, 128, 70, 4, 2),
    "one program": Tile(64, 32, 1, 4, 2),
}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def zero(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def check_greedy(hidden_TD: torch.Tensor, head_VD: torch.Tensor, tile: Tile | None = None) -> None:
    """The value is float32's; the id is the truth's, unless float32 cannot tell the two values apart."""
    counters = zero(hidden_TD.device)
    best_T, ids_T = kernel.greedy(hidden_TD, head_VD, 1000, counters, tile=tile)
    assert not counters.any()
    assert best_T.dtype == torch.float32
    assert ids_T.dtype == torch.int64
    logits_TV = hidden_TD.double() @ head_VD.double().T
    truth_T, rows_T = logits_TV.max(1)
    errors = [best.double() - truth_T for best in (best_T, reference.greedy(hidden_TD, head_VD, 0)[0])]
    # a GPU's tensor cores cut their sums off, and in float32 its chains of multiply-adds are longer than torch's
    slack = 1e-7 if launch.IS_INTERPRETED else 1e-6 if head_VD.dtype == torch.float32 else 1e-5
    assert errors[0].norm() <= 1.25 * errors[1].norm() + slack * truth_T.norm()
    error = 3e-6 * hidden_TD.double().norm(dim=1) * head_VD.double().norm(dim=1).max()
    assert all((found_T.abs() <= error).all() for found_T in errors)
    chosen_T = logits_TV.gather(1, ids_T[:, None] - 1000)[:, 0]
    assert ((ids_T - 1000 == rows_T) | (truth_T - chosen_T <= error)).all()
    assert (ids_T - 1000 == rows_T).float().mean() >= 0.9


DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
"""Of hidden states and head."""


@pytest.mark.parametrize(("dtype", "head_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 9, 16])
def test_greedy_finds_the_largest_logit(
    tokens: int, dtype: torch.dtype, head_dtype: torch.dtype, kernel_device: torch.device
) -> None:
    hidden_TD = normal(tokens, 100, dtype=dtype, device=kernel_device)
    check_greedy(hidden_TD, normal(257, 100, seed=1, dtype=head_dtype, device=kernel_device))


@pytest.mark.parametrize(("dtype", "head_dtype"), DTYPES, ids=str)
def test_products_are_taken_in_the_heads_dtype(
    dtype: torch.dtype, head_dtype: torch.dtype, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not launch.IS_INTERPRETED:
        pytest.skip("no question is heard where kernels are compiled")
    asked: list[str] = []  # the interpreter computes in float32 whatever is asked for
    dot_dtype = launch.dot_dtype
    monkeypatch.setattr(launch, "dot_dtype", lambda dtype: asked.append(dtype.name) or dot_dtype(dtype))
    hidden_TD = normal(3, 32, dtype=dtype, device=kernel_device)
    head_VD = normal(20, 32, seed=1, dtype=head_dtype, device=kernel_device)
    kernel.greedy(hidden_TD, head_VD, 0, zero(kernel_device))
    project(hidden_TD, head_VD, torch.zeros(2, dtype=torch.int32, device=kernel_device))
    assert set(asked) == {{torch.bfloat16: "bf16", torch.float32: "fp32"}[head_dtype]}


@pytest.mark.parametrize("name", TILES)
def test_every_way_of_cutting_the_head_is_right(name: str, kernel_device: torch.device) -> None:
    for rows, width in ((1040, 20), (5, 100), (131, 64)):
        hidden_TD = normal(9, width, dtype=torch.bfloat16, device=kernel_device)
        head_VD = normal(rows, width, seed=1, dtype=torch.bfloat16, device=kernel_device)
        check_greedy(hidden_TD, head_VD, TILES[name])


@pytest.mark.parametrize("name", TILES)
def test_of_equal_logits_the_smaller_id_wins(name: str, kernel_device: torch.device) -> None:
    hidden_TD = normal(6, 32, dtype=torch.float32, device=kernel_device)
    head_VD = -hidden_TD[:1].repeat(1040, 1) - hidden_TD[1:2]
    twins = ((3, 19), (0, 1039), (70, 71), (1026, 1030), (15, 16), (640, 950))
    for token, pair in enumerate(twins):
        head_VD[list(pair)] = 10 * hidden_TD[token]
    _, ids_T = kernel.greedy(hidden_TD, head_VD, 7, zero(kernel_device), tile=TILES[name])
    assert ids_T.tolist() == [first + 7 for first, _ in twins]


@pytest.mark.filterwarnings("ignore:invalid value")  # infinities that cancel are meant
@pytest.mark.parametrize("name", TILES)
def test_negative_infinite_and_undefined_logits_never_win(name: str, kernel_device: torch.device) -> None:
    hidden_TD = torch.ones(4, 32, device=kernel_device)
    hidden_TD[1] = -1  # every logit -inf
    hidden_TD[2] = torch.nan
    hidden_TD[3, 1:] = 0  # finite where only later columns are infinite is NaN: 0 * inf
    head_VD = torch.full((150, 32), torch.inf, device=kernel_device)
    head_VD[100] = -2.0
    head_VD[101] = torch.nan
    for rows_VD in (head_VD[:100], -head_VD.abs(), head_VD):
        best_T, ids_T = kernel.greedy(hidden_TD, rows_VD, 5, zero(kernel_device), tile=TILES[name])
        expected_T, expected_ids_T = reference.greedy(hidden_TD, rows_VD, 5)
        assert torch.equal(best_T, expected_T)
        assert torch.equal(ids_T, expected_ids_T)
    best_T, ids_T = kernel.greedy(hidden_TD[1:3], head_VD[:100], 5, zero(kernel_device), tile=TILES[name])
    assert best_T.tolist() == [-torch.inf, -torch.inf]
    assert ids_T.tolist() == [5, 5]


def test_all_negative_logits_do_not_lose_to_rows_past_the_end(kernel_device: torch.device) -> None:
    hidden_TD = torch.ones(2, 40, device=kernel_device)
    head_VD = -torch.rand(21, 40, device=kernel_device) - 0.1
    for tile in TILES.values():
        best_T, _ = kernel.greedy(hidden_TD, head_VD, 0, zero(kernel_device), tile=tile)
        torch.testing.assert_close(best_T, (hidden_TD @ head_VD.T).amax(1))


def test_a_tokens_choice_does_not_depend_on_the_tokens_beside_it(kernel_device: torch.device) -> None:
    hidden_TD = normal(9, 64, dtype=torch.float32, device=kernel_device)
    head_VD = normal(100, 64, seed=1, dtype=torch.float32, device=kernel_device)
    together = kernel.greedy(hidden_TD, head_VD, 0, zero(kernel_device))
    for t in (0, 4, 8):
        alone = kernel.greedy(hidden_TD[t : t + 1], head_VD, 0, zero(kernel_device))
        assert all(torch.equal(one, all_T[t : t + 1]) for one, all_T in zip(alone, together, strict=True))


def window(
    tokens: int, ranks: int, num_kept: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maxima of several ranks and drafts of which exactly the first ``num_kept`` are the target's choices."""
    generator = torch.Generator().manual_seed(tokens + 100 * num_kept)
    best_RT = torch.randint(0, 3, (ranks, tokens), generator=generator).float()  # many equal ones
    best_ids_RT = torch.randint(0, 50, (ranks, tokens), generator=generator)
    choice_T = [min((-float(best_RT[r, t]), int(best_ids_RT[r, t])) for r in range(ranks))[1] for t in range(tokens)]
    ids_T = torch.tensor([99, *choice_T[:-1]])
    if num_kept < tokens - 1:
        ids_T[num_kept + 1] += 1
    return ids_T.to(device), best_RT.to(device), best_ids_RT.to(device)


@pytest.mark.parametrize("tokens", [1, 2, 9, 16])
def test_accept_counts_the_last_token_and_the_drafts_that_stay(tokens: int, kernel_device: torch.device) -> None:
    for ranks in (1, 3, 4):
        for num_kept in range(tokens):
            ids_T, best_RT, best_ids_RT = window(tokens, ranks, num_kept, kernel_device)
            for accept in (kernel.accept, reference.accept):
                count_1, next_id_1 = accept(ids_T, best_RT, best_ids_RT)
                assert count_1.tolist() == [num_kept + 1]
                chosen = [
                    int(i)
                    for value, i in zip(best_RT[:, num_kept], best_ids_RT[:, num_kept], strict=True)
                    if value == best_RT[:, num_kept].max()
                ]
                assert next_id_1.tolist() == [min(chosen)]
                assert count_1.dtype == next_id_1.dtype == torch.int64


def test_accept_takes_a_rank_that_found_nothing(kernel_device: torch.device) -> None:
    nothing, undefined = -torch.inf, torch.nan
    maxima = [
        [nothing, nothing, undefined, undefined],
        [-5.0, nothing, -9.0, nothing],
        [nothing, nothing, -9.0, undefined],
    ]
    best_RT = torch.tensor(maxima, device=kernel_device)
    best_ids_RT = torch.tensor([[2, 9, 3, 8], [4, 30, 31, 7], [6, 40, 51, 60]], device=kernel_device)
    ids_T = torch.tensor([1, 4, 9, 31], device=kernel_device)
    for accept in (kernel.accept, reference.accept):
        count_1, next_id_1 = accept(ids_T, best_RT, best_ids_RT)
        assert (count_1.item(), next_id_1.item()) == (4, 7)
        no_number_R1 = torch.full_like(best_RT[:, :1], torch.nan)
        count_1, next_id_1 = accept(ids_T[:1], no_number_R1, best_ids_RT[:, 3:].contiguous())
        assert (count_1.item(), next_id_1.item()) == (1, 7)


def test_the_public_functions_check_and_pick_by_device(kernel_device: torch.device) -> None:
    hidden_TD = normal(3, 48, dtype=torch.float32, device=kernel_device)
    head_VD = normal(20, 48, seed=1, dtype=torch.float32, device=kernel_device)
    counters = zero(kernel_device)
    best_T, ids_T = head.greedy(hidden_TD, head_VD, 10, counters)
    expected_T, expected_ids_T = reference.greedy(hidden_TD, head_VD, 10)
    torch.testing.assert_close(best_T, expected_T)
    assert torch.equal(ids_T, expected_ids_T)
    ids_T, best_RT, best_ids_RT = window(3, 2, 1, kernel_device)
    wrong: list[Callable[[], object]] = [
        lambda: head.greedy(hidden_TD[:, :40], head_VD, 0, counters),
        lambda: head.greedy(hidden_TD, head_VD.double(), 0, counters),
        lambda: head.greedy(hidden_TD, head_VD.bfloat16(), 0, counters),
        lambda: head.greedy(hidden_TD.repeat(6, 1), head_VD, 0, counters),
        lambda: head.greedy(hidden_TD, head_VD, 0, counters[:0]),
        lambda: head.greedy(hidden_TD, head_VD.T.contiguous().T, 0, counters),
        lambda: head.accept(ids_T[:2], best_RT, best_ids_RT),
        lambda: head.accept(ids_T, best_RT.double(), best_ids_RT),
        lambda: head.accept(ids_T.int(), best_RT, best_ids_RT),
        lambda: head.accept(ids_T, best_RT.T.contiguous().T, best_ids_RT),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match=r"expected .*found"):
            call()


def test_flash_shapes_compile_for_sm90_without_spills_and_wait_before_they_write() -> None:
    pointers = dict.fromkeys(("hidden", "head"), "*bf16") | dict.fromkeys(("best", "partial_best"), "*fp32")
    pointers |= {"ids": "*i64", "partial_rows": "*i32", "counters": "*i32"}
    scalars = dict.fromkeys(("first_id", "num_tokens", "hidden_stride", "head_stride"), "i32")

    def greedy(tile: Tile) -> dict[str, object]:
        programs = kernel.num_programs(39296, tile)
        cut = {"ROWS": tile.rows, "COLUMNS": tile.columns, "PROGRAMS": programs, "num_stages": tile.num_stages}
        cut |= {"NUM_CHUNKS": 2 * (tile is narrow), "CHUNK": 1280, "IS_CHAINED": True}
        return {"V": 39296, "D": 2560, **cut}

    narrow, wide = kernel.tile_for(2), kernel.tile_for(4)
    whole = pointers | scalars
    accepting = {"ids": "*i64", "best": "*fp32", "best_ids": "*i64", "count": "*i64"}
    accepting |= {"next_id": "*i64"}
    rules = {"NUM_TOKENS": 9, "NUM_RANKS": 4, "IS_CHAINED": True}
    kernels = []
    for function, signature, constexprs, warps, stages in (
        (kernel.greedy_kernel, whole, greedy(narrow), narrow.num_warps, narrow.num_stages),
        (kernel.greedy_kernel, whole | {"head": "*fp32"}, greedy(wide), wide.num_warps, wide.num_stages),
        (kernel.accept_kernel, accepting, rules, 1, 1),
    ):
        kernels.append(
            {
                "name": function.__name__,
                "signature": {name: signature.get(name, "constexpr") for name in function.arg_names},
                "constexprs": constexprs,
                "num_warps": warps,
                "num_stages": stages,
            }
        )
    for row, compiled in zip(kernels, compile_sm90("dspark.kernels.head.kernel", kernels), strict=True):
        assert compiled.spill_bytes == 0, row["name"]
        assert compiled.shared_bytes <= 113 * 1024, row["name"]
        before, after = compiled.ptx.split("griddepcontrol.wait", 1)
        assert not re.search(r"(st|atom|red|ld)\.global", before), row["name"]
        assert re.search(r"st\.global", after), row["name"]


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 9, 16])
def test_a_ranks_vocabulary_is_right_on_a_gpu(tokens: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    hidden_TD = normal(tokens, 2560, dtype=torch.bfloat16, device=kernel_device)
    head_VD = 0.02 * normal(39296, 2560, seed=1, dtype=dtype, device=kernel_device)
    check_greedy(hidden_TD, head_VD)
    alone = kernel.greedy(hidden_TD, head_VD, 0, zero(kernel_device))
    for _ in range(20):
        chained = kernel.greedy(hidden_TD, head_VD, 0, zero(kernel_device), is_chained=True)
        assert all(map(torch.equal, alone, chained))
