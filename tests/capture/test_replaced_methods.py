"""A method that is replaced after a capture runs as it is now, as it does in a loop."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from oracle import assert_same, loop
from torch import nn

from torch_scan_hop import fallback, scan

pytestmark = pytest.mark.torch_version


class Base(nn.Module):
    def forward(self, x):
        return self.helped(x)

    def helped(self, x):
        return x


class Derived(Base):
    @property
    def factor(self):
        return 0.5


class Plain:
    def __init__(self):
        self.k = 1.5

    def times(self, x):
        return x * self.k

    def __call__(self, x):
        return self.times(x)


@contextlib.contextmanager
def new_code():
    """As IPython's autoreload does it."""
    before = Plain.__call__.__code__
    Plain.__call__.__code__ = (lambda self, x: x * 0.7).__code__
    yield
    Plain.__call__.__code__ = before


REPLACED = {
    "of a base class": lambda: mock.patch.object(Base, "helped", lambda self, x: 2 * x),
    "overridden": lambda: mock.patch.object(Derived, "forward", lambda self, x: 3 * x),
    "of a plain class": lambda: mock.patch.object(Plain, "times", lambda self, x: 0.3 * x),
    "in place": new_code,
    "property": lambda: mock.patch.object(Derived, "factor", property(lambda self: 4.0)),
    "of torch": lambda: mock.patch.object(nn.Tanh, "forward", lambda self, x: x.sin()),
}


def test_what_calls_all_modules_is_replaced_for_a_while():
    """A trace goes past it: the loop runs, as long as it is there."""
    module, h, xs = nn.Linear(2, 2), torch.ones(2), torch.ones(3, 2)
    call = nn.Module.__call__

    def cell(h, x):
        h = module(h) + x
        return h, h

    with fallback("error"):
        before = scan(cell, h, xs)
    with mock.patch.object(nn.Module, "__call__", lambda self, *args: 0.5 * call(self, *args)):
        with pytest.warns(UserWarning, match="Module.__call__ has been replaced"):
            assert_same(scan(cell, h, xs), loop(cell, h, xs), 1e-6)
    with fallback("error"):
        assert_same(scan(cell, h, xs), before)


@pytest.mark.parametrize(
    "captured_by", [lambda fn: fn, lambda fn: torch.compile(fn, backend="eager")]
)
@pytest.mark.parametrize("replaced", REPLACED)
def test_a_replaced_method_is_captured_anew(replaced, captured_by):
    module, plain, tanh = Derived(), Plain(), nn.Tanh()

    def cell(h, x):
        h = module(h) * module.factor + plain(h) + tanh(h) + x
        return h, h

    h, xs = torch.ones(2), torch.ones(3, 2)
    run = captured_by(lambda h, xs: scan(cell, h, xs))
    for _ in range(2):
        assert_same(run(h, xs), loop(cell, h, xs), 1e-6)
        before = run(h, xs)
        with REPLACED[replaced]():
            assert_same(run(h, xs), loop(cell, h, xs), 1e-6)
            assert not torch.equal(run(h, xs)[0], before[0])
    assert_same(run(h, xs), before)


class Meta(type):
    k = 2.0

    def times(cls):
        return 3.0


class OfMeta(metaclass=Meta):
    c = 0.5

    @classmethod
    def of_class(cls):
        return cls.c


NO_METHODS = {
    "a method of all tensors": (lambda h: h.sin(), torch.Tensor, "sin", lambda h: torch.cos(h)),
    "an operator": (lambda h: h + 1, torch.Tensor, "__add__", lambda h, x: torch.sub(h, x)),
    "what reads from modules": (nn.Linear(3, 3), nn.Module, "__getattr__", None),
    "a method of a module that the body makes": (
        lambda h: nn.Tanh()(h),
        nn.Tanh,
        "forward",
        lambda self, x: x * 5,
    ),
    "an attribute of a metaclass": (lambda h: h * OfMeta.k, Meta, "k", 5.0),
    "a class attribute": (lambda h: h * OfMeta.of_class(), OfMeta, "c", 5.0),
}


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
@pytest.mark.parametrize("case", NO_METHODS)
def test_what_no_guard_of_torchs_sees(case):
    fn, owner, name, value = NO_METHODS[case]
    read = nn.Module.__getattr__
    if value is None:
        value = lambda self, key: read(self, key) * (5 if key == "weight" else 1)  # noqa: E731

    def cell(h, x):
        h = torch.tanh(fn(h) * 0.3 + x)
        return h, h

    h, xs = torch.zeros(3), torch.linspace(-1, 1, 12).reshape(4, 3)
    before = scan(cell, h, xs)
    with mock.patch.object(owner, name, value):
        assert_same(scan(cell, h, xs), loop(cell, h, xs), 1e-6)
    with fallback("error"):
        assert_same(scan(cell, h, xs), before)


def class_of_objects(gain, weight):
    """A new class, as a notebook's cell makes one each time that it runs."""

    class Made:
        def __init__(self, h, scale=1.0):
            self.h = h * scale

        def grown(self, *, by=1.0):
            return self.h * by * gain + weight

        @property
        def half(self):
            return self.h * 0.5

        @staticmethod
        def of_none(h, by=1.0):
            return h * by

        @classmethod
        def of_class(cls, h, by=1.0):
            return h * by

        @staticmethod
        def set_gain(value):
            nonlocal gain
            gain = value

    return Made


def _kwdefaults(kind):
    kind.grown.__kwdefaults__ = {"by": 3.0}


def _code(of, fn):
    def change(kind):
        of(kind).__code__ = fn.__code__

    return change


def _defaults(of):
    def change(kind):
        of(kind).__defaults__ = (3.0,)

    return change


def _times(h, by=1.0):
    return h * 7


def _init(self, h, scale=1.0):
    self.h = h * 7


OF_FUNCTIONS = {
    "what is closed over": lambda kind: kind.set_gain(3.0),
    "defaults": _defaults(lambda kind: kind.__init__),
    "of names": _kwdefaults,
    "of a static method": _defaults(lambda kind: kind.of_none),
    "of a class method": _defaults(lambda kind: kind.of_class.__func__),
    "code": _code(lambda kind: kind.__init__, _init),
    "of a property": _code(lambda kind: kind.half.fget, lambda self: self.h * 7),
    "code of a static method": _code(lambda kind: kind.of_none, _times),
    "of a class method's": _code(lambda k: k.of_class.__func__, lambda cls, h, by=1.0: h * 7),
    "a static method": lambda kind: setattr(kind, "of_none", staticmethod(_times)),
}


@pytest.mark.parametrize("change", OF_FUNCTIONS)
@pytest.mark.parametrize("makes", [True, False])
def test_methods_of_objects_that_steps_make(change, makes):
    """Dynamo has no source for their functions: a capture kept what these were."""
    weight = nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))
    kind = class_of_objects(1.0, weight)
    state = {"made": kind(torch.zeros(3))}

    def cell(h, x):
        made = state["made"]
        y = made.grown() + made.half + made.of_none(x) + made.of_class(x)
        if makes:
            state["made"] = kind(torch.tanh(y))
        return h + x, y

    def outputs(run):
        state["made"] = kind(torch.ones(3))
        found = run(cell, torch.zeros(3), torch.linspace(-1, 1, 12).reshape(4, 3))
        return found, torch.autograd.grad(found[1].sum(), weight)

    with fallback("error"):
        before = outputs(scan)
        assert_same(before, outputs(loop), 1e-6)
        OF_FUNCTIONS[change](kind)
        after = outputs(scan)
    assert_same(after, outputs(loop), 1e-6)
    assert not torch.equal(after[0][1], before[0][1])
