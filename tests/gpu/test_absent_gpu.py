"""A GPU that is not there: what stands in for autograd's engine, and what ``explain`` says."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from oracle import assert_same
from torch.autograd import Function
from torch.nn import functional as F

from torch_scan_hop import explain, scan
from torch_scan_hop._torch import absent_gpu
from torch_scan_hop._torch.absent_gpu import why_not_here
from torch_scan_hop._torch.engine_in_python import gradients, noting_who_takes_none
from torch_scan_hop._torch.fakes import FakeTensorMode
from torch_scan_hop.explain.__main__ import main
from torch_scan_hop.explain.device import as_if_there

pytestmark = pytest.mark.torch_version


class Scaled(Function):
    """A number among its arguments; of a result that nobody reads, the cotangent is zeros."""

    @staticmethod
    def forward(ctx, x, factor, other):
        ctx.factor = factor
        return x * factor, other.clone()

    @staticmethod
    def backward(ctx, scaled, other):
        return scaled * ctx.factor + other.sum(), None, other


class TakesNone(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, twice, thrice):
        assert thrice is None
        return twice * 2


def lstm(x, w, b):
    i, f, g, o = F.linear(x, w, b).chunk(4, -1)
    c = f.sigmoid() * x[:, :3] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


PROGRAMS = {
    "lstm": lstm,
    "reused, broadcast and cast": lambda x, w, b: ((x * b.sum() + x.float()).exp() @ w.t(), x),
    "a value in place": lambda x, w, b: (x.clone().mul_(2).add_(b[0]) @ w.t(),),
    "complex": lambda x, w, b: ((torch.complex(x, x.sin()) * (1 + 2j)).abs() @ w.t(),),
    "several results": lambda x, w, b: (torch.linalg.svd(w @ w.t() + b.diag())[1], x.max(0)[0]),
    "a function of Python": lambda x, w, b: (Scaled.apply(x, 3.0, b)[0] @ w.t(),),
    "a function that takes None": lambda x, w, b: (TakesNone.apply(w)[0].sin(),),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_walk_gives_what_the_engine_gives(name):
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 3), (12, 3), (12,))
    x, w, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )
    with noting_who_takes_none():
        results = PROGRAMS[name](x, w, b)
    cotangents = [torch.ones_like(r).cumsum(0) for r in results]

    def engine(outputs, cotangents, create_graph):
        options = {"create_graph": create_graph, "retain_graph": True, "allow_unused": True}
        return torch.autograd.grad(outputs, (x, w, b), cotangents, **options)

    def walk(outputs, cotangents, create_graph):
        return gradients(outputs, cotangents, (x, w, b), create_graph)

    found, wanted = (run(results, cotangents, False) for run in (walk, engine))
    assert [g is None for g in found] == [g is None for g in wanted]
    assert_same(known(found), known(wanted), 1e-12)
    assert not any(g.requires_grad for g in known(found))
    # and again, of the sum of squares
    second = []
    for run in (walk, engine):
        sums = [(g * g).sum() for g in known(run(results, cotangents, True))]
        sums = [value for value in sums if value.requires_grad]
        second.append(known(run(sums, [torch.ones_like(value) for value in sums], False)))
    assert_same(*second, 1e-10)


def known(values):
    return [value for value in values if value is not None]


# --- explain ---

cuda = pytest.mark.skipif(bool(why_not_here()), reason="nothing stands in for a GPU on this torch")
absent = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


def gru_of_fakes():
    cell = torch.nn.GRUCell(3, 16)

    def step(h, x):
        h = cell(x, h)
        return h, h

    return step, torch.zeros(2, 16), torch.zeros(9, 2, 3)


def is_one_kernel_each_way(told: str) -> bool:
    kinds = [f"{loop}: one Triton kernel, row by row; 9 steps" for loop in ("forward", "backward")]
    return all(kind in told for kind in kinds) and told.count("launches: one") == 2


@cuda
def test_fakes_are_explained_inside_of_their_mode_and_outside():
    with as_if_there("cuda"), FakeTensorMode(), torch.device("cuda"):
        case = gru_of_fakes()
        inside = str(explain(*case))
    assert is_one_kernel_each_way(inside)
    assert is_one_kernel_each_way(str(explain(*case)))


@cuda
@absent
def test_nothing_stands_in_afterwards():
    before = list(absent_gpu._guards())
    with as_if_there("cuda"), FakeTensorMode(), torch.device("cuda"):
        step, h, xs = gru_of_fakes()
        loss = step(h, xs[0])[0].sum()
    explain(step, h, xs, kernels=False)
    assert torch.cuda.device_count() == 0 and list(absent_gpu._guards()) == before
    with pytest.raises(RuntimeError, match=r"device|driver"):
        torch.autograd.grad(loss, list(step.__closure__[0].cell_contents.parameters()))


@absent
def test_a_torch_that_cannot_says_so(monkeypatch):
    monkeypatch.setattr(absent_gpu, "_guards", lambda: None)
    with FakeTensorMode():
        h, xs = torch.zeros(2, device="cuda"), torch.zeros(9, 2, device="cuda")
    with pytest.raises(RuntimeError, match="nothing can stand in for a GPU"):
        explain(lambda h, x: (h * x, h), h, xs)
    with pytest.raises(RuntimeError, match="does not export"):
        as_if_there("cuda")


@cuda
def test_what_a_program_takes():
    """Rows and warps are known; all else Triton and its assembler know."""
    with as_if_there("cuda"), FakeTensorMode(), torch.device("cuda"):
        case = gru_of_fakes()
    found = explain(*case)
    programs = [kernel.program for kernel in found.scans[0].kernels]
    assert [p.elements for p in programs] == ["1 row"] * 2
    if importlib.util.find_spec("triton") is None:
        said = "1 row, 8 warps, shared memory and registers: not known without"
        assert str(found).count(said) == 2
    else:
        assert all(p.shared > 0 and 16 < p.registers <= 255 for p in programs)
        assert str(found).count("registers a thread, none spilled (9.0)") == 2
    assert found.to_html().count("a program: 1 row,") == 2


@cuda
def test_what_stands_in_the_way_is_said_in_one_line():
    def step(h, x):
        return torch.tanh(h @ down @ up + x), h

    with as_if_there("cuda"), FakeTensorMode(), torch.device("cuda"):
        h, xs, down, up = (torch.zeros(s) for s in ((2, 16), (9, 2, 16), (16, 3), (3, 16)))
    found = explain(step, h, xs)
    why_not = found.scans[0].kernels[0].why_not["one Triton kernel, row by row"]
    assert why_not == "a product of 3 columns, in no blocks of [2, 16], as the carry is"


@cuda
def test_what_is_on_the_cpu_is_explained_for_a_gpu():
    step, h, xs = gru_of_fakes()  # of tensors that are there
    for_gpu = str(explain(step, h, xs, device="cuda"))
    assert is_one_kernel_each_way(for_gpu) and "_thnn_fused_gru_cell" in for_gpu
    program = torch.compile(lambda h, xs: scan(step, h, xs))
    assert is_one_kernel_each_way(str(explain(program, (h, xs), device="cuda")))
    # nothing of that is left
    assert "forward: one kernel, row by row" in str(explain(step, h, xs))
    assert scan(step, h, xs)[1].device.type == "cpu" == torch.zeros(1).device.type


def test_what_device_refuses():
    step, h, xs = gru_of_fakes()
    with pytest.raises(ValueError, match="device must be None or \"cuda\", but got 'xla'"):
        explain(step, h, xs, device="xla")
    traced = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(TypeError, match="device is for a body"):
        explain(traced, device="cuda")


# --- the command line ---


def case_of_a_file(folder, text):
    file = folder / "cells_of_mine.py"
    file.write_text(text)
    return f"{file}:case"


CASE = """
import torch

def case():
    w = torch.randn(4, 4, requires_grad=True)
    return lambda h, x: (torch.tanh(h @ w + x), h), torch.zeros(2, 4), torch.zeros(9, 2, 4)
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_the_command_line(tmp_path, device):
    told = main([case_of_a_file(tmp_path, CASE), "--device", device])
    kernel = "one Triton kernel" if device == "cuda" else "one kernel"
    assert f"forward: {kernel}, row by row; 9 steps" in told
    assert f"backward: {kernel}, row by row; 9 steps" in told


def test_the_command_line_without_a_device(tmp_path):
    told = main([case_of_a_file(tmp_path, CASE), "--no-kernels"])
    assert "forward: 9 steps" in told and "under torch.compile" not in told


@pytest.mark.parametrize(
    ("function", "text", "message"),
    [
        ("cells", CASE, "expected module:function, but got 'cells'"),
        ("no_such_module:case", CASE, "No module named 'no_such_module'"),
        ("", "other = 1", "has no attribute 'case'"),
        ("", "case = lambda: 3", "must return (combine_fn, init, xs), but returned 3"),
    ],
)
def test_what_the_command_line_refuses(tmp_path, capsys, function, text, message):
    name = function or case_of_a_file(tmp_path, text)
    with pytest.raises(SystemExit):
        main([name])
    assert message in capsys.readouterr().err
