"""torch.func under ``torch.compile`` where sizes are symbols."""

import pytest
import torch
from oracle import assert_same, loop
from torch.func import grad, jvp, vmap

from torch_scan_hop import scan

F64 = torch.float64


def cell(c, x):
    n = torch.tanh(x + c)
    return n, n.reshape(-1).view(n.shape[0]) * x.shape[0]


def nested(run):
    return lambda c, x: (torch.sin(c), run(cell, x, torch.stack([c, 2 * c]))[1].sum(0))


#: (what is mapped, the shape of init, that of xs)
CALLS = {
    "init": (lambda run, h, xs: vmap(lambda h: run(cell, h, xs), 1)(h), (3, 5), (4, 3)),
    "xs": (lambda run, h, xs: vmap(lambda xs: run(cell, h, xs))(xs), (3,), (5, 4, 3)),
    "xs of no step": (lambda run, h, xs: vmap(lambda xs: run(cell, h, xs))(xs), (3,), (5, 0, 3)),
    "both": (lambda run, h, xs: vmap(lambda h, xs: run(cell, h, xs), (0, 2))(h, xs), (5, 3), (4, 3, 5)),
    "a closure": (
        lambda run, h, xs: vmap(lambda h: run(lambda c, x: (c + x, h * x), xs[0], xs))(h),
        (5, 3), (4, 3),
    ),
    "twice": (
        lambda run, h, xs: vmap(vmap(lambda h, xs: run(cell, h, xs), (None, 1)), (1, None))(h, xs),
        (3, 5), (4, 6, 3),
    ),
    "nested": (lambda run, h, xs: vmap(lambda h: run(nested(run), h, xs), 1)(h), (3, 5), (4, 3)),
    "grad of vmap": (
        lambda run, h, xs: grad(lambda h: vmap(lambda h: run(cell, h, xs))(h)[1].sum())(h), (5, 3), (4, 3),
    ),
    "vmap of grad": (
        lambda run, h, xs: vmap(grad(lambda h: run(cell, h, xs)[1].sum()))(h), (5, 3), (4, 3),
    ),
    "vmap of jvp": (
        lambda run, h, xs: vmap(lambda h: jvp(lambda h: run(cell, h, xs), (h,), (h,)))(h), (5, 3), (4, 3),
    ),
}  # fmt: skip


@pytest.mark.torch_version
@pytest.mark.parametrize("call", CALLS)
def test_symbolic_sizes(call):
    f, *shapes = CALLS[call]
    torch.manual_seed(0)
    h, xs = (torch.randn(shape, dtype=F64) for shape in shapes)
    compiled = torch.compile(
        lambda h, xs: f(scan, h, xs), backend="aot_eager", fullgraph=True, dynamic=True
    )
    assert_same(compiled(h, xs), f(loop, h, xs))
