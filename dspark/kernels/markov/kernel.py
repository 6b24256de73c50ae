"""A slot of the sequential head in Triton: W2 in registers before the wait, then one vector through it.

A program owns ROWS rows of W2, whole, and reads them before its predecessor has finished: at a quarter of 157184 rows
of 256 numbers all programs fit on 132 multiprocessors at once, five each, and hold 20 MB in registers. After the wait
comes the chain that a slot cannot avoid: the row's number, the row, the products, the choice. Programs meet in a
workspace: the last to arrive merges.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import launch

HELD = {2: 16384, 4: 4096}
"""Numbers of W2 a program, by their bytes: 64 rows of 256 in bfloat16, 64 registers a thread."""

CHUNK = 64
"""Columns of a load: eight threads share a row, so that a sum takes three exchanges and not five for a fourth of it."""


@triton.jit(do_not_specialize=["first_id"])
def step_kernel(
    base, mixed, row, w2, noise, inverse_temperature, logits, best, ids, partial, counters, first_id,
    V: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program p: rows p * ROWS and on. A choice is one integer: its score, in an order of integers, above its row."""
    PROGRAMS: tl.constexpr = (V + ROWS - 1) // ROWS
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    is_row = rows < V
    place = tl.arange(0, CHUNK)
    at = w2 + tl.minimum(rows, V - 1).to(tl.int64)[:, None] * RANK + place[None, :]
    held, mixed_chunks = (), ()
    for chunk in tl.static_range(0, RANK, CHUNK):
        if chunk + CHUNK <= RANK:
            w = tl.load(at + chunk)
        else:
            w = tl.load(at + chunk, mask=(chunk + place < RANK)[None, :], other=0.0)
        held = held + (w,)  # noqa: RUF005
    launch.follow(IS_CHAINED)
    logit = tl.load(base + rows, mask=is_row, other=float("-inf"))  # past the end: the last, with the largest row
    score_noise = tl.load(noise + rows, mask=is_row, other=0.0) if noise is not None else 0.0
    scale = tl.load(inverse_temperature) if inverse_temperature is not None else 1.0
    mixed += tl.load(row) * RANK if row is not None else 0
    for chunk in tl.static_range(0, RANK, CHUNK):
        x = tl.load(mixed + chunk + place, mask=chunk + place < RANK, other=0.0)
        mixed_chunks = mixed_chunks + (x,)  # noqa: RUF005
    sums = tl.zeros((ROWS, CHUNK // 8), tl.float32)
    for i in tl.static_range((RANK + CHUNK - 1) // CHUNK):
        products = held[i].to(tl.float32) * mixed_chunks[i].to(tl.float32)[None, :]
        sums += tl.sum(tl.reshape(products, (ROWS, CHUNK // 8, 8)), 2)
    logit += tl.sum(sums, 1)
    if logits is not None:
        tl.store(logits + rows, logit, mask=is_row)
    score = logit * scale + score_noise
    score = tl.where(score == score, score, float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32 | (0x7FFFFFFF - rows).to(tl.int64)
    tl.store(partial + program, tl.max(key, 0))
    tl.debug_barrier()
    if tl.atomic_add(counters, 1, sem="acq_rel") == PROGRAMS - 1:
        programs = tl.arange(0, triton.next_power_of_2(PROGRAMS))
        mask = programs < PROGRAMS
        top = tl.max(tl.load(partial + programs, mask=mask, other=-(2**63), cache_modifier=".cg"), 0)
        top_bits = (top >> 32).to(tl.int32)
        tl.store(best, (top_bits ^ ((top_bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))
        tl.store(ids, 0x7FFFFFFF - (top & 0x7FFFFFFF) + first_id)
        tl.store(counters, 0)


def step(
    base_V: Tensor, mixed_NR: Tensor, row_1: Tensor | None, w2_VR: Tensor, first_id: int, counters: Tensor,
    noise_V: Tensor | None = None, inverse_temperature_1: Tensor | None = None, logits_V: Tensor | None = None, *,
    rows: int | None = None, is_chained: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``reference.step``; ``rows``: of W2 a program."""
    num_rows, rank = w2_VR.shape
    chunk = min(CHUNK, max(8, triton.next_power_of_2(rank)))
    rows = rows or max(4, HELD[w2_VR.element_size()] // triton.next_power_of_2(rank))
    programs = triton.cdiv(num_rows, rows)
    best_1, id_1 = base_V.new_empty(1), base_V.new_empty(1, dtype=torch.int64)
    partial = torch.empty(programs, dtype=torch.int64, device=base_V.device)
    step_kernel[(programs,)](
        base_V, mixed_NR, row_1, w2_VR, noise_V, inverse_temperature_1, logits_V, best_1, id_1, partial, counters,
        first_id, V=num_rows, RANK=rank, CHUNK=chunk, ROWS=rows, num_warps=4, maxnreg=96,
        **launch.options(is_chained),
    )  # fmt: skip
    return best_1, id_1
