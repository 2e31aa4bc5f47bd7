"""What no gradient reaches is not in the graph of a scan, as it is not in that of a loop."""

from __future__ import annotations

import pytest
import torch
from oracle import written_loop as loop
from torch import nn

from torch_scan_hop import scan

T, B, D = 20, 2, 3

WAYS = {
    "eager": scan,
    "compile=True": lambda *args: scan(*args, compile=True),
    "checkpoint": lambda *args: scan(*args, checkpoint="sqrt"),
    "compiled": torch.compile(lambda *args: scan(*args), backend="aot_eager", fullgraph=True),
}


class Stashing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(D, D, dtype=torch.float64)
        self.last, self.n = torch.zeros(B, D, dtype=torch.float64), 0

    def forward(self, h, x):
        h = torch.tanh(self.linear(h) + x)
        self.stash(h)
        self.n += 1
        return h, h * 2

    def stash(self, h):
        self.last = h


class StashingSometimes(Stashing):
    def stash(self, h):
        if self.n % 2 == 0:
            self.last = h


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Stashing, StashingSometimes])
def test_a_stash_of_one_call_is_not_in_the_graph_of_the_next(way, kind):
    xs, h = torch.randn(T, B, D, dtype=torch.float64), torch.ones(B, D, dtype=torch.float64)
    results = []
    for scan_like in (WAYS[way], loop):
        module = kind()
        for _ in range(3):
            h_T, ys = scan_like(module, h, xs)
            ys.square().sum().backward()  # frees the graph that module.last is of
        results.append([h_T, ys, module.last, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(*results)


BODIES = {
    "not read": lambda w, c, x: ((torch.tanh(c[0] * w + x), x), c[0]),
    "compared": lambda w, c, x: ((torch.tanh(c[0] * w + x), x), c[0] * (c[1] > 0)),
    "detached": lambda w, c, x: ((torch.tanh(c[0] * w + x), x), c[0] * c[1].detach()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("of", ["init", "closure"])
def test_what_a_step_cuts_off(way, name, of):
    w = torch.ones(D, dtype=torch.float64, requires_grad=True)
    xs, h = torch.randn(T, D, dtype=torch.float64), torch.ones(D, dtype=torch.float64)

    def gradients(scan_like):
        used = (w * 2).exp()
        torch.autograd.grad(used.sum(), w)  # which frees its graph

        def body(carry, x):
            return BODIES[name](w, (carry[0], used if of == "closure" else carry[1]), x)

        (h_T, _), ys = scan_like(body, (h, used if of == "init" else h), xs)
        return torch.autograd.grad(ys.sum() + h_T.sum(), w), ys

    torch.testing.assert_close(gradients(WAYS[way]), gradients(loop))


@pytest.mark.parametrize("steps", [0, 1, 20])
def test_init_is_in_the_graph_if_there_is_no_step(steps):
    init = (torch.ones(D), torch.ones(D, requires_grad=True))
    (_, left), _ = scan(lambda c, x: ((c[0] + x, x), c[0]), init, torch.randn(steps, D))
    assert left.requires_grad == (steps == 0)
