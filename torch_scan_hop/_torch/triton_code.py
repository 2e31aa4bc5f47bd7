"""Compile a kernel's text by Triton and its assembler, without a GPU (checked on torch 2.9.1,
2.15.0, with their Triton 3.5 and 3.9).

Import it only where Triton is.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch._inductor.codecache import PyCodeCache
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

_TYPES = {
    torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16",
    torch.int32: "*i32", torch.int64: "*i64", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float32: "*fp32", torch.float64: "*fp64", None: "i32",
}  # fmt: skip


@dataclass(frozen=True)
class Code:
    """``registers`` and ``spilled`` (bytes, stored and loaded) are of a thread, ``shared`` (bytes)
    is of a program."""

    ptx: str
    shared: int
    registers: int
    spilled: int


def code_of(
    text: str, dtypes: Sequence[torch.dtype | None], block: int, warps: int, capability: int
) -> Code:
    """Compile ``scan_kernel`` of ``text`` for a compute capability; 90 is 9.0.

    ``dtypes``: of the buffers that it is called with, None for a size. Pointers are taken for
    aligned, as those of torch are.
    """
    function = PyCodeCache.load(text).scan_kernel
    names = zip(function.arg_names, dtypes, strict=False)
    signature = {name: _TYPES[dtype] for name, dtype in names} | {"BLOCK": "constexpr"}
    aligned = {(k,): [["tt.divisibility", 16]] for k, dtype in enumerate(dtypes) if dtype}
    kernel = triton.compile(
        ASTSource(function, signature, {"BLOCK": block}, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps},
    )
    used = _registers(kernel.asm["cubin"]), _spills(kernel.asm["ptx"], capability)
    return Code(kernel.asm["ptx"], kernel.metadata.shared, *used)


def _registers(cubin: bytes) -> int:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    said = _run(cubin, lambda file: [tool, "--dump-resource-usage", file])
    return int(re.findall(r"\bREG:(\d+)", said)[0])


def _spills(ptx: str, capability: int) -> int:
    # until Triton 3.5 there was one assembler for all targets
    several = bool(inspect.signature(get_ptxas).parameters)
    assembler = (get_ptxas(capability) if several else get_ptxas()).path
    (gpu,) = re.findall(r"^\.target (\w+)", ptx, re.M)
    said = _run(
        ptx.encode(), lambda file: [assembler, "-v", f"--gpu-name={gpu}", file, "-o", os.devnull]
    )
    return sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said)))


def _run(content: bytes, command: Callable[[Path], list[Any]]) -> str:
    """Return what a tool says about a file of that content."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel"
        file.write_bytes(content)
        done = subprocess.run(command(file), capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
