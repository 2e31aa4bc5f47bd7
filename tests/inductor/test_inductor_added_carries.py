"""Carries of a counted loop that steps only add to have one buffer, which steps write over."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cells import Draw
from oracle import assert_same, gradients, loop
from torch.fx.experimental.proxy_tensor import make_fx

from torch_scan_hop import scan
from torch_scan_hop.inductor.body import StepExamples, added_to
from torch_scan_hop.inductor.kernels import is_product
from torch_scan_hop.inductor.loop import ScanLoop
from torch_scan_hop.rewrites import blocks, using_options
from torch_scan_hop.signature import Inputs

DRAW = Draw(torch.float32)


@pytest.fixture
def in_place(monkeypatch):
    """Of each counted loop that is compiled meanwhile, the carries with one buffer."""
    found = []
    made = ScanLoop.__init__

    def recorded(self, *args):
        made(self, *args)
        found.append(list(self.in_place))

    monkeypatch.setattr(ScanLoop, "__init__", recorded)
    return found


def test_which_carries_are_written_in_place():
    """Not what is a y, too, or read besides; no sum that Inductor fuses; nothing of another kind."""

    def step(h, right, left, read, returned, fused, wide, x):
        right, left = right + h.t() @ h, x.t() @ h + left
        returned = returned + h @ right
        carry = h + x, right.clone(), left, read + h @ x.t() @ h, returned, fused + h.sin()
        return (*carry, wide + h[:1] @ h.t() @ h, returned, read * 2)

    rows, matrix = torch.randn(3, 4), torch.randn(4, 4)
    carry, x = [rows, matrix, matrix, rows, rows, rows, rows], rows
    graph = make_fx(step)(*(t.clone() for t in (*carry, x)))
    examples = StepExamples(0, Inputs(carry, [x], []), [])
    assert added_to(graph, examples, is_product) == [2]


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_sums_that_start_from_zeros(cpp_wrapper, in_place, monkeypatch):
    """Of weights' gradients, which each block of a backward's steps adds to."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    monkeypatch.setattr(blocks, "MIN_BLOCK", 4)
    w, u = DRAW.weight(4, 4), DRAW.weight(4, 4)

    def step(h, x):
        h = torch.tanh(h @ w + F.linear(x, u))
        return h, h

    given = [DRAW.normal(3, 4).requires_grad_(), DRAW.normal(12, 3, 4).requires_grad_()]
    with using_options(one_kernel=False):
        options = {"cpp_wrapper": cpp_wrapper}
        compiled = torch.compile(lambda h, xs: scan(step, h, xs), fullgraph=True, options=options)
        got, expected = compiled(*given), loop(step, *given)
        actual = gradients(got, [*given, w, u])
        assert_same(actual, gradients(expected, [*given, w, u]), 1e-4)
    assert any(len(found) >= 2 for found in in_place)
