"""Indexing by 0-d integer tensors: one captured gather or scatter, which means what it says."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from oracle import Variant, assert_same, check, differentiable, loop
from torch import Tensor

from torch_scan_hop import scan
from torch_scan_hop.capture.indexing import getitem, narrow_key, select_key, setitem

pytestmark = pytest.mark.torch_version

VARIANTS = {
    "eager": Variant(),
    "aot_eager": Variant("aot_eager"),
    "inductor": Variant("inductor"),
    "exported": Variant(exported=True),
}


def float64(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def parameter(*shape: int) -> Tensor:
    return float64(*shape).requires_grad_()


# --- the functions, beside eager PyTorch ---

t, minus, u8 = torch.tensor(1), torch.tensor(-2, dtype=torch.int8), torch.tensor(1).to(torch.uint8)
ENTRIES = (
    t,
    minus,
    0,
    slice(None),
    slice(1, None, 2),
    slice(t, t + 2),
    slice(minus - 1, minus),
    None,
    ...,
    True,
    [2, 0],
    torch.tensor([[0], [2]]),
    torch.tensor([True, False, True]),
)


def lengths_of(key: tuple) -> list[int]:
    windows = [e for e in key if isinstance(e, slice) and isinstance(e.stop, Tensor)]
    return [int(w.stop - w.start) for w in windows]


def keys() -> list[tuple]:
    """Every key of up to three entries that holds a 0-d tensor and no second Ellipsis."""
    found = []
    for n in (1, 2, 3):
        for key in itertools.product(ENTRIES, repeat=n):
            unknown = any(e is t or e is minus for e in key) or lengths_of(key)
            if unknown and sum(e is ... for e in key) < 2:
                found.append(key)
    return found


def test_reads_and_writes_are_those_of_eager_pytorch():
    x, checked = torch.arange(3.0 * 3 * 3).view(3, 3, 3), 0
    for key in keys():
        try:
            expected = x[key]
        except IndexError:
            with pytest.raises(IndexError):
                getitem(x, key, lengths_of(key))
            continue
        assert_same(getitem(x, key, lengths_of(key)), expected)
        values = [torch.randn(expected.shape), 2.5]
        for value in values:
            written, by_hand = x.clone(), x.clone()
            setitem(written, key, value, lengths_of(key))
            by_hand[key] = value
            assert_same(written, by_hand)
        checked += 1
    assert checked > 1000


@pytest.mark.parametrize("value", [3, 2.7, True, torch.tensor([[[5]]]), torch.tensor(1.5)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.bool, torch.complex64], ids=str
)
def test_a_value_becomes_what_an_assignment_makes_of_it(dtype, value):
    written, by_hand = torch.zeros(4, 2, dtype=dtype), torch.zeros(4, 2, dtype=dtype)
    setitem(written, t, value)
    by_hand[t] = value
    assert_same(written, by_hand)


@pytest.mark.parametrize("dim", [0, 2, -1, -2])
@pytest.mark.parametrize("start", [0, 1, -1, -3, -4, 3])
def test_select_and_narrow(dim, start):
    x, at = torch.randn(4, 4, 4), torch.tensor(start)
    assert_same(getitem(x, select_key(3, dim, at)), x.select(dim, at))
    for length in range(4 - start % 4 + 1):
        found = getitem(x, narrow_key(3, dim, at), [length])
        assert_same(found, x.narrow(dim, start, length))


@pytest.mark.parametrize(
    ("key", "lengths"),
    [
        (torch.tensor(5), ()),
        (torch.tensor(-6), ()),
        (slice(torch.tensor(4), torch.tensor(6)), [2]),
        (slice(torch.tensor(-2), torch.tensor(0)), [2]),
        (slice(torch.tensor(-7), torch.tensor(-5)), [2]),
        (narrow_key(1, 0, torch.tensor(-2))[0], [3]),
    ],
)
def test_out_of_range(key, lengths):
    with pytest.raises(IndexError, match="out of bounds"):
        getitem(torch.zeros(5), key, lengths)
    with pytest.raises(IndexError, match="out of bounds"):
        setitem(torch.zeros(5), key, 1.0, lengths)


# --- bodies, in every way to run them ---


def embedding():
    table, w = parameter(7, 3), parameter(3, 3)

    def body(h, token):
        h = torch.tanh(h @ w + table[token])
        return h, h

    return body, float64(3), torch.tensor([3, 1, 3, 6, 0]), [table, w]


def hmm_forward():
    log_a, log_b = parameter(4, 4), parameter(4, 6)

    def body(alpha, observed):
        alpha = torch.logsumexp(alpha[:, None] + log_a, 0) + log_b[:, observed]
        return alpha, None

    return body, float64(4), torch.tensor([2, 5, 2, 0, 1]), [log_a, log_b]


def viterbi():
    log_a = parameter(4, 4)

    def body(state, score):
        best = (score + log_a[state]).argmax()
        return best, log_a[state, best] * score[best]

    return body, torch.tensor(0), float64(5, 4), [log_a]


def cache_in_the_carry():
    w = parameter(3, 3)

    def body(carry, x):
        K, i = carry
        K[:, :, i] = x @ w
        attention = torch.softmax((K * x[..., None]).sum(1), -1)
        return (K, i + 1), (K * attention[:, None]).sum(-1)

    return body, (float64(2, 3, 5), 0), float64(5, 2, 3), [w]


def added_to_a_row():
    def body(carry, x):
        K, i = carry
        K[i % 3] += x
        K[i, 1] *= 2
        return (K, i + 1), K.sum(0) * K[i]

    return body, (float64(4, 3), torch.tensor(0)), float64(4, 3), []


def windows():
    signal = parameter(9, 2)

    def body(c, i):
        parts = signal[i : i + 3], signal.narrow(0, 2 * i, 2), torch.narrow(signal, 0, -2 - i, 1)
        c = c.clone()
        c[i : i + 2] = parts[1] * 2
        c[2 * i : 2 * (i + 1), 1] += x0
        return c * sum(p.sum() for p in parts), (parts[0], signal[i + 1 - 1 : 4 + i])

    x0 = float64(2)
    return body, float64(9, 2), torch.arange(4), [signal]


def selects():
    x = parameter(4, 5, 3)

    def body(c, i):
        a = x.select(0, i) * torch.select(x, dim=-2, index=i + 1).sum()
        b = x.index_select(0, i)[0] + x.__getitem__((..., i - 1))[0, 0]
        return c + a * b, a

    return body, float64(5, 3), torch.arange(3), [x]


def several_indices():
    x, mask = parameter(4, 4, 4), torch.tensor([True, False, True, True])
    rows = torch.tensor([2, 0, 2])

    def body(carry, i):
        c, j = carry
        y = x[i, j] * x[i, :, j] + x[j, None, :, 0, None, ...][0, :, 0]
        z = x[i, rows].sum(0) + x[rows, j, i].sum() + x[rows, i][:, 0].sum() + x[0, ..., i]
        c = c.clone()
        c[i, mask] = 0.5
        c[..., mask, i] = 2.5
        c[j, rows[:2]] += z[:2]
        return (c, (j + i) % 4), y * z

    return body, (float64(4, 4), torch.tensor(3)), torch.tensor([0, 3, -1, 1, -3]), [x]


def negative():
    x = parameter(5, 2)

    def body(c, i):
        return c * x[-i] + x[i - 1], x[..., i - 1]

    return body, float64(2), torch.tensor([1, 0, 2]), [x]


def row_changed_through_a_view():
    def body(c, i):
        row = c[i]
        row.add_(1)
        row.view(3, 1)[1:].mul_(2)
        part = row[i]
        part.sub_(3)
        return c * 2, row

    return body, float64(4, 3), torch.arange(3), []


def source_changed_before_the_last_use():
    def body(c, i):
        row, flat = c[i], c.select(1, i)
        turned = row.view(1, 3).t()
        part = turned[i]
        c.mul_(2)
        c[i] += 1
        return c + turned.sum(), (row, part, flat)

    return body, float64(4, 3), torch.arange(3), []


def counter_changed_in_place():
    def body(carry, x):
        c, i = carry
        row = c[i]
        i.add_(1)
        row.mul_(2)
        c[i] = x
        i += 1
        return (c, i), c[i - 2 : i].sum(0) + row

    return body, (float64(7, 3), torch.tensor(0)), float64(3, 3), []


def out_argument():
    def body(c, i):
        torch.add(c[0], 1, out=c[i])
        return c * 3, c.narrow(0, i, 1).neg_()

    return body, torch.arange(12).view(4, 3), torch.arange(3), []


def row_assigned_to_itself():
    def body(c, i):
        c[i] = c[0]
        c[i + 1, 1:] = c[i, :-1]
        return c * 1.5, c[i].expand(2, 3)

    return body, float64(4, 3), torch.arange(3), []


BODIES = (
    embedding,
    hmm_forward,
    viterbi,
    cache_in_the_carry,
    added_to_a_row,
    windows,
    selects,
    several_indices,
    negative,
    row_changed_through_a_view,
    source_changed_before_the_last_use,
    counter_changed_in_place,
    out_argument,
    row_assigned_to_itself,
)


def _variants_of_bodies():
    """One in four is compiled by Inductor, the others as far as Inductor begins, and exported."""
    for name, variant in VARIANTS.items():
        for k, make in enumerate(BODIES):
            by_inductor = k % 4 == 0
            is_left_out = {"inductor": not by_inductor, "aot_eager": by_inductor, "exported": k % 2}
            marks = pytest.mark.slow if is_left_out.get(name) else ()
            yield pytest.param(variant, make, marks=marks, id=f"{name}-{make.__name__}")


@pytest.mark.parametrize(("variant", "make"), list(_variants_of_bodies()))
def test_as_the_loop(variant, make):
    body, init, xs, params = make()
    if variant.exported:  # its parameters are constants, without gradients
        params = []
    check(body, init, xs, variant=variant, params=params)


# --- what is around a body ---


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_closed_over_cache_is_written(variant):
    if variant.exported:
        pytest.skip("an export returns what it does to its constants in other ways")
    cache, by_hand = float64(2, 3, 5), None
    by_hand = cache.clone()

    def body_with(K):
        def body(i, x):
            K[:, :, i] = x
            K[:, i % 3] += 1
            K.select(0, 0).narrow(1, i, 1).mul_(2)
            return i + 1, K.sum(-1)

        return body

    xs = float64(5, 2, 3)
    actual = variant(body_with(cache), 0, xs)
    assert_same(actual, loop(body_with(by_hand), 0, xs))
    assert_same(cache, by_hand)


@pytest.mark.parametrize(
    "options",
    [{"unroll": 2}, {"checkpoint": "full"}, {"checkpoint": 2}, {"reverse": True}],
    ids=str,
)
@pytest.mark.parametrize(
    ("make", "backend"),
    [
        pytest.param(embedding, None, id="embedding-eager"),
        pytest.param(cache_in_the_carry, None, id="cache_in_the_carry-eager"),
        pytest.param(embedding, "aot_eager", id="embedding-aot_eager"),
        pytest.param(
            cache_in_the_carry,
            "aot_eager",
            id="cache_in_the_carry-aot_eager",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_options(make, options, backend):
    body, init, xs, params = make()
    if options.get("checkpoint") == 2:
        xs = xs[:4]
    check(body, init, xs, variant=Variant(backend), params=params, **options)


@pytest.mark.parametrize("make", [embedding, hmm_forward, added_to_a_row], ids=lambda m: m.__name__)
def test_second_derivatives(make):
    body, init, xs, params = make()

    def seconds(run):
        leaves = [*(p.detach().requires_grad_() for p in differentiable((init, xs))), *params]
        result = run(body, *_replaced((init, xs), leaves))
        loss = sum((r**2).sum() for r in differentiable(result))
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return first, torch.autograd.grad(sum((g**2).sum() for g in first), leaves)

    assert_same(seconds(scan), seconds(loop))


def _replaced(value, leaves):
    spec_leaves, spec = torch.utils._pytree.tree_flatten(value)
    left = iter(leaves)
    return torch.utils._pytree.tree_unflatten(
        [next(left) if isinstance(v, Tensor) and v.is_floating_point() else v for v in spec_leaves],
        spec,
    )


def test_vmap_and_jvp():
    table, h, cache, tangent = float64(6, 3), float64(4, 3), float64(4, 5, 3), float64(3)
    tokens = torch.randint(0, 6, (4, 5))

    def run(scan_or_loop):
        def one(h, cache, tokens):
            def body(carry, token):
                h, K, i = carry
                K = K.clone()
                K[i] = h
                h = torch.tanh(h * table[token] + K[i - 1])
                return (h, K, i + 1), h

            (h, K, _), ys = scan_or_loop(body, (h, cache, 0), tokens)
            return h, K, ys

        return one

    rows = [run(loop)(*row) for row in zip(h, cache, tokens, strict=True)]
    expected = [torch.stack(column) for column in zip(*rows, strict=True)]
    assert_same(list(torch.vmap(run(scan))(h, cache, tokens)), expected)

    def results(transform):
        return [transform(lambda h, r=r: run(r)(h, cache[0], tokens[0])) for r in (scan, loop)]

    assert_same(*results(lambda f: torch.func.jvp(f, (h[0],), (tangent,))))
    assert_same(*results(lambda f: torch.func.jacrev(f)(h[0])))


def test_a_scan_in_a_scan_and_a_branch():
    table = parameter(5, 3)

    def inner(h, t):
        return h + table[t], h[t]

    def body(carry, ts):
        h, K = carry
        h, ys = scan(inner, h, ts)
        K[ts[0]] += h
        picked = torch.cond(ys.sum() > 0, lambda K, t: K[t] * 2, lambda K, t: K[t - 1], (K, ts[1]))
        return (h * 0.5, K), (ys, picked)

    def body_of_loop(carry, ts):
        h, K = carry
        h, ys = loop(inner, h, ts)
        K[ts[0]] += h
        return (h * 0.5, K), (ys, K[ts[1]] * 2 if ys.sum() > 0 else K[ts[1] - 1])

    xs = torch.tensor([[0, 2], [1, 1], [2, 0]])
    init = (float64(3), float64(5, 3))
    assert_same(scan(body, init, xs), loop(body_of_loop, init, xs))


def test_a_checkpointed_part():
    """A graph of its own in the body."""
    from torch.utils.checkpoint import checkpoint

    w = parameter(3)

    def part(K, i):
        row = K[i] * w
        return K + row * K.sin()[i : i + 2].sum(0)

    def body(K, i):
        K = checkpoint(part, K, i, use_reentrant=False)
        return K, K[i]

    check(body, float64(4, 3), torch.arange(3), params=[w])


# --- what cannot be had ---


@pytest.mark.parametrize("values", [[1, 7], [-8, 0]])
def test_out_of_range_raises_as_eager_pytorch_does(values):
    table, xs = float64(7, 2), torch.tensor(values)
    with pytest.raises(IndexError):
        scan(lambda h, t: (h + table[t], None), float64(2), xs)
    with pytest.raises(IndexError):
        scan(lambda h, t: (h.index_put((t,), h[0]), None), float64(7), xs)


def test_a_slice_does_not_get_shorter():
    x = float64(5)
    # or the warning that it ran as a loop, where what a captured step raises leads there
    with pytest.raises((IndexError, UserWarning), match="out of bounds"):
        scan(lambda h, t: (h + x[t : t + 2].sum(), None), float64(2), torch.arange(5))


@pytest.mark.parametrize("key", [lambda t: slice(t, None), lambda t: slice(None, t)])
def test_a_slice_of_unknown_length_is_a_loop_that_says_so(key):
    x = float64(5)

    def body(h, t):
        return h + x[key(t)].sum(), None

    with pytest.warns(UserWarning, match=r"narrow\(dim, t, 4\).* torch.where\(torch.arange"):
        found = scan(body, float64(2).zero_(), torch.arange(3))
    assert_same(found, loop(body, float64(2).zero_(), torch.arange(3)))
    run = torch.compile(lambda xs: scan(body, x[:2], xs), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"narrow\(dim, t, 4\).* torch.where\(torch.arange"):
        run(torch.arange(3))


def test_a_length_is_of_the_values_that_the_bounds_had():
    x = float64(9)

    def body(carry, _):
        i, stop = carry[0].clone(), carry[0] + 3
        i.add_(1)
        return (carry[0] + 1, carry[1] + x[i:stop].sum()), None

    init = (torch.tensor(0), torch.zeros((), dtype=torch.float64))
    with pytest.warns(UserWarning, match="narrow"):
        found = scan(body, init, length=3)
    assert_same(found, loop(body, init, length=3))


def test_nothing_stays_patched():
    with pytest.warns(UserWarning, match="plain Python loop"):
        scan(lambda h, t: (h + h[t:].sum(), None), float64(3), torch.arange(2))

    targets = []

    def backend(gm, _):
        targets.extend(n.target for n in gm.graph.nodes)
        return gm

    torch.compile(lambda x, t: x[t] * x[t + 1], backend=backend)(float64(3), torch.tensor(1))
    assert not set(targets) & {getitem, setitem}


PROGRAM = """
import torch
from torch_scan_hop import scan

table, last = torch.randn(64, 4096), torch.tensor(60)
bodies = {
    "token": lambda c, t: ((torch.sin(c[0]) + table[t], c[1]), None),
    "counter": lambda c, t: ((torch.sin(c[0]) + table[c[1]], c[1] + 1), None),
}
for name, body in bodies.items():
    run = torch.compile(lambda init, xs: scan(body, init, xs)[0], fullgraph=True)
    try:
        run((torch.zeros(4096), last), torch.arange(58, 70))
    except RuntimeError as error:
        assert "out of bounds" in str(error), error
        print(name)
"""


def test_out_of_range_in_a_thread_does_not_end_the_process():
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["token", "counter"], done.stderr[-2000:]
