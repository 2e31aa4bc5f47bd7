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
from torch_scan_hop._torch.own_scan import is_torchs, torchs_operator
from torch_scan_hop.op import scan_op, scans_in
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
    """A backend that keeps whose scans it was given."""

    def __init__(self):
        self.owners = []

    def __call__(self, gm, example_inputs):
        self.owners += ["torch" if is_torchs(body) else "ours" for _, body in scans_in(gm)]
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
    assert captured.owners == ["torch", "ours", "torch"]


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


REFUSED = {
    "a number as carry": lambda h, x: (0.0, x + h),
    "no carry": lambda h, x: (None, x + h),
    "more carries": lambda h, x: ((h + x, h), x),
    "another dtype": lambda h, x: ((h + x).double(), x * 2),
    "another shape": lambda h, x: ((h + x).sum(), x * 2),
    "other strides": lambda h, x: ((h + x).t().contiguous().t(), x * 2),
    "one result": lambda h, x: h + x,
    "three results": lambda h, x: (h + x, h * 2, x * 2),
    "a number as y": lambda h, x: (h + x, 3.0),
    "a whole number as y": lambda h, x: (h + x, 3),
    "the carry is written to": lambda h, x: (h.add_(x) + 1, h * 2),
    "x is written to": lambda h, x: (h + x.add_(1), h * 2),
}


@pytest.mark.torch_version
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("accelerated", [False, True])
def test_accelerated_it_refuses_what_torch_refuses(case, accelerated):
    with accelerate_torch(accelerated), pytest.raises((RuntimeError, AssertionError)) as raised:
        torchs_scan(REFUSED[case], H.clone(), XS.clone())
    assert not isinstance(raised.value, torch._dynamo.exc.InternalTorchDynamoError)


def test_accelerated_it_refuses_fewer_carries():
    for accelerated in (False, True):
        with accelerate_torch(accelerated), pytest.raises(RuntimeError, match="number of outputs"):
            torchs_scan(lambda c, x: ((c[0] + x,), c[1] * 2), (H, H * 2), XS)


@pytest.mark.torch_version
def test_accelerated_it_refuses_xs_of_several_lengths():
    """Torch before 2.15 finds out at the step that one of them has not got."""
    for accelerated in (False, True):
        with accelerate_torch(accelerated), pytest.raises((RuntimeError, IndexError)):
            torchs_scan(lambda c, x: (c + x[0], x[1] * 2), H, (XS, XS[:3]))


ALIKE = {
    "backwards along dim 1": (cell, (torch.ones(4, 3), XS), {"dim": 1, "reverse": True}),
    "the last dim": (lambda h, x: (h + x, h * 2), (torch.ones(4, 2), XS), {"dim": -1}),
    "ys of fewer dimensions than dim": (
        lambda h, x: (h + x, h.sum()), (torch.ones(4, 3), XS), {"dim": 1},
    ),
    "a dict of ys": (lambda h, x: (h + x, {"z": x * 2, "a": h * 3}), (H, XS), {}),
    "no ys": (lambda h, x: (h + x, []), (H, XS), {}),
    "y is None": (lambda h, x: (h + x, (None, x * 2)), (H, XS), {}),
    "carries": (lambda c, x: ([c[0] + x, c[1] * 2], x * 2), ((H, H * 2), XS), {}),
    "a transposed init": (lambda h, x: (h + x, h * 2), (torch.ones(3, 2).t(), XS), {}),
}  # fmt: skip


@pytest.mark.torch_version
@pytest.mark.parametrize("case", ALIKE)
def test_accelerated_its_results_are_torchs(case):
    if case == "y is None" and torch.__version__ < "2.15":
        pytest.skip("this torch's own scan takes no None")
    body, (init, xs), options = ALIKE[case]
    want = torchs_scan(body, init, xs, **options)
    with accelerate_torch():
        got = torchs_scan(body, init, xs, **options)
    assert type(got[0]) is type(want[0]) and type(got[1]) is type(want[1])
    leaves = torch.utils._pytree.tree_leaves
    for mine, theirs in zip(leaves(got), leaves(want), strict=True):
        torch.testing.assert_close(mine, theirs)


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
