"""What a compiled program makes of no input: Inductor reads it as an expression, not from memory."""

import pytest
import torch
from oracle import assert_same, gradients, loop
from oracle import randn_of_shape as randn

from torch_scan_hop import scan

pytestmark = pytest.mark.torch_version

f64 = torch.float64
T = 6
W = randn(4, 4).double()


def written(shape):
    made = torch.zeros(shape, dtype=f64)
    made[..., 1] = 1.0
    return made


MADE = {
    "lower": lambda shape: torch.ones(shape, dtype=f64).tril(),
    "written": written,
    "filled": lambda shape: torch.ones(shape, dtype=f64).index_fill(-1, torch.tensor([2]), 3.0),
    "counted": lambda shape: torch.arange(torch.Size(shape).numel(), dtype=f64).reshape(shape) % 3,
}
STEPS = {
    "a kernel of lanes": lambda m: lambda h, x: (torch.sin(h * x) + m, h * m),
    "an affine step": lambda m: lambda h, x: (h * x.sigmoid() + m * 0.5, h * m),
    "a kernel of rows": lambda m: lambda h, x: (torch.tanh(h @ W + x) * m, h + m),
    "a counted loop": lambda m: lambda h, x: (torch.sort(h * x + m)[0], h.cumsum(-1) * m),
    "a kernel of one matrix": lambda m: lambda h, x: (torch.tanh(h + x), h[..., :1] + m),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("step", STEPS)
def test_what_is_made_within_the_program(step, made):
    x = randn(T, 4, 4).double().requires_grad_()

    def program(run, x):
        init, xs, m = MADE[made]((4, 4)), MADE[made]((T, 4, 4)), MADE[made]((4, 4))
        one = STEPS[step](m)
        return run(lambda h, x: one(h, x[0] + x[1]), init, (xs, x))

    expected = program(loop, x)
    actual = torch.compile(lambda x: program(scan, x), fullgraph=True)(x)
    assert_same(actual, expected)
    assert_same(gradients(actual, [x]), gradients(expected, [x]))


@pytest.mark.parametrize("lanes", [(3,), (4, 4), (100,)])
def test_a_place_that_a_step_names_by_a_number(lanes):
    """``made[..., 1] = 1`` compares an index with a number of Python's."""

    def step(h, x):
        return torch.sin(h) + written(h.shape) * x, h

    h, xs = randn(*lanes).double(), randn(T, *lanes).double()
    assert_same(torch.compile(lambda: scan(step, h, xs))(), loop(step, h, xs))
