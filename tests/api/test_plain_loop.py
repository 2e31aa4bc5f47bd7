"""The loop of bodies that cannot be traced: the reference's results, and nobody's tensors harmed."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
import torch
from fuzz.campaign import run_here
from fuzz.generate import DEFAULT
from fuzz.modes import parse_mode
from oracle import assert_same, written_loop

from torch_scan_hop import NotTraceableError, fallback, scan, scan_layers, tree
from torch_scan_hop.eager import plain_loop
from torch_scan_hop.eager.plain_loop import run_loop
from torch_scan_hop.reference import scan_loop

F64 = torch.float64
HELD: list[torch.Tensor] = []
BUFFER = torch.ones(3, dtype=F64)
ARRAY = np.ones(3)


def same_tensor(h, x):
    h = torch.sin(h + x)
    return h, h


def writes_to_its_carry(h, x):
    h.mul_(0.5).add_(x)
    return h, h


def writes_to_its_x(h, x):
    x.mul_(2.0)
    return h + x, x


def writes_to_a_buffer(h, x):
    BUFFER.add_(x.detach())
    return h + BUFFER, BUFFER


def fills_one_buffer_anew(h, x):
    BUFFER.copy_(h.detach() + x.detach())
    return BUFFER + h, BUFFER.view(3)


def returns_what_it_closes_over(h, x):
    if HELD[-1:]:
        h.add_(x)
    HELD.append(h)
    return BUFFER, HELD[0]


def returns_views(h, x):
    z = torch.cat([h * x, x])
    return z[:3], {"a": z[3:], "b": (None, z.detach()), "n": 1.5}


def keeps_its_carry(h, x):
    HELD.append(h)
    h = h.sin()
    if len(HELD) > 1:
        h.add_(x)
    return h, HELD[-1]


def writes_at_one_step(h, x):
    HELD.append(x)
    if len(HELD) == 3:
        h.zero_()
    h = h + x
    return h, h


def returns_data(h, x):
    BUFFER.add_(x.detach())
    h.add_(x)
    h = h.sin()
    return h, (h.data, BUFFER.data)


def returns_arrays(h, x):
    ARRAY[:] += x.detach().numpy()
    return h + x, torch.from_numpy(ARRAY)


def carries_an_array(h, x):
    ARRAY[:] += x.detach().numpy()
    return torch.from_numpy(ARRAY), h * 2


def stays_sparse(h, x):
    h = h + x
    return h, h.to_sparse()


def passes_on(h, x):
    return h, x


BODIES = [
    same_tensor, writes_to_its_carry, writes_to_its_x, writes_to_a_buffer, fills_one_buffer_anew,
    returns_what_it_closes_over, returns_views, keeps_its_carry, writes_at_one_step, passes_on,
    returns_data, returns_arrays, carries_an_array,
]  # fmt: skip


def results(loop, body, carry_kind, with_grad, reverse=False):
    HELD.clear()
    BUFFER.fill_(1.0)
    ARRAY.fill(1.0)
    g = torch.Generator().manual_seed(1)
    init, xs = (torch.randn(n, 3, dtype=F64, generator=g).requires_grad_(with_grad) for n in (1, 4))
    h0 = init[0]
    if carry_kind == "tree":
        inner = body

        def body(c, x):
            h, y = inner(c["h"], x[0])
            return {"n": None, "h": h, "k": (c["k"][0] + 1, x[1])}, (y, [c["k"][0]])

        ones = torch.ones(4, 2)
        found = loop(
            body, {"h": h0, "n": None, "k": (torch.tensor(0), ones[0])}, (xs, ones), 4, reverse
        )
    else:
        found = loop(body, h0, xs, 4, reverse)
    floats = [v for v in tree.tensors(found) if v.requires_grad]
    gradients = (
        torch.autograd.grad([v.square().sum() for v in floats], [init, xs], allow_unused=True)
        if floats
        else None
    )
    return found, gradients, BUFFER.clone(), xs.detach().clone(), init.detach().clone()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("carry_kind", ["tensor", "tree"])
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_results_are_the_reference_s(body, with_grad, carry_kind, reverse, monkeypatch):
    expected = results(scan_loop, body, carry_kind, with_grad, reverse)
    monkeypatch.setattr(plain_loop, "scan_loop", None)  # the path under test is taken
    with torch.set_grad_enabled(with_grad):
        assert_same(results(run_loop, body, carry_kind, with_grad, reverse), expected)


LAYOUTS = {
    "expanded": lambda x: x[:1].expand(4, 3),
    "windows": lambda x: x.flatten().unfold(0, 3, 1)[:4],
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: x.repeat_interleave(2, 0)[::2],
    "complex": lambda x: torch.complex(x, x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("body", [writes_to_its_x, writes_to_its_carry])
def test_layouts_of_xs(body, layout):
    def run(loop):
        xs = LAYOUTS[layout](torch.arange(12.0, dtype=F64).view(4, 3))
        with torch.no_grad():
            return loop(body, torch.zeros(3, dtype=xs.dtype), xs, 4, False), xs

    assert_same(run(run_loop), run(scan_loop))


def test_a_body_that_changes_the_xs_it_scans_sees_its_changes():
    def run(loop):
        xs = torch.ones(4, 2, dtype=F64)

        def body(h, x):
            xs[2:] += 1
            return h + x, x

        return loop(body, torch.zeros(2, dtype=F64), xs, 4, False), xs

    assert_same(run(run_loop), run(scan_loop))


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_contexts_without_autograd(context):
    with context():
        xs = torch.randn(4, 3, dtype=F64)
        assert_same(
            run_loop(writes_to_its_carry, torch.zeros(3, dtype=F64), xs, 4, False),
            scan_loop(writes_to_its_carry, torch.zeros(3, dtype=F64), xs, 4, False),
        )


def test_sparse_ys():
    xs = torch.ones(4, 3, dtype=F64)
    h, ys = run_loop(stays_sparse, torch.zeros(3, dtype=F64), xs, 4, False)
    expected = scan_loop(stays_sparse, torch.zeros(3, dtype=F64), xs, 4, False)
    assert_same((h, ys.to_dense()), (expected[0], expected[1].to_dense()))


def test_tensors_of_inference_mode_in_a_body():
    def body(h, x):
        with torch.inference_mode():
            return h + x, x * 2

    with torch.no_grad():
        xs = torch.randn(4, 3, dtype=F64)
        h = torch.zeros(3, dtype=F64)
        assert_same(run_loop(body, h, xs, 4, False), scan_loop(body, h, xs, 4, False))


def test_only_what_somebody_else_holds_is_copied(monkeypatch):
    copied = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda t: copied.append(1) or clone(t))

    def body(h, x):
        h = torch.sin(h + x)
        return h, h.cos()

    run_loop(body, torch.zeros(2), torch.ones(5, 2), 5, False)
    # init, and what the last step returned, which the loop looks at once more
    assert len(copied) == 1 + 2
    copied.clear()
    run_loop(same_tensor, torch.zeros(2), torch.ones(5, 2), 5, False)
    assert len(copied) == 1 + 4 + 2  # the y of each step, too


def test_wrong_carries_are_named():
    with pytest.raises(ValueError, match="carry"):
        run_loop(lambda h, x: (h[:1], None), torch.zeros(2), torch.ones(3, 2), 3, False)
    with pytest.raises(TypeError, match="pair"):
        run_loop(lambda h, x: h, torch.zeros(2), torch.ones(3, 2), 3, False)
    with pytest.raises(TypeError, match=r"carry\['a'\]"):
        run_loop(lambda h, x: ({"a": 1j}, None), {"a": torch.zeros(())}, torch.ones(3), 3, False)


def test_random_programs():
    found = run_here(range(40, 70), [parse_mode("loop")], DEFAULT)
    assert not [(f.seed, f.outcome) for f in found if f.outcome.is_failure]


def is_odd(z):
    return z * 2 if z.sum() > 0 else z


@pytest.mark.parametrize("kind", ["function", "partial", "module", "layers"])
def test_what_one_callee_does_says_nothing_of_another(kind):
    """A wrapper of scan serves a program: each body that it makes has the same code."""

    class Odd(torch.nn.Linear):
        def forward(self, z):
            return is_odd(super().forward(z))

    x = torch.randn(5, 4).requires_grad_()

    def run(act):
        def cell(h, x):
            h = act(h + x)
            return h, h

        return scan(cell, torch.zeros(4), x)[0]

    calls = {
        "function": (is_odd, torch.sin, run),
        "partial": (functools.partial(is_odd), functools.partial(torch.clamp, min=0), run),
        "module": (Odd(4, 4), torch.nn.Linear(4, 4), run),
        "layers": (
            [Odd(4, 4), Odd(4, 4)],
            [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)],
            lambda layers: scan_layers(layers, x),
        ),
    }
    odd, even, call = calls[kind]
    with pytest.warns(UserWarning, match="plain Python loop"):
        call(odd)
    with fallback("error"):
        assert "Scan" in call(even).grad_fn.name()
        with pytest.raises(NotTraceableError):
            call(odd)


def test_a_second_reason_is_said_too():
    def run(act):
        return scan(lambda h, x: (act(h + x), x), torch.zeros(4), torch.ones(3, 4))

    def prints(z):
        print("here")
        return z

    for act in (is_odd, prints):
        with pytest.warns(UserWarning, match="plain Python loop"):
            run(act)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(is_odd), run(prints)


# --- the first step has init itself, where Python could tell a copy ---


def _gradients_with_init_used_elsewhere(run, cell):
    w = torch.linspace(-0.3, 0.4, 9, dtype=F64).reshape(3, 3).requires_grad_()
    start = torch.ones(3, dtype=F64, requires_grad=True)
    xs = torch.linspace(-1, 1, 12, dtype=F64).reshape(4, 3)
    h0 = start.sin() + 1
    h, ys = run(lambda h, x: cell(h, x, w, h0), h0, xs)
    total = h.sum() + ys.square().sum() + h0.cos().sum()
    return h, ys, h0, *torch.autograd.grad(total, (w, start))


def _hooks_its_carry(h, x, w, h0):
    print(end="")
    if h.requires_grad:
        h.register_hook(lambda g: torch.tanh(g))
    return torch.tanh(h @ w + x), x * h


def _knows_init(h, x, w, h0):
    print(end="")
    return torch.tanh((h * 3 if h is h0 else h) @ w + x), x * h


def _asks_about_its_carry(h, x, w, h0):
    print(end="")
    h = h * 2 if h.is_leaf else h
    h = h * 3 if isinstance(h, torch.nn.Parameter) else h
    return torch.tanh(_doubles_a_view(h) @ w + x), x * h


def _doubles_a_view(h):
    return h * 2 if "Select" in str(h.grad_fn) else h


def _writes_to_init(h, x, w, h0):
    print(end="")
    h = h.mul_(2.0)
    return torch.tanh(x @ w + h), h + x


@pytest.mark.torch_version
@pytest.mark.filterwarnings("ignore:torch_scan_hop")
@pytest.mark.parametrize("cell", [_hooks_its_carry, _knows_init])
def test_the_first_step_has_init_itself(cell):
    expected = _gradients_with_init_used_elsewhere(written_loop, cell)
    assert_same(_gradients_with_init_used_elsewhere(scan, cell), expected)


@pytest.mark.torch_version
@pytest.mark.filterwarnings("ignore:torch_scan_hop")
@pytest.mark.parametrize("cell", [_hooks_its_carry, _knows_init, _asks_about_its_carry])
@pytest.mark.parametrize("kind", ["data", "a view of data", "a leaf", "a parameter", "a view"])
def test_any_init_is_itself_in_the_first_step(cell, kind):
    def results(run):
        start = torch.linspace(0.1, 0.6, 6, dtype=F64).reshape(2, 3)
        start = start.requires_grad_() if kind == "a view" else start
        h0 = start[1] if "view" in kind else start[1].clone()
        h0 = torch.nn.Parameter(h0) if kind == "a parameter" else h0
        h0 = h0.requires_grad_() if kind == "a leaf" else h0
        w = torch.linspace(-0.3, 0.4, 9, dtype=F64).reshape(3, 3).requires_grad_()
        leaves = [w] + [start if start.requires_grad else h0] * (h0.requires_grad)
        h, ys = run(
            lambda h, x: cell(h, x, w, h0), h0, torch.linspace(-1, 1, 12).reshape(4, 3) * h0
        )
        return h, ys, *torch.autograd.grad(h.sum() + ys.square().sum(), leaves)

    assert_same(results(scan), results(written_loop))


@pytest.mark.torch_version
@pytest.mark.parametrize("shared", [False, True])
def test_a_hook_of_a_carry_sees_the_gradients_of_its_other_uses(shared):
    """Autograd saves a carry that a y was made of, which is no reason to copy it (torch 2.13); and
    a copy has no hooks of its own."""
    w, seen = torch.linspace(-0.3, 0.4, 9, dtype=F64).reshape(3, 3).requires_grad_(), []

    def cell(h, x):
        if h.requires_grad:
            h.register_hook(lambda g: g.tanh())
        h = torch.tanh(h @ w + x)
        seen.append(h if shared else 0)
        return h, h @ w

    def gradient(run):
        h, ys = run(torch.zeros(3, dtype=F64), torch.linspace(-1, 1, 12, dtype=F64).reshape(4, 3))
        return torch.autograd.grad(h.sum() + ys.square().sum(), w)

    def through(loop):
        return lambda h, xs: loop(cell, h, xs, 4, False)

    expected = gradient(lambda h, xs: written_loop(cell, h, xs))
    assert_same(gradient(through(run_loop)), expected)
    assert_same(gradient(through(scan_loop)), expected)


@pytest.mark.torch_version
@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_init_gets_back_what_a_step_writes_to_it():
    def on_a_copy(h, x, w, h0):
        return _writes_to_init(h.clone(), x, w, h0)

    expected = _gradients_with_init_used_elsewhere(written_loop, on_a_copy)
    assert_same(_gradients_with_init_used_elsewhere(scan, _writes_to_init), expected)


@pytest.mark.torch_version
@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_a_constant_parameter_and_an_attribute_are_seen_at_first():
    init = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    init.scale = 3.0
    w = torch.eye(3, requires_grad=True)

    def cell(h, x):
        print(end="")
        h = h * getattr(h, "scale", 1.0) + isinstance(h, torch.nn.Parameter)
        return h.add_(x) @ w, h

    def writing(h, x):
        print(end="")
        h = h.mul_(w.sum())
        return h.clone(), h + x

    xs = torch.linspace(-1, 1, 12).reshape(4, 3)
    assert_same(scan(cell, init, xs), written_loop(cell, init, xs))
    scan(writing, init, xs)
    assert init.is_leaf and not init.requires_grad and bool((init == 1).all())


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "start", [(None, 0), (0.0, 0), (None, None), (torch.zeros(3).double(), None)]
)
def test_numbers_stay_numbers_when_the_first_step_changes_a_carry(start, traced):
    """Of an int in a tensor, 0.1 * n has the digits of float32."""
    xs = torch.randn(5, 3, dtype=torch.float64)

    def body(carry, x):
        h, n = carry
        if not traced and x.sum() > 1e9:
            raise AssertionError
        n = 0 if n is None else n + 1
        h = torch.zeros_like(x) if h is None else h + torch.zeros_like(x)
        return (torch.tanh(h * 0.5 + x * (0.5 + 0.1 * n)), n), x * n

    for count in (1, 2, 5):
        carry, ys = start, []
        for x in xs[:count]:
            carry, y = body(carry, x)
            ys.append(y)
        with fallback("error" if traced else "allow"):
            (h, n), found = scan(body, start, xs[:count])
        assert_same((h, int(n), found), (carry[0], carry[1], torch.stack(ys)))
