"""torch's own prototype ``scan()`` beside ours: as torch has it, or on our operator when asked."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from oracle import assert_same
from torch._higher_order_ops.scan import scan as torchs_scan

import torch_scan_hop
from torch_scan_hop import accelerate_torch
from torch_scan_hop._torch.own_scan import torchs_operator
from torch_scan_hop.op import scan_op
from torch_scan_hop.settings import accelerates_torch

BOTH_ORDERS = """
import {first}
import {second}
import torch
from torch._higher_order_ops.scan import scan as torchs
import torch_scan_hop

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
w = torch.randn(3, 3, requires_grad=True)
h, xs = torch.randn(2, 3, requires_grad=True), torch.randn(4, 2, 3)
def cell(h, x):
    new = h @ w + x
    return new, new * 2
def total(result):
    return result[0].sum() + result[1].sum()
want = torch.autograd.grad(total(torch_scan_hop.scan(cell, h, xs)), [h, w])
run = torch.compile(lambda h, xs: torchs(cell, h, xs, dim=0), backend="aot_eager", fullgraph=True)
for accelerated in (False, True, False):
    torch_scan_hop.accelerate_torch(accelerated)
    for each in (lambda h, xs: torchs(cell, h, xs, dim=0), run):
        with torch.no_grad():
            ours = torch_scan_hop.scan(cell, h, xs)
            torch.testing.assert_close(each(h, xs), ours)
        got = torch.autograd.grad(total(each(h, xs)), [h, w])
        torch.testing.assert_close(got, want)
print("both work")
"""


INDUCTOR_ALONE = """
import torch
import torch_scan_hop
from torch._higher_order_ops.scan import scan

run = torch.compile(lambda xs: scan(lambda h, x: (h + x, h * x), torch.ones(2), xs), fullgraph=True)
h, ys = run(torch.ones(3, 2))
torch.testing.assert_close((h, ys.sum()), (torch.full((2,), 4.0), torch.tensor(12.0)))
print("it works")
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("torch._higher_order_ops.scan", "torch_scan_hop"),
        # as in this file, whose conftest.py imports ours
        pytest.param("torch_scan_hop", "torch._higher_order_ops.scan", marks=pytest.mark.slow),
    ],
)
def test_both_orders_of_import(first, second):
    code = textwrap.dedent(BOTH_ORDERS.format(first=first, second=second))
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert "both work" in result.stdout, result.stderr[-3000:]


def test_the_name_of_the_operator_is_ours():
    assert torch.ops.higher_order.scan is scan_op
    assert torchs_operator() is not scan_op


#: torch 2.9's own lowering of its own scan fails, with and without this package
needs_torchs_lowering = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="Inductor of torch 2.9 cannot lower torch's own scan"
)

W = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)) / 3
H, XS = torch.ones(2, 3), torch.linspace(-1, 1, 24).reshape(4, 2, 3)


def cell(h, x):
    new = torch.sin(h @ W + x)
    return new, new * 2


def run_torchs(h, xs):
    return torchs_scan(cell, h, xs, dim=0)


class Captured:
    """A backend that keeps which operators it was given."""

    def __init__(self):
        self.targets = []

    def __call__(self, gm, example_inputs):
        self.targets.append({n.target for n in gm.graph.nodes if n.op == "call_function"})
        return gm


def test_who_runs_it_can_be_changed_and_changed_back():
    want = torch_scan_hop.scan(cell, H, XS)
    captured = Captured()
    compiled = torch.compile(run_torchs, backend=captured, fullgraph=True)
    assert_same(compiled(H, XS), want, 1e-6)
    with accelerate_torch():
        assert_same(compiled(H, XS), want, 1e-6)
        accelerate_torch(True)
        assert_same(compiled(H, XS), want, 1e-6)
    assert not accelerates_torch()
    assert_same(compiled(H, XS), want, 1e-6)
    operators = [targets & {scan_op, torchs_operator()} for targets in captured.targets]
    assert operators == [{torchs_operator()}, {scan_op}, {torchs_operator()}]


@pytest.mark.parametrize(
    ("backend", "accelerated"),
    [
        ("eager", False),
        ("eager", True),
        ("aot_eager", False),
        ("aot_eager", True),
        pytest.param("inductor", False, marks=needs_torchs_lowering),
        ("inductor", True),
    ],
)
def test_every_backend_runs_it(backend, accelerated):
    with accelerate_torch(accelerated):
        compiled = torch.compile(run_torchs, backend=backend, fullgraph=True)
        with torch.no_grad():
            assert_same(compiled(H, XS), torch_scan_hop.scan(cell, H, XS), 1e-5)


@needs_torchs_lowering
def test_inductor_lowers_it_where_no_scan_of_ours_was():
    result = subprocess.run(
        [sys.executable, "-c", INDUCTOR_ALONE], capture_output=True, text=True, timeout=300
    )
    assert "it works" in result.stdout, result.stderr[-3000:]


@needs_torchs_lowering
def test_both_in_one_program_under_inductor():
    def both(h, xs):
        return torchs_scan(cell, h, xs, dim=0), torch_scan_hop.scan(cell, h, xs)

    torchs, ours = torch.compile(both, fullgraph=True)(H, XS)
    assert_same(torchs, ours, 1e-5)


def test_accelerated_it_takes_what_ours_takes():
    """torch's operator refuses a body whose results alias, and does not train this one compiled."""

    def returns_its_carry(h, x):
        h = torch.tanh(h @ weight + x)
        return h, h

    weight = W.clone().requires_grad_()
    with accelerate_torch():
        compiled = torch.compile(lambda xs: torchs_scan(returns_its_carry, H, xs), fullgraph=True)
        h, ys = compiled(XS)
    want = torch_scan_hop.scan(returns_its_carry, H, XS)
    assert_same((h, ys), want, 1e-5)
    got, expected = (torch.autograd.grad(r.sum(), weight) for r in (ys, want[1]))
    assert_same(got, expected, 1e-5)


def test_accelerated_it_is_exported_with_our_operator():
    class Program(torch.nn.Module):
        def forward(self, h, xs):
            return run_torchs(h, xs)

    with accelerate_torch():
        program = torch.export.export(Program(), (H, XS))
    assert program.graph.find_nodes(op="call_function", target=scan_op)
    assert_same(tuple(program.module()(H, XS)), torch_scan_hop.scan(cell, H, XS), 1e-5)


def test_a_switch_is_a_bool():
    with pytest.raises(TypeError, match="accelerate_torch: on must be True or False, but got str"):
        accelerate_torch("yes")
