"""The public contract of ``scan``, clause by clause."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from oracle import VARIANTS, Variant, assert_same, check, loop, randn
from torch import nn

from torch_scan_hop import fallback, scan

F64 = torch.float64
EAGER_AND_COMPILED = pytest.mark.parametrize(
    "variant", [VARIANTS["eager"], VARIANTS["aot_eager"]], ids=["eager", "aot_eager"]
)
ALL_WAYS = pytest.mark.parametrize(
    "variant",
    [VARIANTS["eager"], VARIANTS["aot_eager"], VARIANTS["unroll3"]],
    ids=["eager", "aot_eager", "unroll3"],
)
#: For what is decided before a scan is unrolled.
CAPTURED = pytest.mark.parametrize(
    "variant",
    [
        pytest.param(VARIANTS["eager"], id="eager"),
        pytest.param(VARIANTS["aot_eager"], id="aot_eager"),
        pytest.param(VARIANTS["unroll3"], id="unroll3", marks=pytest.mark.slow),
    ],
)

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class State:
    h: Any
    c: Any


pytree.register_dataclass(State, serialized_type_name="tests.test_api.State")


@dataclasses.dataclass
class Unregistered:
    h: Any
    c: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frozen:
    h: Any
    c: Any = dataclasses.field(default=None)


@dataclasses.dataclass(slots=True)
class Slots:
    h: Any
    c: Any
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.made = self.made + 1


def cumulative(h, x):
    h = h + x
    return h, h


# --- the loop itself ---


def test_the_reference_is_the_loop_one_would_write():
    w, xs, h = randn(3, 3), randn(4, 3), randn(3)
    result = scan(lambda h, x: (torch.tanh(h @ w + x), h * x), h, xs)
    ys = []
    for x in xs:
        h, y = torch.tanh(h @ w + x), h * x
        ys.append(y)
    assert_same(result, (h, torch.stack(ys)))


def test_reverse_is_the_loop_backwards_with_ys_in_place():
    xs, h = randn(4, 3), randn(3)
    result = scan(cumulative, h, xs, reverse=True)
    ys = [None] * 4
    for t in (3, 2, 1, 0):
        h = h + xs[t]
        ys[t] = h
    assert_same(result, (h, torch.stack(ys)))


def test_positional_arguments_are_those_of_jax():
    result = scan(lambda c, _: (c * 2, c), torch.tensor(1.0), None, 3)
    assert_same(result, (torch.tensor(8.0), torch.tensor([1.0, 2.0, 4.0])))


# --- pytrees ---


@CAPTURED
def test_dicts_match_by_key_not_by_order(variant):
    def cell(carry, x):
        a = carry["a"] * 0.5 + x
        b = carry["b"] - a
        return {"b": b, "a": a}, {"sum": a + b, "a": a}

    result = check(cell, {"a": randn(2), "b": randn(2)}, randn(4, 2), variant=variant)
    assert list(result[0]) == ["a", "b"]
    assert list(result[1]) == ["sum", "a"]


@EAGER_AND_COMPILED
def test_nested_containers(variant):
    def cell(carry, x):
        (h, [c]), extra = carry["state"], carry["extra"]
        h = torch.tanh(h + x["a"]) * c
        return {"extra": extra, "state": (h, [c + x["b"][0]])}, [h, (c, {"k": h * c})]

    init = {"state": (randn(2), [randn(2)]), "extra": randn(1)}
    check(cell, init, {"a": randn(3, 2), "b": (randn(3, 2),)}, variant=variant)


@EAGER_AND_COMPILED
def test_namedtuples(variant):
    def cell(carry, x):
        second = carry.second + x.first
        return Pair(carry.first * x.second, second), Pair(second, carry.first)

    result = check(cell, Pair(randn(2), randn(2)), Pair(randn(3, 2), randn(3, 2)), variant=variant)
    assert isinstance(result[0], Pair) and isinstance(result[1], Pair)


@EAGER_AND_COMPILED
@pytest.mark.parametrize("kind", [State, Unregistered, Frozen, Slots])
def test_dataclasses(kind, variant):
    def cell(state, x):
        h = torch.tanh(state.h + x.h * x.c)
        return kind(h=h, c=state.c + h), kind(h=h, c=[h * state.c, None])

    init, xs = kind(h=randn(2), c=0.0), kind(h=randn(3, 2), c=randn(3, 2))
    if kind is Slots:
        xs.made = torch.zeros(3)
    carry, ys = check(cell, init, xs, variant=variant)
    assert type(carry) is kind and type(ys) is kind and ys.c[1] is None
    assert carry.c.shape == (2,) and ys.c[0].shape == (3, 2)


def test_a_dataclass_is_named_by_its_fields():
    init = {"a": Unregistered(torch.zeros(2), "word")}
    with pytest.raises(TypeError, match=r"init\['a'\]\.c must be a tensor, a number or None"):
        scan(lambda c, x: (c, x), init, torch.zeros(3))
    with pytest.raises(
        TypeError, match=r"expected a Unregistered \(from init\), but combine_fn returned tuple"
    ):
        init = Unregistered(torch.zeros(2), torch.zeros(2))
        scan(lambda c, x: ((c.h, c.c), x), init, torch.zeros(3))


@EAGER_AND_COMPILED
def test_ordered_dict(variant):
    def cell(carry, x):
        h = torch.tanh(carry["h"] + x)
        return OrderedDict(c=carry["c"] + h, h=h), h

    result = check(cell, OrderedDict(h=randn(2), c=randn(2)), randn(3, 2), variant=variant)
    assert type(result[0]) is OrderedDict and list(result[0]) == ["h", "c"]


@CAPTURED
def test_none_leaves(variant):
    def cell(carry, x):
        h, nothing = carry
        assert nothing is None and x["mask"] is None
        h = h + x["v"]
        return (h, None), {"h": h, "aux": None}

    result = check(cell, (randn(2), None), {"v": randn(4, 2), "mask": None}, variant=variant)
    assert result[0][1] is None and result[1]["aux"] is None


@ALL_WAYS
def test_no_y(variant):
    result = check(lambda h, x: (h * x, None), randn(2), randn(4, 2), variant=variant)
    assert result[1] is None


@EAGER_AND_COMPILED
def test_empty_carry_is_a_map(variant):
    result = check(lambda c, x: (c, x * x), (), randn(4, 2), variant=variant)
    assert result[0] == ()
    result = check(lambda c, x: (None, x * x), None, randn(4, 2), variant=variant)
    assert result[0] is None


@EAGER_AND_COMPILED
def test_the_carry_may_come_back_as_the_lists_it_went_in(variant):
    check(
        lambda c, x: ([c[0] + x, c[1] * c[0]], c[1]),
        [randn(2), randn(2)],
        randn(3, 2),
        variant=variant,
    )


# --- numbers ---


@CAPTURED
def test_number_as_init(variant):
    check(lambda c, x: (c + x.sum(), c), 0.5, randn(4, 3), variant=variant)


@EAGER_AND_COMPILED
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_float_takes_the_dtype_that_the_step_gives_it(variant, dtype):
    carry, ys = variant(lambda c, x: (c + x.sum(), c * x), 0.0, torch.ones(3, 2, dtype=dtype))
    assert carry.dtype == dtype and ys.dtype == dtype
    assert carry.item() == 6.0


@EAGER_AND_COMPILED
def test_an_int_stays_an_int_beside_floats(variant):
    def cell(carry, x):
        n, total = carry
        return (n + 1, total + x), n

    (n, _), ns = variant(cell, (0, randn(2)), randn(4, 2))
    assert n.dtype == torch.int64 and n.item() == 4
    assert ns.tolist() == [0, 1, 2, 3]


@EAGER_AND_COMPILED
def test_numbers_promote_one_another(variant):
    def cell(carry, x):
        a, b = carry
        return (a + x.sum(), b * a), None

    (a, b), _ = variant(cell, (0.0, 2), torch.ones(3, 2, dtype=F64))
    assert a.dtype == F64 and b.dtype == F64
    assert (a.item(), b.item()) == (6.0, 0.0)


@EAGER_AND_COMPILED
def test_bool_and_complex_numbers(variant):
    carry, _ = variant(lambda c, x: (c & (x > 0), None), True, torch.ones(3))
    assert carry.dtype == torch.bool and carry.item() is True
    carry, _ = variant(lambda c, x: (c * 1j, None), 1.0, torch.ones(3))
    assert carry.dtype == torch.complex64 and carry.item() == -1j


@EAGER_AND_COMPILED
@pytest.mark.parametrize("T", [0, 1])
def test_promotion_without_and_with_one_step(variant, T):
    carry, ys = variant(lambda c, x: (c + x, c + x), 0.0, torch.ones(T, dtype=F64))
    assert carry.dtype == F64 and ys.dtype == F64 and carry.item() == T


def test_another_number_needs_no_other_capture():
    cell, xs = lambda c, x: (c + x, c), torch.ones(3)
    scan(cell, 0.5, xs)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert scan(cell, 0.25, xs)[0].item() == 3.25
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_numbers_returned_by_the_body():
    carry, ys = scan(lambda c, x: (c * 0 + 3, 1.5), torch.zeros(2), torch.ones(4))
    assert_same((carry, ys), (torch.full((2,), 3.0), torch.full((4,), 1.5)))
    carry, _ = scan(lambda c, x: (7, None), torch.tensor(0), torch.ones(4))
    assert carry.dtype == torch.int64 and carry.item() == 7


# --- length, dim, reverse, few steps ---


@ALL_WAYS
@pytest.mark.parametrize("reverse", [False, True])
def test_length_without_xs(variant, reverse):
    def cell(c, x):
        assert x is None
        return c * 1.5, c

    check(cell, randn(2), None, length=5, reverse=reverse, variant=variant)


@EAGER_AND_COMPILED
def test_length_zero_without_xs(variant):
    init = randn(2)
    carry, ys = variant(lambda c, x: (c * 2, c), init, None, length=0)
    assert_same((carry, ys), (init, torch.empty(0, 2, dtype=F64)))


def test_length_that_agrees_with_xs():
    assert scan(cumulative, torch.zeros(2), torch.ones(3, 2), 3)[0].tolist() == [3.0, 3.0]


def _ways_and_dims():
    """A dimension is moved to the front of xs, and back in ys, whoever runs the scan then."""
    for way in ("eager", "aot_eager", "unroll3"):
        for dim in (1, 2, -1, -2, -3):
            is_slow = way != "eager" and dim not in (1, -1)
            marks = pytest.mark.slow if is_slow else ()
            yield pytest.param(VARIANTS[way], dim, id=f"{dim}-{way}", marks=marks)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("variant", "dim"), list(_ways_and_dims()))
def test_dim(variant, dim, reverse):
    def cell(h, x):
        h = torch.tanh(h + x)
        return h, h

    xs = randn(3, 4, 5)
    shape = list(xs.shape)
    shape.pop(dim)
    result = check(cell, randn(*shape), xs, dim=dim, reverse=reverse, variant=variant)
    assert result[1].shape == xs.shape


@EAGER_AND_COMPILED
def test_ys_of_too_low_a_rank_are_stacked_in_front(variant):
    _, (y, s, v) = variant(
        lambda h, x: (h, (x, x.sum(), x.sum(0))), torch.zeros(()), randn(3, 4, 5), dim=2
    )
    assert y.shape == (3, 4, 5) and s.shape == (5,) and v.shape == (5, 4)


@ALL_WAYS
@pytest.mark.parametrize("T", [0, 1, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_few_steps(variant, T, reverse):
    w = randn(2, 2).requires_grad_()

    def cell(h, x):
        h = torch.tanh(h @ w + x)
        return h, {"h": h, "n": (h > 0).sum()}

    result = check(cell, randn(2), randn(T, 2), params=[w], reverse=reverse, variant=variant)
    assert result[1]["h"].shape == (T, 2)
    assert result[1]["n"].shape == (T,) and result[1]["n"].dtype == torch.int64


# --- dtypes and layouts ---


@CAPTURED
def test_mixed_dtypes(variant):
    def cell(carry, x):
        f, d, n, b = carry
        f = f + x["f"]
        d = d * f.double()
        return (f, d, n + x["n"], b ^ (x["n"] > 0)), (d, n, b)

    init = (
        randn(2, dtype=torch.float32),
        randn(2),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.bool),
    )
    xs = {"f": randn(4, 2, dtype=torch.float32), "n": torch.randint(-2, 3, (4, 2))}
    check(cell, init, xs, variant=variant, tolerance=1e-5)


@CAPTURED
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integer_carry(variant, dtype):
    result = check(
        lambda n, x: (n + x, n),
        torch.zeros(2, dtype=dtype),
        torch.ones(4, 2, dtype=dtype),
        variant=variant,
    )
    assert result[0].dtype == dtype


@EAGER_AND_COMPILED
def test_bool_carry(variant):
    check(
        lambda b, x: (b | x, b),
        torch.tensor(False),
        torch.tensor([False, True, False]),
        variant=variant,
    )


@EAGER_AND_COMPILED
def test_complex_carry(variant):
    z = randn(3, dtype=torch.complex128).requires_grad_()
    check(
        lambda h, x: (h * z + x, (h * z).abs()),
        randn(3, dtype=torch.complex128),
        randn(4, 3, dtype=torch.complex128),
        params=[z],
        variant=variant,
    )


@EAGER_AND_COMPILED
def test_integer_xs_as_indices(variant):
    table = randn(5, 3).requires_grad_()
    check(
        lambda h, i: (h + table[i], h),
        randn(2, 3),
        torch.randint(0, 5, (4, 2)),
        params=[table],
        variant=variant,
    )


@ALL_WAYS
@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided", "view", "flipped"])
def test_inputs_of_any_layout(variant, layout):
    full = {
        "transposed": randn(3, 5, 2).transpose(0, 1),
        "expanded": randn(1, 1, 2).expand(5, 3, 2),
        "strided": randn(10, 3, 2)[::2],
        "view": randn(6, 3, 2)[1:],
        "flipped": randn(5, 3, 2).flip(0),
    }[layout]
    init = randn(1, 2).expand(3, 2)

    def cell(h, x):
        h = torch.tanh(h.view(3, 2) + x)
        return h, h.t()

    actual = variant(cell, init, full)
    assert_same(actual, loop(cell, init, full))


@EAGER_AND_COMPILED
def test_gradients_through_views_and_expanded_inputs(variant):
    base, row = randn(6, 3, 2).requires_grad_(), randn(1, 2).requires_grad_()

    def run(scan_):
        carry, ys = scan_(cumulative, row.expand(3, 2), base[1:])
        return torch.autograd.grad((carry * ys[2]).sum(), [base, row])

    assert_same(run(variant), run(loop))


# --- what a body may return ---


@ALL_WAYS
@pytest.mark.parametrize(
    "name",
    [
        "same twice",
        "x",
        "carry in",
        "view",
        "closure",
        "swapped",
        "unchanged",
        "constant",
        "one tensor as two carries",
    ],
)
def test_a_body_may_return_any_tensor_it_has(variant, name):
    w = randn(2, 2).requires_grad_()
    cells = {
        "same twice": lambda c, x: ((c[0] + x, c[1]), (c[0] + x, c[0] + x)),
        "x": lambda c, x: ((x, c[1] * x), x),
        "carry in": lambda c, x: ((c[0] * x, c[1] + x), c),
        "view": lambda c, x: ((c[0].t() + x, c[1].view(4).view(2, 2)), (c[0][0], x.t())),
        "closure": lambda c, x: ((w, c[1] + c[0] * x), w),
        "swapped": lambda c, x: ((c[1], c[0]), c[0] * x),
        "unchanged": lambda c, x: (c, x),
        "constant": lambda c, x: ((torch.ones_like(x), c[1]), torch.zeros(3, dtype=F64)),
        "one tensor as two carries": lambda c, x: ((c[0] + x,) * 2, c[1]),
    }
    check(cells[name], (randn(2, 2), randn(2, 2)), randn(4, 2, 2), params=[w], variant=variant)


def storages(value):
    return {
        t.untyped_storage().data_ptr()
        for t in pytree.tree_leaves(value)
        if isinstance(t, torch.Tensor) and t.numel()
    }


@ALL_WAYS
@pytest.mark.parametrize("T", [0, 1, 4])
@pytest.mark.parametrize("grad", [False, True])
def test_results_share_storage_with_nothing(variant, T, grad):
    w = randn(2).requires_grad_(grad)
    init = {"a": randn(2), "b": randn(2), "c": randn(2)}
    xs = {"u": randn(T, 2), "v": randn(T, 2)}

    def cell(c, x):
        return {"a": c["a"], "b": w, "c": x["u"]}, (x["u"], c["a"], w, x["u"], x["v"][:1])

    carry, ys = variant(cell, init, xs)
    inputs = storages((init, xs, w))
    leaves = pytree.tree_leaves((carry, ys))
    assert not storages(leaves) & inputs
    assert len(storages(leaves)) == len([leaf for leaf in leaves if leaf.numel()])


# --- mutation ---


@ALL_WAYS
def test_in_place_on_carry_and_x_leaves_the_inputs_alone(variant):
    def cell(h, x):
        x.mul_(2)
        h.add_(x)
        h[0] = 1.0
        return h, h

    init, xs = randn(3), randn(4, 3)
    before = init.clone(), xs.clone()
    actual = variant(cell, init, xs)
    assert_same((init, xs), before)
    assert_same(actual, loop(cell, init, xs))


@ALL_WAYS
def test_in_place_on_what_the_body_made(variant):
    w = randn(3).requires_grad_()

    def cell(h, x):
        out = torch.zeros_like(h)
        out[1:] = (h * w)[:-1]
        out += x
        return out.sin_(), out

    check(cell, randn(3), randn(4, 3), params=[w], variant=variant)


class EMA(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=F64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.weight = nn.Parameter(torch.ones(3, dtype=F64))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x, alpha=0.1)
            self.steps.add_(1)
        return (x - self.mean) * self.weight


def trained(make, variant, cell_of, init, xs):
    """(result, gradients, buffers) of a module that changes in the loop."""
    module = make()
    result = variant(cell_of(module), init, xs)
    total = sum(leaf.sum() for leaf in pytree.tree_leaves(result) if leaf is not None)
    gradients = torch.autograd.grad(total, list(module.parameters()))
    return result, list(gradients), [b.clone() for b in module.buffers()]


@ALL_WAYS
@pytest.mark.parametrize("T", [0, 1, 4])
def test_buffers_changed_in_place(variant, T):
    def cell_of(module):
        def cell(h, x):
            h = torch.tanh(h + module(x))
            return h, h

        return cell

    init, xs = randn(3), randn(T, 3)
    if T == 0:
        module = EMA()
        variant(cell_of(module), init, xs)
        assert module.steps.item() == 0 and not module.mean.any()
        return
    assert_same(trained(EMA, variant, cell_of, init, xs), trained(EMA, loop, cell_of, init, xs))


@CAPTURED
def test_batch_norm_in_train_mode(variant):
    def make():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()

    def cell_of(module):
        def cell(h, x):
            h = torch.tanh(module(h + x))
            return h, None

        return cell

    init, xs = randn(5, 3), randn(4, 5, 3)
    actual = trained(make, variant, cell_of, init, xs)
    assert_same(actual, trained(make, loop, cell_of, init, xs))
    assert actual[2][-1].item() == 4  # num_batches_tracked


@ALL_WAYS
def test_a_number_as_init_beside_a_buffer_counts_steps_once(variant):
    module = EMA()
    variant(lambda c, x: (c + module(x).sum(), None), 0.0, randn(4, 3))
    assert module.steps.item() == 4


def test_an_attribute_bound_to_another_tensor_is_carried():
    module = nn.Module()
    module.state = torch.zeros(2)

    def cell(h, x):
        module.state = module.state + x
        return h + module.state, None

    with fallback("error"):
        result = scan(cell, torch.zeros(2), torch.ones(3, 2))
    assert result[0].tolist() == [6.0, 6.0] and module.state.tolist() == [3.0, 3.0]


@EAGER_AND_COMPILED
def test_a_kv_cache_written_by_position(variant):
    def run(scan_):
        cache = torch.zeros(5, 3, dtype=F64)

        def cell(position, x):
            cache.index_copy_(0, position.view(1), x.view(1, 3))
            return position + 1, cache.sum()

        result = scan_(cell, torch.tensor(0), xs)
        return result, cache

    xs = randn(4, 3)
    assert_same(run(variant), run(loop))


# --- closures ---


def test_closures_are_seen_as_they_are_at_each_call():
    scale = 2.0
    w = torch.ones(2)

    def cell(h, x, k=1):
        return h + x * scale * w * k, None

    xs = torch.ones(3, 2)
    assert scan(cell, torch.zeros(2), xs)[0].tolist() == [6.0, 6.0]
    scale = 3.0
    assert scan(cell, torch.zeros(2), xs)[0].tolist() == [9.0, 9.0]
    w = torch.full((2,), 2.0)
    assert scan(cell, torch.zeros(2), xs)[0].tolist() == [18.0, 18.0]
    for k in (1, 2, 5):
        bound = lambda h, x, k=k: cell(h, x, k)  # noqa: E731
        assert scan(bound, torch.zeros(2), xs)[0].tolist() == [18.0 * k] * 2


class Doubler(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0], dtype=F64))

    def forward(self, h, x):
        return h * self.weight + x, h

    def method(self, h, x):
        return self(h, x)

    def __add__(self, other):
        return self.method(other, other)


@CAPTURED
@pytest.mark.parametrize("kind", ["module", "method", "partial", "partial of method", "lambda"])
def test_kinds_of_callables(variant, kind):
    module = Doubler()

    def three(scale, h, x):
        return module(h * scale, x)

    combine_fn = {
        "module": module,
        "method": module.method,
        "partial": functools.partial(three, 0.5),
        "partial of method": functools.partial(module.method),
        "lambda": lambda h, x: module(h, x),
    }[kind]
    check(combine_fn, randn(2), randn(4, 2), params=[module.weight], variant=variant)


# --- bodies that cannot be traced ---


def test_a_body_that_prints_runs_as_a_loop_and_warns_once(capsys):
    def cell(h, x):
        print("h =", h.sum().item())
        return h + x, h

    init, xs = torch.zeros(2), torch.ones(3, 2)
    with pytest.warns(UserWarning, match="could not be traced"):
        result = scan(cell, init, xs)
    assert_same(result, (torch.full((2,), 3.0), torch.tensor([[0.0] * 2, [1.0] * 2, [2.0] * 2])))
    assert capsys.readouterr().out.split("\n")[:3] == ["h = 0.0", "h = 2.0", "h = 4.0"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scan(cell, init, xs)


def test_a_data_dependent_if_runs_as_a_loop():
    w = randn(2).requires_grad_()

    def cell(h, x):
        h = h * w + x
        if h.sum() > 0:
            h = h * 2
        return h, h

    with pytest.warns(UserWarning, match=r"cell .*test_api\.py"):
        check(cell, randn(2), randn(4, 2), params=[w])


@pytest.mark.torch_version
def test_an_untraceable_body_is_an_error_under_compile_that_names_the_line():
    def cell(h, x):
        if h.sum() > 0:  # the user's line
            h = h * 2
        return h + x, None

    with pytest.raises(
        torch._dynamo.exc.TorchDynamoException, match=r"the user's line|test_api.py"
    ):
        torch.compile(lambda h, xs: scan(cell, h, xs), fullgraph=True, backend="eager")(
            torch.zeros(2), torch.ones(3, 2)
        )


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken, KeyError, RuntimeError, ValueError])
def test_exceptions_of_the_body_keep_their_type(error):
    def cell(h, x):
        raise error("the message")

    with pytest.raises(error, match="the message"):
        scan(cell, torch.zeros(2), torch.ones(3, 2))


def test_errors_of_operators_keep_their_type():
    with pytest.raises(RuntimeError, match=r"(?i)size|shape"):
        scan(lambda h, x: (h @ torch.ones(3, 3), None), torch.zeros(2), torch.ones(3, 2))
    with pytest.raises(IndexError):
        scan(lambda h, x: (h[5], None), torch.zeros(2), torch.ones(3, 2))
    with pytest.raises(AttributeError):
        scan(lambda h, x: (h.no_such_method(), None), torch.zeros(2), torch.ones(3, 2))


def test_a_disabled_dynamo_runs_the_loop():
    with (
        pytest.warns(UserWarning, match="Dynamo is disabled"),
        torch.compiler.set_stance("force_eager"),
    ):
        result = scan(lambda h, x: (h + x, h), torch.zeros(2), torch.ones(3, 2))
    assert result[0].tolist() == [3.0, 3.0]


# --- unroll ---


@pytest.mark.parametrize("variant", ["eager", "aot_eager"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("T", [0, 1, 4, 5])
@pytest.mark.parametrize("unroll", [pytest.param(1, marks=pytest.mark.slow), 4, 10])
def test_unroll_changes_nothing(variant, unroll, T, reverse):
    if variant == "aot_eager" and T not in (0, 5):
        pytest.skip("eager covers the other trip counts")
    w = randn(2, 2).requires_grad_()

    def cell(h, x):
        h = torch.tanh(h @ w + x["a"])
        return h, (h, x["b"])

    xs = {"a": randn(T, 2), "b": torch.arange(T)}
    options = Variant(VARIANTS[variant].backend, {"unroll": unroll})
    check(cell, randn(2), xs, params=[w], reverse=reverse, variant=options)


def test_unroll_by_length_and_dim():
    options = Variant(options={"unroll": 3})
    check(lambda c, _: (c * 1.5, c), randn(2), None, length=7, variant=options)
    check(cumulative, randn(3, 2), randn(3, 7, 2), dim=1, variant=options)


def test_unroll_with_a_dynamic_trip_count():
    w = randn(2, 2).requires_grad_()

    def cell(h, x):
        h = torch.tanh(h @ w + x)
        return h, h

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(
        lambda h, xs: scan(cell, h, xs, unroll=3), backend=counter, fullgraph=True, dynamic=True
    )
    for T in (7, 8, 9, 10):
        h, xs = randn(2), randn(T, 2)
        actual, expected = run(h, xs), loop(cell, h, xs)
        assert_same(actual, expected)
        assert_same(
            torch.autograd.grad(actual[1].sum(), w), torch.autograd.grad(expected[1].sum(), w)
        )
    assert counter.frame_count <= 3  # once per T % 3 at most, whatever T
