"""Lists of the program's that a body appends to: what steps append is stacked, and then appended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.oracle import assert_same
from torch_scan_hop import NotTraceableError, fallback, scan
from torch_scan_hop.capture.replay import _entries, history_of


def loop(cell: Any, h: Any, xs: Any, reverse: bool = False) -> Any:
    ys = []
    for x in xs.flip(0) if reverse else xs:
        h, y = cell(h, x)
        ys.append(y)
    return h, torch.stack(ys[::-1] if reverse else ys)


WAYS: dict[str, Any] = {
    "eager": scan,
    "aot_eager": torch.compile(scan, backend="aot_eager", fullgraph=True),
}


class State:
    def __init__(self, **kept: Any) -> None:
        vars(self).update(kept)


def attribute(o: Any, h: Any, x: Any) -> Any:
    h = torch.tanh(o.layer(h) + x)
    o.kept.append(h)
    return h, h * 2


def of_a_dict(o: Any, h: Any, x: Any) -> Any:
    h = torch.tanh(o.layer(h) + x)
    o.table["a"].append(h.detach())
    o.table["b"] += [h * 3, x]
    return h, h


def structures(o: Any, h: Any, x: Any) -> Any:
    h = torch.tanh(o.layer(h) + x)
    o.kept.extend([(h, {"x": x}), (h * 2, {"x": x + 1})])
    return h, h


def other_state(o: Any, h: Any, x: Any) -> Any:
    if o.last is not None:
        h = h + o.last
    o.last = torch.tanh(o.layer(h))
    o.kept.append(o.last)
    o.n += 1
    return o.last * 0.5, x * o.n


def branches(o: Any, h: Any, x: Any) -> Any:
    h = torch.tanh(o.layer(h) + x)
    o.kept.append(h if o.n % 2 == 0 else x)
    if o.n < 4:
        o.table["a"].append(h * 2)
    o.n += 1
    return h, h


def nested(o: Any, h: Any, x: Any) -> Any:
    def inner(c: Any, y: Any) -> Any:
        c = torch.tanh(c + y)
        o.kept.append(c)
        return c, c

    run = scan if o.run is not loop else loop
    h, ys = run(inner, o.layer(h), torch.stack([x, x * 2]))
    return h, ys.sum(0)


def written_in_the_step(o: Any, h: Any, x: Any) -> Any:
    h = o.layer(h) + x
    o.kept.append(h)
    h.mul_(0.5)
    return h + 0, h + 1


def numbers(o: Any, h: Any, x: Any) -> Any:
    o.n += 1
    h = torch.tanh(o.layer(h) + x)
    o.kept.append(h.sum().item())
    o.table["a"].append((o.n, h.float().sum().item() / 3 + o.n * 0.1, h))
    o.table["b"] += [h.argmax().item(), bool(h.sum() > 0), {"rate": 0.1, "n": 2}]
    return h, h


def rows(o: Any, h: Any, x: Any) -> Any:
    h = torch.tanh(o.layer(h) + x)
    o.kept.append(h.detach().numpy())
    o.table["a"].append(h.tolist())
    return h, h


def numbers_after_a_first_step(o: Any, h: Any, x: Any) -> Any:
    h = torch.tanh(o.layer(h) + x)
    o.last = h if o.last is None else o.last * 0.5 + h
    o.kept.append((o.last.mean().item(), o.last))
    return h, o.last


def numbers_in_a_nested_scan(o: Any, h: Any, x: Any) -> Any:
    def inner(c: Any, y: Any) -> Any:
        c = torch.tanh(c + y)
        o.kept.append(c.sum().item())
        return c, c

    run = scan if o.run is not loop else loop
    h, ys = run(inner, o.layer(h), torch.stack([x, x * 2]))
    return h, ys.sum(0)


def numbers_of_branches(o: Any, h: Any, x: Any) -> Any:
    h = torch.tanh(o.layer(h) + x)
    if o.n < 4:
        o.kept.append(h.sum().item())
    o.n += 1
    return h, h


def made_in_the_first_step(o: Any, h: Any, x: Any) -> Any:
    h = torch.tanh(o.layer(h) + x)
    o.table.setdefault("c", []).append(h)
    if o.last is None:
        o.last = []
    o.last.append((h.sum().item(), h * 2))
    return h, h


def emptied_in_each_step(o: Any, h: Any, x: Any) -> Any:
    h = torch.tanh(o.layer(h) + x)
    o.kept.clear()
    o.kept.append(h.abs().sum())
    o.kept.append(h.pow(2).sum())
    return h, sum(o.kept)


NUMBERS = [
    *(numbers, rows, numbers_after_a_first_step, numbers_in_a_nested_scan, numbers_of_branches),
]
BODIES = [
    *(attribute, of_a_dict, structures, other_state, branches, nested, written_in_the_step),
    *(made_in_the_first_step, emptied_in_each_step),
    *NUMBERS,
]


def outputs(body: Any, run: Any, length: int = 7, **keywords: Any) -> Any:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    o = State(layer=layer, kept=[], table={"a": [], "b": []}, last=None, n=0, run=run)
    h = torch.zeros(3, dtype=torch.float64)
    xs = torch.randn(length, 3, dtype=torch.float64, requires_grad=True)
    results = run(lambda h, x: body(o, h, x), h, xs, **keywords)
    found = (*results, o.kept, o.table, o.last, o.n)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(found) if torch.is_tensor(leaf)]
    weighed = [(k + 1.0) * leaf.pow(2).sum() for k, leaf in enumerate(leaves) if leaf.requires_grad]
    grads = torch.autograd.grad(sum(weighed), [xs, *layer.parameters()], allow_unused=True)
    return found, [v for v in grads if v is not None]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_list_grows_as_in_the_loop(body: Any, way: str) -> None:
    torch._dynamo.reset()
    with fallback("error"):
        assert_same(outputs(body, WAYS[way]), outputs(body, loop))


@pytest.mark.parametrize(
    "how",
    [{"reverse": True}, {"unroll": 2}, {"checkpoint": "full"}],
    ids=lambda how: next(iter(how)),
)
@pytest.mark.parametrize("body", [structures, other_state], ids=lambda body: body.__name__)
def test_a_schedule_keeps_the_order_of_steps(body: Any, how: dict[str, Any]) -> None:
    expected = outputs(body, loop, **{k: v for k, v in how.items() if k == "reverse"})
    with fallback("error"):
        assert_same(outputs(body, scan, **how), expected)


@pytest.mark.parametrize("body", NUMBERS, ids=lambda body: body.__name__)
def test_numbers_and_arrays_are_what_the_loop_appends(body: Any) -> None:
    def kinds(run: Any) -> Any:
        kept = outputs(body, run)[0][2:4]
        return torch.utils._pytree.tree_map(type, kept)

    with fallback("error"):
        assert kinds(scan) == kinds(loop)


@pytest.mark.parametrize("length", [1, 2])
def test_a_list_grows_in_few_steps(length: int) -> None:
    with fallback("error"):
        assert_same(outputs(attribute, scan, length), outputs(attribute, loop, length))


def test_no_steps_append_nothing() -> None:
    kept: list[torch.Tensor] = []

    def cell(h: Any, x: Any) -> Any:
        kept.append(h + x)
        return h + x, x

    with fallback("error"):
        scan(cell, torch.zeros(3), torch.ones(0, 3))
    assert kept == []


@pytest.mark.parametrize("way", WAYS)
def test_first_steps_append_what_is_closed_over(way: str) -> None:
    """The scan of the other steps finds it in the list, which began empty."""

    def run(scanned: Any) -> Any:
        torch.manual_seed(1)
        kept: list[Any] = []
        w, xs = (torch.randn(n, 3, dtype=torch.float64) for n in (1, 5))

        def cell(h: Any, x: Any) -> Any:
            kept.extend([w, x])
            h = x if h is None else torch.tanh(h + w[0])
            return h, h * 2

        return *scanned(cell, None, xs), kept

    torch._dynamo.reset()
    with fallback("error"):
        assert_same(run(WAYS[way]), run(loop))


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_of_a_module_keeps_its_outputs(way: str) -> None:
    def run(scanned: Any) -> Any:
        torch.manual_seed(1)
        layer, seen = nn.Linear(3, 3).double(), []
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
        xs = torch.randn(5, 3, dtype=torch.float64)
        _, ys = scanned(lambda h, x: (torch.tanh(layer(h) + x),) * 2, xs[0], xs)
        return ys, torch.stack(seen)

    torch._dynamo.reset()
    with fallback("error"):
        assert_same(run(WAYS[way]), run(loop))


def test_what_was_in_the_list_stays() -> None:
    first, kept = torch.ones(3), []
    kept.append(first)

    def cell(h: Any, x: Any) -> Any:
        kept.append(h * x)
        return h + x, x

    xs = torch.ones(2, 3)
    run = torch.compile(scan, backend="eager", fullgraph=True)
    for calls in range(1, 4):
        run(cell, torch.ones(3), xs)
        assert kept[0] is first and len(kept) == 1 + 2 * calls
    assert_same(kept[1:], [torch.ones(3), torch.ones(3) * 2] * 3)


@pytest.mark.parametrize("begins", ["with a tensor", "with None"])
def test_one_capture_serves_a_list_of_any_length(begins: str) -> None:
    """Also one that has items, of any kind, and any number of steps."""

    class Cell:
        def __init__(self) -> None:
            self.kept: list[Any] = [] if begins == "with None" else ["the first", torch.ones(1)]
            self.last = None if begins == "with None" else torch.zeros(3)

        def step(self, h: Any, x: Any) -> Any:
            self.last = h + x if self.last is None else torch.tanh(self.last + x)
            self.kept.append((self.last.sum().item(), {"of": [self.last, x]}, x.numpy(), 0.1))
            return self.last, self.last * 2

    def run(scanned: Any) -> Any:
        torch.manual_seed(0)
        cell = Cell()
        found = []
        for steps in (4, 5, 30, 1030, 3):
            if begins == "with None":  # the first step appends to it, before the scan does
                cell.kept, cell.last = [], None
            found.append(scanned(cell.step, torch.zeros(3), torch.randn(steps, 3)))
            assert len(cell.kept) >= steps
            found.append(cell.kept[0 if begins == "with None" else 2 :])
        return found

    _entries.clear()
    with fallback("error"):
        ours, expected = run(scan), run(loop)
    assert_same(ours, expected, 1e-6)
    kinds = torch.utils._pytree.tree_map(type, (ours, expected))
    assert kinds[0] == kinds[1]
    assert len(history_of(Cell.step)) == 2  # of four steps, and of any number


@pytest.mark.parametrize("items", [[torch.ones(1)], [0.5] * 40], ids=["a tensor", "numbers"])
def test_what_is_in_a_list_calls_for_no_other_capture(items: Any) -> None:
    kept: list[Any] = []

    def cell(h: Any, x: Any) -> Any:
        kept.append(h)
        return h + x, x

    for before in ([], items, [None], ["a"] * 3):
        kept[:] = before
        with fallback("error"):
            scan(cell, torch.zeros(3), torch.ones(4, 3))
        assert kept[: len(before)] == before
        assert_same(kept[len(before) :], [torch.full((3,), float(k)) for k in range(4)])
    assert len(history_of(cell)) == 1


@pytest.mark.parametrize("why", ["items before the scan", "another number", "more than 1024"])
def test_what_would_be_captured_at_each_call_is_a_loop(why: str) -> None:
    """Steps that branch differently are several scans, and the trace appends what they leave."""
    o = State(kept=[torch.ones(3)] if why.startswith("items") else [], n=0)

    def cell(h: Any, x: Any) -> Any:
        o.kept.append(h if o.n < 2 else x)
        o.n += 1
        return h + x, x

    lengths = {"items before the scan": (4,), "another number": (4, 5, 6)}.get(why, (1028,))
    with fallback("error"), pytest.raises(NotTraceableError, match=why):
        for length in lengths:
            o.n = 0
            scan(cell, torch.zeros(3), torch.ones(length, 3))
            o.kept.clear()


def test_what_is_scanned_is_no_list_that_grows() -> None:
    """A capture that served any length of it would scan the tensors of its first call."""
    kept = [torch.ones(4, 3), torch.ones(4, 3) * 2]

    def cell(h: Any, x: Any) -> Any:
        kept.append(torch.ones(4, 3))
        return h + x[0], x[1]

    with fallback("error"), pytest.raises(NotTraceableError, match="the length of a list"):
        scan(cell, torch.zeros(3), kept)
    assert len(kept) == 2


def test_a_first_step_appends_to_an_empty_list() -> None:
    kept: list[Any] = [torch.ones(3)]

    def cell(h: Any, x: Any) -> Any:
        h = x if h is None else h + x
        kept.append(h.sum().item())
        return h, x

    with fallback("error"), pytest.raises(NotTraceableError, match="items before the scan"):
        scan(cell, None, torch.ones(4, 3))


def reads(kept: list[Any], h: Any, x: Any) -> Any:
    h = h + (kept[-1] if kept else x)
    kept.append(h)
    return h, x


def asks_how_many(kept: list[Any], h: Any, x: Any) -> Any:
    kept.append(h)
    return h + len(kept), x


def goes_through(kept: list[Any], h: Any, x: Any) -> Any:
    kept.append(h)
    return h + sum(kept), x


@pytest.mark.parametrize("body", [reads, asks_how_many, goes_through])
def test_what_is_no_scan_is_a_loop_but_for_a_few_steps(body: Any) -> None:
    def run(scanned: Any, steps: int = 20) -> Any:
        kept: list[Any] = []
        return *scanned(lambda h, x: body(kept, h, x), torch.zeros(3), torch.ones(steps, 3)), kept

    with fallback("error"):
        assert_same(run(scan, 4), run(loop, 4))
        with pytest.raises(NotTraceableError, match=r"test_growing_lists.py:\d+"):
            run(scan)
    with fallback("allow"):
        assert_same(run(scan), run(loop))


def test_what_a_step_writes_to_is_not_kept_as_it_was() -> None:
    kept: list[Any] = []
    table = torch.zeros(3)

    def of_the_carry(h: Any, x: Any) -> Any:
        kept.append(h)
        h += x
        return h, x

    def of_a_closure(h: Any, x: Any) -> Any:
        table.add_(x)
        kept.append(table[:2])
        return h + x, x

    for body in (of_the_carry, of_a_closure):
        with fallback("error"), pytest.raises(NotTraceableError, match="length of a list"):
            scan(body, torch.zeros(3), torch.ones(4, 3))


def test_steps_of_a_block_append_as_many() -> None:
    o = State(n=0)
    kept: list[Any] = []

    def cell(h: Any, x: Any) -> Any:
        if o.n % 2 == 0:
            kept.append(h)
        o.n += 1
        return h + x, x

    with fallback("error"), pytest.raises(NotTraceableError, match="in some steps"):
        scan(cell, torch.zeros(3), torch.ones(8, 3))
    assert not kept and o.n == 0


@pytest.mark.parametrize("way", WAYS)
def test_items_are_tensors_of_their_own(way: str) -> None:
    """Not views of one stack, to which torch lets nobody write under gradients."""

    def train(run: Any) -> Any:
        o = State(kept=[], pairs=[])
        w = torch.tensor([0.5, 0.7, 0.9], dtype=torch.float64, requires_grad=True)
        xs = (torch.arange(12.0, dtype=torch.float64).reshape(4, 3) / 7).requires_grad_()

        def cell(h: Any, x: Any) -> Any:
            h = torch.tanh(h * w + x)
            o.kept.append(h * 2)
            o.pairs.append((h * 3, x.sum()))
            return h, h.sum()

        h, ys = run(cell, torch.zeros(3, dtype=torch.float64), xs)
        o.kept[0].mul_(2.0)
        o.pairs[2][0].mul_(3.0)
        items = zip(o.kept, o.pairs, strict=True)
        total = h.sum() + ys.sum() + sum((a * b[0]).sum() for a, b in items)
        grads = torch.autograd.grad(total, (w, xs))
        o.kept[1].detach_()
        return total, o.kept, grads

    with fallback("error"):
        got = train(WAYS[way])
    assert_same(got, train(loop))


def test_the_last_item_is_the_view_that_the_last_step_appended() -> None:
    """Of a tensor that the body closes over: a later write to that is seen in the list."""
    weight, kept = torch.arange(6.0).view(2, 3), list[torch.Tensor]()

    def cell(h: Any, x: Any) -> Any:
        kept.append(weight[0])
        return h + x, h

    with fallback("error"):
        scan(cell, torch.zeros(3), torch.ones(2, 3))
    weight.add_(1)
    assert_same(kept[-1], weight[0])
