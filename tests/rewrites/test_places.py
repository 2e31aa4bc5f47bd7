"""What a step makes and the scan keeps is computed where it is kept, in the eager loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_same, gradients, loop
from oracle import randn_of_shape as randn

from torch_scan_hop import fallback, scan
from torch_scan_hop.eager import run as eager_run
from torch_scan_hop.eager.calls import MOST_BYTES

T, B, D = 30, 3, 4
ORDER = torch.tensor([2, 0, 3, 1])


FUNCTIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda v: F.gelu(v, approximate="tanh"),
    "softplus": lambda v: F.softplus(v, 2.0, 1.0),
    "leaky relu": lambda v: F.leaky_relu(v, 0.2),
    "elu": lambda v: F.elu(v, 0.5),
    "hardtanh": lambda v: F.hardtanh(v, -0.4, 0.6),
    "hardsigmoid": F.hardsigmoid,
    "softmax": lambda v: F.softmax(v, -1),
    "log_softmax": lambda v: F.log_softmax(v, 0),
    "logsumexp": lambda v: v.logsumexp(1, keepdim=True) + v,
    "where": lambda v: torch.where(v > 0, v, 0.5 * v),
    "where of two dtypes": lambda v: torch.where(v > 0, v, torch.ones((), dtype=torch.float32)),
    "gather": lambda v: v.gather(1, ORDER.expand(B, D)),
    "index_select": lambda v: v.index_select(1, ORDER),
    "mean": lambda v: v.mean(1, keepdim=True) + v,
    "tril": lambda v: v.tril(1),
    "mean and a mask": lambda v: v * (v > v.mean()),
}  # fmt: skip


@pytest.fixture
def sources(monkeypatch):
    """The loops that are written."""
    written = []

    class Noted(eager_run.EagerLoop):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            written.append(self.source)

    monkeypatch.setattr(eager_run, "EagerLoop", Noted)
    return written


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_made_where_they_are_kept(name, sources):
    def step(h, x):
        h = FUNCTIONS[name](h @ w + x)
        return h, h

    def train(run):
        h, ys = run(step, init, xs)
        return (h, ys), gradients((h, ys), [init, xs, w])

    w, init, xs = (randn(*s).double().requires_grad_() for s in ((D, D), (B, D), (T, B, D)))
    with fallback("error"):
        got = train(scan)
    assert_same(got, train(loop), 1e-9)
    assert len(sources) == 2
    assert not any("copy_" in source for source in sources), "\n".join(sources)


CARRIES = {
    "a view": lambda v, x: (v * x).t().contiguous().t(),
    "a transpose": lambda v, x: (v + x).t()[:, :B].t(),
    "a part": lambda v, x: torch.cat([v * x, v], 1)[:, :D],
    "a reshape": lambda v, x: (v * x).reshape(D, B).reshape(B, D),
    "a split": lambda v, x: torch.cat([v + x, v], 1).split(D, 1)[1] + torch.chunk(v * x, 2, 1)[0][:, :1],
    "over an operand": lambda v, x: torch.tanh(torch.exp(v * x).neg()),
    "in place": lambda v, x: (v * x).index_put_((ORDER[1:2],), x[0]),
    "in place by a slice": lambda v, x: torch.slice_scatter(v * x, x[:1], 0, 1, 2),
    "squeezed": lambda v, x: (v * x)[None].squeeze(0).expand(B, D),
    "detached": lambda v, x: (v * x).detach(),
    "by a scan": lambda v, x: scan(lambda c, r: (c, r), v * x, x)[0],
    "by a longer scan": lambda v, x: scan(lambda c, r: (c * 0.9 + r, None), v * x, x.repeat(9, 1))[0],
    "added to": lambda v, x: (v * x).index_add_(0, ORDER[1:2], x[:1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIES)
def test_a_carry_keeps_its_memory_for_a_step(name):
    """The loop computes small values where they were in the step before, but no carry."""

    def step(carry, x):
        h, before = carry
        new = torch.tanh(CARRIES[name](h, x) * w + 1.0)
        return (CARRIES[name](h, x), h), (new * before).sum()

    def train(run):
        results = run(step, (init, init * 0), xs)
        return results, gradients(results, [init, xs])

    w = randn(B, D).double()
    init, xs = (randn(*s).double().requires_grad_() for s in ((B, D), (T, B, D)))
    assert_same(train(scan), train(loop), 1e-9)
    with torch.no_grad():
        assert_same(scan(step, (init, init), xs), loop(step, (init, init), xs), 1e-9)


def test_small_values_keep_their_memory(sources):
    def step(h, x):
        h = torch.relu(h @ w + x)
        return h / h.sum(), None

    w, init, xs = randn(D, D).double(), randn(B, D).double(), randn(T, B, D).double()
    assert_same(scan(step, init, xs), loop(step, init, xs), 1e-9)
    scan(step, init.repeat(9000, 1), xs.repeat(1, 9000, 1))
    small, large = sources
    before_the_loop = "\n    addmm_default = None\n"
    assert before_the_loop in small and "out=addmm_default" in small, small
    assert before_the_loop not in large, large  # it is freed where it ends


def test_a_relu_of_zeros_and_nan():
    values = torch.tensor([-0.0, 0.0, torch.nan, -torch.inf, torch.inf, -1.0])
    _, ys = scan(lambda c, x: (c, torch.relu(x + c)), -torch.zeros(()), values.expand(20, 6))
    want = torch.relu(values).expand(20, 6)
    assert torch.equal(ys.signbit(), want.signbit())
    torch.testing.assert_close(ys, want, equal_nan=True, rtol=0, atol=0)


def test_the_memory_that_is_kept_is_bounded(sources):
    def step(h, x):
        for _ in range(40):
            h = torch.tanh(h) @ w
        return h * x, None

    w, init, xs = randn(64, 64).double(), randn(64, 64).double(), randn(T, 64, 64).double()
    assert_same(scan(step, init, xs), loop(step, init, xs), 1e-9)
    (source,) = sources
    kept = source[: source.index("for step__")].count(" = None")
    assert kept == MOST_BYTES // (64 * 64 * 8), source
