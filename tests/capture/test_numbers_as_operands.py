"""Operators that are given a number which steps carry: what they give has the values and the dtype
that it has in the loop, where the number is Python's."""

from __future__ import annotations

import math
import operator

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_same, loop, written_loop
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_scan_hop import fallback, scan

INTS = torch.arange(1, 5)
HALF = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.bfloat16)
DOUBLE = torch.float64

#: of a state, a counter and a number that decays
OPERATORS = {
    "tensors of numbers": [
        lambda h, n, d: torch.tensor(d),
        lambda h, n, d: torch.tensor([d, 1.0, n]),
        lambda h, n, d: torch.tensor([[n], [2]]),
        lambda h, n, d: torch.tensor([d], dtype=DOUBLE),
        lambda h, n, d: torch.tensor(d, dtype=torch.bfloat16),
        lambda h, n, d: torch.as_tensor(d) * INTS,
        lambda h, n, d: torch.as_tensor([n, n]),
        lambda h, n, d: torch.asarray([d, d]),
        lambda h, n, d: torch.scalar_tensor(d),
        lambda h, n, d: torch.cat([torch.tensor([d]), torch.zeros(1)]),
        lambda h, n, d: HALF.new_tensor([d, n]),
        lambda h, n, d: torch.full((2,), d),
        lambda h, n, d: torch.full(size=(2,), fill_value=n),
        lambda h, n, d: torch.full((2,), d, dtype=DOUBLE),
        lambda h, n, d: torch.linspace(0, d, 4),
        lambda h, n, d: torch.eye(2) * d,
    ],
    "of integers": [
        lambda h, n, d: INTS * d,
        lambda h, n, d: d**INTS,
        lambda h, n, d: torch.rsub(INTS, d),
        lambda h, n, d: torch.copysign(INTS, d),
        lambda h, n, d: torch.xlogy(INTS, d),
        lambda h, n, d: torch.special.xlog1py(INTS, d),
        lambda h, n, d: INTS.float_power(d),
        lambda h, n, d: torch.where(INTS > 1, d, 0.0),
        lambda h, n, d: torch.where(INTS > 1, d, n),
        lambda h, n, d: torch.where(INTS > 1, n, 0),
        lambda h, n, d: torch.where(INTS > 1, INTS, d),
        lambda h, n, d: torch.div(INTS, d, rounding_mode="floor"),
        lambda h, n, d: INTS.to(torch.int8) * n,
        lambda h, n, d: INTS == n,
    ],
    "of scalars and halves": [
        lambda h, n, d: h.sum() * d,
        lambda h, n, d: torch.copysign(h.sum(), d),
        lambda h, n, d: torch.xlogy(h.sum().abs(), d),
        lambda h, n, d: torch.lerp(h.sum(), h.mean(), d),
        lambda h, n, d: torch.add(h.sum(), h.mean(), alpha=d),
        lambda h, n, d: F.leaky_relu(h.sum(), d),
        lambda h, n, d: F.softshrink(h.mean(), d),
        lambda h, n, d: torch.copysign(HALF.sum(), d),
        lambda h, n, d: HALF.masked_fill(INTS > 2, d),
        lambda h, n, d: torch.lerp(HALF, HALF * 2, d),
        lambda h, n, d: F.elu(HALF, d),
        lambda h, n, d: F.softplus(HALF, beta=d),
    ],
    "activations": [
        lambda h, n, d: F.leaky_relu(h, negative_slope=d),
        lambda h, n, d: F.elu(h, d),
        lambda h, n, d: F.celu(h, alpha=d),
        lambda h, n, d: F.softplus(h * 90, d),
        lambda h, n, d: F.softplus(h, beta=2.0, threshold=d),
        lambda h, n, d: F.threshold(h, threshold=d, value=-d),
        lambda h, n, d: F.hardtanh(h, -d, d),
        lambda h, n, d: F.softshrink(h, d),
        lambda h, n, d: F.hardshrink(h, d),
        lambda h, n, d: F.dropout(h, d, False) + F.alpha_dropout(h, p=d, training=n > 99),
    ],
    "products and rolls": [
        lambda h, n, d: torch.addmm(h[None], h[None], torch.eye(4), beta=1 - d, alpha=d),
        lambda h, n, d: torch.addmv(h, torch.ones(4, 4), h, alpha=d),
        lambda h, n, d: torch.baddbmm(h.view(1, 1, 4), h.view(1, 1, 4), torch.eye(4)[None], beta=d),
        lambda h, n, d: h.roll(n),
        lambda h, n, d: torch.roll(h.view(2, 2), shifts=-n, dims=1),
        lambda h, n, d: torch.roll(h.view(2, 2), n, (0,)),
        lambda h, n, d: torch.roll(h.view(2, 2), n),
        lambda h, n, d: torch.tril(h.view(2, 2), n - 1),
        lambda h, n, d: h.view(2, 2).triu(diagonal=n),
        lambda h, n, d: F.scaled_dot_product_attention(*h.view(1, 2, 2).expand(3, 2, 2), scale=d),
    ],
    "random numbers": [
        lambda h, n, d: torch.normal(0.0, d, (4,)),
        lambda h, n, d: torch.normal(d, 2.0, size=(4,)),
        lambda h, n, d: torch.normal(h, d),
        lambda h, n, d: torch.empty(4).normal_(0, d),
        lambda h, n, d: torch.empty(20).uniform_(-d, d),
        lambda h, n, d: torch.distributions.Normal(0.0, d).sample((4,)),
        lambda h, n, d: torch.distributions.Uniform(-d, d).sample((4,)),
        lambda h, n, d: torch.distributions.Bernoulli(d).sample(),
        lambda h, n, d: torch.distributions.Normal(h, d).rsample(),
    ],
    "distributions": [
        lambda h, n, d: torch.distributions.Normal(0.0, d).log_prob(h),
        lambda h, n, d: torch.distributions.Normal(h.double(), d).entropy(),
        lambda h, n, d: torch.distributions.Laplace(d, 1.0).entropy(),
    ],
    "complex numbers": [
        lambda h, n, d: h * (d * 1j),
        lambda h, n, d: h / (1 + 1j * n),
        lambda h, n, d: torch.exp(-1j * d * h),
        lambda h, n, d: torch.tensor(d * 1j),
        lambda h, n, d: h.sum() * (1j * d) ** 2,
        lambda h, n, d: INTS * (n - 1j),
    ],
}


class Numbers(nn.Module):
    def __init__(self, operators):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, -0.7, 1.1, -1.6]))
        self.n, self.d, self.operators = 0, 0.5, operators

    def forward(self, h, x):
        h = torch.tanh(h * self.w + x)
        ys = [of(h, self.n, self.d) for of in self.operators]
        self.n += 1
        self.d *= 0.9
        return h, ys


def compiled(module, init, xs):
    return torch.compile(scan, backend="aot_eager", fullgraph=True)(module, init, xs)


def results(run, operators):
    module = Numbers(operators)
    torch.manual_seed(0)
    xs = torch.randn(5, 4)
    found = [run(module, torch.zeros(4), xs) for _ in range(2)]  # it goes on with its numbers
    differentiable = [y for _, ys in found for y in ys if y.requires_grad]
    gradient = torch.autograd.grad(sum(y.abs().float().sum() for y in differentiable), module.w)
    return found, gradient, (module.n, module.d)


@pytest.mark.torch_version
@pytest.mark.parametrize("run", [scan, compiled])
@pytest.mark.parametrize("operators", OPERATORS)
def test_an_operator_is_given_a_number(operators, run):
    if operators == "random numbers" and run is compiled:
        pytest.skip("compiled programs draw others")
    of = [lambda h, n, d: h, *OPERATORS[operators]]
    with fallback("error"):
        found = results(run, of)
    torch.testing.assert_close(found, results(loop, of))


@pytest.mark.torch_version
@pytest.mark.parametrize("run", [scan, compiled])
def test_a_complex_number_has_all_digits(run):
    """Also one that is made of a float which steps only read, and which another call finds
    changed."""
    z = torch.linspace(0, 1, 4, dtype=DOUBLE)
    omega = [0.3]

    def cell(d, _):
        return d * 0.9, (z * (d * 1j), torch.exp(1j * omega[0] * z), z * (omega[0] * 1j - d))

    for value in (0.3, 0.7, 0.9):
        omega[0] = value
        with fallback("error"):
            _, found = run(cell, 0.5, torch.zeros(5))
        assert_same(found, loop(cell, 0.5, torch.zeros(5))[1], 1e-14)


@pytest.mark.filterwarnings("error")
def test_a_tensor_of_a_number_warns_of_nothing():
    with fallback("error"):
        results(scan, [lambda h, n, d: h * torch.tensor(d)])


@pytest.mark.parametrize("run", [scan, compiled])
def test_a_division_rounds_once(run):
    """As Python's: the operators of IEEE 754 give the last digit, too."""
    divisions = [lambda n, d: 0.1 / n, lambda n, d: n / 3, lambda n, d: d / n, lambda n, d: 7 / d]

    def cell(carry, x):
        h, n, d = carry
        ys = [torch.tensor(of(n, d), dtype=DOUBLE) for of in divisions]
        return (h + x, n + 1, d * 0.9), ys

    with fallback("error"):
        _, found = run(cell, (torch.zeros(()), 1, 0.7), torch.zeros(60))
    n, d, expected = 1, 0.7, []
    for _ in range(60):
        expected.append([of(n, d) for of in divisions])
        n, d = n + 1, d * 0.9
    assert [y.tolist() for y in found] == [list(of) for of in zip(*expected, strict=True)]


class _Scaled(torch.autograd.Function):
    """What is given, and scaled; the backward keeps the factor as a number, and changes the sign."""

    @staticmethod
    def forward(ctx, h, factor):
        ctx.factor = factor / 3
        return h.clone(), h * (1 - 0.9**factor)

    @staticmethod
    def backward(ctx, *cotangents):
        return sum(-ctx.factor * g for g in cotangents), None


#: functions of the user's that have graphs of their own in a step's
FUNCTIONS = {
    "custom function": lambda h, d: sum(_Scaled.apply(h, d)),
    "checkpoint": lambda h, d: checkpoint(lambda h, d: h * d, h, d, use_reentrant=False),
    "inner scan": lambda h, d: scan(lambda c, _: (c * d, c), h, None, length=2)[0],
    "arithmetic in a checkpoint": lambda h, d: checkpoint(
        lambda h: h * (1 - 0.9**d) + math.sqrt(d), h, use_reentrant=False
    ),
    "arithmetic in an inner scan": lambda h, d: scan(
        lambda c, _: (c * (1 - 0.9**d) + math.sqrt(d), c), h, None, length=2
    )[0],
    "vmap": lambda h, d: torch.vmap(lambda h: torch.sin(h * d))(h),
    "gradient": lambda h, d: torch.func.grad(lambda h: (h.cos() * d).sum())(h),
}


@pytest.mark.torch_version
@pytest.mark.parametrize("run", [scan, compiled])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_has_all_digits_of_a_number(function, run):
    def outputs(run, dtype):
        def cell(carry, x):
            h, n = carry
            h = FUNCTIONS[function](h, 0.3 * n) + x
            return (h, n + 1), h

        torch.manual_seed(0)
        init, xs = (torch.randn(n, 3, dtype=dtype, requires_grad=True) for n in (1, 5))
        (h, _), ys = run(cell, (init[0], 1), xs)
        return ys.detach(), torch.autograd.grad((ys.sin() + h).sum(), (init, xs))

    for dtype, tolerance in ((DOUBLE, 1e-13), (torch.float32, 1e-5)):
        with fallback("error"):
            found = outputs(run, dtype)
        expected = outputs(written_loop, dtype)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.torch_version
@pytest.mark.parametrize("run", [scan, compiled])
def test_all_digits_beside_a_float_that_was_another_one_before(run):
    """Dynamo has a symbol for it from the second call on."""

    def decaying(rate):
        def cell(carry, x):
            h, n, d = carry
            return (h + x, n + 1, d * rate), h * (1 - rate**n) + d / (n + rate)

        return cell

    init, xs = (torch.zeros(3, dtype=DOUBLE), 1, 1.0), torch.ones(5, 3, dtype=DOUBLE)
    for cell in map(decaying, (0.1, 0.17, 0.24)):
        with fallback("error"):
            found = run(cell, init, xs)[1]
        torch.testing.assert_close(found, written_loop(cell, init, xs)[1], rtol=0, atol=1e-14)


FLAGS = {
    "1 - b": lambda b, n: 1 - b,
    "b - 1": lambda b, n: b - 1,
    "n - b": lambda b, n: n - b,
    "n -= b": lambda b, n: operator.isub(n, b),
    "1.0 - b": lambda b, n: 1.0 - b,
    "b - b": lambda b, n: b - (n < 3),
    "b + b": lambda b, n: b + b,
    "b * b": lambda b, n: b * (n < 4),
    "-b": lambda b, n: -b,
    "+b": lambda b, n: +b,
    "~b": lambda b, n: operator.invert(b),
    "abs(b)": lambda b, n: abs(b),
    "b << 1": lambda b, n: b << 1,
    "b // 1": lambda b, n: b // 1,
    "b % 2": lambda b, n: b % 2,
    "b ** 2": lambda b, n: b**2,
    "round(b)": lambda b, n: round(b) + math.floor(b) + math.ceil(b),
    "fabs(b)": lambda b, n: math.fabs(b),
    "0.1 * (1 - b)": lambda b, n: 0.1 * (1 - b),
}


@pytest.mark.torch_version
@pytest.mark.filterwarnings("ignore:Bitwise inversion")
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_an_int_to_arithmetic(name):
    """``~True`` is -2; torch's ``~`` of a scalar that says True is False, and it subtracts none."""

    def cell_and_state():
        state = {"n": 0}

        def cell(h, x):
            state["n"] += 1
            made = FLAGS[name](state["n"] % 2 == 0, state["n"])
            return h * 0.5 + x * made, (h, made)

        return cell

    torch._dynamo.reset()
    h, xs = torch.zeros(3, dtype=DOUBLE), torch.ones(5, 3, dtype=DOUBLE)
    with fallback("error"):
        found = scan(cell_and_state(), h, xs)
    assert_same(found, loop(cell_and_state(), h, xs))
