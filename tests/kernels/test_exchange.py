"""The residual stream over ranks: all ranks in one process, and the protocol in every interleaving."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernels.compiling import compile_sm90

from dspark.kernels import exchange
from dspark.kernels.exchange import kernel
from dspark.kernels.residual.reference import add_norm, partial_sum

EPS = 1e-6
ROWS = 3
LIMIT_SECONDS = 3e-6
"""Three polls in the interpreter."""


class Ranks:
    """All ranks in one process: every rank pushes, then every rank receives."""

    def __init__(self, num_ranks: int, width: int, sent: torch.dtype, device: torch.device) -> None:
        flat = [torch.empty(3 * num_ranks * ROWS * width, dtype=sent, device=device) for _ in range(num_ranks)]
        slots = [exchange.empty_slots(memory, num_ranks, ROWS, width) for memory in flat]
        peers_R = torch.tensor([memory.data_ptr() for memory in slots], device=device)
        self.turns = [torch.zeros(ROWS, dtype=torch.int32, device=device) for _ in slots]
        self.errors = [torch.zeros(ROWS, dtype=torch.int32, device=device) for _ in slots]
        rows = enumerate(zip(slots, self.turns, self.errors, strict=True))
        self.memory = [exchange.Exchange(rank, peers_R, *own, LIMIT_SECONDS) for rank, own in rows]

    def run(self, rank: int, inputs: list[Any], *phases: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return kernel.add_norm(**inputs[rank], eps=EPS, exchange=self.memory[rank], phases=phases)

    def push(self, rank: int, inputs: list[Any]) -> None:
        self.run(rank, inputs, True, False)

    def receive(self, rank: int, inputs: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run(rank, inputs, False, True)

    def call(self, inputs: list[Any], silent: int = -1) -> list[tuple[torch.Tensor, torch.Tensor]]:
        for rank in range(len(inputs)):
            if rank != silent:
                self.push(rank, inputs)
        return [self.receive(rank, inputs) for rank in range(len(inputs))]

    def gather(self, values: list[torch.Tensor], silent: int = -1) -> list[torch.Tensor]:
        """Every rank's [T, C] of four-byte numbers, as every rank gets them."""

        def run(rank: int, phases: tuple[bool, bool]) -> torch.Tensor:
            return kernel.gather(values[rank].view(torch.int32), self.memory[rank], phases=phases)

        for rank in range(len(values)):
            if rank != silent:
                run(rank, (True, False))
        return [run(rank, (False, True)).view(values[0].dtype) for rank in range(len(values))]


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
        partials_TRD = torch.stack([partial_sum(x["parts_TKD"], x["weights_TK"]).to(sent) for x in inputs], 1)
        expected = add_norm(partials_TRD, None, inputs[0]["residual_TD"], inputs[0]["norm_weight_D"], EPS)
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
        partials_TRD = torch.stack([partial_sum(x["parts_TKD"], x["weights_TK"]) for x in inputs], 1)
        expected = add_norm(partials_TRD, None, inputs[0]["residual_TD"], inputs[0]["norm_weight_D"], EPS)
        torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(second, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gathers_and_sums_are_one_series(num_ranks: int, kernel_device: torch.device) -> None:
    width = 20
    ranks = Ranks(num_ranks, width, torch.float32, kernel_device)
    generator = torch.Generator().manual_seed(0)
    for call, num_tokens in enumerate((2, 3, 1, 1, 3, 2, 3)):
        best = [torch.randn(num_tokens, 1, generator=generator).to(kernel_device) for _ in range(num_ranks)]
        best[-1][:, 0] = -torch.inf
        ids = [torch.randint(157184, (num_tokens, 1), generator=generator).to(kernel_device) for _ in range(num_ranks)]
        for values in (best, ids) if call % 2 else (ids, [row.expand(-1, width).contiguous() for row in best]):
            for found_RTC in ranks.gather(values):
                assert torch.equal(found_RTC, torch.stack(values))
        inputs = rank_inputs(num_ranks, num_tokens, 1, width, kernel_device, call, torch.float32)
        partials_TRD = torch.stack([partial_sum(x["parts_TKD"], x["weights_TK"]) for x in inputs], 1)
        expected = add_norm(partials_TRD, None, inputs[0]["residual_TD"], inputs[0]["norm_weight_D"], EPS)
        for actual in ranks.call(inputs):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert not any(errors.any() for errors in ranks.errors)


def test_a_gathered_minus_zero_is_zero(kernel_device: torch.device) -> None:
    ranks = Ranks(2, 8, torch.float32, kernel_device)
    values = [torch.full((1, 3), value, device=kernel_device) for value in (-0.0, 1.0)]
    for found_RTC in ranks.gather(values):
        assert found_RTC.tolist() == [[[0.0] * 3], [[1.0] * 3]]
        assert not found_RTC.signbit().any()


@pytest.mark.parametrize(("num_ranks", "silent"), [(2, 1), (2, 0), (3, 1)])
def test_a_rank_that_stays_silent_is_named_and_its_rows_are_not_numbers(
    num_ranks: int, silent: int, kernel_device: torch.device
) -> None:
    ranks = Ranks(num_ranks, 20, torch.float32, kernel_device)
    ranks.call(rank_inputs(num_ranks, 2, 1, 20, kernel_device, 0, torch.float32))
    inputs = rank_inputs(num_ranks, 2, 1, 20, kernel_device, 1, torch.float32)
    for call, who in enumerate((silent, -1)):  # a lost rank stays lost though it speaks again; nobody waits for it
        for errors, (residual_TD, normed_TD) in zip(ranks.errors, ranks.call(inputs, who), strict=True):
            assert errors.tolist() == [silent + 1] * 2 + [0] * (ROWS - 2)
            assert residual_TD.isnan().all()
            assert normed_TD.isnan().all()
        assert all(turns.tolist() == [-1, -1, (2 + call) % 3] for turns in ranks.turns)


def test_a_gather_without_a_rank_names_it_and_gives_zeros(kernel_device: torch.device) -> None:
    ranks = Ranks(2, 20, torch.float32, kernel_device)
    values = [torch.full((2, 1), 7, device=kernel_device) for _ in range(2)]
    for found_RTC, errors in zip(ranks.gather(values, silent=1), ranks.errors, strict=True):
        assert not found_RTC.any()  # valid ids, whatever they index before the host looks
        assert errors.tolist() == [2, 2, 0]


def test_the_cpu_is_refused() -> None:
    handle = Ranks(2, 8, torch.float32, torch.device("cpu")).memory[0]
    with pytest.raises(ValueError, match="on a GPU, found 3 on cpu"):
        exchange.add_norm(torch.zeros(3, 1, 8), None, torch.zeros(3, 8), torch.ones(8), EPS, handle)
    with pytest.raises(ValueError, match="on a GPU, found 2 on cpu"):
        exchange.gather(torch.zeros(2, 1, dtype=torch.int32), handle)


def test_flash_rows_compile_for_sm90_without_spills_and_wait_before_they_write() -> None:
    signature = {"parts": "*bf16", "weights": "*fp32"}
    signature |= dict.fromkeys(("residual", "norm_weight", "new_residual", "normed"), "*bf16")
    signature |= {"peers": "*i64", "turns": "*i32", "errors": "*i32", "eps": "fp32"}
    signature |= dict.fromkeys(("num_tokens", "rank", "limit_microseconds"), "i32")
    sizes = {"WIDTH": 2560, "RANKS": 4, "ROWS": 16, "DO_PUSH": True, "DO_RECEIVE": True, "IS_CHAINED": True}
    kernels = [
        {
            "name": "exchange_kernel",
            "signature": signature | {"slots": pointer},
            "constexprs": sizes | {"PARTS": 9},
            "num_warps": 16,
            "maxnreg": 128,
        }
        for pointer in ("*fp32", "*bf16")
    ]
    names = ("peers", "turns", "errors", "num_tokens", "rank", "limit_microseconds")
    signature = {name: signature[name] for name in names} | {"values": "*i32", "gathered": "*i32", "slots": "*fp32"}
    for columns in (1, 2, 2560):
        more = {"COLUMNS": columns, "COLUMNS_PAD": max(512, 1 << (columns - 1).bit_length())}
        kernels.append({"name": "gather_kernel", "signature": signature, "constexprs": sizes | more, "num_warps": 16})
    for number, compiled in enumerate(compile_sm90("dspark.kernels.exchange.kernel", kernels)):
        assert compiled.spill_bytes == 0
        assert compiled.ptx.index("griddepcontrol.wait") < compiled.ptx.index("st.global")
        loop = compiled.ptx[compiled.ptx.rindex("ld.volatile.global") :]
        look = loop[loop.rindex("globaltimer") :]
        assert loop[: loop.index("globaltimer")].count("bar.sync") >= 2, "threads may not agree what is missing"
        assert look[: look.index("bra")].count("bar.sync") >= 2, "threads may not agree what the time is"
        assert number >= 2 or "ld.volatile.global.v4" in compiled.ptx


@pytest.mark.skipif(not torch.cuda.is_available(), reason="waiting for another rank needs a GPU")
def test_gpu_check_two_ranks_on_two_streams_wait_for_each_other(kernel_device: torch.device) -> None:
    ranks, width = Ranks(2, 2560, torch.float32, kernel_device), 2560
    streams = [torch.cuda.Stream() for _ in range(2)]
    calls = [rank_inputs(2, 1 + call % ROWS, 9, width, kernel_device, call, torch.bfloat16) for call in range(200)]
    apart = Ranks(2, width, torch.float32, kernel_device)
    alone = apart.memory[0]._replace(limit_seconds=1e-3)
    for inputs in calls[:ROWS]:  # loads the kernels: beside one that waits the driver may not
        exchange.add_norm(**inputs[0], eps=EPS, exchange=alone, is_chained=True)
        exchange.gather(inputs[0]["weights_TK"].view(torch.int32), alone)
    torch.cuda.synchronize()
    outputs, gathered = [], []
    for inputs in calls:
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                handle = ranks.memory[rank]._replace(limit_seconds=5.0)
                outputs.append(exchange.add_norm(**inputs[rank], eps=EPS, exchange=handle, is_chained=True))
                gathered.append(exchange.gather(inputs[rank]["weights_TK"].view(torch.int32), handle))
    torch.cuda.synchronize()
    assert not any(errors.any() for errors in ranks.errors)
    for inputs, *found in zip(calls, gathered[::2], gathered[1::2], strict=True):
        weights_RTK = torch.stack([x["weights_TK"] for x in inputs])
        assert all(torch.equal(bits_RTK.view(torch.float32), weights_RTK) for bits_RTK in found)
    for inputs, first, second in zip(calls, outputs[::2], outputs[1::2], strict=True):
        partials_TRD = torch.stack([partial_sum(x["parts_TKD"], x["weights_TK"]) for x in inputs], 1)
        expected = add_norm(partials_TRD, None, inputs[0]["residual_TD"], inputs[0]["norm_weight_D"], EPS)
        for mine, other, right in zip(first, second, expected, strict=True):
            assert torch.equal(mine, other)
            torch.testing.assert_close(mine, right, rtol=2**-6, atol=2**-6)


# The protocol as a state machine. A rank's kernel has two programs, one for a number that every call sends and awaits
# (the first of row 0) and one for a number that only some do: another row of a longer window, or a column of a sum
# that a gather in the same series leaves out. A program pushes its number to both ranks, empties the set of the call
# before, and polls its own set until both ranks' numbers are there; without a number it only empties. The next call
# begins when both programs have ended. Pushes to the peer are in flight until they land, at any time, in any order.

Plans = tuple[tuple[bool, ...], tuple[int, ...], tuple[int, ...]]
"""In which calls the second program has a number; a program's steps with a number; its steps without."""
Slots = tuple[tuple[int | None, int | None], ...]
"""Sets of (number from rank 0, from rank 1), None where empty."""


@dataclass(frozen=True)
class Rank:
    """Where one of two ranks stands: its call, and each program's step and slots."""

    call: int
    steps: tuple[int, int]
    slots: tuple[Slots, Slots]


@dataclass(frozen=True)
class World:
    """Both ranks, and the pushes in flight: (to, program, set, from, number)."""

    ranks: tuple[Rank, Rank]
    flying: frozenset[tuple[int, int, int, int, int]] = frozenset()


PUSH, EMPTY, POLL = range(3)
ORDER, IDLE = (PUSH, EMPTY, POLL), (EMPTY,)
WIDE, MIXED = (True,), (True, False, False, True, True, False, True)


def put(items: tuple, place: int, item: Any) -> tuple:
    return (*items[:place], item, *items[place + 1 :])


def written(rank: Rank, program: int, place: int, source: int, number: int | None) -> Rank:
    slots = rank.slots[program]
    return replace(rank, slots=put(rank.slots, program, put(slots, place, put(slots[place], source, number))))


def with_rank(world: World, me: int, rank: Rank) -> World:
    return replace(world, ranks=put(world.ranks, me, rank))


def todo_of(rank: Rank, program: int, plans: Plans) -> tuple[int, ...]:
    pattern, order, idle = plans
    return order if program == 0 or pattern[rank.call % len(pattern)] else idle


def successors(world: World, plans: Plans, num_calls: int, num_sets: int, back: int) -> Iterator[World]:
    """Every next state. Raises AssertionError when a rank reads a number of another call."""
    for push in world.flying:
        to, program, place, source, number = push
        landed = with_rank(world, to, written(world.ranks[to], program, place, source, number))
        yield replace(landed, flying=world.flying - {push})
    for me, rank in enumerate(world.ranks):
        for program, step in enumerate(rank.steps):
            order, place = todo_of(rank, program, plans), rank.call % num_sets
            if rank.call == num_calls or step == len(order):
                continue
            following = replace(rank, steps=put(rank.steps, program, step + 1))
            if order[step] == EMPTY:
                old = (rank.call - back) % num_sets
                emptied = written(following, program, old, 0, None)
                yield with_rank(world, me, written(emptied, program, old, 1, None))
            elif order[step] == PUSH:
                pushed = with_rank(world, me, written(following, program, place, me, rank.call))
                yield replace(pushed, flying=world.flying | {(1 - me, program, place, me, rank.call)})
            elif None not in rank.slots[program][place]:
                found = rank.slots[program][place]
                assert found == (rank.call, rank.call), f"call {rank.call} read {found}"
                yield with_rank(world, me, following)


def explore(plans: Plans, num_calls: int, num_sets: int, back: int = 1) -> int:
    """Walk every reachable state; returns their number. Raises AssertionError for a wrong read or a stuck state."""
    empty = ((None, None),) * num_sets
    rank = Rank(0, (0, 0), (empty, empty))
    start = World((rank, rank))
    seen, todo = {start}, [start]
    while todo:
        world = todo.pop()
        is_stuck = True
        for after in successors(world, plans, num_calls, num_sets, back):
            is_stuck = False
            for me, rank in enumerate(after.ranks):
                if rank.steps == tuple(len(todo_of(rank, program, plans)) for program in range(2)):
                    after = with_rank(after, me, replace(rank, call=rank.call + 1, steps=(0, 0)))
            if after not in seen:
                seen.add(after)
                todo.append(after)
        is_over = all(rank.call == num_calls for rank in world.ranks)
        assert is_over or not is_stuck, f"stuck at {world}"
    return len(seen)


@pytest.mark.parametrize("pattern", [WIDE, MIXED])
@pytest.mark.parametrize("order", [ORDER, (EMPTY, PUSH, POLL), (PUSH, POLL, EMPTY)])
def test_three_sets_are_right_in_every_interleaving_of_two_ranks(
    pattern: tuple[bool, ...], order: tuple[int, ...]
) -> None:
    assert explore((pattern, order, IDLE), num_calls=9, num_sets=exchange.NUM_TURNS) > 100


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
        explore((WIDE, order, IDLE), 9, num_sets, back)


def test_the_walk_finds_that_a_call_without_a_number_must_empty_too() -> None:
    with pytest.raises(AssertionError, match=r"read"):
        explore((MIXED, ORDER, ()), 9, exchange.NUM_TURNS)
