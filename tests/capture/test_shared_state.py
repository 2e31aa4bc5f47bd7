"""State that is one object in two places, or whose order matters: a scan, or the loop, but never
another number."""

from __future__ import annotations

import collections
from typing import NamedTuple

import pytest
import torch
from oracle import assert_same, written_loop
from torch.utils.checkpoint import checkpoint

from torch_scan_hop import NotTraceableError, fallback, scan, tree
from torch_scan_hop.reference import scan_loop

pytestmark = pytest.mark.torch_version

XS = torch.arange(1.0, 5.0, dtype=torch.float64)


class Thing:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Seen:
    def __init__(self, h, seen):
        self.h, self.seen = h, seen


class State(NamedTuple):
    h: torch.Tensor
    items: list[torch.Tensor]


def zero(value=0.0):
    return torch.tensor(value, dtype=torch.float64)


def difference_to_the_previous():
    """``+=`` writes in place, so that the previous one is the same tensor."""
    o = Thing(h=zero(), prev=zero(5))

    def cell(c, x):
        o.h += x
        y = o.h - o.prev
        o.prev = o.h
        return c, y

    return cell, lambda: [o.h, o.prev]


def two_names():
    o = Thing(a=zero(), b=zero())

    def cell(c, x):
        o.a.add_(100)
        y = o.b * 1
        o.a = o.b = x * 2
        return c, y

    return cell, lambda: [o.a, o.b]


def two_names_of_a_dict():
    o = Thing(a={"h": zero()}, b={"h": zero(3)})

    def cell(c, x):
        o.b["h"] = o.b["h"] + 1
        y = o.a["h"] + x
        o.a = o.b = {"h": y}
        return c, y

    return cell, lambda: [o.a["h"], o.b["h"]]


def a_list_within_a_tuple():
    o = Thing(a=(zero(), [zero()]), b=[zero(3)])

    def cell(c, x):
        o.b[0] = o.b[0] + 1
        o.b = [o.a[1][0] + x]
        o.a = (x, o.b)
        return c, o.b[0]

    return cell, lambda: [o.a[1][0], o.b[0]]


def a_dict_that_is_kept():
    o = Thing(state={"h": zero()}, kept=[])

    def cell(c, x):
        o.state["h"] = o.state["h"] + x
        o.kept.append(o.state)
        return c, o.state["h"]

    return cell, lambda: [state["h"] for state in o.kept]


def an_item_and_an_attribute():
    o = Thing(h=zero(), last=[zero()])

    def cell(c, x):
        o.h.add_(100)
        y = o.last[0] * 1
        o.h = x * 1
        o.last[0] = o.h
        return c, y

    return cell, lambda: [o.h, *o.last]


def a_view_of_other_state():
    o = Thing(all=torch.zeros(2, dtype=torch.float64), row=zero())

    def cell(c, x):
        o.row.add_(100)
        y = o.all.sum()
        o.all = torch.stack([x, x])
        o.row = o.all[0]
        return c, y

    return cell, lambda: [o.all, o.row]


def one_tensor_before_the_scan():
    o = Thing(a=zero(), n=zero())
    o.b = o.a

    def cell(c, x):
        o.a.add_(x)
        y = o.b * 1
        o.a, o.b = o.a * 1, o.b + 1
        return c, y

    return cell, lambda: [o.a, o.b]


def what_the_body_closes_over():
    o, total = Thing(prev=zero(5)), zero()

    def cell(c, x):
        total.add_(x)
        y = total - o.prev
        o.prev = total
        return c, y

    return cell, lambda: [total, o.prev]


def moved_while_the_other_is_written():
    o = Thing(queue=[zero(), zero()], last=zero())

    def cell(c, x):
        o.last.add_(100)
        o.last = x * 1
        o.queue = [o.queue[1], o.last]
        return c, x * 1

    return cell, lambda: [*o.queue, o.last]


def a_tensor_with_an_attribute():
    o = Thing(h=zero())

    def cell(c, x):
        times = getattr(o.h, "times", 0) + 1
        o.h = o.h + x
        o.h.times = times
        return c, o.h * times

    return cell, lambda: [o.h, o.h.times]


def kept_tensors_with_an_attribute():
    o = Thing(kept=[])

    def cell(c, x):
        y = x * 2
        y.label = "y"
        o.kept.append(y)
        return c, y

    return cell, lambda: [y.label for y in o.kept]


def exchanged():
    o = Thing(a=zero(), b=zero(1))
    a, b = o.a, o.b

    def cell(c, x):
        o.a.mul_(2).add_(x)
        o.a, o.b = o.b, o.a
        return c, o.a - o.b

    return cell, lambda: [o.a, o.b, a, b]


def keys_in_turn():
    d = {"a": zero(), "b": zero(10), "c": zero(20)}

    def cell(c, x):
        key = next(iter(d))
        value = d.pop(key)
        d[key] = value + x
        return c, value

    return cell, lambda: [*d, *d.values()]


def the_first_of_an_ordered_dict():
    d = collections.OrderedDict(a=zero(), b=zero(10))

    def cell(c, x):
        key, value = d.popitem(last=False)
        d[key] = value + x
        return c, value

    return cell, lambda: [*d, *d.values()]


def lists_that_are_swapped():
    a, b = [zero()], [zero(10)]
    o = Thing(p=a, q=b)

    def cell(c, x):
        o.p[0] = o.p[0] + x
        o.p, o.q = o.q, o.p
        return c, a[0] - b[0]

    return cell, lambda: [a[0], b[0], o.p is a]


def a_list_that_becomes_another():
    o = Thing(p=[zero()], q=[zero()])

    def cell(c, x):
        o.q = o.p
        o.q[0] = o.q[0] + x
        return c, o.p[0]

    return cell, lambda: [o.p[0], o.q[0], o.p is o.q]


def counted_in_a_checkpoint():
    o = Thing(h=zero(), n=0)

    def inner(x):
        o.n += 1
        return torch.tanh(x)

    def cell(c, x):
        o.h = o.h + checkpoint(inner, x, use_reentrant=False)
        return c, o.h

    return cell, lambda: [o.h, o.n]


def asked_if_they_are_one():
    o = Thing(a=zero(), b=zero())

    def cell(c, x):
        same = o.a is o.b
        o.a = o.b = x * 2
        return c, x * (10.0 if same else 1.0)

    return cell, lambda: [o.a, o.b]


class CountingSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, o):
        o.n += 1
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def counted_in_a_custom_function():
    o = Thing(n=0)
    return lambda c, x: (c, CountingSquare.apply(x, o)), lambda: [o.n]


def sums_over_a_counted_dimension():
    o, table = Thing(n=0), torch.arange(4.0, dtype=torch.float64).view(2, 2)

    def cell(c, x):
        y = (table * x).sum(o.n % 2, keepdim=True)
        o.n += 1
        return c, y.flatten()

    return cell, lambda: [o.n]


#: and a word of the reason that the loop runs
REFUSED = {
    difference_to_the_previous: "in place",
    two_names: "in place",
    two_names_of_a_dict: "a list, a dict or an object that attribute 'b'.*Make a new one",
    a_list_within_a_tuple: "a list, a dict or an object that attribute 'b'.*Make a new one",
    a_dict_that_is_kept: "a list, a dict or an object that item 'h'.*Make a new one",
    an_item_and_an_attribute: "in place",
    a_view_of_other_state: "in place",
    what_the_body_closes_over: "in place",
    asked_if_they_are_one: "are` one",
    exchanged: "in place",
    moved_while_the_other_is_written: "in place",
    a_tensor_with_an_attribute: "an attribute of a tensor that it made",
    kept_tensors_with_an_attribute: "an attribute of a tensor that it made",
    keys_in_turn: "order",
    the_first_of_an_ordered_dict: "",
    lists_that_are_swapped: "list of the program's",
    a_list_that_becomes_another: "list of the program's",
    counted_in_a_checkpoint: "checkpointed",
    counted_in_a_custom_function: "custom function",
}


def outcome(run, make):
    cell, left = make()
    found = []
    for _ in range(2):
        _, ys = run(cell, None, XS)
        found += [v.tolist() if isinstance(v, torch.Tensor) else v for v in (ys, *left())]
    return found


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_shared_state_is_that_of_the_loop(make):
    with fallback("error"), pytest.raises(NotTraceableError, match=REFUSED[make]):
        scan(make()[0], None, XS)
    with fallback("allow"):
        assert outcome(scan, make) == outcome(written_loop, make)


def rebuilt_in_another_order():
    """Once: the first step runs on its own."""
    o = Thing(d={"a": zero(), "b": zero(10)})

    def cell(c, x):
        y = next(iter(o.d.values())) * 1
        o.d = {"b": o.d["b"] + x, "a": o.d["a"] * 1}
        return c, y

    return cell, lambda: [*o.d, *o.d.values()]


def kept_and_not_read():
    o, n = Thing(last=None), zero()

    def cell(c, x):
        n.add_(x)
        o.last = n * 2
        return c, n * 1

    return cell, lambda: [n, o.last]


def written_in_place_alone():
    o = Thing(h=zero(), other=zero(3))

    def cell(c, x):
        o.h += x
        o.other = o.other * o.h
        return c, o.other * 1

    return cell, lambda: [o.h, o.other]


def written_and_replaced():
    """The first step writes to what was there before, which others know."""
    o = Thing(h=zero())
    before = o.h

    def cell(c, x):
        o.h.add_(x)
        o.h = o.h * 2
        return c, o.h * 1

    return cell, lambda: [o.h, before]


def one_tensor_afterwards():
    o = Thing(a=zero(), b=zero(1), c=None)

    def cell(c, x):
        o.a = o.b = o.c = o.a + x
        return c, o.b * 1

    return cell, lambda: [o.a, o.a is o.b, o.b is o.c]


def one_dict_afterwards():
    o = Thing(a={"h": zero()}, b=None, c=(None,))

    def cell(c, x):
        y = o.a["h"] + x
        o.a = o.b = {"h": y}
        o.c = (o.a, x)
        return c, y

    return cell, lambda: [o.a["h"], o.a is o.b, o.c[0]["h"]]


def one_tensor_in_two_containers():
    o = Thing(q=(zero(), zero(1)), d={"a": [zero()]}, h=zero())

    def cell(c, x):
        new = o.q[0] * 0.5 + x
        o.q, o.h = (o.q[1], new), new
        o.d["a"] = [new]
        return c, new * 1

    return cell, lambda: [*o.q, o.q[1] is o.d["a"][0], o.q[1] is o.h, o.h.add_(1), *o.q]


def one_object_in_two_containers():
    o = Thing(last=Seen(zero(), [zero()]), kept=(None, [None]), seen=None)

    def cell(c, x):
        new = Seen(o.last.h + x, [x])
        o.last, o.kept, o.seen = new, (x, [new]), {"it": new.seen}
        return c, new.h

    def left():
        kept = o.kept[1][0]
        return [kept.h, kept is o.last, o.seen["it"] is kept.seen, *kept.seen]

    return cell, left


def one_list_within_a_named_tuple():
    o = Thing(state=State(zero(), [zero()]), items=[zero()])

    def cell(c, x):
        items = [o.state.h + x]
        o.state, o.items = State(items[0] * 1, items), items
        return c, items[0] * 1

    return cell, lambda: [o.state.h, o.items is o.state.items, *o.items]


def the_last_that_is_kept():
    """A write after the scan is seen in both, and in no earlier row."""
    o = Thing(h=zero(), kept=[])

    def cell(c, x):
        o.h = o.h * 0.5 + x
        o.kept.append((x * 2, {"h": o.h}))
        return c, o.h * 1

    return cell, lambda: [o.h.add_(1), *(kept["h"] for _, kept in o.kept), o.kept[-1][0]]


def a_view_that_is_kept():
    o = Thing(h=zero(), kept=[])

    def cell(c, x):
        o.h = o.h * 0.5 + x
        o.kept.append(o.h.detach())
        return c, o.h * 1

    return cell, lambda: [o.h.add_(1), *o.kept]


def asked_if_the_carry_is_x():
    return lambda c, x: (x * 2, (x if c is x else x * 3)), lambda: []


@pytest.mark.parametrize(
    "make",
    [
        rebuilt_in_another_order,
        kept_and_not_read,
        written_in_place_alone,
        written_and_replaced,
        one_tensor_before_the_scan,
        one_tensor_afterwards,
        one_dict_afterwards,
        one_tensor_in_two_containers,
        one_object_in_two_containers,
        one_list_within_a_named_tuple,
        the_last_that_is_kept,
        a_view_that_is_kept,
        asked_if_the_carry_is_x,
        sums_over_a_counted_dimension,
    ],
    ids=lambda make: make.__name__,
)
def test_state_of_one_name_is_carried(make):
    with fallback("error"):
        assert outcome(scan, make) == outcome(written_loop, make)


@pytest.mark.parametrize("steps", [0, 2])
def test_state_is_what_it_was_after_no_steps(steps):
    """The objects themselves, without a history."""
    o, w = Thing(h=zero(), d={"h": zero()}), zero(2).requires_grad_()
    h = o.h

    def cell(c, x):
        o.h = o.h * w + x
        o.d = {"h": o.h * 2}
        return c, o.h

    with fallback("error"):
        scan(cell, None, XS[:steps])
    assert (o.h is h) == (steps == 0)
    assert o.h.requires_grad == o.d["h"].requires_grad == (steps > 0)


VIEWS = {
    "row": lambda h: h[0, 1:],
    "rows": lambda h: (h[0], h[0][1:]),
    "chunks": lambda h: {"a": h.chunk(3, -1)[1], "b": h.unbind(0)[1]},
    "transposed": lambda h: h.T,
    "flat": lambda h: h.flatten(),
    "of a size": lambda h: h.view(h.shape[0], 1, -1),
    "detached": lambda h: h.detach(),
    "data": lambda h: h.data[1],
    "as the other": lambda h: h.view_as(h),
}


def results_of_views(run, view):
    o, w = Thing(h=torch.zeros(2, 3, dtype=torch.float64)), zero(0.5).requires_grad_()
    o.v = tree.map_leaves(torch.clone, view(o.h))

    def cell(c, x):
        h = torch.tanh(o.h * w + x) + sum(v.sum() for v in tree.tensors(o.v)) * 0.1
        o.h, o.v = h, view(h)
        return c, h * 2

    with torch.no_grad():
        _, first = run(cell, zero(), XS)
        o.h.mul_(0.5)
    left = [v.clone() for v in (o.h, *tree.tensors(o.v))]
    _, ys = run(cell, zero(), XS)
    after = [ys, o.h, *tree.tensors(o.v)]
    gradient = torch.autograd.grad(sum(v.sum() for v in after if v.requires_grad), w)
    return [first, *left, *after, *gradient]


@pytest.mark.parametrize(
    ("view", "way"), [*((v, "eager") for v in VIEWS), ("chunks", "aot"), ("detached", "aot")]
)
def test_a_view_of_other_state_shares_its_memory(view, way):
    """A write after the scan is seen in both, and gradients are those of a loop."""

    def compiled(cell, init, xs):
        return torch.compile(lambda: scan(cell, init, xs), backend="aot_eager", fullgraph=True)()

    torch._dynamo.reset()
    with fallback("error"):
        found = results_of_views(scan if way == "eager" else compiled, VIEWS[view])
    assert_same(found, results_of_views(written_loop, VIEWS[view]), 1e-12)


KEEPING = {
    "attribute": lambda o, h: setattr(o, "h", h),
    "dict": lambda o, h: setattr(o, "d", {"h": h}),
    "list": lambda o, h: o.kept.append(h),
}


@pytest.mark.parametrize("where", KEEPING)
def test_a_leaf_that_a_step_has_made_gets_its_gradient(where):
    """`.grad` of what is left is that of a loop."""

    def gradients(run):
        o, w = Thing(h=zero(), d={}, kept=[]), zero(2).requires_grad_()

        def cell(c, x):
            h = torch.tanh(x * w).detach().requires_grad_()
            KEEPING[where](o, h)
            return c, h * w

        run(cell, None, XS)[1].sum().backward()
        left = [*o.kept, o.d.get("h", o.h)]
        return [h.tolist() for h in left], [h.grad is None for h in left], w.grad.item()

    with fallback("error"), pytest.raises(NotTraceableError, match=r"require grad|requires_grad"):
        gradients(scan)
    with fallback("allow"):
        assert gradients(scan) == gradients(written_loop)


def test_xs_may_share_memory_with_one_another():
    total, wide = zero(), torch.stack([XS, XS * 2])

    def cell(h, x):
        total.add_(h)
        return h + x[0] * x[1], x[0] - h

    for xs in ((XS, XS), (wide[0], wide[1])):
        total.zero_()
        with fallback("error"):
            got = [scan(cell, zero(), xs), total.clone()]
        total.zero_()
        want = [scan_loop(cell, zero(), xs, len(XS), False), total.clone()]
        assert_same(got, want)


@pytest.mark.parametrize(
    "write",
    [lambda buffer, x: buffer.mul_(1.5), lambda buffer, x: buffer[1:].add_(x)],
    ids=["whole", "part"],
)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_xs_that_the_body_writes_to_by_another_name(write, needs_grad):
    """The x at hand has changed, too, and so have those of later steps."""

    def results(run):
        buffer, w = XS.clone(), zero(2).requires_grad_(needs_grad)

        def cell(h, x):
            write(buffer, x.clone())
            return h * w + x, h + x * 2

        h, ys = run(cell, zero(), buffer)
        gradients = torch.autograd.grad(ys.sum() + h, w) if needs_grad else []
        return [v.tolist() for v in (h, ys, buffer, *gradients)]

    with fallback("error"), pytest.raises(NotTraceableError, match=r"the xs in place.*clone"):
        results(scan)
    with fallback("allow"):
        assert results(scan) == results(written_loop)


def results_of_a_view_of_a_closure(run, view):
    table = torch.arange(9.0, dtype=torch.float64).view(3, 3).clone().requires_grad_()
    o = Thing(row=torch.zeros_like(view(table.detach())))

    def cell(c, x):
        o.row = view(table)
        return c + x * o.row.sum(), c

    carry, ys = run(cell, zero(), XS)
    with torch.no_grad():
        table *= 2
    loss = carry + ys.sum() + o.row.cos().sum()
    return o.row, o.row.requires_grad, torch.autograd.grad(loss, table)


@pytest.mark.parametrize("way", ["eager", "aot"])
@pytest.mark.parametrize(
    "view", [lambda w: w[0], lambda w: w.t()[1:].unsqueeze(0), lambda w: w.reshape(-1)[2:5]]
)
def test_a_view_of_a_closure_shares_its_memory(view, way):
    """A later write to the tensor of the program, as by an optimiser, is seen in the state."""
    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    with fallback("error"):
        found = results_of_a_view_of_a_closure(scan if way == "eager" else compiled, view)
    assert_same(found, results_of_a_view_of_a_closure(written_loop, view), 1e-12)


def a_list_that_it_writes_to():
    kept = [zero(), zero(1)]

    def cell(c, x):
        kept[0], kept[1] = kept[1], kept[0] * c + x
        return c * 0.9 + kept[0], kept

    return cell, zero(1), lambda: kept


def a_dict_in_what_it_carries():
    d = {"h": zero()}

    def cell(c, x):
        d["h"] = d["h"] * 0.5 + c[0] * x
        return (c[0] + d["h"], d), [d, (c[1]["h"], d)]

    return cell, (zero(1), {"h": zero(2)}), lambda: d


def a_list_of_a_module():
    o = Thing(kept=Seen(zero(), [zero(), 0]))

    def cell(c, x):
        o.kept.seen[1] += 1
        o.kept.seen[0] = o.kept.seen[0] * 0.9 + x * o.kept.seen[1]
        return c + o.kept.seen[0], o.kept.seen

    return cell, zero(1), lambda: o.kept.seen


def a_list_that_it_carries_from_none():
    kept = [zero(1)]

    def cell(c, x):
        kept[0] = kept[0] * 0.5 + (x if c[0] is None else c[0] * x)
        return kept, (kept, c[0] if c[0] is not None else x)

    return cell, [None], lambda: kept


def a_list_of_an_inner_scan():
    kept = [zero()]

    def inner(c, x):
        kept[0] = kept[0] + x
        return c + kept[0], kept

    def cell(c, x):
        c, ys = scan(inner, c, torch.stack([x, -x / 2]))
        return c, (ys, kept)

    return cell, zero(), lambda: kept


RETURNED = [
    a_list_that_it_writes_to,
    a_dict_in_what_it_carries,
    a_list_of_a_module,
    a_list_that_it_carries_from_none,
    a_list_of_an_inner_scan,
]


@pytest.mark.parametrize("make", RETURNED)
@pytest.mark.parametrize(
    "options, backend",
    [({}, None), ({"reverse": True, "checkpoint": 2}, None), ({"unroll": 2}, "aot_eager")],
)
def test_what_is_written_to_may_be_returned(make, options, backend):
    """A trace puts back what was in it before, and the results have what a step leaves in it."""
    found = []

    def by_scan(cell, init, xs):
        return scan(cell, init, xs, **options)

    def by_hand(cell, init, xs):
        return scan_loop(cell, init, xs, len(xs), "reverse" in options)

    if backend is not None:
        by_scan = torch.compile(by_scan, backend=backend, fullgraph=True)
    for run in (by_scan, by_hand):
        cell, init, left = make()
        xs = XS.clone().requires_grad_()
        with fallback("error"):
            results = run(cell, init, xs)
        values = [v for v in tree.leaves((results, left())) if v is not None]
        total = sum(v.sum() * k for k, v in enumerate(values) if isinstance(v, torch.Tensor))
        found.append((values, torch.autograd.grad(total, xs)))
    assert_same(*found)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_what_no_step_reads_may_have_another_size_in_each_call(backend):
    """Also within a tuple, a list, a dict or an object."""
    o = Thing(pair=(zero(), 0), items=[None, [zero()]], named={"h": zero()}, seen=Seen(zero(), 1))

    def cell(c, x):
        o.pair = (c, o.pair[1] + 0.5)
        o.items[1] = [c]
        o.named = {"h": (c,)}
        o.seen = Seen(c, x)
        return c + x, x

    run = scan if backend is None else torch.compile(scan, backend=backend, fullgraph=True)
    for size in (2, 3, 4):
        o.pair, before = (zero(), size), torch.zeros(size)
        with fallback("error"):
            run(cell, before, torch.ones(3, size))
        left = [o.pair[0], o.items[1][0], o.named["h"][0], o.seen.h, o.seen.seen]
        assert [v.tolist() for v in left] == [[2.0] * size] * 4 + [[1.0] * size]
        assert o.pair[1] == size + 1.5
