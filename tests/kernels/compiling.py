"""Compiles kernels for sm_90 as a launch does, without a GPU, in a process where Triton's interpreter is off."""

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Compiled:
    """What the assembler says of a kernel: registers a thread, bytes spilled, bytes of shared memory; and its PTX."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx: str


def compile_sm90(module: str, kernels: list[dict[str, Any]]) -> list[Compiled]:
    """Each of ``kernels``: name, signature (argument: "*bf16", "i32", ...), constexprs, num_warps, num_stages, maxnreg.

    As a launch finds them, pointers are aligned to 16 bytes and strides multiples of 16. A constexpr that is a Triton
    dtype is written "tl.bfloat16".
    """
    server = _server()
    assert server.stdin
    assert server.stdout
    server.stdin.write(json.dumps([module, kernels]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:  # a fault ends it, with its traceback
        server.wait()
        _server.cache_clear()
        pytest.fail("the compiler has ended: its traceback is on the standard error")
    return [Compiled(**row) for row in json.loads(answer)]


@functools.cache
def _server() -> "subprocess.Popen[str]":
    """Loads the packages once; it ends with this process, whose pipe then closes."""
    search = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": search}
    command, pipe = [sys.executable, __file__], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)


def _assemble(ptx: str, folder: str) -> tuple[int, int]:
    import triton

    source = Path(folder) / "kernel.ptx"
    source.write_text(ptx)
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [str(ptxas), "-v", "--gpu-name", "sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))]
    said = subprocess.run(command, check=True, text=True, capture_output=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert registers, said
    assert spills, said
    return int(registers.group(1)), sum(map(int, spills))


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed
    for line in sys.stdin:
        answers.write(json.dumps(_compile(*json.loads(line))) + "\n")


def _compile(name: str, kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    module = importlib.import_module(name)
    rows = []
    for kernel in kernels:
        constexprs = {
            name: getattr(tl, value[3:]) if isinstance(value, str) and value.startswith("tl.") else value
            for name, value in kernel["constexprs"].items()
        }
        signature = kernel["signature"] | dict.fromkeys(constexprs, "constexpr")
        function = getattr(module, kernel["name"])
        is_aligned = {
            name: kind.startswith("*") or (kind == "i32" and "stride" in name) for name, kind in signature.items()
        }
        places = [function.arg_names.index(name) for name in signature if is_aligned[name]]
        source_of = GluonASTSource if function.is_gluon() else triton.compiler.ASTSource
        source = source_of(
            fn=function,
            signature=signature,
            constexprs=constexprs,
            attrs={(place,): [["tt.divisibility", 16]] for place in places},
        )
        options = {name: kernel[name] for name in ("num_warps", "num_stages", "maxnreg") if name in kernel}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx, shared_bytes = compiled.asm["ptx"], compiled.metadata.shared
        with tempfile.TemporaryDirectory() as folder:
            registers, spill_bytes = _assemble(ptx, folder)
        rows.append({"registers": registers, "spill_bytes": spill_bytes, "shared_bytes": shared_bytes, "ptx": ptx})
    return rows


if __name__ == "__main__":
    _serve()
