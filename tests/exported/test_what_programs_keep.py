"""What an exported program keeps: numbers' digits, what steps leave in attributes, ``no_grad``."""

from __future__ import annotations

import io

import pytest
import torch
from oracle import assert_same, gradients
from torch import nn

from torch_scan_hop import fallback, scan

pytestmark = [pytest.mark.torch_version, pytest.mark.works("torch.export")]
W = torch.tensor([0.5, -0.7], dtype=torch.float64)


class Adam(nn.Module):
    """Corrects by ``1 - 0.9 ** k``, whose digits are Python's."""

    def forward(self, scan_, w, xs):
        def step(carry, x):
            w, m, k = carry
            k = k + 1
            m = 0.9 * m + 0.1 * torch.sin(w - x)
            w = w - 0.1 * m / (1 - 0.9**k)
            return (w, m, k), w

        (w, m, _), ws = scan_(step, (w, w * 0, 0), xs)
        return w, m, ws


class Memory:
    trace, calls = None, 0


class Leaving(nn.Module):
    """Goes on with what steps have left in variables, and in an object."""

    def forward(self, scan_, w, xs):
        memory, total, count = Memory(), w * 0, 0

        def step(h, x):
            nonlocal total, count
            h = torch.sin(h * w + x)
            total, count = total + h, count + 1
            memory.trace = h if memory.trace is None else 0.5 * memory.trace + h
            memory.calls += 1
            return h, h

        h, ys = scan_(step, w * 0, xs)
        return h, ys, total / count, memory.trace * memory.calls


def loop(step, carry, xs):
    """Python's numbers stay Python's."""
    ys = []
    for x in xs:
        carry, y = step(carry, x)
        ys.append(y)
    return carry, None if y is None else torch.stack(ys)


def steps(n):
    return torch.linspace(-1, 1, 2 * n, dtype=torch.float64).reshape(n, 2)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("model", [Adam, Leaving])
def test_a_program_computes_what_the_loop_does(model, strict):
    class Program(nn.Module):
        def forward(self, w, xs):
            return model()(scan, w, xs)

    T = torch.export.Dim("T", min=3, max=50)
    with fallback("error"):
        program = torch.export.export(
            Program(), (W, steps(4)), dynamic_shapes=(None, {0: T}), strict=strict
        )
    for n in (4, 7):
        wrt = [W.clone().requires_grad_(), steps(n).requires_grad_()]
        expected, results = model()(loop, *wrt), program.module()(*wrt)
        assert_same([*results], [*expected], 1e-12)
        assert_same(gradients(results, wrt), gradients(expected, wrt), 1e-12)


class Frozen(nn.Module):
    """Nothing that steps do under ``no_grad`` has a gradient; what follows has."""

    def forward(self, scan_, w, xs):
        with torch.no_grad():
            h, ys = scan_(lambda h, x: (torch.tanh(h * w + x),) * 2, w * 0, xs)
            h, _ = scan_(lambda h, x: (torch.sin(h * w - x), None), h, xs)
        more, _ = scan_(lambda h, x: (torch.tanh(h * w + x), None), h, ys)
        return h * w, more


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_keeps_no_grad_around_a_scan(strict):
    class Program(nn.Module):
        def forward(self, w, xs):
            return Frozen()(scan, w, xs)

    wrt = [W.clone().requires_grad_(), steps(4).requires_grad_()]
    program = torch.export.export(Program(), (W, steps(4)), strict=strict)
    expected, results = Frozen()(loop, *wrt), program.module()(*wrt)
    assert_same([*results], [*expected], 1e-12)
    assert_same(gradients(results, wrt), gradients(expected, wrt), 1e-12)
    with torch.no_grad():  # such a program is one without regions, and may be trained
        there = torch.export.export(Program(), (W, steps(4)), strict=strict)
    assert gradients(there.module()(*wrt), wrt)[0] is not None


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_with_a_scan_of_no_results_is_loaded(strict):
    class Program(nn.Module):
        def forward(self, w, xs):
            scan(lambda c, x: (None, None), None, xs)
            return scan(lambda h, x: (h * w + x, None), w, xs)[0]

    saved = io.BytesIO()
    torch.export.save(torch.export.export(Program(), (W, steps(4)), strict=strict), saved)
    saved.seek(0)
    loaded = torch.export.load(saved).module()
    assert_same(loaded(W, steps(4)), Program()(W, steps(4)), 1e-12)


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_has_a_scan_under_vmap(strict):
    class Program(nn.Module):
        def forward(self, w, xs):
            def one(w, xs):
                return scan(lambda h, x: (torch.tanh(h * w + x), h.sum()), w, xs)

            return torch.vmap(one, in_dims=(None, 1))(w, xs)

    xs = steps(12).reshape(4, 3, 2)
    program = torch.export.export(Program(), (W, xs), strict=strict)
    assert_same(program.module()(W, xs), Program()(W, xs), 1e-12)
