"""Keys, and names of attributes and layers, that are made of what steps count."""

from __future__ import annotations

import pytest
import torch
from oracle import written_loop as loop
from torch import nn
from torch.profiler import record_function

from torch_scan_hop import fallback, scan

pytestmark = pytest.mark.usefixtures("nothing_captured")

T, B, D = 7, 2, 3


class Keyed(nn.Module):
    """A cell whose steps use what ``use(self, h)`` finds by the count ``n``."""

    def __init__(self, use, count=lambda n: n + 1):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.even, self.odd = (nn.Linear(D, D).double() for _ in range(3))
        self.cell0, self.cell1 = self.even, self.odd
        self.cells = nn.ModuleDict({"0": self.even, "1": self.odd})
        self.rates = {0: 0.5, 1: 0.25, 2: 2.0}
        self.by_pair = {(0, 1): 0.5, (1, 1): 0.25}
        self.memory = {k: torch.full((B, D), 0.1 * k, dtype=torch.float64) for k in range(2)}
        self.named = {f"at{k}": value for k, value in self.memory.items()}
        self.last0 = self.last1 = torch.zeros(B, D, dtype=torch.float64)
        self.use, self.count, self.n = use, count, 0

    def forward(self, h, x):
        h = self.use(self, torch.tanh(self.linear(h) + x))
        self.n = self.count(self.n)
        return h, h * 2

    def state(self):
        return [self.n, *self.memory.values(), *self.named.values(), self.last0, self.last1]


def exchanged(held, key, h):
    before, held[key] = held[key], h
    return h + 0.1 * before


def assigned(self, h):
    setattr(self, f"last{self.n % 2}", h)
    return h


USES = {
    "item": lambda self, h: h * self.rates[self.n % 3],
    "get": lambda self, h: h * self.rates.get(self.n % 4, 0.9),
    "in a set": lambda self, h: h * 0.5 if self.n % 4 in {1, 2} else h,
    "in a dict": lambda self, h: h * 0.5 if self.n % 4 in self.rates else h,
    "in a tuple": lambda self, h: h * 0.5 if self.n in (2, 5) else h,
    "not in a list": lambda self, h: h if self.n not in [0, 3] else h * 0.5,
    "in a range": lambda self, h: h * 0.5 if self.n in range(2, 9, 3) else h,
    "in a range, wrapped": lambda self, h: h * 0.5 if self.n % 5 in range(1, 4) else h,
    "in no range": lambda self, h: h if self.n % 5 not in range(4, 0, -2) else h * 0.5,
    "either": lambda self, h: h * 0.5 if (self.n == 2) | (self.n > 5) else h,
    "both": lambda self, h: h * 0.5 if (self.n % 2 == 0) & (self.n > 3) else h,
    "pair": lambda self, h: h * self.by_pair[self.n % 2, 1],
    "exchanged": lambda self, h: exchanged(self.memory, self.n % 2, h),
    "exchanged by name": lambda self, h: exchanged(self.named, "at" + str(self.n % 2), h),
    "str": lambda self, h: self.cells[str(self.n % 2)](h),
    "length of a text": lambda self, h: h * len(f"step {self.n + 98}") * len(str(self.n % 2)),
    "f-string": lambda self, h: self.cells[f"{self.n % 2}"](h),
    "getattr": lambda self, h: getattr(self, f"cell{self.n % 2}")(h),
    "percent": lambda self, h: getattr(self, "cell%d" % (self.n % 2))(h),  # noqa: UP031
    "format": lambda self, h: getattr(self, "cell{}".format(self.n % 2))(h),  # noqa: UP032
    "setattr": assigned,
}


def compiled(cell, init, xs):
    return scan(cell, init, xs)


def check(run, use, count=lambda n: n + 1, steps=T):
    cells, xs = (Keyed(use, count), Keyed(use, count)), torch.randn(steps, B, D).double()
    for _ in range(2):
        results = []
        for scan_like, cell in zip((run, loop), cells, strict=True):
            h_T, ys = scan_like(cell, torch.ones(B, D, dtype=torch.float64), xs)
            used = [*cell.parameters()]
            gradients = torch.autograd.grad(ys.square().sum(), used, allow_unused=True)
            results.append((h_T, ys, *gradients, *cell.state()))
            for name, value in (*cell.memory.items(), *cell.named.items()):
                (cell.memory if type(name) is int else cell.named)[name] = value.detach()
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("use", USES)
def test_what_is_found_by_a_count(use):
    with fallback("error"):
        check(scan, USES[use])


@pytest.mark.parametrize(
    "use", ["get", "in a tuple", "in a range", "exchanged", "str", "getattr", "setattr"]
)
def test_in_a_compiled_program(use):
    check(torch.compile(compiled, backend="aot_eager", fullgraph=True), USES[use])


@pytest.mark.parametrize(("use", "modulus"), [("item", 3), ("f-string", 2)])
def test_a_count_that_wraps(use, modulus):
    with fallback("error"):
        check(scan, USES[use], lambda n: (n + 1) % modulus)


@pytest.mark.parametrize("use", ["item", "exchanged", "in a tuple"])
def test_a_count_that_turns(use):
    with fallback("error"):
        check(scan, USES[use], lambda n: 2 - n)


def profiled(self, h):
    with record_function(f"step {self.n}"):
        assert h.shape == (B, D), f"at step {self.n}"
        return h * 2


def test_a_message_that_nobody_reads_is_no_branch():
    with fallback("error"):
        check(scan, profiled, steps=40)


@pytest.mark.parametrize("divided", [7, 7.5])
def test_a_remainder_is_no_text(divided):
    with fallback("error"):
        check(scan, lambda self, h: h * (divided % (self.n + 1)), steps=40)


@pytest.mark.parametrize("use", [lambda self, h: h * self.rates.get(self.n, 1.0)])
def test_another_key_at_each_of_many_steps_is_a_loop(use):
    with pytest.raises(Exception, match=r"each takes another item.*compare: \(n == 2\)"):
        with fallback("error"):
            check(scan, use, steps=40)
    advised = lambda self, h: h * 0.5 if (self.n == 0) | (self.n == 2) else h  # noqa: E731
    with fallback("error"):
        check(scan, advised, steps=40)


def test_a_text_of_what_is_not_counted_is_a_loop():
    def use(self, h):
        return self.named.get(f"at{self.n * 0.5}", h)

    with pytest.raises(Exception, match=r"makes a text of a number that steps make, at .*get"):
        with fallback("error"):
            check(scan, use)
