"""A tensor whose value a step reads as a Python number (``.item()``, ``float(t)``, ``math.exp(t)``):
it is a number in the body, without a gradient, as in the loop."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import assert_same, loop
from torch.utils.checkpoint import checkpoint

from torch_scan_hop import NotTraceableError, fallback, scan

pytestmark = pytest.mark.torch_version

TABLE = torch.arange(12.0, dtype=torch.float64).reshape(4, 3).sin()
NEXT = torch.arange(12).reshape(4, 3) * 5 % 4


def changed_later(h, w):
    total = h.sum()
    number = total.item()
    total.add_(1)
    return h * w * number + total


#: of a state and a weight that requires grad
STEPS = {
    "item": lambda h, w: h * w * h.sum().item(),
    "item of one element": lambda h, w: h * w + h[:1].item(),
    "float": lambda h, w: h * w / (1 + float(h.norm())),
    "int": lambda h, w: h * w + int(h.sum() * 7),
    "math": lambda h, w: h * w * math.exp(-h.sum()),
    "int of one element": lambda h, w: h * w + int(h[1:2] * 7) + math.exp(h[:1].detach() * 0.1),
    "arithmetic of numbers": lambda h, w: h * w * (1 - 0.9 ** (2 + h.sum().item()) / 3),
    "an index": lambda h, w: h * w + TABLE[int(h.argmax()), h.argmin().item()],
    "a size is known": lambda h, w: h * w + h.numel() + torch.tensor(h.max().item()),
    "changed later": changed_later,
    "one bound of two": lambda h, w: (h * w).clamp(-0.5, h.max().item()),
    "the lower bound": lambda h, w: torch.clip(h * w, h.min().item(), max=0.5),
    "a bound in place": lambda h, w: (h * w).clamp_(min=-0.5, max=float(h.mean())),
    "bounds that cross": lambda h, w: h * w + (h * w).clamp(0.5, h.min().item()),
    "a list": lambda h, w: h * w * sum(h.tolist()),
    "lists in a list": lambda h, w: h * w + max(map(sum, TABLE[:, 0].view(2, 2).tolist())),
    "a list of numbers of a state": lambda h, w: h * w + sum(map(sum, h.view(3, 1).tolist())),
    "bool": lambda h, w: h * w + bool(h[0] > 0),
    "a kind": lambda h, w: h * w if isinstance(h.sum().item(), float) else h,
    "in a checkpoint": lambda h, w: checkpoint(
        lambda h: h * w * (1 - 0.9 ** float(h.norm())), h, use_reentrant=False
    ),
    "in a scan": lambda h, w: scan(lambda c, _: (c * w * c.sum().item(), None), h, length=2)[0],
}


def compiled(*args):
    return torch.compile(scan, backend="aot_eager", fullgraph=True)(*args)


def outputs(run, step, dtype):
    torch.manual_seed(0)
    w, init, xs = (torch.randn(*size, dtype=dtype) for size in [(3,), (3,), (5, 3)])
    leaves = [tensor.requires_grad_() for tensor in (w, init, xs)]

    def cell(h, x):
        h = torch.tanh(step(h, w) + x)
        return h, (h, h.detach().sum().item())

    h, (ys, numbers) = run(cell, init, xs)
    return h, ys, numbers, torch.autograd.grad((ys.sin() + h).sum(), leaves)


@pytest.mark.parametrize("run", [scan, compiled])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_as_the_loop(name, run):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        with fallback("error"):
            found = outputs(run, STEPS[name], dtype)
        expected = outputs(loop, STEPS[name], dtype)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("run", [scan, compiled])
def test_states_that_are_numbers(run):
    """As in a table of values, which learns."""

    def results(run):
        values = torch.zeros(4, 3, dtype=torch.float64)

        def cell(state, reward):
            s = state.item()
            action = values[s].argmax().item()
            after = int(NEXT[s, action])
            values[s, action] += 0.5 * (reward + 0.9 * values[after].max() - values[s, action])
            return torch.tensor(after), action

        rewards = torch.linspace(-1, 1, 20, dtype=torch.float64)
        return run(cell, torch.tensor(1), rewards), values

    with fallback("error"):
        found = results(run)
    assert_same(found, results(loop), 1e-12)


@pytest.mark.parametrize("run", [scan, compiled])
def test_a_number_in_the_carry(run):
    def results(run):
        def cell(carry, x):
            h, scale, n = carry
            h = torch.tanh(h * scale + x / n)
            return (h, 0.5 * scale + h.norm().item(), n + 1), scale

        xs = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)
        (h, scale, n), ys = run(cell, (torch.ones(3, dtype=torch.float64), 1.0, 1), xs)
        return h, torch.as_tensor(scale).float(), torch.as_tensor(n), ys.float()

    with fallback("error"):
        found = results(run)
    expected = results(loop)
    assert_same(found[0], expected[0], 1e-12)
    assert_same(found[1:], expected[1:], 1e-6)


def test_a_root_of_a_negative_value_is_an_error_as_in_python():
    with fallback("allow"), pytest.raises(ValueError, match="math domain error"):
        scan(lambda h, x: (h + math.sqrt(x.sum()), None), torch.zeros(()), -torch.ones(3, 2))


def by_a_counter(carry, x):
    h, n = carry
    return (h * 2 if n + h.sum().item() > 2 else h + x, n + 1), h


@pytest.mark.parametrize(
    ("cell", "init", "words"),
    [
        (lambda h, x: (h * 2 if h.sum().item() > 0 else h, h), torch.ones(2), "torch.where"),
        (by_a_counter, (torch.ones(2), 0), "torch.where"),
        (lambda h, x: (h + x[: int(h.sum())].sum(), h), torch.ones(2), r"int\(h\.sum\(\)\)"),
        (lambda h, x: (h + len(str(h.sum().item())), h), torch.ones(2), "reads|str"),
    ],
    ids=["branch", "branch beside a counter", "size", "text"],
)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_what_needs_the_value_is_a_loop(cell, init, words):
    xs = torch.ones(4, 2)
    with fallback("error"), pytest.raises(NotTraceableError, match=words):
        scan(cell, init, xs)
    with fallback("allow"):
        found = scan(cell, init, xs)
    torch.testing.assert_close(found[1], loop(cell, init, xs)[1])
