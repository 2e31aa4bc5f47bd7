"""The code of the Triton kernels, without a GPU: what a wrapper launches, and what ptxas says.

The registers of each kernel are pinned in ``gpu_registers.json``, by the version of Triton;
EXPECTTEST_ACCEPT=1 accepts new ones.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
from fake_cuda import launches, loops, needs_cuda_build_and_triton, scan_kernels, wrappers
from gpu_cells import CASES
from torch.utils import _pytree as pytree

needs_cuda_build_and_triton()

import triton
from torch._inductor.codecache import PyCodeCache
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torch_scan_hop.inductor.gpu import launch
from torch_scan_hop.inductor.gpu.lanes import TritonSource

TARGETS = (80, 90, 100)

# what a block may have at most, of compute capability 8.0 (the others have more)
SHARED_MEMORY = 163 * 1024

REGISTERS = Path(__file__).parent / "gpu_registers.json"
FIRST = ["gated", "selective ssm", "counter"]
TRAINED = [
    name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in CASES
]


def trained_wrappers(name: str, T: int = 12, dtype: torch.dtype = torch.float32):
    """The wrappers of a case, all of whose inputs require gradients, and the kernels' sources."""

    def leaf(value):
        return value.requires_grad_() if value.dtype.is_floating_point else value

    case, sources = CASES[name], []
    inputs = pytree.tree_map_only(torch.Tensor, leaf, case.drawn(T, dtype))

    def call(wrapper, definition, arguments):
        sources.append(definition)
        return original(wrapper, definition, arguments)

    original = launch.call_kernel
    with mock.patch.object(launch, "call_kernel", call):
        return wrappers(case.run, *inputs), sources


TYPE_NAMES = {
    torch.bool: "*i1", torch.uint8: "*u8", torch.int16: "*i16", torch.int64: "*i64", None: "i32",
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
}  # fmt: skip


def compiled(source: TritonSource, block: int, warps: int, target: int):
    """Triton's compiled kernel; pointers are aligned, as those of torch are."""
    function = PyCodeCache.load(source.text).scan_kernel
    names = dict(zip(function.arg_names, source.dtypes, strict=False))
    signature = {name: TYPE_NAMES[dtype] for name, dtype in names.items()} | {"BLOCK": "constexpr"}
    aligned = {(k,): [["tt.divisibility", 16]] for k, d in enumerate(source.dtypes) if d}
    return triton.compile(
        ASTSource(function, signature, {"BLOCK": block}, aligned),
        target=GPUTarget("cuda", target, 32),
        options={"num_warps": warps},
    )


def resources(cubin: bytes, path: Path) -> dict[str, int]:
    path.write_bytes(cubin)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    said = subprocess.run(
        [tools / "cuobjdump", "--dump-resource-usage", path],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
