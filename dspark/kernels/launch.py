"""What every Triton kernel's launch shares: the interpreter's arithmetic, programmatic dependent launch, prefetching.

With programmatic dependent launch (PDL) a kernel may start while its predecessor still runs. A wait returns when the
predecessor has finished and its writes are seen; every kernel of a chain waits, before its first read of an activation
and its first write to memory, also one that reads nothing of its predecessor: otherwise the work of the kernel two back
is not ordered. Weights may be read before. A signal lets the successor be scheduled. Some signal before they wait: what
a kernel reads before its wait must be older than every kernel back to the last one that waited before it signalled (a
step's first, ``embed_norm``, does).
Source: CUDA programming guide, programmatic dependent launch; specs/verifier-kernels.md section 3.
"""

import ctypes
from functools import cache
from typing import Any

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter, whose bfloat16 arithmetic is wrong and which knows no PDL."""


@triton.jit
def follow(IS_CHAINED: tl.constexpr, IS_EARLY: tl.constexpr = False) -> None:  # type: ignore[assignment]
    """In a chain, wait and then signal, as most kernels do; or signal, then wait."""
    if IS_CHAINED:
        if IS_EARLY:
            tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
        if not IS_EARLY:
            tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]


@triton.jit
def prefetch_lines(  # type: ignore[no-untyped-def]
    base, first_line, num_bytes, LINES: tl.constexpr, IS_CHAINED: tl.constexpr
) -> None:
    """Lines of 128 bytes first_line .. first_line + LINES - 1 after base, as far as they begin inside num_bytes.

    Only in a chain, where a kernel starts early enough for this to help: inline assembly is not interpreted either.
    """
    if IS_CHAINED:
        offset = (first_line + tl.arange(0, LINES)) * 128
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l,r",
            [base.to(tl.int64) + offset, (offset < num_bytes).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@cache
def keep_shared_memory() -> None:
    """Have every Triton kernel loaded from now on, also others', ask for a multiprocessor's most shared memory.

    The commit of linear attention is left alone: its states reach registers through the cache that is left.

    Left alone each kernel asks for what it needs, and where its share differs from its predecessor's, a multiprocessor
    must be empty before it takes both: chained launches would not overlap. Worth 36 of 3,650 us a step on an H200.
    Source: CUDA driver API, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT.
    """
    driver = ctypes.CDLL("libcuda.so.1")

    def prefer(module: object, function: Any, name: str, metadata_group: dict[str, str], hash: str) -> None:
        if name == "commit_kernel":
            return
        error = driver.cuFuncSetAttribute(ctypes.c_void_p(function), 9, 100)
        assert error == 0, f"cuFuncSetAttribute of {name}: error {error}"

    triton.knobs.runtime.kernel_load_end_hook.add(prefer)


@triton.constexpr_function
def dot_dtype(dtype: tl.dtype) -> tl.dtype:
    """What to cast the operands of ``tl.dot`` to: float32 in the interpreter, their own dtype on a GPU."""
    return tl.float32 if IS_INTERPRETED else dtype


@triton.constexpr_function
def padded(width: int) -> int:
    """What a side of ``tl.dot`` takes: a power of two, at least 16."""
    return int(max(16, triton.next_power_of_2(width)))


@triton.constexpr_function
def num_lines(size: int, dtype: tl.dtype) -> int:
    """How many lines of 128 bytes so many numbers take, as a power of two."""
    return int(triton.next_power_of_2(triton.cdiv(size * dtype.primitive_bitwidth, 1024)))


def options(is_chained: bool) -> dict[str, Any]:
    """The launch arguments that switch PDL; none in the interpreter."""
    is_chained = is_chained and not IS_INTERPRETED
    return {"IS_CHAINED": is_chained, "launch_pdl": is_chained}
