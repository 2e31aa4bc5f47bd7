"""Each rewrite on its own: what it moves (structure), and that values do not change."""

from __future__ import annotations

from collections import Counter

import expecttest
import pytest
import torch
from cells import lstm_cell
from oracle import assert_same, loop, scalar
from torch.fx.experimental.proxy_tensor import make_fx

import torch_scan_hop
from torch_scan_hop import scan
from torch_scan_hop.body.cleanup import clean_up
from torch_scan_hop.op import FORWARD, REVERSE, scans_in
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.rewrites import Options, Planner, using_options
from torch_scan_hop.signature import Inputs, Signature

T, B, D, H = 6, 2, 3, 4
OFF = {
    "hoist_invariant": False,
    "batch_xs": False,
    "sink_outputs": False,
    "contract_accumulators": False,
    "drop_dead": False,
}


def only(*names: str) -> Options:
    return Options(**{**OFF, **dict.fromkeys(names, True)})


def body_of(fn, *examples):
    module = make_fx(fn)(*examples)
    clean_up(module)
    return module


def operators(module: torch.fx.GraphModule) -> Counter[str]:
    names = [n.target for n in module.graph.nodes if n.op == "call_function"]
    return Counter(getattr(t, "overloadpacket", t).__name__ for t in names)


def run_loop(body, inputs, options=FORWARD):
    """The oracle: the body step by step."""
    carry, steps = list(inputs.carry), []
    order = range(inputs.trip_count)
    for t in reversed(order) if options.reverse else order:
        out = body(*carry, *(x[t] for x in inputs.xs), *inputs.additional)
        carry, ys = list(out[: len(carry)]), out[len(carry) :]
        steps.append(ys)
    if options.reverse:
        steps.reverse()
    return [*carry, *(torch.stack(leaf) for leaf in zip(*steps, strict=True))]


def check_values(plan, body, init, xs, additional):
    inputs = Inputs(init, xs, additional)
    for options in (FORWARD, REVERSE):
        found = plan.run(run_loop, inputs, options)
        expected = run_loop(body, inputs, options)
        for k, (a, b) in enumerate(zip(found, expected, strict=True)):
            if plan.decisions.used_outputs[k]:
                torch.testing.assert_close(a, b)


def make(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class TestHoistInvariant:
    @staticmethod
    def step(h, x, w):
        return torch.tanh(h + x @ torch.exp(w).t()), h

    def test_structure_and_values(self):
        h, xs, w = make(B, D), make(T, B, D), make(D, D)
        body = body_of(self.step, h, xs[0], w)
        plan = Planner(
            body, Signature(1, 1, 1), only("hoist_invariant"), pointwise_pays=False
        ).plan()
        assert operators(plan.body) == {"mm": 1, "add": 1, "tanh": 1}
        assert operators(plan.invariant_part.module) == {"exp": 1, "t": 1}
        check_values(plan, body, [h], [xs], [w])

    def test_off(self):
        body = body_of(self.step, make(B, D), make(B, D), make(D, D))
        plan = Planner(body, Signature(1, 1, 1), Options(**OFF), pointwise_pays=False).plan()
        assert plan.is_trivial() and "exp" in operators(plan.body)


class TestWeightsThatLieApart:
    """A library would copy such a matrix in each of its products."""

    @pytest.mark.parametrize(
        ("part", "copied"),
        [
            (lambda w: w, False),
            (lambda w: w.t(), False),
            (lambda w: torch.cat([w, w], 1)[:, H:], False),
            (lambda w: torch.cat([w, w])[::2], False),
            (lambda w: torch.view_as_real(torch.complex(w, w))[..., 1], True),
            (lambda w: torch.complex(w, w).real.t(), True),
            (lambda w: torch.stack([w, w], -1)[..., 0], True),
        ],
    )
    def test_they_are_copied_once(self, part, copied):
        h, xs, w = make(B, H), make(T, B, H), part(make(H, H))
        body = body_of(lambda h, x, w: (torch.tanh(h @ w + x), h * 2), h, xs[0], w)
        plan = Planner(body, Signature(1, 1, 1), Options(**OFF), pointwise_pays=False).plan()
        (given,) = plan.invariants(Inputs([h], [xs], [w])).values()
        assert (given is not w) == copied and torch.equal(given, w)
        assert not copied or given.is_contiguous()
        check_values(plan, body, [h], [xs], [w])

    def test_what_no_product_reads_stays(self):
        w = torch.stack([make(B, H)] * 2, -1)[..., 0]
        h, xs = make(B, H), make(T, B, H)
        body = body_of(lambda h, x, w: (h * w + x, h + 1), h, xs[0], w)
        plan = Planner(body, Signature(1, 1, 1), Options(**OFF), pointwise_pays=False).plan()
        assert plan.invariants(Inputs([h], [xs], [w])) == {plan.roles.additional[0]: w}


class TestBatchXs:
    @staticmethod
    def step(h, x, w, u):
        return torch.tanh(x @ w + h @ u), h

    def test_the_input_product_leaves_the_loop(self):
        h, xs, w, u = make(B, H), make(T, B, D), make(D, H), make(H, H)
        body = body_of(self.step, h, xs[0], w, u)
        plan = Planner(body, Signature(1, 1, 2), only("batch_xs"), pointwise_pays=False).plan()
        assert operators(plan.body)["mm"] == 1
        check_values(plan, body, [h], [xs], [w, u])
        batched = make_fx(
            lambda xs, w: plan.batched_part.over_steps(
                {plan.roles.xs[0]: xs}, {plan.roles.additional[0]: w}, False
            )[plan.batched_part.outputs[0]]
        )(xs, w)
        products = [n for n in batched.graph.nodes if n.target is torch.ops.aten.mm.default]
        assert [tuple(n.meta["val"].shape) for n in products] == [(T * B, H)]

    def test_pointwise_work_moves_only_where_it_pays(self):
        def step(h, x):
            return h + torch.sin(torch.exp(x)), h

        h, xs = make(H), make(T, H)
        body = body_of(step, h, xs[0])
        for pays, left in ((False, {"exp": 1, "sin": 1, "add": 1}), (True, {"add": 1})):
            plan = Planner(body, Signature(1, 1, 0), only("batch_xs"), pointwise_pays=pays).plan()
            assert operators(plan.body) == left
            check_values(plan, body, [h], [xs], [])

    def test_the_memory_gate(self):
        def step(h, x, w):
            return h + (x @ w).sum(), h.clone()

        h, xs, w = make(1), make(T, 1, 2), make(2, 100)
        body = body_of(step, h, xs[0], w)
        wide = Planner(
            body, Signature(1, 1, 1), Options(memory_gate=1000), pointwise_pays=True
        ).plan()
        assert "mm" not in operators(wide.body)
        none = Planner(body, Signature(1, 1, 1), Options(memory_gate=0), pointwise_pays=True).plan()
        assert "mm" in operators(none.body)


class TestSinkOutputs:
    @staticmethod
    def step(h, x, w):
        h = torch.tanh(h + x)
        return h, h @ w

    def test_the_output_product_leaves_the_loop(self):
        h, xs, w = make(B, D), make(T, B, D), make(D, H)
        body = body_of(self.step, h, xs[0], w)
        plan = Planner(body, Signature(1, 1, 1), only("sink_outputs"), pointwise_pays=False).plan()
        assert operators(plan.body) == {"add": 1, "tanh": 1}
        assert [n.name for n in plan.decisions.stacked] == ["tanh"]
        check_values(plan, body, [h], [xs], [w])

    def test_random_work_stays(self):
        def step(h, x):
            h = h + x
            return h, torch.bernoulli(torch.sigmoid(h))

        h, xs = make(H), make(T, H)
        body = body_of(step, h, xs[0])
        plan = Planner(body, Signature(1, 1, 0), Options(), pointwise_pays=True).plan()
        assert operators(plan.body)["bernoulli"] == 1


class TestContractAccumulators:
    def test_a_product_of_weights_is_one_contraction(self):
        def step(acc, g, a, b):
            return acc + a.t() @ b, g * 2, a + 1

        acc, g, a, b = make(D, H), make(H), make(T, B, D), make(T, B, H)
        body = body_of(step, acc, g, a[0], b[0])
        plan = Planner(
            body, Signature(2, 2, 0), only("contract_accumulators"), pointwise_pays=False
        ).plan()
        assert plan.decisions.loop_carry == [1]
        assert operators(plan.body)["mm"] == 0
        check_values(plan, body, [acc, g], [a, b], [])

    def test_views_and_sums_around_it(self):
        def step(w, bias, h, x):
            h = torch.tanh(h + x)
            return w + (h.t() @ x).t(), bias + h.sum([0], keepdim=True).view(D), h, h * 2

        w, bias, h, xs = make(D, D), make(D), make(B, D), make(T, B, D)
        body = body_of(step, w, bias, h, xs[0])
        plan = Planner(body, Signature(3, 1, 0), Options(), pointwise_pays=False).plan()
        assert plan.decisions.loop_carry == [2]
        assert operators(plan.body)["mm"] == operators(plan.body)["sum"] == 0
        check_values(plan, body, [w, bias, h], [xs], [])

    @pytest.mark.parametrize("pointwise_pays", [False, True])
    def test_what_a_known_factor_scales(self, pointwise_pays):
        """As the gradient of ``sigmoid(w) * h``, of ``w / 2 @ h``, of ``-exp(w)``."""

        def step(v, w, b, h, x, p):
            known = torch.sigmoid(p)
            h = torch.tanh(h + x)
            return (
                v - (h * x).sum(0, keepdim=True).view(D) * known,
                w + (h.t() @ x).t() / 2 * known,
                b + -(-h.sum(0) * 0.5 / known),
                h,
            )

        carry, xs, p = [make(D), make(D, D), make(D), make(B, D)], make(T, B, D), make(D)
        body = body_of(step, *carry, xs[0], p)
        plan = Planner(body, Signature(4, 1, 1), Options(), pointwise_pays=pointwise_pays).plan()
        # the first is no sum of theirs, but a difference
        assert plan.decisions.loop_carry == [0, 3]
        assert operators(plan.body)["mm"] == operators(plan.body)["div"] == 0
        check_values(plan, body, carry, [xs], [p])

    @pytest.mark.parametrize("pointwise_pays", [False, True])
    def test_what_is_spread_over_a_weight(self, pointwise_pays):
        """As the gradient of ``w.mean()``: one number a step is added up, not one of each weight."""

        def step(w, h, x):
            h = torch.tanh(h + x)
            aten = torch.ops.aten
            spread = aten.expand.default(aten.mul.Scalar(h.sum(), 3), [100, D])
            return w + aten.div.Scalar(spread, 100 * D), h

        carry, xs = [make(100, D), make(B, D)], make(T, B, D)
        body = body_of(step, *carry, xs[0])
        plan = Planner(body, Signature(2, 1, 0), Options(), pointwise_pays=pointwise_pays).plan()
        assert plan.decisions.loop_carry == [1]
        assert operators(plan.body)["expand"] == operators(plan.body)["div"] == 0
        check_values(plan, body, carry, [xs], [])

    @pytest.mark.parametrize(
        "scaled",
        [
            lambda h, x, p: h.sum(0) * x[0],
            lambda h, x, p: p / h.sum(0),
            lambda h, x, p: h.sum(0) * h.sum(0),
        ],
        ids=["by x", "divides", "by itself"],
    )
    def test_what_is_not_linear_is_summed_as_it_is(self, scaled):
        def step(acc, h, x, p):
            h = torch.tanh(h + x) + 2
            return acc + scaled(h, x, p), h

        carry, xs, p = [make(D), make(B, D)], make(T, B, D), make(D)
        body = body_of(step, *carry, xs[0], p)
        plan = Planner(body, Signature(2, 1, 1), Options(), pointwise_pays=True).plan()
        check_values(plan, body, carry, [xs], [p])

    def test_narrow_numbers_are_scaled_before_they_are_added(self):
        acc, xs = torch.zeros(2).half(), torch.full((40, 2), 3e3).half()
        body = body_of(lambda acc, x: [acc + x.exp2().clamp(max=3e3) * 1e-3, x], acc, xs[0])
        plan = Planner(body, Signature(1, 1, 0), Options(), pointwise_pays=True).plan()
        check_values(plan, body, [acc], [xs], [])

    def test_batched_products(self):
        def step(acc, x):
            return acc + torch.bmm(x.transpose(1, 2), x), x.sum()

        acc, xs = make(2, H, H), make(T, 2, 3, H)
        body = body_of(step, acc, xs[0])
        plan = Planner(body, Signature(1, 1, 0), Options(), pointwise_pays=True).plan()
        assert plan.decisions.loop_carry == []
        check_values(plan, body, [acc], [xs], [])

    def test_a_sum_that_is_read_stays(self):
        def step(acc, x):
            acc = acc + x
            return acc, acc * 2

        body = body_of(step, make(H), make(H))
        plan = Planner(body, Signature(1, 1, 0), Options(), pointwise_pays=True).plan()
        assert plan.decisions.loop_carry == [0]
        check_values(plan, body, [make(H)], [make(T, H)], [])


class TestDropDead:
    @staticmethod
    def step(dead, fixed, h, x):
        return dead * 2, fixed, h * fixed + x, h.sin(), h.cos()

    def test_unread_results_and_unchanged_carries(self):
        init, xs = [make(H), make(H), make(H)], make(T, H)
        body = body_of(self.step, *init, xs[0])
        plan = Planner(
            body,
            Signature(3, 1, 0),
            only("drop_dead"),
            pointwise_pays=False,
            used_outputs=[False, True, True, False, True],
        ).plan()
        assert plan.decisions.loop_carry == [2] and plan.decisions.constant_carry == [1]
        assert operators(plan.body) == {"mul": 1, "add": 1, "cos": 1}
        check_values(plan, body, init, [xs], [])

    def test_forwarded_xs_are_copied(self):
        xs, h = make(T, H), make(H)
        body = body_of(lambda h, x: (h + 1, x, x), h, xs[0])
        plan = Planner(body, Signature(1, 1, 0), Options(), pointwise_pays=False).plan()
        _, first, second = plan.run(run_loop, Inputs([h], [xs], []))
        torch.testing.assert_close([first, second], [xs, xs])
        assert len({t.data_ptr() for t in (xs, first, second)}) == 3


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "dynamic",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["static", "dynamic"],
)
def test_the_compiled_lstm_has_one_product_forward_and_no_weight_gradient_backward(dynamic):
    """All rewrites together, in the graphs that Inductor lowers."""
    from torch_scan_hop._torch.inductor_passes import post_grad

    seen: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()
    w, u, b = (make(D, 4 * H), make(H, 4 * H), make(4 * H))
    for t in (w, u, b):
        t.requires_grad_()
    xs, state = make(T, B, D).requires_grad_(), (make(B, H), make(B, H))
    cell = lstm_cell(w, u, b)
    run = torch.compile(lambda xs: scan(cell, state, xs), fullgraph=True, dynamic=dynamic)
    from torch_scan_hop import inductor

    inductor.register()
    prepare = post_grad.decompose_scan_to_while_loop

    def record(gm):
        prepare(gm)
        seen.extend(body for _, body in scans_in(gm))

    post_grad.decompose_scan_to_while_loop = record
    try:
        _, ys = run(xs)
        gradients = torch.autograd.grad(ys.square().sum(), [w, u, b, xs])
    finally:
        post_grad.decompose_scan_to_while_loop = prepare
    _, expected = scan_loop(cell, state, xs, T, False)
    torch.testing.assert_close(ys, expected)
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected.square().sum(), [w, u, b, xs])
    )
    forward, backward = seen
    products = ("mm", "addmm", "bmm")
    assert sum(operators(forward)[p] for p in products) == 1
    # the product with the recurrent weight; none for the gradients of weights
    assert sum(operators(backward)[p] for p in products) == 1


@pytest.mark.parametrize("switch", ["none", *OFF])
def test_eager_values_with_each_rewrite_off(switch):
    w, u, b = (make(D, 4 * H), make(H, 4 * H), make(4 * H))
    for t in (w, u, b):
        t.requires_grad_()
    xs, state = make(T, B, D).requires_grad_(), (make(B, H), make(B, H))
    cell = lstm_cell(w, u, b)
    with using_options(**({} if switch == "none" else {switch: False})):
        _, ys = scan(cell, state, xs)
        gradients = torch.autograd.grad(ys.square().sum(), [w, u, b, xs])
    _, expected = scan_loop(cell, state, xs, T, False)
    torch.testing.assert_close(ys, expected)
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected.square().sum(), [w, u, b, xs])
    )


def test_the_loop_of_an_lstm_is_straight_line_code():
    from torch_scan_hop.eager.loop import EagerLoop

    def step(h, c, gates_x, u):
        i, f, g, o = (gates_x + h @ u).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, c, h

    with torch._subclasses.FakeTensorMode():
        body = body_of(
            step, torch.empty(B, H), torch.empty(B, H), torch.empty(B, 4 * H), torch.empty(H, 4 * H)
        )
    source = EagerLoop(body, Signature(2, 1, 1)).source
    lines = [line for line in source.splitlines() if not line.endswith(" = None")]
    expecttest.assert_expected_inline(
        "\n".join(lines),
        """\
def run_loop(order, init, xs, additional, places):
    next__h_1, next__c_1, = init
    all__gates_x_1, = xs
    u_1, = additional
    place__0, = places
    for step__ in order:
        h_1, c_1, gates_x_1 = next__h_1, next__c_1, all__gates_x_1[step__]
        addmm_default = call_addmm(gates_x_1, h_1, u_1, out=addmm_default)
        split = call_split(addmm_default, 4, -1)
        getitem = split[0]
        getitem_1 = split[1]
        getitem_2 = split[2]
        getitem_3 = split[3]
        sigmoid = call_sigmoid(getitem_1)
        sigmoid_1 = call_sigmoid(getitem)
        tanh = call_tanh(getitem_2)
        mul_1 = call_mul(sigmoid_1, tanh, out=sigmoid_1)
        addcmul_default = call_addcmul(mul_1, sigmoid, c_1, out=mul_1)
        sigmoid_2 = call_sigmoid(getitem_3, out=sigmoid_2)
        tanh_1 = call_tanh(addcmul_default, out=tanh_1)
        mul_2 = call_mul(sigmoid_2, tanh_1, out=place__0[step__])
        next__h_1, next__c_1 = mul_2, addcmul_default
    return next__h_1, next__c_1,""",
    )


def both_read(h, x, w, u):
    """``x @ w`` is read by the loop, and is a result."""
    gates = x @ w
    h = torch.tanh(h @ u + gates)
    return h, (h, gates)


def read_twice(h, x, w, u):
    gates = x @ w
    h = torch.tanh(h @ u + gates) * gates
    return h, h


def viewed_before(h, x, w, u):
    """The loop reads a product made before it, and a view of it."""
    gates = x @ w
    h = torch.tanh(h @ u + gates) * gates.flip(0).t().contiguous().t()
    return h, h


def multiplies_itself(h, x, w, u):
    h = h.sin()
    return torch.addmm(h, h, h) + x[:, :1], h


def added_to_itself(h, x, w, u):
    gates = x @ w
    product = gates * h.tanh()
    product = product + product
    twice = gates @ u
    return product + (twice + twice), product


def overwritten(h, x, w, u):
    h = torch.tanh(h @ u + x @ w)
    return h, h


@pytest.mark.parametrize(
    "cell",
    [both_read, read_twice, viewed_before, multiplies_itself, added_to_itself, overwritten],
)
def test_what_the_eager_loop_writes_over_is_read_by_nothing_else(cell):
    make = torch.Generator().manual_seed(0)
    h, xs = (torch.randn(*s, generator=make).double() for s in ((H, H), (T, H, D)))
    w, u = (torch.randn(*s, generator=make).double().requires_grad_() for s in ((D, H), (H, H)))

    def run(scan_, *options):
        carry, ys = scan_(lambda h, x: cell(h, x, w, u), h, xs, *options)
        total = carry.sum() + sum(y.square().sum() for y in torch.utils._pytree.tree_leaves(ys))
        wanted = [t for t in (w, u) if cell is not multiplies_itself]
        return carry, ys, torch.autograd.grad(total, wanted) if wanted else ()

    untouched = xs.clone()
    torch.testing.assert_close(run(scan), run(scan_loop, T, False))
    assert xs.equal(untouched)


def read_before_and_returned(h, x):
    made = torch.tanh(x)
    return made.mean() * h, made


def read_before_and_after(h, x):
    made = torch.tanh(x)
    return made.mean() * h, (made.sin().sum(-1), h)


@pytest.mark.parametrize("cell", [read_before_and_returned, read_before_and_after])
def test_work_before_the_loop_is_not_done_again_after_it(cell):
    make = torch.Generator().manual_seed(0)
    h, xs = torch.randn(H, generator=make).double(), torch.randn(T, B, D, generator=make).double()
    flat = lambda h, x: torch.utils._pytree.tree_leaves(cell(h, x))  # noqa: E731
    plan = Planner(
        body_of(flat, h, xs[0]), Signature(1, 1, 0), Options(), pointwise_pays=True
    ).plan()
    assert operators(plan.batched_part.module)["tanh"] == 1
    assert plan.sunk_part.module is None or operators(plan.sunk_part.module)["tanh"] == 0
    assert_same(scan(cell, h, xs), loop(cell, h, xs))


@pytest.mark.parametrize("size", [2**10, 2**18])
def test_a_large_value_stays_in_the_step_that_has_it_in_a_cache(size):
    cell = lambda h, x: [h * (x + torch.zeros(size)).sin().mean(), x * 2]  # noqa: E731
    body = body_of(cell, torch.empty(3), torch.empty(()))
    plan = Planner(body, Signature(1, 1, 0), Options(), pointwise_pays=True).plan()
    assert operators(plan.body)["sin"] == (size == 2**18)


def test_the_eager_loop_adds_to_a_product_where_it_is():
    body = body_of(
        lambda h, x, w, u: [torch.tanh(h @ u + x @ w)] * 2,
        *(torch.empty(*s) for s in ((B, H), (B, D), (D, H), (H, H))),
    )
    plan = Planner(body, Signature(1, 1, 2), Options(), pointwise_pays=True).plan()
    assert plan.own_xs == [0]
    from torch_scan_hop.eager.loop import EagerLoop

    source = EagerLoop(plan.body, Signature(1, 1, 1), plan.own_xs).source
    assert "call_addmm(mm_1, h_1, u_1, out=mm_1)" in source, source


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [3, T, 300])
def test_a_carry_that_is_a_y_is_written_by_the_step_before(steps, reverse):
    def cell(c, x):
        a, b = c
        return (a * x + 1, b + x), (a, b, a)

    make = torch.Generator().manual_seed(0)
    init = tuple(torch.randn(64, 64, generator=make).double() for _ in range(2))
    xs = torch.rand(steps, 64, 64, generator=make).double()
    carry, ys = scan(cell, init, xs, reverse=reverse)
    expected = scan_loop(cell, init, xs, steps, reverse)
    torch.testing.assert_close((carry, ys), expected)
    for leaf in carry:
        leaf.zero_()  # results share no memory
    torch.testing.assert_close(ys, expected[1])


def test_the_eager_loop_writes_carries_ahead():
    from torch_scan_hop.eager.loop import EagerLoop

    body = body_of(lambda c, x: [c * x, c], torch.empty(B, H), torch.empty(B, H))
    loop = EagerLoop(body, Signature(1, 1, 0))
    assert loop.written_ahead == {0: 0}
    assert "copy_" not in loop.source, loop.source


def test_the_eager_loop_has_no_views_that_change_nothing():
    from torch_scan_hop.eager.loop import EagerLoop

    w = torch.empty(B, H, H)
    body = body_of(lambda c, x: [torch.tanh(c @ x.expand(B, H, H)), c], w, w)
    source = EagerLoop(body, Signature(1, 1, 0)).source
    assert "call_bmm" in source and "reshape" not in source and "expand" not in source, source


FACTORISED = {
    "cholesky": lambda a, x: torch.linalg.solve_triangular(
        torch.linalg.cholesky(a), x, upper=False
    ),
    "cholesky solve": lambda a, x: torch.cholesky_solve(x, torch.linalg.cholesky(a)),
    "inverse": lambda a, x: torch.linalg.inv(a),
    "solve": lambda a, x: torch.linalg.solve(a, x),
    "lu": lambda a, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), x),
    "determinant": lambda a, x: torch.linalg.det(a),
    "logarithm of a determinant": lambda a, x: torch.linalg.slogdet(a)[1],
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", FACTORISED)
def test_a_factorisation_that_no_step_needs_is_made_after_the_loop(name, reverse):
    def cell(a, x):
        a = 0.9 * a + x @ x.mT + 0.1 * torch.eye(3)
        return a, FACTORISED[name](a, x)

    init, xs = torch.eye(3).double().repeat(2, 1, 1), torch.randn(T, 2, 3, 3).double()
    body = body_of(lambda a, x: [*cell(a, x)], init, xs[0])
    plan = Planner(body, Signature(1, 1, 0), Options(), pointwise_pays=True).plan()
    left = {op for op in operators(plan.body) if "linalg" in op or "cholesky" in op}
    assert not left and plan.decisions.sunk

    wrt = [init.requires_grad_(), xs.requires_grad_()]
    found = []
    for run in (scan, loop):
        result = run(cell, init, xs, reverse=reverse)
        first = torch.autograd.grad(scalar(result), wrt, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), wrt)
        found.append((result, first, second))
    assert_same(*found)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("batch", [(), (4,)])
def test_the_error_of_a_factorisation_is_that_of_the_step_that_ran_first(batch, reverse):
    def cell(a, x):
        return a, torch.linalg.cholesky(a + x)

    init = torch.eye(3).double().expand(*batch, 3, 3)
    xs = torch.zeros(T, *batch, 3, 3).double()
    for t, place in ((1, 0), (4, 2)):
        matrices = xs[t].reshape(-1, 3, 3)
        matrices[min(place, len(matrices) - 1), place, place] = -5
    with pytest.raises(torch.linalg.LinAlgError) as expected:
        scan_loop(cell, init, xs, T, reverse)
    with pytest.raises(torch.linalg.LinAlgError) as got:
        scan(cell, init, xs, reverse=reverse)
    assert str(got.value) == str(expected.value)


def test_a_check_of_a_factorisation_is_one_call_of_the_eager_loop():
    def cell(a, x):
        lower = torch.linalg.cholesky(a + x)
        return lower @ lower.mT, torch.linalg.solve_triangular(lower, x, upper=False)

    init, xs = 4 * torch.eye(3).double(), torch.eye(3).double().repeat(T, 1, 1)
    torch.testing.assert_close(scan(cell, init, xs), scan_loop(cell, init, xs, T, False))
    xs[3] = -20
    with pytest.raises(torch.linalg.LinAlgError, match=r"linalg\.cholesky: .* not positive"):
        scan(cell, init, xs)


@pytest.mark.parametrize("reverse", [False, True])
def test_short_scans_in_a_body_are_written_out(reverse, monkeypatch):
    """A scan in a scan in a scan: no step of the outer loop calls the operator."""
    from torch_scan_hop.eager import loop

    sources = []

    class Noted(loop.EagerLoop):
        def __init__(self, *args):
            super().__init__(*args)
            sources.append(self.source)

    monkeypatch.setattr("torch_scan_hop.eager.run.EagerLoop", Noted)
    w = torch.randn(3, H, H).double().requires_grad_()

    def make_cell(scan_):
        def half(h, x):
            return 0.5 * h + x, h

        def layer(x, above):
            h, w = above
            h, parts = scan_(half, torch.tanh(h @ w + x), torch.stack([x, h]), 2, not reverse)
            return h, (h, parts.sum(0))

        def cell(hs, x):
            y, (hs, parts) = scan_(layer, x, (hs, w), 3, reverse)
            return hs, (y, parts)

        return cell

    def ours(fn, init, xs, _, reverse):
        return scan(fn, init, xs, reverse=reverse)

    init, xs = torch.zeros(3, B, H).double(), torch.randn(T, B, H).double()

    def run(scan_):
        carry, ys = scan_(make_cell(scan_), init, xs, T, reverse)
        total = carry.square().sum() + sum(y.square().sum() for y in ys)
        return carry, ys, *torch.autograd.grad(total, [w])

    torch.testing.assert_close(run(ours), run(scan_loop))
    with torch.no_grad():
        got, want = (s(make_cell(s), init, xs, T, reverse) for s in (ours, scan_loop))
    torch.testing.assert_close(got, want)
    assert sources and not any("scan" in source for source in sources), sources


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 5, 0), (0, 5, 3), (2, 0, 0)])
def test_products_of_sizes_that_are_zero(shape, caplog):
    """Gradients of weights are one product for all steps, of matrices that may be empty, too."""
    b, k, n = shape
    xs, h = torch.ones(4, b, k, requires_grad=True), torch.ones(b, n)
    w, v = torch.ones(k, n, requires_grad=True), torch.ones(b, k, n, requires_grad=True)

    def cell(h, x):
        h = torch.tanh(h + x @ w + (x[:, None] @ v).squeeze(1))
        return h, h

    def gradients(run):
        carry, ys = run(cell, h, xs)
        return torch.autograd.grad(carry.sum() + ys.sum(), (xs, w, v))

    assert_same(gradients(scan), gradients(loop), 1e-5)
    assert "rewrites of a scan failed" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_that_is_cast_to_a_wider_type_is_one_product(dtype):
    """Autocast's: of bfloat16, that is; a sum of float16 may overflow."""
    generator = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3
        for shape in ((9, 2, 4), (4, 4), (4,))
    )

    def gradients(run, dtype, *inputs):
        xs, w, b = (v.to(dtype).requires_grad_() for v in inputs)

        def cell(h, x):
            with torch.autocast("cpu", dtype=half, enabled=dtype is torch.float32):
                h = torch.tanh(torch.nn.functional.linear(h + x, w, b)).to(dtype)
            return h, h

        h = torch.zeros(2, 4, dtype=dtype)
        final, ys = run(cell, h, xs)
        return torch.autograd.grad((final * ys).sum(), (xs, w, b))

    half = dtype
    exact = gradients(lambda f, h, xs: scan_loop(f, h, xs, 9, False), torch.float64, x, w, b)
    found = gradients(scan, torch.float32, x, w, b)
    assert_same(found, exact, 0.05, dtype=False)
    explained = torch_scan_hop.explain(*_autocast_cell(half), kernels=False)
    (of_w,) = (
        op
        for op in explained.scans[0].loops[1].operators
        if op.type.endswith("[4, 4]") and op.call.startswith("mm(")
    )
    is_one = of_w.place == "after the loop, as one sum over all steps"
    assert is_one is (half is torch.bfloat16)


def _autocast_cell(half):
    w = torch.zeros(4, 4, requires_grad=True)

    def cell(h, x):
        with torch.autocast("cpu", dtype=half):
            h = torch.tanh((h + x) @ w).float()
        return h, h

    return cell, torch.zeros(2, 4), torch.zeros(9, 2, 4)


def test_a_view_of_a_copy_whose_source_has_another_layout():
    """As of what is written in place to an output of attention, which is a transposed view."""

    def step(c, x):
        return torch.ops.aten.copy.default(torch.zeros(2, 3), x.t()).view(6) + c, x

    x = torch.randn(3, 2)
    body = body_of(step, torch.zeros(6), x)
    assert "copy" not in operators(body)
    assert_same(body(torch.zeros(6), x)[0], x.t().reshape(6))


MASK = torch.rand(3, 3, dtype=torch.float64)
MADE_OF_A_WEIGHT = {
    "transposed": lambda w: w.t(),
    "masked": lambda w: w * MASK,
    "masked, then transposed": lambda w: (w * MASK).t(),
    "transposed, then masked": lambda w: w.t() * MASK,
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
@pytest.mark.parametrize("reads", [2, 3, 4])
@pytest.mark.parametrize("of", MADE_OF_A_WEIGHT)
def test_what_a_step_makes_of_a_weight_is_read_several_times(of, reads, compiled, caplog):
    """The gradient of the weight is a sum of sums of products, and that is transposed, or scaled."""
    init, xs = torch.zeros(2, 3, dtype=torch.float64), torch.randn(9, 2, 3, dtype=torch.float64)
    w = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def cell(h, x):
        own, h = MADE_OF_A_WEIGHT[of](w), h + x
        for _ in range(reads):
            h = torch.tanh(h @ own)
        return h, h

    def gradient(run):
        final, ys = run(cell, init, xs)
        return torch.autograd.grad((final * ys).sum(), w)

    compiled_scan = torch.compile(scan, fullgraph=True) if compiled else scan
    assert_same(gradient(compiled_scan), gradient(loop))
    assert "failed" not in caplog.text
