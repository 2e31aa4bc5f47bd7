"""Forward-mode derivatives in a body: their zeros are tensors without memory."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, loop

from torch_scan_hop import scan

pytestmark = pytest.mark.torch_version


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_filter_whose_jacobian_is_taken_forward(compile):
    """The solve has its step differentiated with gradients on: constants have tangents then."""
    h, zs = torch.randn(2, 3).double(), torch.randn(4, 2).double()

    def filtered(scan_, **options):
        w = h.clone().requires_grad_()

        def observe(x):
            return w @ x + 0.1 * (x**2).sum()

        def cell(carry, z):
            x, s = carry
            j = torch.func.jacfwd(observe)(x)
            gain = torch.linalg.solve(j @ s @ j.T + torch.eye(2).double(), j @ s).T
            x = x + gain @ (z - observe(x))
            return (x, s - gain @ j @ s), x

        init = (torch.ones(3).double(), torch.eye(3).double())
        (x, s), xs = scan_(cell, init, zs, **options)
        return x, s, *torch.autograd.grad(xs.sum() + s.sum(), w)

    assert_same(filtered(scan, compile=compile), filtered(loop))
