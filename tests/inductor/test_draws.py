"""Steps that draw random numbers, compiled: their seeds are drawn before the loop, all at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cells import Draw
from gpu_cells import DRAW_CASES
from oracle import assert_same, differentiable, gradients, loop, require_grad, zeros_for_none

from torch_scan_hop import scan
from torch_scan_hop.inductor.watch import watching

pytestmark = pytest.mark.torch_version
B, H, T = 3, 13, 3  # no whole vectors


def lstm_between_two_dropouts(state, x, p):
    h, c = torch.lstm_cell(F.dropout(x, 0.2), state, p["w"], p["u"], p["b"])
    h = F.dropout(h, 0.4)
    return (h, c), h


def number_for_all(h, x, p):
    h = torch.tanh(h * p["d"] + x + torch.randn(()))
    return h, h * torch.rand(H)


def inputs(name):
    draw = Draw(torch.float32)
    p = {"w": draw.normal(4 * H, H), "u": draw.normal(4 * H, H), "b": draw.normal(4 * H)}
    p = {k: 0.3 * v for k, v in p.items()} | {"d": draw.normal(H)}
    init = draw.normal(B, H)
    return (init, init * 0.5) if name == "lstm" else init, draw.normal(T, B, H), p


STEPS = {name: case.step for name, case in DRAW_CASES.items() if name != "lstm that drops"}
SLOW = ("lstm", "number for all", "chooses")
STEPS |= {"lstm": lstm_between_two_dropouts, "number for all": number_for_all}


@pytest.mark.parametrize(
    ("name", "reverse"),
    [
        *(("drops", False), ("noisy", True)),
        *(pytest.param(name, name == "lstm", marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_a_scan_draws_what_the_compiled_loop_draws(name, reverse):
    step = STEPS[name]
    given = inputs(name)
    given[2]["u"] = given[2]["u"][:H] if name != "lstm" else given[2]["u"]

    def drawn_by(way):
        def run(init, xs, p):
            return way(lambda c, x: step(c, x, p), init, xs, reverse=reverse)

        torch.manual_seed(3)
        arguments = require_grad(given)
        results = torch.compile(run, fullgraph=True)(*arguments)
        return results, zeros_for_none(gradients(results, at := differentiable(arguments)), at)

    kernels = []
    with watching(lambda _, kernel, __: kernels.append(kernel)):
        ours = drawn_by(scan)
    assert kernels[0], "the steps that draw are a counted loop"
    assert_same(ours, drawn_by(loop), 1e-5)


def test_any_number_of_steps_and_another_seed_each_time():
    def step(h, x):
        h = F.dropout(h + x, 0.5)
        return h, h

    run = torch.compile(lambda xs: scan(step, torch.ones(7), xs)[1], dynamic=True, fullgraph=True)
    patterns = [run(torch.ones(n, 7)) != 0 for n in (0, 1, 5, 40)]
    assert [p.shape[0] for p in patterns] == [0, 1, 5, 40]
    rows = torch.cat(patterns[2:])
    assert 0.35 < float(rows.double().mean()) < 0.65 and len(rows.unique(dim=0)) > 30


def test_a_generator_in_the_order_of_eager_mode_is_left_to_the_steps():
    def step(h, x):
        h = F.dropout(h + x, 0.5)
        return h, h

    xs = torch.ones(6, 5)
    with torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(1)
        got = torch.compile(lambda xs: scan(step, torch.ones(5), xs), fullgraph=True)(xs)
    torch.manual_seed(1)
    assert_same(got, loop(step, torch.ones(5), xs), 1e-6)


def flags_and_signs(h, x, p):
    h = torch.tanh(h * p["d"] + x)
    return h, (h, h > 0.1, (h > x) & (x > 0))


def flags_of_products(h, x, p):
    h = torch.tanh(h @ p["u"][:H] + x)
    return torch.where(h > 0, h, h * p["d"]), (h, h > 0.1)


def flags_in_the_carry(state, x, p):
    h, on = state
    h = torch.where(on, torch.tanh(h * p["d"] + x), h * 0.9)
    return (h, h > x), (h, ~on)


@pytest.mark.parametrize("rows", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", [flags_and_signs, flags_of_products, flags_in_the_carry])
def test_bools_are_results_of_kernels(step, rows):
    _, _, p = inputs("flags")
    draw = Draw(torch.float32)
    init, xs = draw.normal(rows, H), draw.normal(T, rows, H)
    init = (init, init > 0) if step is flags_in_the_carry else init
    given = require_grad((init, xs, p))
    kernels = []

    def run(init, xs, p):
        return scan(lambda c, x: step(c, x, p), init, xs)

    with watching(lambda _, kernel, __: kernels.append(kernel)):
        got = torch.compile(run, fullgraph=True)(*given)
        found = gradients(got, wrt := differentiable(given))
    assert all(kernels), "a counted loop"
    want = loop(lambda c, x: step(c, x, given[2]), given[0], given[1])
    assert_same(got, want, 1e-5)
    assert_same(zeros_for_none(found, wrt), zeros_for_none(gradients(want, wrt), wrt), 1e-4)
