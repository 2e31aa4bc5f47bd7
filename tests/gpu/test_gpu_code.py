"""The code of the Triton kernels, without a GPU: what a wrapper launches, and what ptxas says.

The registers of each kernel are pinned in ``gpu_registers.json``, by the version of Triton;
EXPECTTEST_ACCEPT=1 accepts new ones.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("triton")

import torch
import triton
from affine_cells import AFFINE
from fake_cuda import launches, scan_kernels, wrappers
from fake_graphs import CountedGraphs
from gpu_cells import (
    CASES,
    DRAW_CASES,
    NORM_CASES,
    ROW_CASES,
    SQUARE_CASES,
    gru,
    hidden_markov,
    lstm,
    row_case,
    softmax,
    square_case,
)
from on_the_cpu import serving, triton_kernels
from torch.utils import _pytree as pytree
from wrappers import loops

from torch_scan_hop import explain
from torch_scan_hop._torch.absent_gpu import why_not_here
from torch_scan_hop._torch.fakes import FakeTensorMode
from torch_scan_hop._torch.triton_code import Code, code_of
from torch_scan_hop.inductor.gpu import launch, row_programs
from torch_scan_hop.inductor.gpu.launch import Launch, call_program
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
    "4096 wide": row_case(softmax, "g", 40, 4096),
    "64 states": square_case(hidden_markov, (8, 64), lead=(8,), width=64),
    "65 states": square_case(hidden_markov, (8, 65), lead=(8,), width=65),
}

REGISTERS = Path(__file__).parents[1] / "gpu_registers.json"
FIRST = ["gated", "counter"]
TRAINED = [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def compiled_for_cuda(name: str, dtype: torch.dtype = torch.float32, T: int = 12):
    """The wrappers of a case, all of whose inputs require gradients; and its kernels."""

    def leaf(value):
        return value.requires_grad_() if value.dtype.is_floating_point else value

    known = AFFINE | CASES | ROW_CASES | NORM_CASES | SQUARE_CASES | DRAW_CASES | LARGE
    case, programs = known[name], []
    inputs = pytree.tree_map_only(torch.Tensor, leaf, case.drawn(T, dtype))

    def call(wrapper, program, results):
        programs.append(program)
        call_program(wrapper, program, results)

    with mock.patch.object(launch, "call_program", call):
        found = wrappers(case.run, *inputs)
    launched = [kernel for wrapper in found.values() for kernel in scan_kernels(wrapper)]
    assert [(p.source.text, p.block, p.warps) for p in programs] == launched
    return found, programs


def compiled(program: Launch, target: int) -> Code:
    source = program.source
    return code_of(source.text, source.dtypes, program.block, program.warps, target)


TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


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


def check_cubins(name, dtype, products=False, suffix="", T=12):
    """No register spills, shared memory is within limits, the registers are those pinned."""
    spills = SPILLS.get(name + suffix, {}) if TRITON < (3, 6) else {}
    _, kernels = compiled_for_cuda(name, dtype, T)
    assert kernels
    for direction, program in zip(("forward", "backward"), kernels, strict=False):
        registers = []
        for target in TARGETS:
            code = compiled(program, target)
            assert program.nbytes <= code.shared <= SHARED_MEMORY, (direction, target)
            assert code.spilled <= spills.get((direction, target), 0), (direction, target)
            assert bool(re.search(r"\bw?g?mma\b|mma\.", code.ptx)) is products
            registers.append(code.registers)
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
def test_cubins(name, dtype):
    check_cubins(name, dtype)


# of many steps and few lanes: how many of its directions are parallel in time
LONG = {"recurrence": 2, "gated": 1, "lru": 2, "two carries": 2, "selective ssm": 2}
LONG |= {"scalar": 1, "transcendental": 1, "shifted x": 2}
LONG |= {"extremes": 2, "triangular": 2, "product": 2, "integers": 1}
LONG_CASES = [
    name if name == "recurrence" else pytest.param(name, marks=pytest.mark.slow) for name in LONG
]


def are_parallel(kernels):
    return ["tl.associative_scan(" in kernel.source.text for kernel in kernels]


@pytest.mark.parametrize("name", LONG_CASES)
def test_cubins_of_kernels_parallel_in_time(name):
    kernels = check_cubins(name, torch.float32, suffix=", 300 steps", T=300)
    assert sum(are_parallel(kernels)) == LONG[name]
    assert all(k.warps == 8 for k in kernels if "tl.associative_scan(" in k.source.text)


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
def test_cubins_with_products(name, dtype, monkeypatch):
    monkeypatch.setattr(row_programs, "MOST_FOR_ONE_ROW", 0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        check_cubins(name, dtype, products=True)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("name", "T"),
    [
        ("lstm that drops", 12),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("drops", 12), ("noisy", 12))),
        pytest.param("sum that drops", 300, marks=pytest.mark.slow),
    ],
)
def test_cubins_with_draws(name, T):
    kernels = check_cubins(name, torch.float32, T=T)
    assert "tl.rand" in kernels[0].source.text
    assert len(kernels) == 2


NORMS = [("norm in a cell", True), ("running", False), ("two blocks", False), ("layer norm", False)]
NORMS += [("4096 wide", False)]


@pytest.mark.parametrize(
    ("name", "products"),
    NORMS[:1] + [pytest.param(*row, marks=pytest.mark.slow) for row in NORMS[1:]],
)
def test_cubins_with_reductions(name, products, monkeypatch):
    monkeypatch.setattr(row_programs, "MOST_FOR_ONE_ROW", 0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        kernels = check_cubins(name, torch.float32, products=products)
    finally:
        torch.set_float32_matmul_precision(before)
    assert kernels[0].source.text.count("tl.sum(") >= 1


SQUARES = [
    "32 states",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("chain of tags", "64 states")),
]


@pytest.mark.parametrize("name", SQUARES)
def test_cubins_with_squares(name):
    kernels = check_cubins(name, torch.float32)
    assert [kernel.block for kernel in kernels] == [1, 1]


def test_squares_that_do_not_fit_are_a_counted_loop():
    found, kernels = compiled_for_cuda("65 states")
    assert not kernels and all(loops([wrapper]) == [1] for wrapper in found.values())


@pytest.mark.parametrize(("most", "rows"), [(256, 1), pytest.param(0, 4, marks=pytest.mark.slow)])
def test_exact_products_of_float32(most, rows, monkeypatch):
    """Unless the user lets them be rounded, they run on no tensor core."""
    monkeypatch.setattr(row_programs, "MOST_FOR_ONE_ROW", most)
    assert torch.get_float32_matmul_precision() == "highest"
    kernels = check_cubins("lstm, 64 wide", torch.float32, suffix=f", {rows} rows")
    assert [kernel.block for kernel in kernels] == [rows, rows]


@pytest.mark.parametrize("most", [256, 0])
def test_one_launch_of_rows_each_way(most, monkeypatch):
    monkeypatch.setattr(row_programs, "MOST_FOR_ONE_ROW", most)
    found, kernels = compiled_for_cuda("lstm, 64 wide")
    multiplies = "tl.sum(" if most else "tl.dot("
    assert len(kernels) == 2 and all(multiplies in kernel.source.text for kernel in kernels)
    for wrapper in found.values():
        assert len(scan_kernels(wrapper)) == 1 and loops([wrapper]) == [0]


def test_weights_that_do_not_fit_are_a_counted_loop(monkeypatch):
    monkeypatch.setattr(row_programs, "MOST_FOR_ONE_ROW", 0)
    found, kernels = compiled_for_cuda("lstm, 128 wide", torch.float32)
    assert not kernels and all(loops([wrapper]) == [1] for wrapper in found.values())


def test_loads_run_ahead_of_the_loop():
    _, kernels = compiled_for_cuda("recurrence")
    for kernel in kernels:
        assert "cp.async" in compiled(kernel, 80).ptx


def test_offsets_beyond_32_bits():
    _, [kernel, _] = compiled_for_cuda("recurrence")
    assert "tl.program_id(0) * BLOCK" in kernel.source.text

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
    assert "not one Triton kernel, row by row: neither a product nor a reduction of rows" in text
    assert "launches: those of a step, in every step" in text
    assert "not a CUDA graph: its tensors are on another device" in text
    with using_options(cuda_graphs=False):
        text = explained(lambda h, x: (h.cumsum(0) * x, h))
    assert "not a CUDA graph: cuda_graphs is switched off" in text
    with serving("cpu", CountedGraphs()):
        text = explained(lambda h, x: (h.cumsum(0) * x, h))
    assert "launches: one, and 2 copies, for each block of up to 32 steps" in text


def test_explain_tells_the_time_of_a_kernel_from_a_bandwidth():
    with FakeTensorMode():  # as much as there is of a GPU
        h, xs = torch.zeros(4096, device="cuda"), torch.zeros(1000, 4096, device="cuda")
    told = explain(lambda h, x: (h * x, h), h, xs, limits=(1e15, 1e12))
    # xs and ys once, and a carry each way, at 1 TB/s
    assert "at least 32.8 us, bound by memory" in str(told)
    assert "one Triton kernel, parallel in time; 1000 steps" in str(told)
