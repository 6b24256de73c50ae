"""The greedy head in Triton: one pass over the vocabulary rows, no logits in memory.

A fixed number of programs share the row tiles in turn; one software pipeline runs through all tiles of a program, so
loads never drain between them. Each place of the [ROWS, 16] tile keeps its own running best in registers; it sees its
rows in ascending order, so only a larger value replaces it. Programs meet in a workspace: the last to arrive merges.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import MAX_TOKENS, launch
from dspark.kernels.projection.kernel import chunks, prefetch_tile, token_tile, weight_tile

MERGE = tl.constexpr(64)
"""Programs whose results the last one merges at a time."""


class Tile(NamedTuple):
    """How the head is cut; every field can be swept.

    rows of a tile (64 or more use the warp-group instruction); columns of a pipeline step; programs in all (0 for one
    a tile). Weights leave the caches first.
    """

    rows: int
    columns: int
    programs: int
    num_warps: int
    num_stages: int


def tile_for(element_size: int) -> Tile:
    """At most three programs on each of 132 multiprocessors, with 3 stages of 16 KB of weights in flight each."""
    return Tile(32, 256, 396, 4, 4) if element_size == 2 else Tile(16, 32, 264, 4, 2)


def num_programs(num_rows: int, tile: Tile) -> int:
    """As few as need no more rounds of tiles than ``tile.programs`` do: of equal work, as far as whole tiles allow."""
    num_tiles = triton.cdiv(num_rows, tile.rows)
    return int(triton.cdiv(num_tiles, triton.cdiv(num_tiles, tile.programs or num_tiles)))


@triton.jit(do_not_specialize=["num_tokens", "first_id"])  # one program text for every T
def greedy_kernel(
    hidden, head, best, ids, partial_best, partial_rows, counters, first_id, num_tokens, hidden_stride, head_stride,
    V: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, IS_CHAINED: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    """Program p of PROGRAMS: tiles p, p + PROGRAMS, ... of ROWS rows, each in STEPS steps of COLUMNS columns."""
    STEPS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    IS_WHOLE: tl.constexpr = D % COLUMNS == 0
    DOT: tl.constexpr = launch.dot_dtype(head.dtype.element_ty)
    program = tl.program_id(0)
    places = tl.arange(0, ROWS)
    if NUM_CHUNKS > 0:
        first_rows = tl.minimum(program * ROWS + places, V - 1).to(tl.int64)
        prefetch_tile(head, head_stride, first_rows, 0, D, NUM_CHUNKS, CHUNK)
    launch.follow(IS_CHAINED)
    NUM_TILES: tl.constexpr = (V + ROWS - 1) // ROWS
    num_steps = tl.cdiv(NUM_TILES - program, PROGRAMS) * STEPS
    sums = tl.zeros((ROWS, 16), tl.float32)
    top = tl.full((ROWS, 16), float("-inf"), tl.float32)
    top_rows = tl.zeros((ROWS, 16), tl.int32) + (program * ROWS + places)[:, None]
    for i in tl.range(0, num_steps, num_stages=num_stages):
        rows = (program + i // STEPS * PROGRAMS) * ROWS + places
        at = i % STEPS * COLUMNS
        w = weight_tile(head, head_stride, tl.minimum(rows, V - 1).to(tl.int64), at, D, D, D, COLUMNS, 1, IS_WHOLE)
        tokens = token_tile(hidden, hidden_stride, at, num_tokens, D, COLUMNS, 1, IS_WHOLE)
        sums = tl.dot(w.to(DOT), tokens.to(DOT), sums, input_precision="ieee")
        is_last = i % STEPS == STEPS - 1
        is_larger = (sums > top) & is_last  # past the end the last row comes again, and loses to its own smaller id
        top = tl.where(is_larger, sums, top)
        top_rows = tl.where(is_larger, rows[:, None], top_rows)
        sums = tl.where(is_last, 0.0, sums)
    most = tl.max(top, 0)
    row = tl.min(tl.where(top == most[None, :], top_rows, V), 0)
    tokens = tl.arange(0, 16)
    tl.store(partial_best + program * 16 + tokens, most)
    tl.store(partial_rows + program * 16 + tokens, row)
    tl.debug_barrier()
    if tl.atomic_add(counters, 1, sem="acq_rel") == PROGRAMS - 1:
        merged = tl.full((MERGE, 16), float("-inf"), tl.float32)
        merged_rows = tl.full((MERGE, 16), V, tl.int32)
        for start in range(0, PROGRAMS, MERGE):
            programs = start + tl.arange(0, MERGE)[:, None]
            at = programs * 16 + tokens[None, :]
            is_one = programs < PROGRAMS
            value = tl.load(partial_best + at, mask=is_one, other=float("-inf"), cache_modifier=".cg")
            its_row = tl.load(partial_rows + at, mask=is_one, other=V, cache_modifier=".cg")
            is_better = (value > merged) | ((value == merged) & (its_row < merged_rows))
            merged = tl.where(is_better, value, merged)
            merged_rows = tl.where(is_better, its_row, merged_rows)
        most = tl.max(merged, 0)
        row = tl.min(tl.where(merged == most[None, :], merged_rows, V), 0)
        tl.store(best + tokens, most, mask=tokens < num_tokens)
        tl.store(ids + tokens, row.to(tl.int64) + first_id, mask=tokens < num_tokens)
        tl.store(counters, 0)


@triton.jit
def accept_kernel(
    ids, best, best_ids, count, next_id, NUM_TOKENS: tl.constexpr, NUM_RANKS: tl.constexpr, IS_CHAINED: tl.constexpr
):  # fmt: skip
    """One program: the ranks' maxima merge, then the first slot whose choice is not the next draft ends the window."""
    launch.follow(IS_CHAINED)
    slots = tl.arange(0, 16)
    ranks = tl.arange(0, triton.next_power_of_2(NUM_RANKS))[:, None]
    at = ranks * NUM_TOKENS + slots[None, :]
    mask = (ranks < NUM_RANKS) & (slots < NUM_TOKENS)[None, :]
    value = tl.load(best + at, mask=mask, other=float("-inf"))
    value = tl.where(value == value, value, float("-inf"))
    candidates = tl.load(best_ids + at, mask=mask, other=0)
    most = tl.max(value, 0)
    choice = tl.min(tl.where((value == most[None, :]) & mask, candidates, 0x7FFFFFFFFFFFFFFF), 0)
    is_kept = tl.load(ids + slots + 1, mask=slots + 1 < NUM_TOKENS, other=-1) == choice  # -1 is no token
    last = tl.min(tl.where(is_kept, 16, slots), 0)
    tl.store(count, last.to(tl.int64) + 1)
    tl.store(next_id, tl.sum(tl.where(slots == last, choice, 0), 0))


def greedy(
    hidden_TD: Tensor, head_VD: Tensor, first_id: int, counters: Tensor, *, is_chained: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``reference.greedy``; ``tile`` overrides the table."""
    num_tokens, (vocab_size, width), device = hidden_TD.shape[0], head_VD.shape, hidden_TD.device
    tile = tile or tile_for(head_VD.element_size())
    programs = num_programs(vocab_size, tile)
    num_chunks, chunk = chunks(head_VD, tile.rows, tile.num_warps, width)
    best_T = torch.empty(num_tokens, dtype=torch.float32, device=device)
    ids_T = torch.empty(num_tokens, dtype=torch.int64, device=device)
    partial_best = torch.empty(programs, MAX_TOKENS, dtype=torch.float32, device=device)
    partial_rows = torch.empty(programs, MAX_TOKENS, dtype=torch.int32, device=device)
    greedy_kernel[(programs,)](
        hidden_TD, head_VD, best_T, ids_T, partial_best, partial_rows, counters, first_id, num_tokens,
        hidden_TD.stride(0), head_VD.stride(0), V=vocab_size, D=width, ROWS=tile.rows, COLUMNS=tile.columns,
        PROGRAMS=programs, NUM_CHUNKS=num_chunks, CHUNK=chunk, num_stages=tile.num_stages, num_warps=tile.num_warps,
        **launch.options(is_chained),
    )  # fmt: skip
    return best_T, ids_T


def accept(ids_T: Tensor, best_RT: Tensor, best_ids_RT: Tensor, *, is_chained: bool = False) -> tuple[Tensor, Tensor]:
    """``reference.accept``."""
    num_ranks, num_tokens = best_RT.shape
    count_1, next_id_1 = torch.empty_like(ids_T[:1]), torch.empty_like(ids_T[:1])
    accept_kernel[(1,)](
        ids_T, best_RT, best_ids_RT, count_1, next_id_1, NUM_TOKENS=num_tokens, NUM_RANKS=num_ranks, num_warps=1,
        **launch.options(is_chained),
    )  # fmt: skip
    return count_1, next_id_1
