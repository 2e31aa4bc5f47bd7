"""Hooks of a body's tensors that read, in the backward, what steps have changed: in a loop they find
what the last step left, and a trace has what their own step had."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, written_loop

from torch_scan_hop import NotTraceableError, fallback, scan

pytestmark = pytest.mark.torch_version

F64 = torch.float64


def scalar(value=1.0):
    return torch.tensor(value, dtype=F64)


def an_attribute(s):
    s.scale = s.scale * 0.5
    return lambda g: g * s.scale


def an_item(s):
    s.items["k"] = s.items["k"] * 0.5
    return lambda g: g * s.items["k"]


def a_number(s):
    s.n += 1
    return lambda g: g * s.n


def assigned_after_it(s):
    return lambda g: g * s.later[0] + s.last


def called_by_it(s):
    s.scale = s.scale * 0.5

    def scaled(g):
        return g * s.scale

    return lambda g: scaled(g)


_scale = scalar()


def a_global(s):
    global _scale
    _scale = _scale * 0.5
    return lambda g: g * _scale


def read_before(s):
    s.scale = s.scale * 0.5
    scale = s.scale
    return lambda g: g * scale


def what_no_step_changes(s):
    return lambda g: (g * s.fixed).clamp(-s.limit, s.limit)


CHANGED = [an_attribute, an_item, a_number, assigned_after_it, called_by_it, a_global]
KEPT = [read_before, what_no_step_changes]


def outcome(hook_of, run):
    global _scale
    torch.manual_seed(0)
    s = torch.nn.Module()
    s.scale, s.last, s.fixed, s.n, s.limit = scalar(), scalar(), scalar(0.3), 0, 0.2
    s.h, s.items, s.later = torch.zeros(3, dtype=F64), {"k": scalar()}, [scalar()]
    _scale = scalar()
    layer = torch.nn.Linear(3, 3).double()

    def cell(c, x):
        s.h = torch.tanh(layer(x) + s.h)
        s.h.register_hook(hook_of(s))
        if hook_of is assigned_after_it:
            s.later[0] = s.later[0] * 0.5
            s.last = s.last * 0.5
        return c + s.h, s.h

    found = []
    for _ in range(2):
        carry, ys = run(cell, torch.zeros(3, dtype=F64), torch.randn(4, 3, dtype=F64))
        total = (carry * carry).sum() + (ys * ys).sum()
        found += [carry, ys, *torch.autograd.grad(total, list(layer.parameters()))]
        s.h = s.h.detach()
    return found


@pytest.mark.parametrize("hook_of", CHANGED)
@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_a_hook_finds_what_the_last_step_left(hook_of) -> None:
    with fallback("error"), pytest.raises(NotTraceableError, match="reads what steps change, at"):
        outcome(hook_of, scan)
    assert_same(outcome(hook_of, scan), outcome(hook_of, written_loop))


@pytest.mark.parametrize("hook_of", KEPT)
def test_a_hook_of_what_stays_is_captured(hook_of) -> None:
    with fallback("error"):
        assert_same(outcome(hook_of, scan), outcome(hook_of, written_loop))


def test_a_local_variable_that_changes_after_the_hook() -> None:
    def cell(c, x):
        scale = x * 0 + 0.5
        h = torch.tanh(x * w + c)
        h.register_hook(lambda g: g * scale)
        scale = scale * 0.5
        return h * scale, h

    w = torch.randn(3, dtype=F64, requires_grad=True)
    xs, h0 = torch.randn(4, 3, dtype=F64), torch.zeros(3, dtype=F64)
    with fallback("allow"):
        got = torch.autograd.grad(sum(v.sum() for v in scan(cell, h0, xs)), w)
    assert_same(got, torch.autograd.grad(sum(v.sum() for v in written_loop(cell, h0, xs)), w))
