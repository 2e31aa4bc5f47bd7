"""A default device, ``with torch.device`` and any TorchFunctionMode reach the body, as a loop's."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from oracle import assert_same, loop
from torch.overrides import TorchFunctionMode

from torch_scan_hop import NotTraceableError, fallback, scan

H, XS = torch.zeros(2), torch.linspace(0.5, 1, 6).reshape(3, 2)


class SinForTanh(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return torch.sin(*args) if func is torch.tanh else func(*args, **(kwargs or {}))


class Scaled(TorchFunctionMode):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func is torch.tanh else result


class Counting(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.tanh
        return func(*args, **(kwargs or {}))


class OnPowers(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if "pow" in func.__name__ or "sub" in func.__name__ else result


class Listing(Counting):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs)

    def __init__(self):
        super().__init__()
        self.seen = []


def makes(h, x):
    return h + x, torch.ones(1)


def nested(h, x):
    return scan(lambda a, b: (torch.tanh(a + b), torch.ones(1)), h, x)


def transforms(h, x):
    slope = torch.func.grad(lambda v: torch.tanh(v).sum())(h)
    return torch.vmap(torch.tanh)(h + x) + slope, slope


def cell(h, x):
    h = torch.tanh(h + x)
    return h, h


def compiled(combine_fn, init, xs):
    return torch.compile(
        lambda init, xs: scan(combine_fn, init, xs), backend="eager", fullgraph=True
    )(init, xs)


def inductor(combine_fn, init, xs):
    return scan(combine_fn, init, xs, compile=True)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


RUNS = {"eager": scan, "compiled": compiled, "compile=True": inductor}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("context", [default_device, torch.device])
def test_the_body_makes_tensors_on_the_default_device(run, context):
    h, xs = H.to("meta"), XS.to("meta")
    for device in ("meta", "cpu", None, "meta"):
        with context(device) if device else contextlib.nullcontext():
            given = (h, xs) if device == "meta" else (H, XS)
            assert run(makes, *given)[1].device == loop(makes, *given)[1].device
    assert run(makes, H, XS)[1].device.type == "cpu"


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("make", [torch.rand, torch.randn, torch.arange, torch.randperm])
def test_every_function_makes_tensors_on_the_default_device(run, make):
    def body(h, x):
        return h + make(2) * x, make(2)

    h, xs = H.to("meta"), XS.to("meta")
    with torch.device("meta"), fallback("error"):
        h, ys = run(body, h, xs)
    assert h.device.type == ys.device.type == "meta"


def test_what_is_made_may_meet_what_is_there():
    with torch.device("meta"), fallback("error"):
        h, ys = scan(lambda h, x: (h + x, torch.ones(2) * x), torch.zeros(2), torch.ones(3, 2))
    assert h.device.type == ys.device.type == "meta"


@pytest.mark.parametrize("run", [scan, compiled])
def test_numbers_become_tensors_on_the_default_device(run):
    def program():
        return scan(lambda h, _: (h + 1, torch.ones(2)), 0.0, length=3)

    for device in ("meta", "cpu"):
        with default_device(device):
            run_it = program if run is scan else torch.compile(program, backend="eager")
            h, ys = run_it()
        assert h.device.type == ys.device.type == device


def decayed(carry, x):
    h, n, scale = carry
    n += 1
    scale = max(scale * 0.7, 0.1)
    h = h * (1 - 0.9**n) / (n // 2 + 1) + x * abs(-scale)
    return (h, n, scale), (h, n)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("mode", [lambda: torch.device("cpu"), lambda: Scaled(2.0), OnPowers])
def test_arithmetic_of_numbers_is_pythons_under_a_mode(run, mode):
    """They keep their digits, and no mode sees it."""
    init, xs = (H.double(), 0, 0.3), XS.double()
    (h, n, scale), ys = init, []
    for x in xs:
        (h, n, scale), (y, _) = decayed((h, n, scale), x)
        ys.append(y)
    with mode(), fallback("error"):
        carry, (results, counts) = run(decayed, init, xs)
    assert_same([carry[0], results, counts], [h, torch.stack(ys), torch.tensor([1, 2, 3])], 1e-14)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("body", [cell, transforms])
def test_a_mode_sees_what_the_body_calls(run, body):
    """At the first call and later ones, and never when it is not there."""
    for mode in (SinForTanh(), contextlib.nullcontext(), SinForTanh(), Scaled(2.0), Scaled(3.0)):
        with mode, fallback("error"):
            expected, results = loop(body, H, XS), run(body, H, XS)
        torch.testing.assert_close(results, expected)


def test_modes_see_a_nested_scan_and_one_another():
    xs = torch.linspace(0, 1, 12).reshape(3, 2, 2)
    for modes in ([SinForTanh()], [Scaled(2.0), Scaled(3.0)], [torch.device("meta"), Scaled(2.0)]):
        with contextlib.ExitStack() as stack, fallback("error"):
            for mode in modes:
                stack.enter_context(mode)
            expected, results = loop(nested, H, xs), scan(nested, H, xs)
        assert results[1].device == expected[1].device
        torch.testing.assert_close(results[0], expected[0])


def test_gradients_under_a_mode():
    def gradient(run):
        w = torch.ones(2, device="cpu", requires_grad=True)
        h, ys = run(lambda h, x: (torch.tanh(h * w + x), torch.tanh(h)), H, XS)
        (first,) = torch.autograd.grad(h.sin().sum() + ys.sum(), w, create_graph=True)
        return first, *torch.autograd.grad(first.sin().sum(), w)

    for make in (SinForTanh, lambda: Scaled(2.0), lambda: torch.device("meta")):
        with make(), fallback("error"):
            torch.testing.assert_close(gradient(scan), gradient(loop))


def test_a_mode_that_cannot_be_traced_sees_the_loop():
    def body(h, x):
        return torch.tanh(h + x[:]), None

    mode = Listing()
    with mode, pytest.warns(UserWarning, match="changes the length of a list") as caught:
        for _ in range(3):
            results = scan(body, H, XS)
    assert mode.count == 9 and len(caught) == 1
    with fallback("error"):  # it says nothing about the body itself
        assert torch.equal(scan(body, H, XS)[0], results[0])


def test_what_a_mode_counts_is_carried():
    mode = Counting()
    with mode, fallback("error"):
        for _ in range(3):
            scan(lambda h, x: (torch.tanh(h + x), None), H, XS)
    assert mode.count == 9


@pytest.mark.parametrize("kind", ["None at first", "wider"])
def test_a_mode_sees_a_first_step_once(kind):
    def body(h, x):
        new = torch.tanh(x if h is None else x + h)
        return new, new * 2

    def program(run):
        return run(body, None if kind == "None at first" else torch.zeros(1), XS)

    with Scaled(2.0):
        with fallback("allow"):
            expected, results = program(loop), program(scan)
        torch.testing.assert_close(results, expected)
        with pytest.raises(NotTraceableError, match="Scaled is active, a TorchFunctionMode"):
            with fallback("error"):
                program(scan)
    with torch.device("cpu"), fallback("error"):
        torch.testing.assert_close(program(scan), program(loop))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_number_of_a_tensor_is_kept_on_a_default_device(run):
    kept = {"best": float("-inf"), "last": 0.0, "place": 0}

    def body(h, x):
        value = torch.tanh(x).sum().item()
        kept["best"], kept["last"] = max(kept["best"], -value), value
        kept["place"] = x.argmin().item()
        return h + value, h

    with torch.device("cpu"), fallback("error"):
        run(body, H, XS)
        values = [torch.tanh(x).sum().item() for x in XS]
    assert kept == {"best": -values[0], "last": values[-1], "place": 0}


def test_a_device_in_the_body():
    def body(h, x):
        with torch.device("meta"):
            there = torch.ones(1)
        return h + x, (there, torch.ones(1))

    with fallback("allow"):  # Dynamo cannot enter a device
        _, (there, here) = scan(body, H, XS)
    assert (there.device.type, here.device.type) == ("meta", "cpu")


def test_a_call_under_a_mode_is_replayed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in (Scaled(2.0), torch.device("cpu")):
            with mode:
                for _ in range(12):
                    scan(cell, H, XS)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_default_dtype(run):
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert run(makes, H, XS)[1].dtype == dtype
    finally:
        torch.set_default_dtype(before)


@pytest.mark.xla
def test_the_default_device_is_xla():
    pytest.importorskip("torch_xla")
    from torch_xla import _XLAC

    with default_device("xla"), fallback("error"):
        h, ys = scan(lambda h, x: (h + x, torch.ones(2) * x), torch.zeros(2), torch.ones(3, 2))
        count, more = scan(lambda h, _: (h + 1, torch.ones(2)), 0.0, length=3)
        assert {t.device.type for t in (h, ys, count, more)} == {"xla"}
        for result in (h, count):
            assert "while" in _XLAC._get_xla_tensors_hlo([result])
    assert h.tolist() == [3, 3] and ys.tolist() == [[1, 1]] * 3 and count.item() == 3
