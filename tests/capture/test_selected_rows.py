"""Reads and writes by masks: captured, with the loop's values and gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from oracle import Variant, assert_same, check, gradients, loop
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_scan_hop import explain, fallback, scan

pytestmark = [
    pytest.mark.torch_version,
    pytest.mark.works("rows that a mask selects"),
]

VARIANTS = {
    "eager": Variant(),
    "aot_eager": Variant("aot_eager"),
    "inductor": Variant("inductor"),
    "exported": Variant(exported=True),
}
BODIES, LOOPS = {}, {}

torch.manual_seed(0)
lstm, gru = nn.LSTMCell(4, 8).double(), nn.GRUCell(4, 8).double()
linear, norm = nn.Linear(8, 8).double(), nn.LayerNorm(8).double()
embedding = nn.Embedding(7, 8).double()
w = torch.randn(8, dtype=torch.float64, requires_grad=True)
PARAMETERS = [w, *(p for m in (lstm, gru, linear, norm, embedding) for p in m.parameters())]


def body(f):
    BODIES[f.__name__] = f
    return f


def true_loop(f):
    LOOPS[f.__name__] = f
    return f


@body
def one_value_with_a_gradient(h, x):
    h = torch.tanh(h + w) * 0.5
    h[h > 0.5] = w[0] * 2
    h[x[:, 0] > 0] = x[0, 1]
    h[:, h[1] < 0] = w.sum()
    return h, h


@body
def scaled_in_place(h, x):
    h = h.clone()
    h[x[:, 0] > 0] *= 0.5
    return h, h


@body
def of_a_ragged_batch(h, x):
    active = x[:, 0] > 0
    new = torch.tanh(linear(h[active]) + x[active].sum(-1, keepdim=True))
    out = h.clone()
    out[active] = new
    return out, out.sum()


@body
def lstm_of_active_rows(h, x):
    active = x[:, 0] > 0
    new, c = lstm(x[active], (h[active], h[active] * 0.5))
    h = h.clone()
    h[active] = new * c
    return h, h


@body
def gru_of_active_rows(h, x):
    active = (x[:, 0] > 0).nonzero().squeeze(-1)
    new = gru(x[active], h[active])
    h = h.clone()
    h[active] = new
    return h, h


@body
def positions_in_a_tuple(h, x):
    (at,) = torch.where(x[:, 0] > 0)
    rows = torch.nonzero(x[:, 1] > 0, as_tuple=True)[0]
    h = h.clone()
    h[at] = torch.tanh(linear(h.index_select(0, at)))
    h[at] *= 0.5
    h[rows] = 0.25
    return h, h


@body
def mask_written_twice(h, x):
    h = h + x.sum(-1, keepdim=True)
    h[h > 0] = h[h > 0] * 0.5
    return h, h[h > 0].sum()


@body
def singular_where_left_out(h, x):
    h = h + x.mean()
    m = h > 0.1
    h[m] = torch.log(h[m]) * w.sum()
    h[h < -1] = torch.sqrt(-h[h < -1])
    return torch.tanh(h), h[m].mean().nan_to_num(2.5)


@body
def singular_at_ones(h, x):
    m = h[:, 0] > 0
    rows = h[m] * w
    rows = (rows / rows.std(-1, keepdim=True)) @ linear.weight
    out = h + x.sum(-1, keepdim=True) * 0.1
    out[m] = rows / rows.std(-1, keepdim=True)
    return torch.tanh(out), (1 - h[m]).log().nan_to_num().sum()


@body
def normed_rows(h, x):
    m = x[:, 0] > 0
    out = h * 0.9
    out[m] = norm(h[m])
    return out, F.softmax(h[m], -1).sum(0)


@body
def sums_of_what_is_selected(h, x):
    m = x[:, 0] > 0
    h = torch.tanh(h + x.sum(-1, keepdim=True))
    of_none = h[h > 9].mean().isnan()
    ys = (h.masked_select(h > 0).sum(), h[m].mean(0).nan_to_num(), (h[m] > 0).any(), h[m].prod())
    return h, (*ys, of_none)


@body
def other_shapes_of_rows(h, x):
    m = x[:, 0] > 0
    rows = h[m].view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)
    rows = torch.cat([rows, x[m]], dim=1)[:, 2:10]
    first, second = rows.chunk(2, dim=-1)
    h = h.clone()
    h[m] = torch.cat([second, first.flip(-1)], -1) * 0.9
    return h, h


@body
def columns_and_parts(h, x):
    m, columns = x[:, 0] > 0, h.sum(0) > 0
    out = h.clone()
    out[:, columns] = torch.sin(h[:, columns])
    out[m, 1] = h[m, 0] * 2
    out[m, 2:4] = h[m, :2] + 1
    out[None, m] *= 0.9
    return out * 0.9, out[0, out[0] > 0].sum()


@body
def integers(h, x):
    m = x[:, 0] > 0
    k = (h[:, 0] * 4).long().clamp(0, 6)
    k2 = k.clone()
    k2[m] = k[m] // 2
    h = h * 0.9
    h[m] = h[m] + embedding(k[m])
    return h, k2


@body
def centred_rows(h, x):
    m = x[:, 0] > 0
    h = h.clone()
    h[m] = h[m] - h[m].mean(0)
    return h * 0.5, h


@body
def attention_of_selected_queries(h, x):
    m = x[:, 0] > 0
    found = F.softmax(h[m] @ linear.weight @ h.t(), -1) @ h
    h = h.clone()
    h[m] = found
    return h * 0.5, h


@body
def without_gradient(h, x):
    m = x[:, 0] > 0
    with torch.no_grad():
        k = linear(h[m])
    h = h.clone()
    h[m] = k * h[m]
    return h * 0.9, h


@body
def in_an_inner_scan(h, x):
    def inner(c, q):
        m = c > q
        c = c.clone()
        c[m] = c[m] * 0.5
        return c, c.sum()

    return scan(inner, h, x[0])


@true_loop
def rows_in_turn(h, x):
    m = x[:, 0] > 0
    h = h.clone()
    h[m] = h[m].cumsum(0)
    return h * 0.5, h


@true_loop
def number_of_rows(h, x):
    rows = h[x[:, 0] > 0]
    return h * 0.9, rows.sum() / rows.shape[0]


@true_loop
def rows_of_another_number(h, x):
    h = h.clone()
    h[x[:, 0] > -9] = h[x[:, 0] > -9] * x[:, :1]
    return h * 0.5, h


@true_loop
def mask_that_changes(h, x):
    m = (x[:, 0] > 0).clone()
    rows = h[m].detach()
    m.fill_(False)
    return h * 0.9, rows.sum()


@true_loop
def positions_that_change(h, x):
    at = (x[:4, 0] > 0).nonzero().squeeze(1)
    at += 1
    h = h.clone()
    h[at] = h[at] * 0.5
    return h, h


@true_loop
def division_by_selected_integers(h, x):
    k = (h * 4).long().clamp(1, 5)
    k[h > 0] = 12 // k[h > 0]
    return h * 0.9, k


@true_loop
def number_of_another_dtype(h, x):
    k = h.float()
    k[h > 0] = k[h > 0] * w.sum()
    return h * 0.9 + k * 0.1, k


@true_loop
def hooked_rows(h, x):
    m = x[:, 0] > 0
    rows = h[m] * 2
    if rows.requires_grad:
        rows.register_hook(lambda g: g / (1 + g.mean().abs()) + 0.1)
    h = h.clone()
    h[m] = torch.tanh(rows)
    return h, h


counting = nn.Embedding(7, 8, scale_grad_by_freq=True).double()


@true_loop
def gradient_by_frequency(h, x):
    m = x[:, 0] > 0
    h = h.clone()
    h[m] = h[m] + counting((x[:, 1] * 4).long().clamp(0, 6)[m])
    return h, h


@true_loop
def passed_to_a_checkpoint(h, x):
    m = x[:, 0] > 0
    rows = checkpoint(lambda r: torch.tanh(linear(r)), h[m], use_reentrant=False)
    h = h.clone()
    h[m] = rows
    return h * 0.9, h


def operands(selects: str) -> tuple[Tensor, Tensor]:
    xs = torch.randn(4, 5, 4, dtype=torch.float64)
    if selects != "some":
        xs = xs.abs() * (1 if selects == "all" else -1)
    return torch.randn(5, 8, dtype=torch.float64), xs


@pytest.mark.parametrize("name", BODIES)
def test_like_the_loop(name):
    with fallback("error"):
        for selects in ("some", "all", "none"):
            check(BODIES[name], *operands(selects), params=PARAMETERS)


@pytest.mark.parametrize("variant", ["aot_eager", "inductor", "exported"])
@pytest.mark.parametrize("name", ["gru_of_active_rows", "columns_and_parts", "singular_at_ones"])
def test_compiled(name, variant):
    params = () if variant == "exported" else PARAMETERS
    check(BODIES[name], *operands("some"), variant=VARIANTS[variant], params=params)


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_not_done_row_by_row_is_a_loop(name):
    init, xs = operands("some")
    init.requires_grad_()
    with pytest.warns(UserWarning, match="plain Python loop"):
        actual = scan(LOOPS[name], init, xs)
    expected = loop(LOOPS[name], init, xs)
    assert_same(actual, expected)
    assert_same(gradients(actual, [init]), gradients(expected, [init]))


@pytest.mark.parametrize(("width", "runs_as_loop"), [(8, False), (128, True)])
def test_large_products_of_selected_rows_are_a_loops(width, runs_as_loop):
    """It makes them of those rows alone. Compiled as a whole, there is no loop instead."""
    cell = nn.GRUCell(width, width)

    def body(h, x):
        x, active = x
        h = h.clone()
        h[active] = cell(x[active], h[active])
        return h, h

    h, xs = torch.zeros(32, width), (torch.randn(4, 32, width), torch.rand(4, 32) > 0.5)
    assert ("runs as a plain Python loop" in str(explain(body, h, xs))) == runs_as_loop
    expected = loop(body, h, xs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same(scan(body, h, xs), expected, 1e-5)
    assert any("plain Python loop" in str(w.message) for w in caught) == runs_as_loop
    run = torch.compile(lambda h, xs: scan(body, h, xs), backend="aot_eager", fullgraph=True)
    assert_same(run(h, xs), expected, 1e-5)


def test_for_any_batch():
    def run(h, xs):
        return scan(gru_of_active_rows, h, xs)[0]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (5, 6, 9):
        h, xs = torch.randn(n, 8, dtype=torch.float64), torch.randn(4, n, 4, dtype=torch.float64)
        assert_same(compiled(h, xs), loop(gru_of_active_rows, h, xs)[0])


def test_a_second_derivative():
    init = operands("some")[0].requires_grad_()
    xs = operands("some")[1][:2]
    second = []
    for run in (scan, loop):
        (first,) = torch.autograd.grad(
            run(of_a_ragged_batch, init, xs)[0].pow(3).sum(), init, create_graph=True
        )
        second += torch.autograd.grad(first.sin().sum(), (init, linear.weight))
    assert_same(second[:2], second[2:])
