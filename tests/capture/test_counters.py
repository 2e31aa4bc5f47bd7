"""Branches on numbers that steps count: one for all steps, others before, or every few steps."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from fuzz.campaign import run_here
from fuzz.modes import parse_mode
from oracle import written_loop as loop
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.testing import CompileCounter

from torch_scan_hop import Binomial, explain, fallback, scan

pytestmark = pytest.mark.usefixtures("nothing_captured")

T, B, D = 6, 3, 4


class Counting(nn.Module):
    """``branch(n)`` says what ``n``, which each step counts on by ``by``, decides."""

    def __init__(self, branch, start=0, by=1):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(D, D, dtype=torch.float64)
        self.branch, self.n, self.by = branch, start, by

    def forward(self, h, x):
        if self.branch(self.n):
            h = h * 0.5 + x
        h = torch.tanh(self.linear(h) + x)
        self.n = self.count(self.n)
        return h, h * (1 + self.n)

    def count(self, n):
        return n + self.by


class CountingInOtherWords(Counting):
    def forward(self, h, x):
        if self.n:
            h = h * 0.5 + x
        h = h * (2 if self.n else 3) + (self.n or 7)
        self.n = 1 + self.n
        return torch.tanh(self.linear(h) + x), h


def make_xs(steps=T):
    return torch.randn(steps, B, D, dtype=torch.float64)


def compiled(module, init, xs):
    return scan(module, init, xs)


def eager(module, init, xs):
    with fallback("error"):
        return scan(module, init, xs)


WAYS = {
    "eager": lambda: eager,
    "compiled": lambda: torch.compile(compiled, backend="aot_eager", fullgraph=True),
}


def check(run, module, other, steps=T):
    xs, h = make_xs(steps), torch.ones(B, D, dtype=torch.float64)
    results = []
    for scan_like, cell in ((run, module), (loop, other)):
        h_T, ys = scan_like(cell, h, xs)
        gradients = torch.autograd.grad(h_T.sum() + (ys * ys).sum(), [*cell.parameters()])
        results.append((h_T, ys, *gradients))
    torch.testing.assert_close(*results)
    assert module.n == other.n and type(module.n) is int


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("branch", "start", "by"),
    [
        (lambda n: n == 0, 0, 1),
        (lambda n: n + 2 <= 2, 0, 3),
        (lambda n: n >= 100, 100, -1),
        (lambda n: n == 5 or n == 7, 5, 3),
        (lambda n: -3 < n and not n > 1000, 0, 1),
        (lambda n: not n, 0, 1),
        (lambda n: bool(int(n)), 0, 1),
        (lambda n: 3 - 2 * n == 3, 0, 1),
        (lambda n: 1 + -n > 0, 0, 2),
    ],
)
def test_the_first_step_alone_branches_in_another_way(way, branch, start, by):
    run = WAYS[way]()
    module, other = (Counting(branch, start, by) for _ in range(2))
    for _ in range(3):  # each call goes on from where the last one ended
        check(run, module, other)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("branch", [lambda n: n < 3, lambda n: n % 3 == 0, lambda n: 0.1 * n < 0.3])
def test_under_a_default_device(way, branch):
    with torch.device("cpu"):
        check(WAYS[way](), Counting(branch), Counting(branch))


@pytest.mark.parametrize("way", WAYS)
def test_a_number_is_asked_if_it_is_0(way):
    run = WAYS[way]()
    module, other = (CountingInOtherWords(None) for _ in range(2))
    for _ in range(2):
        check(run, module, other)


@pytest.mark.parametrize("way", [{}, {"unroll": 2}, {"checkpoint": "sqrt"}, {"reverse": True}])
@pytest.mark.parametrize("start", [0, 7])
def test_a_number_in_init(way, start):
    def step(carry, x):
        h, n = carry
        if n == 0:
            h = h * 0.5
        if n < 1000:
            h = h + x
        return (torch.tanh(h), n + 1), h * n

    xs, init = make_xs(), (torch.ones(B, D, dtype=torch.float64), start)
    with fallback("error"):
        (h, n), ys = scan(step, init, xs, **way)
    turn = (0,) if "reverse" in way else ()
    (h_loop, n_loop), ys_loop = loop(step, init, xs.flip(turn))
    assert n == n_loop
    torch.testing.assert_close((h, ys), (h_loop, ys_loop.flip(turn)))


@pytest.mark.parametrize("branch", [lambda n, t: n > 0, lambda n, t: t > 0])
def test_a_number_in_init_beside_one_in_an_attribute(branch):
    def results(scan):
        module = Counting(bool)

        def step(carry, x):
            h, t = carry
            module.n += 1
            h = h * 0.5 + x if branch(module.n, t) else h * (1 + 0.1 * t)
            return (h, t + 1), h * module.n

        (h, t), ys = scan(step, (torch.ones(B, D, dtype=torch.float64), 0), xs)
        return h, torch.as_tensor(t), ys, torch.tensor(module.n)

    xs = make_xs()
    torch.testing.assert_close(results(eager), results(loop))


@pytest.mark.parametrize("branch", [lambda n: n == 0, lambda n: False])
def test_a_program_is_compiled_once_for_all_counts(branch):
    """And once for the first: torch alone compiles a module that counts anew at each call."""
    module, counter = Counting(branch), CompileCounter()
    run = torch.compile(compiled, backend=counter, fullgraph=True)
    with dynamo_config.patch(automatic_dynamic_shapes=True):  # torch_xla turns it off
        for _ in range(5):
            run(module, torch.ones(B, D, dtype=torch.float64), make_xs())
    assert counter.frame_count == 2
    assert module.n == 5 * T


def by_one(n):
    return n + 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("branch", "start", "count"),
    [
        (lambda n: n == 3, 0, by_one),
        (lambda n: 2 < n < 6, 0, by_one),
        (lambda n: n > 3, 9, lambda n: n - 1),
        (lambda n: n % 2 == 0, 0, by_one),
        (lambda n: n % 3 == 2, 1, lambda n: n + 2),
        (lambda n: n < 5 or n % 2 == 0, 0, by_one),
        (lambda n: n % 2 == 0 and n % 3 == 0, 0, by_one),
        (lambda n: n % 100 == 0, 95, by_one),
        (lambda n: n & 1 or n * 0 == 1, 0, by_one),
        (lambda n: n == 0, 0, lambda n: (n + 1) % 5),
        (lambda n: n == 0, 3, lambda n: n + 1 if n < 3 else 0),
        (lambda n: n == 1, 0, lambda n: 1 - n),
        (lambda n: n > 0 or n % 3 == 1, 3, lambda n: -n),
        (lambda n: n / 4 > 1, 6, lambda n: 7 - n),
    ],
)
def test_steps_branch_in_several_ways(way, branch, start, count):
    run = WAYS[way]()
    module, other = (Counting(branch, start) for _ in range(2))
    module.count = other.count = count
    for _ in range(2):  # each call goes on from where the last one ended
        check(run, module, other, steps=13)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 11])
def test_every_third_step(steps, reverse):
    """With an int in init, a y of another dtype in each branch, and a state that is None first."""

    def results(scan_like, xs, reverse):
        holder = Holder()

        def step(carry, x):
            h, n = carry
            if holder.last is not None and n % 3 == 1:
                h = h + holder.last.sin()
            holder.last = x * 2
            return (torch.tanh(h), n + 1), {"h": h, "n": n if n < 5 else n * 0.5}

        init = (torch.ones(B, D, dtype=torch.float64), 0)
        if scan_like is scan:
            (h, n), ys = scan(step, init, xs, reverse=reverse)
        else:
            (h, n), ys = by_hand(step, init, xs.flip(0) if reverse else xs)
            ys = {k: y.flip(0) if reverse else y for k, y in ys.items()}
        return h, torch.as_tensor(n), ys, holder.last

    xs = make_xs(steps)
    if steps == 0:
        with fallback("error"):
            assert results(scan, xs, reverse)[2]["h"].shape == (0, B, D)
        return
    with fallback("error"):
        found = results(scan, xs, reverse)
    torch.testing.assert_close(found, results(by_hand, xs, reverse))


class Holder:
    last = None


def by_hand(step, carry, xs):
    ys = []
    for x in xs:
        carry, y = step(carry, x)
        ys.append({k: torch.as_tensor(leaf) for k, leaf in y.items()})
    dtypes = {k: torch.stack([y[k] for y in ys]) for k in ys[0]}
    return carry, dtypes


@pytest.mark.parametrize("branch", [lambda n: n % 3 == 0, lambda n: n < 4])
def test_a_program_of_any_number_of_steps(branch):
    """It is compiled once for each remainder, and for each place of a change that it has met."""
    module, other, counter = Counting(branch), Counting(branch), CompileCounter()
    run = torch.compile(compiled, backend=counter, fullgraph=True, dynamic=True)
    with dynamo_config.patch(automatic_dynamic_shapes=True):  # torch_xla turns it off
        for steps in (12, 15, 18, 21, 24, 27, 30):
            check(run, module, other, steps)
    assert counter.frame_count <= 3


class ByPosition(Counting):
    """It takes a layer, a function and a weight, by its count."""

    def __init__(self, lists):
        super().__init__(None)
        self.linear = None
        self.layers = nn.ModuleList([nn.Linear(D, D, dtype=torch.float64) for _ in range(3)])
        self.lists = lists([torch.tanh, torch.sin]), lists(torch.randn(6, D).double().unbind())

    def forward(self, h, x):
        functions, weights = self.lists
        h = functions[self.n % 2](self.layers[self.n % 3](h) + x) * weights[self.n]
        self.n += 1
        return h, h


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lists", [list, tuple])
def test_lists_at_what_is_counted(way, lists):
    check(WAYS[way](), ByPosition(lists), ByPosition(lists))


def test_a_position_beyond_the_list():
    with pytest.raises(IndexError, match="out of range"):
        scan(ByPosition(list), torch.ones(B, D, dtype=torch.float64), make_xs(7))


def test_a_block_of_steps_is_one_of_a_scan():
    bodies = []

    def backend(graph, example_inputs):
        bodies.extend(node for node in graph.graph.nodes if "scan" in str(node.target))
        return graph

    module = Counting(lambda n: n % 3 == 0)
    run = torch.compile(compiled, backend=backend, fullgraph=True)
    run(module, torch.ones(B, D, dtype=torch.float64), make_xs(300))
    assert len([node for node in bodies if node.op == "call_function"]) == 1


def test_what_counts_in_no_known_way_is_a_loop():
    module = Counting(lambda n: n < 3)
    module.count = lambda n: n * n + 1
    with pytest.raises(Exception, match=r"steps do not all take the same branch.*self.branch"):
        with fallback("error"):
            scan(module, torch.ones(B, D, dtype=torch.float64), make_xs())


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_few_steps(steps):
    module, other = (Counting(lambda n: n == 0) for _ in range(2))
    if steps == 0:
        h, ys = eager(module, torch.ones(B, D, dtype=torch.float64), make_xs(0))
        assert (h == 1).all() and ys.shape == (0, B, D) and module.n == 0
    else:
        check(eager, module, other, steps)


def test_a_scan_in_the_body_has_counters_of_its_own():
    def run(scan_like, xs):
        def inner(carry, z):
            h, k = carry
            if k == 0:
                h = h + 1
            return (h * 0.5 + z, k + 1), h

        def outer(carry, x):
            h, n = carry
            if n >= 4:
                h = h * 2
            (h, _), ys = scan_like(inner, (h, 0), x)
            return (h, n + 1), ys

        return scan_like(outer, (torch.zeros(D, dtype=torch.float64), 4), xs)

    xs = make_xs()
    with fallback("error"):
        (h, n), ys = run(scan, xs)
    (h_loop, n_loop), ys_loop = run(loop, xs)
    assert n == n_loop
    torch.testing.assert_close((h, ys), (h_loop, ys_loop))


def test_explain_says_so():
    text = str(
        explain(Counting(lambda n: n == 0), torch.ones(B, D, dtype=torch.float64), make_xs())
    )
    assert "other steps are on their own, before these: after them the branch at" in text


def test_the_operator_in_the_body_has_no_numbers():
    """Its carries are tensors, whatever the scan around it carries at the same places."""

    def by_hand(combine_fn, init, xs, _):
        carry, ys = list(init), []
        for x in xs[0]:
            *carry, y = combine_fn(*carry, x)
            ys.append(y)
        return (*carry, torch.stack(ys))

    def run(scan_like, inner_scan):
        def inner(h, scale, x):
            return [h + x, scale.clone(), scale * torch.ones((), dtype=torch.bfloat16)]

        def outer(carry, x):
            h, n = carry
            h, _, ys = inner_scan(inner, [h, torch.tensor(1.001)], [x], [])
            return (h, n + 1), ys

        return scan_like(outer, (torch.ones(D), 1), torch.ones(T, B, D))

    with fallback("error"):
        _, ys = run(scan, torch.ops.higher_order.scan)
    torch.testing.assert_close(ys, run(loop, by_hand)[1])


@pytest.mark.parametrize("seed", range(12))
def test_random_branches(seed):
    draw = random.Random(seed)
    compare = draw.choice([operator.lt, operator.le, operator.gt, operator.ge, operator.eq])
    more, bound, by = draw.choice([0, 1, -2]), draw.randint(-4, 12), draw.choice([1, 2, -1])
    start, steps, is_late = draw.randint(-3, 9), draw.choice([2, 3, T, 14]), draw.random() < 0.5
    modulus = draw.choice([None, 2, 3, 5])

    def step(carry, x):
        h, n = carry
        if is_late:
            n = n + by
        asked = n + more if modulus is None else (n + more) % modulus
        h = h * 0.5 + 1 if compare(asked, bound if modulus is None else bound % 5) else h - x
        return (torch.tanh(h), n if is_late else n + by), h * n

    xs, init = make_xs(steps), (torch.ones(B, D, dtype=torch.float64), start)
    with fallback("error"):
        found = scan(step, init, xs)
    (h, n), ys = loop(step, init, xs)
    assert found[0][1] == n
    torch.testing.assert_close((found[0][0], found[1]), (h, ys))


@pytest.mark.parametrize("way", [{"checkpoint": Binomial(2)}, {"checkpoint": 2}, {"unroll": 2}])
def test_a_number_of_a_scan_that_is_split(way):
    """It is one in all parts: a second name of it was multiplied in place (fuzz, seed 42007)."""
    holder = Holder()
    holder.decay = 0.7

    def step(h, x):
        holder.decay *= 0.9
        other = holder.decay
        other *= 3
        return torch.tanh(h * other + x), h

    with fallback("error"):
        scan(step, torch.ones(B, D, dtype=torch.float64), make_xs(), **way)
    assert holder.decay == pytest.approx(0.7 * 0.9**T, rel=1e-15)


@pytest.mark.filterwarnings("ignore:.*steps do not all take the same branch")
@pytest.mark.filterwarnings("ignore:.*captured anew")
@pytest.mark.parametrize("start", [0, 4, 8])
def test_random_programs(start):
    """A loop at times, where the steps branch in too many ways; never wrong."""
    features = ("pointwise", "branches", "counters", "attributes")
    found = [*run_here(range(start, start + 4), [parse_mode("eager")], features)]
    assert not [f for f in found if f.outcome.is_failure]
    assert any(f.outcome.status == "ok" for f in found)


class Flagged(Counting):
    """It makes tensors of what it asks of its counter, which it has not assigned to so far."""

    def forward(self, h, x):
        even = torch.as_tensor(self.n % 2 == 0)
        h = torch.where(even, h * 0.5 + x, h) + torch.tensor(self.n > 3, dtype=h.dtype)
        h = torch.tanh(self.linear(h) + x)
        self.n += 1
        return h, h


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_of_a_flag(way):
    run = WAYS[way]()
    module, other = (Flagged(None) for _ in range(2))
    for steps in (5, 5, 4):  # it goes on from an odd count, too
        check(run, module, other, steps)


class InContexts(Counting):
    def forward(self, h, x):
        with torch.set_grad_enabled(self.branch(self.n)):
            h = torch.tanh(self.linear(h) + x)
        self.n += 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.n > 2):
            y = self.linear(h)
        torch.set_grad_enabled(self.n % 2 == 0)
        h = h * 2
        torch.set_grad_enabled(True)
        return h, y


@pytest.mark.torch_version
@pytest.mark.parametrize("branch", [lambda n: n >= 2, lambda n: n % 3 > 0])
@pytest.mark.parametrize("way", WAYS)
def test_a_flag_is_given_to_a_context(way, branch):
    check(WAYS[way](), InContexts(branch), InContexts(branch))


class GivesToTorch(Counting):
    def forward(self, h, x):
        h = torch.tanh(self.linear(h) + x)
        h = self.branch(h, self.n)
        self.n += 1
        return h, h


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "branch",
    [
        lambda h, n: nn.functional.dropout(h, 1.0, training=n > 3),
        lambda h, n: torch.sort(h, descending=n % 2 == 0)[0],
        lambda h, n: h + h.sum(n % 2, keepdim=n >= 0),
        lambda h, n: h.cumsum(dim=n % 2),
        lambda h, n: h + torch.diag(h[:, :3], n % 2).sum(),
        lambda h, n: h + torch.arange(n, n + D),
        lambda h, n: h + sum(i for i in range(n % 3)),
        lambda h, n: h + (n > 2),
        lambda h, n: h * divmod(7, 2)[0] + divmod(n, 4)[1],
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_torch_is_given_what_steps_count(way, branch):
    """A flag, a dimension and an offset: they are known where they are the same again."""
    run = WAYS[way]()
    module, other = GivesToTorch(branch), GivesToTorch(branch)
    for _ in range(2):
        check(run, module, other)


class Trains(Counting):
    def __init__(self, branch):
        super().__init__(branch)
        self.norm = nn.BatchNorm1d(D, dtype=torch.float64)

    def forward(self, h, x):
        self.norm.train(self.branch(self.n))
        self.n += 1
        h = torch.tanh(self.norm(self.linear(h) + x))
        return h, h


@pytest.mark.torch_version
@pytest.mark.parametrize("way", WAYS)
def test_a_module_trains_by_a_flag(way):
    module, other = (Trains(lambda n: n < 3) for _ in range(2))
    check(WAYS[way](), module, other)
    assert module.norm.training is other.norm.training is False
    torch.testing.assert_close(module.norm.running_var, other.norm.running_var)


def test_a_flag_of_a_tensor_is_no_flag_of_a_context():
    def cell(h, x):
        with torch.set_grad_enabled(bool(x.sum() > 0)):
            return torch.tanh(h + x), h

    with fallback("allow"):
        found = scan(cell, torch.zeros(D), torch.ones(3, D))
    torch.testing.assert_close(found, loop(cell, torch.zeros(D), torch.ones(3, D)))
