"""Where Python makes of numbers an error, a complex number or a large int, no scan goes on."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import assert_same
from oracle import written_loop as loop

from torch_scan_hop import fallback, scan
from torch_scan_hop.capture import variables
from torch_scan_hop.fallback import forget_reasons
from torch_scan_hop.reference import scan_loop

pytestmark = pytest.mark.usefixtures("nothing_captured")

XS = torch.arange(5.0)
#: what steps make of a number, what they leave of it, and what it is at first
RAISING = {
    "sqrt": (math.sqrt, lambda c: c - 1, 2),
    "log": (math.log, lambda c: c - 1, 2),
    "log1p": (math.log1p, lambda c: c - 1, 2),
    "acos": (math.acos, lambda c: c + 0.5, 0.0),
    "sin": (math.sin, lambda c: c * 1e200, 1.0),
    "exp": (math.exp, lambda c: c * 10, 10.0),
    "int": (int, lambda c: c * 1e200, 1.0),
    "1 / c": (lambda c: 1 / c, lambda c: c - 1, 2),
    "5.5 // c": (lambda c: 5.5 // c, lambda c: c - 1, 2.0),
    "5 % c": (lambda c: 5 % c, lambda c: c - 1, 2),
    "1 << c": (lambda c: 1 << c, lambda c: c - 1, 2),
    "c >> c": (lambda c: 8 >> c, lambda c: c - 1, 2),
    "c ** -2.0": (lambda c: c**-2.0, lambda c: c - 1, 2),
    "0 ** c": (lambda c: 0**c, lambda c: c - 1, 2),
    "2.0 ** c": (lambda c: 2.0**c, lambda c: c * 10, 10),
    "1 / (c - 1)": (lambda c: 1 / (c - 1), lambda c: c - 1, 4),
    "c >> -1": (lambda c: c >> -1, lambda c: c + 1, 2),
    "c / 0": (lambda c: c / 0, lambda c: c, 1.0),
}
#: of these it makes what no scalar tensor is
OTHERS = {
    "a complex number": (lambda c: abs((1 - c) ** 0.5), lambda c: c - 1, 2.0),
    "a float": (lambda c: 2**c, lambda c: c - 1, 2),
    "a float of an int": (lambda c: c**-2, lambda c: c + 1, 1),
    "a large int": (lambda c: (c * c) % 7, lambda c: c * 1000, 1000),
    "a large power": (lambda c: (3**c) % 7, lambda c: c + 20, 1),
    "a shift of all bits": (lambda c: (c >> 70) + 1, lambda c: c + 1, 1),
    "a large shift": (lambda c: (3 << c) % 7, lambda c: c + 20, 1),
}
FINE = {
    "roots": (lambda c: math.sqrt(c) + c**0.5 + c**2, lambda c: c + 1, 0),
    "quotients": (lambda c: 1 / c + 5 % c + c // 2 + c % 3, lambda c: c + 1, 1),
    "of less": (lambda c: math.log(c - 1) / 3 + 1 / (c - 1), lambda c: c + 1, 5),
    "powers": (lambda c: 0.9**c + 2**c + (-2.0) ** c + (1 << c), lambda c: c + 1, 0),
    "bits": (lambda c: (c >> 1 & 1) + (c >> 63) + (c << 2), lambda c: c + 1, -3),
    "infinite": (lambda c: math.exp(-c) + 1 / c, lambda c: c * 1e200, 1.0),
    "not a number": (lambda c: math.sqrt(c), lambda c: c * math.inf, 0.0),
}


def body(of):
    make, after, _ = of
    return lambda c, x: (after(c), x * make(c))


@pytest.mark.parametrize("name", RAISING)
@pytest.mark.parametrize("way", [{}, {"checkpoint": "sqrt"}, {"unroll": 2}], ids=str)
def test_the_error_is_pythons(name, way):
    of = RAISING[name]
    with pytest.raises((ValueError, ArithmeticError)) as expected:
        loop(body(of), of[2], XS)
    with pytest.raises(expected.type, match=str(expected.value).replace("(", r"\(")[:20]):
        scan(body(of), of[2], XS, **way)


@pytest.mark.parametrize("name", OTHERS)
def test_the_loop_runs_what_is_no_scalar(name):
    of = OTHERS[name]
    with pytest.warns(UserWarning, match="plain Python loop"):
        _, ys = scan(body(of), of[2], XS)
    assert torch.equal(ys, loop(body(of), of[2], XS)[1])


@pytest.mark.parametrize("name", FINE)
@pytest.mark.parametrize("way", [{}, {"checkpoint": "sqrt"}, {"unroll": 2}], ids=str)
def test_what_python_makes_is_captured(name, way):
    of = FINE[name]
    with fallback("error"):
        _, ys = scan(body(of), of[2], XS, **way)
    torch.testing.assert_close(ys, loop(body(of), of[2], XS)[1], equal_nan=True)


@pytest.mark.parametrize("n", [0, 7])
def test_compiled_programs_fail(n):
    @torch.compile(fullgraph=True)
    def run(n, xs):
        return scan(lambda c, x: (c - 1, x * math.sqrt(c)), n, xs)[1]

    expected = loop(lambda c, x: (c - 1, x * math.sqrt(c)), 7, XS)[1]
    if n == 7:
        torch.testing.assert_close(run(7, XS), expected)
    else:
        with pytest.raises(
            RuntimeError, match="of a number that steps carry Python makes an error"
        ):
            run(0, XS)


def test_a_scan_in_the_body():
    def run(n, xs, scan_like):
        def outer(h, x):
            return h + x, scan_like(lambda c, z: (c - 1, z * math.sqrt(c)), n, x * XS)[1].sum()

        return scan_like(outer, torch.zeros(()), xs)[1]

    with fallback("error"):
        torch.testing.assert_close(run(4, XS, scan), run(4, XS, loop))
    with pytest.raises(ValueError, match="math domain"):
        run(3, XS, scan)


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_transforms(transform):
    def run(n):
        return lambda xs: scan(lambda c, x: (c - 1, x * math.sqrt(c)), n, xs)[1]

    rows = torch.randn(5, 3) if transform is not torch.vmap else torch.randn(3, 5)
    assert not transform(run(5))(rows).isnan().any()
    with pytest.raises(ValueError, match="math domain"):
        transform(run(3))(rows)


def test_what_is_left_in_an_attribute():
    class Cell(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.n, self.mean = 3, torch.zeros(())
            self.register_buffer("total", torch.zeros(()))

        def forward(self, h, x):
            self.total.add_(x)
            self.mean = self.mean + x / 2
            self.n -= 1
            return h + x, h * abs(self.n**0.5)

    ran, expected = Cell(), Cell()
    with pytest.warns(UserWarning, match="plain Python loop"):
        actual = scan(ran, torch.zeros(()), XS)
    torch.testing.assert_close(actual, loop(expected, torch.zeros(()), XS))
    assert (ran.n, ran.mean, ran.total) == (expected.n, expected.mean, expected.total)


def test_an_exported_program_fails():
    class Program(torch.nn.Module):
        def forward(self, xs):
            return scan(lambda c, x: (c - 1, x * math.sqrt(c)), 4, xs)[1]

    shapes = {"xs": {0: torch.export.Dim("T", min=2)}}
    exported = torch.export.export(Program(), (XS[1:],), dynamic_shapes=shapes).module()
    torch.testing.assert_close(exported(XS), Program()(XS))
    with pytest.raises(RuntimeError, match="Python makes an error"):
        exported(torch.ones(6))


@pytest.mark.parametrize("way", [{}, {"compile": True}], ids=str)
def test_powers_of_negative_numbers(way):
    def cell(h, x):
        y = torch.cond(x > 2, lambda x: (-2) ** x, lambda x: (-3.0) ** x, (x,))
        return h + 1, (-2.0) ** h + y

    with fallback("error"):
        _, ys = scan(cell, torch.zeros(()), XS, **way)
    assert ys.tolist() == [2, -5, 13, -16, 32]


def test_a_line_with_quotes_is_compiled():
    with fallback("error"):
        _, ys = scan(lambda c, x: (c + 1, x / len("\n'" + '"') * math.sqrt(c)), 1, XS, compile=True)
    torch.testing.assert_close(ys[1].item(), math.sqrt(2) / 3)


def test_an_int_that_outgrows_a_scalar():
    class Fibonacci:
        a, b = 1, 1

        def __call__(self, h, x):
            self.a, self.b = self.b, self.a + self.b
            return h, x * (self.a % 7)

    ran, expected = Fibonacci(), Fibonacci()
    with pytest.warns(UserWarning, match="plain Python loop"):
        actual = scan(ran, torch.zeros(()), torch.ones(100))
    torch.testing.assert_close(actual, loop(expected, torch.zeros(()), torch.ones(100)))
    assert ran.b == expected.b


@pytest.mark.parametrize("start, by", [(2**63 - 3, 1), (3 - 2**63, -1)])
def test_a_counter_that_begins_near_the_largest_int(start, by):
    class Counter:
        n = start

        def __call__(self, h, x):
            self.n += by
            return h, x * (self.n % 7)

    ran, expected = Counter(), Counter()
    with pytest.warns(UserWarning, match="attribute 'n' of a Counter.*more than 62 bits"):
        actual = scan(ran, torch.zeros(()), XS)
    torch.testing.assert_close(actual, loop(expected, torch.zeros(()), XS))
    assert ran.n == expected.n


def test_a_number_in_the_carry_that_begins_near_the_largest_int():
    def cell(c, x):
        return (c[0] + 1, c[1] + x * (c[0] % 7)), c[1]

    for start in (2**63 - 30, -(2**63) + 1):
        init = (start, torch.zeros(()))
        with pytest.warns(UserWarning, match="counts in init from an int of more than 62 bits"):
            actual = scan(cell, init, XS)
        assert_same(actual, scan_loop(cell, init, XS, len(XS), False))
        forget_reasons()
    with pytest.raises(RuntimeError, match="without overflow"):  # the loop's
        scan(lambda c, x: (c + 1, x), 2**63 - 3, XS)
    run = torch.compile(scan, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.UncapturedHigherOrderOpError, match="more than 62 bits"):
        run(cell, (2**63 - 3, torch.zeros(())), XS)
    with fallback("error"):  # and the next call is no loop
        assert scan(lambda c, x: (c + 1, x), 2**62 - 3, XS)[0] == 2**62 + len(XS) - 3


def test_nothing_is_checked_of_a_counter(monkeypatch):
    monkeypatch.setattr(variables, "check_after", None)
    with fallback("error"):
        n, _ = scan(lambda n, x: (n + 1, x * (3 * n) / 2 + n // 2), 0, XS)
    assert n == 5
