"""Eager capture: what changes is captured again, what only looks new is not."""

from __future__ import annotations

import functools

import pytest
import torch
from oracle import VARIANTS, Variant, assert_same, check, loop
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from torch_scan_hop import fallback, scan

pytestmark = pytest.mark.torch_version

W = torch.randn(3, 3) * 0.3


class Cell(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(W.clone())

    def step(self, h, x):
        h = torch.tanh(h @ self.w + x)
        return h, h

    forward = step


def scaled(w, h, x, *, scale):
    h = torch.tanh(h @ w * scale + x)
    return h, h


cell = Cell()
# each call makes the function anew, as a model's forward does
FUNCTIONS = {
    "module": lambda: cell,
    "bound method": lambda: cell.step,
    "lambda": lambda: lambda h, x: (torch.tanh(h @ W + x), h),
    "partial": lambda: functools.partial(scaled, W, scale=2.0),
    "partial of a method": lambda: functools.partial(cell.step),
}


def run(fn, steps=5):
    _, ys = scan(fn, torch.zeros(2, 3), torch.randn(steps, 2, 3, requires_grad=True))
    ys.sum().backward()


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_the_same_function_is_captured_once(make):
    run(make())
    captured = counters["stats"]["unique_graphs"]
    assert captured > 0
    for _ in range(3):
        run(make())
    assert counters["stats"]["unique_graphs"] == captured


def test_a_new_trip_count_is_captured_once_more():
    for steps in (5, 6):
        run(cell, steps)
    captured = counters["stats"]["unique_graphs"]
    for steps in (7, 9, 12):
        run(cell, steps)
    assert counters["stats"]["unique_graphs"] == captured


def test_another_default_argument_is_another_function():
    totals = []
    for k in (1.0, 2.0, 3.0):
        carry, _ = scan(lambda c, x, k=k: (c + k * x, None), torch.zeros(1), torch.ones(4, 1))
        totals.append(float(carry))
    assert totals == [4.0, 8.0, 12.0]


def test_another_closure_is_seen():
    def total(w):
        return scan(lambda c, x: (c + w * x, None), torch.zeros(2), torch.ones(3, 2))[0]

    torch.testing.assert_close(total(torch.ones(2)), torch.full((2,), 3.0))
    torch.testing.assert_close(total(torch.full((2,), 5.0)), torch.full((2,), 15.0))


@pytest.mark.filterwarnings("error:.*could not be traced")
def test_a_call_under_a_users_mode_does_not_end_capturing():
    class Logger(TorchDispatchMode):
        def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
            return fn(*args, **(kwargs or {}))

    def add(c, x):
        return c + x, c * 2

    def call(n):
        return scan(add, torch.zeros(n), torch.ones(3, n))[0].tolist()

    with Logger():
        assert call(2) == [3, 3]
    assert call(2) == [3, 3]
    assert call(5) == [3] * 5


class Frozen(torch.nn.Module):
    """A layer that reads its own size, and whether it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.1, 0.4, 12).reshape(4, 3))

    def forward(self, h):
        scale = 1.0 if self.weight.requires_grad else 3.0
        return h * self.weight.sum(0) / self.weight.shape[0] * scale


def _larger(layer):
    layer.weight.data = torch.linspace(0.1, 0.9, 18).reshape(6, 3)


CHANGES = {
    "forward hook": lambda layer: layer.register_forward_hook(lambda _, args, out: out * 2),
    "forward pre-hook": lambda layer: layer.register_forward_pre_hook(lambda _, args: args[0] * 2),
    "backward hook": lambda layer: layer.register_full_backward_hook(
        lambda _, grads_in, grads_out: (grads_in[0] * 2,)
    ),
    "data of another size": _larger,
    "frozen": lambda layer: layer.requires_grad_(False),
}


@pytest.mark.filterwarnings("ignore:torch_scan_hop", "ignore:Full backward hook")
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_changes_after_the_capture(change):
    """Dynamo leaves guards out to be faster (``skip_*`` in its config): captures have them."""
    layer, xs = Frozen(), torch.ones(4, 3)

    def cell(h, x):
        h = torch.tanh(layer(h) + x)
        return h, h

    def results(run):
        h = torch.ones(3, requires_grad=True)
        carry, ys = run(cell, h, xs)
        return carry, ys, *torch.autograd.grad(carry.sum() + ys.sum(), h)

    assert_same(results(scan), results(loop), 1e-5)
    handle = CHANGES[change](layer)
    assert_same(results(scan), results(loop), 1e-5)
    if isinstance(handle, RemovableHandle):
        handle.remove()
        assert_same(results(scan), results(loop), 1e-5)


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_hooks_of_all_modules_do_not_see_graphs():
    layer, xs = Frozen(), torch.ones(4, 3)

    def cell(h, x):
        h = torch.tanh(layer(h) + x @ torch.eye(3))
        return h, h

    def results(run):
        h = torch.ones(3, requires_grad=True)
        carry, ys = run(cell, h, xs)
        return carry, ys, *torch.autograd.grad(carry.sum() + ys.sum(), (h, layer.weight))

    seen = []

    def hook(module, args, out):
        if isinstance(module, torch.fx.GraphModule):
            seen.append(module)
        return out * 2

    with register_module_forward_hook(hook):
        assert_same(results(scan), results(loop), 1e-5)
    assert seen == []


def in_inference_mode(h, x):
    with torch.inference_mode():
        norm = (h * 2).sum()
    return torch.tanh(h * 0.5 + x), norm.clone()


def with_modes_in_modes(h, x):
    with torch.no_grad():
        a = h * 3
        with torch.inference_mode():
            b = torch.ones(3) * 2
        a = a + b
    d = h * x
    with torch.inference_mode():
        e = torch.ones(3) * 3
        e.add_(1)
    return torch.tanh(h * a + d), e.clone() * h


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("body", [in_inference_mode, with_modes_in_modes])
def test_inference_mode_in_a_body(body, backend):
    """A trace that failed within it left torch in the trace's state, and nothing ran any more."""
    init, xs = torch.ones(3), torch.linspace(-1, 1, 12).reshape(4, 3)
    check(body, init, xs, variant=Variant(backend))
    assert torch.equal(torch.ones(2) + torch.ones(2), torch.full((2,), 2.0))


@pytest.mark.parametrize("layer", ["plain", "two layers", "bidirectional", "projected"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", ["eager", "inductor", "exported"])
def test_an_lstm_of_torchs_in_a_body(variant, dtype, layer):
    """In float32 torch's trace took oneDNN's operator for inference: a loop, and then a crash."""
    options = {"two layers": {"num_layers": 2}, "bidirectional": {"bidirectional": True}}
    options["projected"] = {"proj_size": 2}
    lstm = torch.nn.LSTM(3, 4, **options.get(layer, {})).to(dtype)
    n = 2 if layer in ("two layers", "bidirectional") else 1
    init = (torch.randn(n, 2, lstm.proj_size or 4, dtype=dtype), torch.randn(n, 2, 4, dtype=dtype))

    def cell(state, x):
        output, state = lstm(x[None], state)
        return state, output[0]

    run = Variant(exported=True) if variant == "exported" else VARIANTS[variant]
    exact = dtype is torch.float64
    xs = torch.randn(5, 2, 3, dtype=dtype)
    if variant == "exported":
        with torch.no_grad():
            assert_same(run(cell, init, xs), loop(cell, init, xs), 1e-9 if exact else 1e-5)
        return
    check(
        cell,
        init,
        xs,
        variant=run,
        params=list(lstm.parameters()),
        tolerance=1e-9 if exact else 1e-4,
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_divergence_that_torch_has_not_met(compiled, monkeypatch):
    monkeypatch.setattr(torch.distributions.kl, "_KL_MEMOIZE", {})

    def body(h, x):
        prior = torch.distributions.Normal(h, torch.ones_like(h))
        now = torch.distributions.Normal(torch.tanh(h @ W.double() + x), 0.5)
        both = (torch.distributions.Independent(d, 1) for d in (now, prior))
        divergence = torch.distributions.kl_divergence(now, prior).sum(-1)
        return now.mean, divergence + torch.distributions.kl_divergence(*both)

    def run(h, xs):
        return scan(body, h, xs)

    h, xs = torch.zeros(2, 3).double(), torch.linspace(-1, 1, 24).double().reshape(4, 2, 3)
    run = torch.compile(run, backend="eager", fullgraph=True) if compiled else run
    with fallback("error"):
        results = run(h, xs)
    assert_same(results, loop(body, h, xs), 1e-12)
