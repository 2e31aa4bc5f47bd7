"""Indexing by 0-d integer tensors: one captured gather or scatter, which means what it says."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle import Variant, assert_same, check, loop
from torch import Tensor

from torch_scan_hop import scan
from torch_scan_hop.indexing import getitem, narrow_key, select_key, setitem

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
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64], ids=str)
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


@pytest.mark.parametrize("make", BODIES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_as_the_loop(variant, make):
    body, init, xs, params = make()
    if variant.exported:  # its parameters are constants, without gradients
        params = []
    check(body, init, xs, variant=variant, params=params)
