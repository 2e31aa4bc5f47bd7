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

pytest.importorskip("triton")

import torch
import triton
from affine_cells import AFFINE
from fake_cuda import launches, scan_kernels, wrappers
from fake_graphs import CountedGraphs
from gpu_cells import CASES, ROW_CASES, gru, lstm, row_case
from on_the_cpu import serving, triton_kernels
from torch._inductor.codecache import PyCodeCache
from torch.utils import _pytree as pytree
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from wrappers import loops

from torch_scan_hop import explain
from torch_scan_hop._torch.absent_gpu import why_not_here
from torch_scan_hop._torch.fakes import FakeTensorMode
from torch_scan_hop.inductor.gpu import launch, parallel, rows
from torch_scan_hop.inductor.gpu.launch import call_program
from torch_scan_hop.inductor.gpu.source import TritonSource
from torch_scan_hop.rewrites import using_options

pytestmark = pytest.mark.skipif(
    bool(why_not_here()), reason="nothing stands in for a GPU on this torch"
)

TARGETS = (80, 90, 100)

# what a block may have at most, of compute capability 8.0 (the others have more)
SHARED_MEMORY = 163 * 1024

# as wide as the weights fit shared memory
LARGE = {
    "lstm, 64 wide": row_case(lstm, "wub", 40, 64, gates=4, carries=2),
    "lstm, 128 wide": row_case(lstm, "wub", 40, 128, gates=4, carries=2),
    "gru, 128 wide": row_case(gru, "wub", 40, 128, gates=3),
}

REGISTERS = Path(__file__).parents[1] / "gpu_registers.json"
FIRST = ["gated", "counter"]
TRAINED = [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def compiled_for_cuda(name: str, dtype: torch.dtype = torch.float32, T: int = 12):
    """The wrappers of a case, all of whose inputs require gradients; its kernels, and how each
    is launched: ``(source, lanes of a program, warps)``."""

    def leaf(value):
        return value.requires_grad_() if value.dtype.is_floating_point else value

    case, sources = (AFFINE | CASES | ROW_CASES | LARGE)[name], []
    inputs = pytree.tree_map_only(torch.Tensor, leaf, case.drawn(T, dtype))

    def call(wrapper, source, results, block, warps):
        sources.append((source, block, warps))
        call_program(wrapper, source, results, block, warps)

    with (
        mock.patch.object(launch, "call_program", call),
        mock.patch.object(rows, "call_program", call),
        mock.patch.object(parallel, "call_program", call),
    ):
        found = wrappers(case.run, *inputs)
    launched = [kernel for wrapper in found.values() for kernel in scan_kernels(wrapper)]
    assert [(source.text, block, warps) for source, block, warps in sources] == launched
    return found, sources


TYPE_NAMES = {
    torch.bool: "*i1", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", None: "i32",
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


TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def registers_and_spills(kernel, target: int, path: Path) -> tuple[int, int]:
    """Registers of a thread of the cubin; bytes that ptxas says it spills of the same PTX."""
    path.write_bytes(kernel.asm["cubin"])
    said = run_tool("cuobjdump", "--dump-resource-usage", path)
    registers = int(re.findall(r"\bREG:(\d+)", said)[0])
    path.write_text(kernel.asm["ptx"])
    gpu = re.findall(r"^\.target (\w+)", kernel.asm["ptx"], re.M)[0]
    before_3_6 = TRITON < (3, 6)  # one assembler for all targets
    assembler = get_ptxas() if before_3_6 else get_ptxas(target)
    name = Path(assembler.path).name
    said = run_tool(name, "-v", f"--gpu-name={gpu}", path, "-o", os.devnull)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert spills, said
    return registers, sum(map(int, spills))


def run_tool(name: str, *arguments: object) -> str:
    command = [str(TOOLS / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", TRAINED)
def test_one_launch_each_way(name):
    found, kernels = compiled_for_cuda(name)
    trains = "backward" in found
    assert len(kernels) == 1 + trains
    for wrapper in found.values():
        assert len(scan_kernels(wrapper)) == 1 and loops([wrapper]) == [0]
        # work before and after the loop, and what does not depend on the number of steps
        assert launches(wrapper) <= 8
        assert "torch.cuda._DeviceGuard(0)" in wrapper
    if name == "gated":
        assert launches(found["forward"]) == 1


def pinned(key: str, registers: list[int]) -> list[int]:
    """What the table says, or, to be accepted, ``registers``."""
    table = json.loads(REGISTERS.read_text()) if REGISTERS.exists() else {}
    own = table.setdefault(f"triton {triton.__version__}", {})
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        own[key] = registers
        lines = json.dumps(table, indent=1, sort_keys=True)
        REGISTERS.write_text(
            re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", lines) + "\n"
        )
    return own.get(key, registers)


def check_cubins(name, dtype, path, products=False, suffix="", T=12):
    """No register spills, shared memory is within limits, the registers are those pinned."""
    spills = SPILLS.get(name + suffix, {}) if TRITON < (3, 6) else {}
    _, kernels = compiled_for_cuda(name, dtype, T)
    assert kernels
    for direction, (source, block, warps) in zip(("forward", "backward"), kernels, strict=False):
        registers = []
        for target in TARGETS:
            kernel = compiled(source, block, warps, target)
            used, spilled = registers_and_spills(kernel, target, path / "kernel")
            assert kernel.metadata.shared <= SHARED_MEMORY, (direction, target)
            assert spilled <= spills.get((direction, target), 0), (direction, target)
            assert bool(re.search(r"\bw?g?mma\b|mma\.", kernel.asm["ptx"])) is products
            registers.append(used)
        key = f"{name}, {direction}, {str(dtype).removeprefix('torch.')}{suffix}"
        assert registers == pinned(key, registers)
    return kernels


# bytes, stored and loaded, of a thread: with the assembler of Triton 3.5
SPILLS = {
    "gru, 128 wide": {("backward", 90): 8, ("backward", 100): 8},
    "lstm, 64 wide, exact": {("forward", 90): 136, ("forward", 100): 136},
}

HALF = pytest.param(torch.bfloat16, marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", TRAINED)
def test_cubins(name, dtype, tmp_path):
    check_cubins(name, dtype, tmp_path)


# of many steps and few lanes: how many of its directions are parallel in time
LONG = {"recurrence": 2, "gated": 1, "lru": 2, "two carries": 2, "selective ssm": 2}
LONG |= {"scalar": 1, "transcendental": 1, "shifted x": 2}
LONG |= {"extremes": 2, "triangular": 2, "product": 2, "integers": 1}
LONG_CASES = [
    name if name == "recurrence" else pytest.param(name, marks=pytest.mark.slow) for name in LONG
]


def are_parallel(kernels):
    return ["tl.associative_scan(" in source.text for source, *_ in kernels]


@pytest.mark.parametrize("name", LONG_CASES)
def test_cubins_of_kernels_parallel_in_time(name, tmp_path):
    kernels = check_cubins(name, torch.float32, tmp_path, suffix=", 300 steps", T=300)
    assert sum(are_parallel(kernels)) == LONG[name]
    assert all(warps == 8 for source, _, warps in kernels if "tl.associative_scan(" in source.text)


def test_one_launch_of_many_steps_each_way():
    found, kernels = compiled_for_cuda("lru", T=300)
    assert are_parallel(kernels) == [True, True]
    for wrapper in found.values():
        assert len(scan_kernels(wrapper)) == 1 and loops([wrapper]) == [0]
    with using_options(parallel_in_time=False):
        assert are_parallel(compiled_for_cuda("lru", T=300)[1]) == [False, False]


ROWS = [
    ("gru", torch.float32),
    ("lstm, 64 wide", torch.float32),
    ("lstm, 128 wide", torch.bfloat16),
]
ROWS += [
    ("gru, 128 wide", torch.bfloat16),
    ("rnn", torch.bfloat16),
    ("two products", torch.float32),
]


@pytest.mark.parametrize(
    ("name", "dtype"), ROWS[:1] + [pytest.param(*row, marks=pytest.mark.slow) for row in ROWS[1:]]
)
def test_cubins_with_products(name, dtype, tmp_path):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        check_cubins(name, dtype, tmp_path, products=True)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.slow
def test_exact_products_of_float32(tmp_path):
    """Unless the user lets them be rounded, they run on no tensor core."""
    assert torch.get_float32_matmul_precision() == "highest"
    check_cubins("lstm, 64 wide", torch.float32, tmp_path, suffix=", exact")


def test_one_launch_of_rows_each_way():
    found, kernels = compiled_for_cuda("lstm, 64 wide")
    assert len(kernels) == 2 and all("tl.dot(" in source.text for source, *_ in kernels)
    for wrapper in found.values():
        assert len(scan_kernels(wrapper)) == 1 and loops([wrapper]) == [0]


def test_weights_that_do_not_fit_are_a_counted_loop():
    found, kernels = compiled_for_cuda("lstm, 128 wide", torch.float32)
    assert not kernels and all(loops([wrapper]) == [1] for wrapper in found.values())


def test_loads_run_ahead_of_the_loop():
    _, kernels = compiled_for_cuda("recurrence")
    for source, block, warps in kernels:
        assert "cp.async" in compiled(source, block, warps, 80).asm["ptx"]


def test_offsets_beyond_32_bits():
    _, [(source, *_), _] = compiled_for_cuda("recurrence")
    assert "tl.program_id(0) * BLOCK" in source.text

    def run(h, xs):
        return CASES["recurrence"].run(h, xs, h[0])

    large = torch.empty(1, 1).expand(2**16, 2**16), torch.empty(1, 1, 1).expand(3, 2**16, 2**16)
    [(text, _, warps)] = scan_kernels(wrappers(run, *large)["forward"])
    assert "tl.program_id(0).to(tl.int64) * BLOCK" in text and warps == 4


def test_explain_names_the_kernel():
    def explained(cell):
        with triton_kernels():
            return str(explain(cell, torch.zeros(3, 7), torch.zeros(5, 3, 7)))

    pointwise = explained(lambda h, x: (h * x, h))
    assert "one Triton kernel, lane by lane; 5 steps" in pointwise
    assert "launches: one" in pointwise
    assert "not one Triton kernel, parallel in time: 5 steps are few" in pointwise
    rows = explained(lambda h, x: (torch.tanh(h @ torch.eye(7)) + x, h))
    assert "one Triton kernel, row by row; 5 steps" in rows
    assert "not one Triton kernel, lane by lane: not pointwise: mm" in rows
    text = explained(lambda h, x: (h.cumsum(0) * x, h))
    assert "a counted loop; 5 steps" in text
    assert "not one Triton kernel, lane by lane: not pointwise: cumsum" in text
    assert "not one Triton kernel, row by row: no product" in text
    assert "launches: those of a step, in every step" in text
    assert "not a CUDA graph: cuda_graphs is switched off" in text
    with using_options(cuda_graphs=True), serving("cpu", CountedGraphs()):
        text = explained(lambda h, x: (h.cumsum(0) * x, h))
    assert "launches: one, and 2 copies, for each block of up to 32 steps" in text


def test_explain_tells_the_time_of_a_kernel_from_a_bandwidth():
    with FakeTensorMode():  # as much as there is of a GPU
        h, xs = torch.zeros(4096, device="cuda"), torch.zeros(1000, 4096, device="cuda")
    told = explain(lambda h, x: (h * x, h), h, xs, limits=(1e15, 1e12))
    # xs and ys once, and a carry each way, at 1 TB/s
    assert "at least 32.8 us, bound by memory" in str(told)
    assert "one Triton kernel, parallel in time; 1000 steps" in str(told)
