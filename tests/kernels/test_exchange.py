"""The residual stream over ranks: all ranks in one process, and the protocol in every interleaving."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import exchange
from dspark.kernels.exchange import kernel, reference
from dspark.kernels.residual.reference import partial_sum

EPS = 1e-6
ROWS = 3


class Ranks:
    """All ranks in one process: every rank pushes, then every rank receives."""

    def __init__(self, num_ranks: int, width: int, sent: torch.dtype, device: torch.device) -> None:
        flat = [torch.empty(3 * num_ranks * ROWS * width, dtype=sent, device=device) for _ in range(num_ranks)]
        self.slots = [exchange.empty_slots(memory, num_ranks, ROWS, width) for memory in flat]
        self.peers_R = torch.tensor([slots.data_ptr() for slots in self.slots], device=device)
        self.turns = [torch.zeros(ROWS, dtype=torch.int32, device=device) for _ in self.slots]
        self.errors = [torch.zeros(ROWS, dtype=torch.int32, device=device) for _ in self.slots]

    def run(self, rank: int, inputs: list[Any], *phases: bool) -> tuple[torch.Tensor, torch.Tensor]:
        memory = (self.peers_R, self.slots[rank], self.turns[rank], self.errors[rank], rank)
        names = dict(zip(("peers_R", "slots_SRPD", "turns_P", "errors_P", "rank"), memory, strict=True))
        return kernel.add_norm(**inputs[rank], eps=EPS, **names, max_polls=3, phases=phases)

    def push(self, rank: int, inputs: list[Any]) -> None:
        self.run(rank, inputs, True, False)

    def receive(self, rank: int, inputs: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run(rank, inputs, False, True)

    def call(self, inputs: list[Any], silent: int = -1) -> list[tuple[torch.Tensor, torch.Tensor]]:
        for rank in range(len(inputs)):
            if rank != silent:
                self.push(rank, inputs)
        return [self.receive(rank, inputs) for rank in range(len(inputs))]


def rank_inputs(
    num_ranks: int, num_tokens: int, num_parts: int, width: int, device: torch.device, seed: int, dtype: torch.dtype
) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    residual_TD = torch.randn(num_tokens, width, generator=generator).to(dtype).to(device)
    weight_D = torch.randn(width, generator=generator).to(dtype).to(device)
    rows = []
    for _ in range(num_ranks):
        parts_TKD = torch.randn(num_tokens, num_parts, width, generator=generator)
        parts_TKD[..., ::3] = -0.0  # what stands for an empty place may well be the sum,
        parts_TKD[..., 1::3] = -(2.0**-24)  # or what is left of it in float16
        weights_TK = torch.rand(num_tokens, num_parts, generator=generator) / 5
        rows.append({"parts_TKD": parts_TKD.to(dtype).to(device), "weights_TK": weights_TK.to(device)})
    return [row | {"residual_TD": residual_TD, "norm_weight_D": weight_D} for row in rows]


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "sent"),
    [(2, torch.float32, torch.float32), (3, torch.float16, torch.float16), (4, torch.float16, torch.float32)],
)
def test_every_rank_gets_the_sum_of_all_ranks_in_turn_after_turn(
    num_ranks: int, dtype: torch.dtype, sent: torch.dtype, kernel_device: torch.device
) -> None:
    width = 37
    ranks = Ranks(num_ranks, width, sent, kernel_device)
    for call, num_tokens in enumerate((2, 1, 3, 2, 3)):
        inputs = rank_inputs(num_ranks, num_tokens, 2, width, kernel_device, call, dtype)
        outputs = ranks.call(inputs)
        partials_RTD = torch.stack([partial_sum(x["parts_TKD"], x["weights_TK"]).to(sent) for x in inputs])
        expected = reference.sum_norm(partials_RTD, inputs[0]["residual_TD"], inputs[0]["norm_weight_D"], EPS)
        for actual in outputs:
            for mine, first, right in zip(actual, outputs[0], expected, strict=True):
                assert torch.equal(mine, first), "bits differ between ranks"
                tolerance = 1e-5 if dtype == torch.float32 else 2**-9
                torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance)
    assert all(turns.eq(5 % 3).all() for turns in ranks.turns)
    assert not any(errors.any() for errors in ranks.errors)


def test_float32_partials_are_rounded_after_all_ranks_are_added(kernel_device: torch.device) -> None:
    ranks = Ranks(2, 8, torch.float32, kernel_device)
    zeros_TD = torch.zeros(1, 8, dtype=torch.float16, device=kernel_device)
    rest = {"weights_TK": None, "residual_TD": zeros_TD, "norm_weight_D": zeros_TD[0]}
    parts = [torch.full((1, 1, 8), value, device=kernel_device) for value in (2049.0, 1.0)]
    for residual_TD, _ in ranks.call([rest | {"parts_TKD": parts_TKD} for parts_TKD in parts]):
        assert residual_TD.eq(2050).all()


def test_a_rank_may_push_the_next_call_before_another_has_read_this_one(kernel_device: torch.device) -> None:
    ranks = Ranks(2, 8, torch.float32, kernel_device)
    calls = [rank_inputs(2, 2, 1, 8, kernel_device, call, torch.float32) for call in range(8)]
    ranks.push(0, calls[0])
    for call, inputs in enumerate(calls):
        ranks.push(1, inputs)
        first = ranks.receive(0, inputs)
        if call + 1 < len(calls):
            ranks.push(0, calls[call + 1])
        second = ranks.receive(1, inputs)
        partials_RTD = torch.stack([partial_sum(x["parts_TKD"], x["weights_TK"]) for x in inputs])
        expected = reference.sum_norm(partials_RTD, inputs[0]["residual_TD"], inputs[0]["norm_weight_D"], EPS)
        torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(second, expected, rtol=1e-5, atol=1e-5)


def test_a_rank_that_stays_silent_is_reported_and_its_rows_are_not_numbers(kernel_device: torch.device) -> None:
    ranks = Ranks(2, 20, torch.float32, kernel_device)
    ranks.call(rank_inputs(2, 2, 1, 20, kernel_device, 0, torch.float32))
    outputs = ranks.call(rank_inputs(2, 2, 1, 20, kernel_device, 1, torch.float32), silent=1)
    for errors, (residual_TD, normed_TD) in zip(ranks.errors, outputs, strict=True):
        assert errors.tolist() == [1, 1] + [0] * (ROWS - 2)
        assert residual_TD.isnan().all()
        assert normed_TD.isnan().all()


def test_the_cpu_is_refused() -> None:
    memory = Ranks(2, 8, torch.float32, torch.device("cpu"))
    handle = exchange.Exchange(0, memory.peers_R, memory.slots[0], memory.turns[0], memory.errors[0])
    with pytest.raises(ValueError, match="on a GPU, found 3 on cpu"):
        exchange.add_norm(torch.zeros(3, 1, 8), None, torch.zeros(3, 8), torch.ones(8), EPS, handle)


def test_flash_rows_compile_for_sm90_without_spills_and_wait_before_they_write() -> None:
    signature = {"parts": "*bf16", "weights": "*fp32"}
    signature |= dict.fromkeys(("residual", "norm_weight", "new_residual", "normed"), "*bf16")
    signature |= {"peers": "*i64", "turns": "*i32", "errors": "*i32", "eps": "fp32"}
    signature |= dict.fromkeys(("num_tokens", "rank", "max_polls"), "i32")
    sizes = {"WIDTH": 2560, "PARTS": 9, "HAS_WEIGHTS": True, "RANKS": 4, "RANKS_PAD": 4, "ROWS": 16, "BLOCK": 4096}
    sizes |= {"DO_PUSH": True, "DO_RECEIVE": True, "IS_CHAINED": True}
    kernels = [
        {
            "name": "exchange_kernel",
            "signature": signature | {"slots": pointer},
            "constexprs": sizes | {"EMPTY_BITS": kernel.EMPTY[dtype]},
            "num_warps": 16,
            "maxnreg": 128,
        }
        for pointer, dtype in (("*fp32", torch.float32), ("*bf16", torch.bfloat16))
    ]
    for compiled in compile_sm90("dspark.kernels.exchange.kernel", kernels):
        assert compiled.spill_bytes == 0
        assert compiled.ptx.index("griddepcontrol.wait") < compiled.ptx.index("st.global")
        assert "ld.volatile.global.v4" in compiled.ptx


@pytest.mark.skipif(not torch.cuda.is_available(), reason="waiting for another rank needs a GPU")
def test_gpu_check_two_ranks_on_two_streams_wait_for_each_other(kernel_device: torch.device) -> None:
    ranks, width = Ranks(2, 2560, torch.float32, kernel_device), 2560
    streams = [torch.cuda.Stream() for _ in range(2)]
    calls = [rank_inputs(2, 1 + call % ROWS, 9, width, kernel_device, call, torch.bfloat16) for call in range(200)]
    torch.cuda.synchronize()
    outputs = []
    for inputs in calls:
        for rank, stream in enumerate(streams):
            memory = (ranks.peers_R, ranks.slots[rank], ranks.turns[rank], ranks.errors[rank])
            with torch.cuda.stream(stream):
                handle = exchange.Exchange(rank, *memory)
                outputs.append(exchange.add_norm(**inputs[rank], eps=EPS, exchange=handle, is_chained=True))
    torch.cuda.synchronize()
    assert not any(errors.any() for errors in ranks.errors)
    for inputs, first, second in zip(calls, outputs[::2], outputs[1::2], strict=True):
        partials_RTD = torch.stack([partial_sum(x["parts_TKD"], x["weights_TK"]) for x in inputs])
        expected = reference.sum_norm(partials_RTD, inputs[0]["residual_TD"], inputs[0]["norm_weight_D"], EPS)
        for mine, other, right in zip(first, second, expected, strict=True):
            assert torch.equal(mine, other)
            torch.testing.assert_close(mine, right, rtol=2**-6, atol=2**-6)


# The protocol as a state machine. A rank's program for one number of one row: push it to both ranks, empty the set of
# the call before, poll its own set until both numbers are there. Pushes to the peer are in flight until they land, at
# any time and in any order; emptying is done when the call ends (a kernel's end, for which the next one waits).


@dataclass(frozen=True)
class Rank:
    """Where one of two ranks stands, and its slots: sets of (number from rank 0, from rank 1), None where empty."""

    call: int
    step: int
    slots: tuple[tuple[int | None, int | None], ...]


@dataclass(frozen=True)
class World:
    """Both ranks, and the pushes in flight: (to, set, from, number)."""

    ranks: tuple[Rank, Rank]
    flying: frozenset[tuple[int, int, int, int]] = frozenset()


PUSH, EMPTY, POLL = range(3)
ORDER = (PUSH, EMPTY, POLL)


def written(rank: Rank, place: int, source: int, number: int | None) -> Rank:
    pair = tuple(number if who == source else old for who, old in enumerate(rank.slots[place]))
    return replace(rank, slots=(*rank.slots[:place], pair, *rank.slots[place + 1 :]))


def with_rank(world: World, me: int, rank: Rank) -> World:
    ranks = (rank, world.ranks[1]) if me == 0 else (world.ranks[0], rank)
    return replace(world, ranks=ranks)


def successors(world: World, num_calls: int, num_sets: int, back: int, order: tuple[int, ...]) -> Iterator[World]:
    """Every next state. Raises AssertionError when a rank reads a number of another call."""
    for push in world.flying:
        to, place, source, number = push
        landed = with_rank(world, to, written(world.ranks[to], place, source, number))
        yield replace(landed, flying=world.flying - {push})
    for me, rank in enumerate(world.ranks):
        if rank.call == num_calls:
            continue
        place = rank.call % num_sets
        following = replace(rank, step=rank.step + 1)
        if order[rank.step] == PUSH:
            pushed = with_rank(world, me, written(following, place, me, rank.call))
            yield replace(pushed, flying=world.flying | {(1 - me, place, me, rank.call)})
        elif order[rank.step] == EMPTY:
            old = (rank.call - back) % num_sets
            yield with_rank(world, me, written(written(following, old, 0, None), old, 1, None))
        elif None not in rank.slots[place]:
            assert rank.slots[place] == (rank.call, rank.call), f"call {rank.call} read {rank.slots[place]}"
            yield with_rank(world, me, following)


def explore(num_calls: int, num_sets: int, back: int = 1, order: tuple[int, ...] = ORDER) -> int:
    """Walk every reachable state; returns their number. Raises AssertionError for a wrong read or a stuck state."""
    empty = ((None, None),) * num_sets
    start = World((Rank(0, 0, empty), Rank(0, 0, empty)))
    seen, todo = {start}, [start]
    while todo:
        world = todo.pop()
        is_stuck = True
        for after in successors(world, num_calls, num_sets, back, order):
            is_stuck = False
            for me, rank in enumerate(after.ranks):
                if rank.step == len(order):
                    after = with_rank(after, me, replace(rank, call=rank.call + 1, step=0))
            if after not in seen:
                seen.add(after)
                todo.append(after)
        is_over = all(rank.call == num_calls for rank in world.ranks)
        assert is_over or not is_stuck, f"stuck at {world}"
    return len(seen)


def test_three_sets_are_right_in_every_interleaving_of_two_ranks() -> None:
    assert explore(num_calls=8, num_sets=exchange.NUM_TURNS) > 100
    assert explore(num_calls=8, num_sets=exchange.NUM_TURNS, order=(EMPTY, PUSH, POLL)) > 100
    assert explore(num_calls=8, num_sets=exchange.NUM_TURNS, order=(PUSH, POLL, EMPTY)) > 100


@pytest.mark.parametrize(
    ("num_sets", "back", "order"),
    [
        (2, 1, (PUSH, EMPTY, POLL)),  # the peer may have pushed the next call's number already
        (3, 2, (PUSH, EMPTY, POLL)),  # that is the next call's set: the same
        (3, 0, (PUSH, EMPTY, POLL)),  # its own set, before it was read
        (1, 0, (PUSH, POLL, EMPTY)),
        (2, 0, (PUSH, POLL, POLL)),  # never emptied: reads the call before last
    ],
)
def test_the_walk_finds_what_is_wrong_with_other_protocols(num_sets: int, back: int, order: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match=r"stuck|read"):
        explore(8, num_sets, back, order)
