"""Why a body runs as a loop: the reason is true, its advice is captured, and it is not kept for
calls that it does not hold for."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_scan_hop import NotTraceableError, fallback, scan, tree
from torch_scan_hop.capture.reasons import callees_of, reason_of
from torch_scan_hop.reference import scan_loop

XS = torch.linspace(-1.0, 1.0, 20).reshape(5, 4)
H = torch.linspace(0.5, 1.5, 4)
SPARSE = torch.eye(4).to_sparse()
TABLES = [torch.full((4,), float(k)) for k in range(6)]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def assert_same(found: Any, expected: Any) -> None:
    pairs = zip(tree.tensors(found), tree.tensors(expected), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b))


def is_captured(cell: Callable[..., Any], init: Any = H, xs: Any = XS) -> None:
    """A scan, with the numbers of the loop."""
    with fallback("error"):
        assert_same(scan(cell, init, xs), scan_loop(cell, init, xs, len(xs), False))


# -- a reason, and what it advises ---------------------------------------------------------------


def branch(h: Tensor, x: Tensor) -> Any:
    if h.sum() > 0:
        h = h * 0.5
    return h + x, h


def no_branch(h: Tensor, x: Tensor) -> Any:
    h = torch.where(h.sum() > 0, h * 0.5, h)
    return h + x, h


def prints(h: Tensor, x: Tensor) -> Any:
    print(end="")
    return h + x, h


def masked(h: Tensor, x: Tensor) -> Any:
    h = h.clone()
    h[h > 0] = x[h > 0]
    return h + x, h[x > 0].sum()


def not_masked(h: Tensor, x: Tensor) -> Any:
    h = torch.where(h > 0, x, h)
    return h + x, torch.where(x > 0, h, 0.0).sum()


def part_of_a_row(carry: Any, x: Tensor) -> Any:
    rows, i = carry
    rows = rows.clone()
    rows[i, :i] = x[:1]
    return (rows, i + 1), x


def whole_row(carry: Any, x: Tensor) -> Any:
    rows, i = carry
    rows = rows.clone()
    rows[i] = torch.where(torch.arange(4) < i, x[:1], rows[i])
    return (rows, i + 1), x


def item_of_a_list(i: Tensor, x: Tensor) -> Any:
    return i + 1, TABLES[i] * x


def item_of_a_stack(i: Tensor, x: Tensor) -> Any:
    return i + 1, torch.stack(TABLES)[i] * x


def repeated(i: Tensor, x: Tensor) -> Any:
    for _ in range(i):
        x = x * 2
    return i + 1, x


def repeated_as_often_as_may_be(i: Tensor, x: Tensor) -> Any:
    for k in range(5):
        x = torch.where(k < i, x * 2, x)
    return i + 1, x


def sparse_product(h: Tensor, x: Tensor) -> Any:
    return (SPARSE @ h[:, None])[:, 0] + x, h


def dense_product(h: Tensor, x: Tensor) -> Any:
    return (SPARSE_AS_DENSE @ h[:, None])[:, 0] + x, h


SPARSE_AS_DENSE = SPARSE.to_dense()
W = torch.linspace(-0.2, 0.3, 16).reshape(4, 4).requires_grad_()


def _layer(register: Callable[[torch.nn.Module], Any] = lambda layer: None) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    register(layer)
    return layer


def halves(*args: Any) -> Any:
    return args[-1] * 0.5


def same_gradient(module: Any, before: Any, after: Any) -> Any:
    return before


PLAIN, HALVED = _layer(), _layer(lambda layer: layer.register_forward_hook(halves))
WATCHED = _layer(lambda layer: layer.register_full_backward_hook(same_gradient))


def with_a_hook(h: Tensor, x: Tensor) -> Any:
    h = torch.tanh(h @ W + x)
    with h.register_hook(halves):
        return h, h * 2


def removes_its_hook(h: Tensor, x: Tensor) -> Any:
    h = torch.tanh(h @ W + x)
    handle = h.register_hook(halves)
    y = h * 2
    handle.remove()
    return h, y


def no_hook(h: Tensor, x: Tensor) -> Any:
    h = torch.tanh(h @ W + x)
    return h, h * 2


def halves_in_place(h: Tensor, x: Tensor) -> Any:
    h = torch.tanh(h @ W + x)
    h.register_hook(lambda g: g.mul_(0.5))
    return h, h * 2


def halves_a_gradient(h: Tensor, x: Tensor) -> Any:
    h = torch.tanh(h @ W + x)
    h.register_hook(lambda g: g * 0.5)
    return h, h * 2


def saves_on_cpu(h: Tensor, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return no_hook(h, x)


def packs(h: Tensor, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        return no_hook(h, x)


def retains_grad(h: Tensor, x: Tensor) -> Any:
    h = torch.tanh(h @ W + x)
    h.retain_grad()
    return h, h * 2


def hooks_a_module(h: Tensor, x: Tensor) -> Any:
    handle = PLAIN.register_forward_hook(halves)
    h = torch.tanh(PLAIN(h) + x)
    handle.remove()
    return h, h


def hooked_module(h: Tensor, x: Tensor) -> Any:
    h = torch.tanh(HALVED(h) + x)
    return h, h


def hooks_a_modules_backward(h: Tensor, x: Tensor) -> Any:
    handle = PLAIN.register_full_backward_hook(same_gradient)
    h = torch.tanh(PLAIN(h) + x)
    handle.remove()
    return h, h


def module_with_a_backward_hook(h: Tensor, x: Tensor) -> Any:
    h = torch.tanh(WATCHED(h) + x)
    return h, h


def hook_of_a_modules_result(h: Tensor, x: Tensor) -> Any:
    h = PLAIN(h)
    h.register_hook(lambda g: g * 0.5)
    h = torch.tanh(h + x)
    return h, h


def takes_a_gradient(h: Tensor, x: Tensor) -> Any:
    p = h.detach().requires_grad_()
    (gradient,) = torch.autograd.grad((p.sin() * x).sum(), p)
    return h - gradient, h


def takes_a_gradient_by_func(h: Tensor, x: Tensor) -> Any:
    return h - torch.func.grad(lambda p: (p.sin() * x).sum())(h), h


def asks_for_the_function(h: Tensor, x: Tensor) -> Any:
    h = h @ W + x
    return h if not h.grad_fn else h.sin(), x


def asks_if_there_is_a_function(h: Tensor, x: Tensor) -> Any:
    h = h @ W + x
    return h if h.grad_fn is None else h.sin(), x


def gathered_product(h: Tensor, x: Tensor) -> Any:
    return torch.zeros(4).index_add(0, ROWS, VALUES * h[COLUMNS]) + x, h


def counts_by_bincount(h: Tensor, x: Tensor) -> Any:
    counts = torch.bincount((x > 0).long(), minlength=2)
    return h + x, counts


def counts_by_index_add(h: Tensor, x: Tensor) -> Any:
    i = (x > 0).long()
    return h + x, torch.zeros(2, dtype=torch.long).index_add(0, i, torch.ones_like(i))


def asks_the_variance(h: Tensor, x: Tensor) -> Any:
    return h + x, torch.nn.functional.gaussian_nll_loss(h, x, x.exp())


def loss_written_out(h: Tensor, x: Tensor) -> Any:
    mean, y, var = h, x, x.exp()
    return h + x, 0.5 * (var.log() + (y - mean) ** 2 / var).mean()


def draws_by_a_generator(h: Tensor, x: Tensor) -> Any:
    return h + x + 0 * torch.rand(4, generator=GENERATOR), h


def forces_the_teacher(h: Tensor, x: Tensor) -> Any:
    return (h if random.random() < 0.5 else x) * 0 + x, h


def changes_the_default_dtype(h: Tensor, x: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    third = torch.ones(4) / 3
    torch.set_default_dtype(torch.float32)
    return h + x, third


def names_the_dtype(h: Tensor, x: Tensor) -> Any:
    return h + x, torch.ones(4, dtype=torch.float64) / 3


GENERATOR = torch.Generator()
(ROWS, COLUMNS), VALUES = SPARSE.coalesce().indices().clone(), SPARSE.coalesce().values().clone()
COUNTER = torch.tensor(0)

OWNER = torch.nn.Linear(4, 4)


def makes_a_parameter(h: Tensor, x: Tensor) -> Any:
    OWNER.bias = torch.nn.Parameter(torch.full((4,), 0.5))
    return h + x, h * OWNER.bias.detach()


def writes_to_a_parameter(h: Tensor, x: Tensor) -> Any:
    with torch.no_grad():
        OWNER.bias.copy_(torch.full((4,), 0.5))
    return h + x, h * OWNER.bias.detach().clone()


def copies_deeply(h: Tensor, x: Tensor) -> Any:
    return h + x, copy.deepcopy({"h": h})["h"]


def clones(h: Tensor, x: Tensor) -> Any:
    return h + x, h.detach().clone()


ADVICE: dict[str, tuple[Any, Any, str, list[Any]]] = {
    "branch": (branch, H, "torch.where", [no_branch]),
    "print": (prints, H, "Print after the scan", [lambda h, x: (h + x, h)]),
    "mask": (masked, H, "torch.where(mask, new, h)", [not_masked]),
    "part of a row": (
        part_of_a_row,
        (torch.zeros(6, 4), torch.tensor(1)),
        "torch.where(torch.arange(n) < t, new, old)",
        [whole_row],
    ),
    "item of a list": (item_of_a_list, COUNTER, "torch.stack(tensors)[i]", [item_of_a_stack]),
    "range": (repeated, COUNTER, "torch.where(k < n", [repeated_as_often_as_may_be]),
    "with a hook": (with_a_hook, H, "Leave the hook out", [no_hook]),
    "removed hook": (removes_its_hook, H, "Leave the hook out", [no_hook]),
    "gradient in place": (halves_in_place, H, "as g * 0.5", [halves_a_gradient]),
    "save_on_cpu": (saves_on_cpu, H, "around the scan", [no_hook]),
    "saved_tensors_hooks": (packs, H, "around the scan", [no_hook]),
    "default dtype": (changes_the_default_dtype, H, "dtype=x.dtype", [names_the_dtype]),
    "retain_grad": (retains_grad, H, "ys.retain_grad() after the scan", [no_hook]),
    "hook of a module": (hooks_a_module, H, "Register it before the scan", [hooked_module]),
    "backward hook": (
        hooks_a_modules_backward,
        H,
        "module(x).register_hook(f)",
        [hook_of_a_modules_result],
    ),
    "backward hook before": (
        module_with_a_backward_hook,
        H,
        "module(x).register_hook(f)",
        [hook_of_a_modules_result],
    ),
    "autograd.grad": (takes_a_gradient, H, "torch.func.grad", [takes_a_gradient_by_func]),
    "parameter": (makes_a_parameter, H, "p.copy_(new)", [writes_to_a_parameter]),
    "deepcopy": (copies_deeply, H, "tensor.detach().clone()", [clones]),
    "grad_fn": (asks_for_the_function, H, "h.grad_fn is None", [asks_if_there_is_a_function]),
    "sparse": (sparse_product, H, "to_dense()", [dense_product, gathered_product]),
    "bincount": (counts_by_bincount, H, "index_add(0, i, ones)", [counts_by_index_add]),
    "variance": (asks_the_variance, H, "Write it out", [loss_written_out]),
    "generator": (draws_by_a_generator, H, "Draw before the scan", [lambda h, x: (h + x, h)]),
    "random": (forces_the_teacher, H, "Draw before the scan", [lambda h, x: (x.clone(), h)]),
}


HOOKS = list(ADVICE)[list(ADVICE).index("with a hook") : list(ADVICE).index("sparse")]


@pytest.mark.torch_version
@pytest.mark.parametrize("name", ADVICE)
def test_a_reason_advises_what_is_captured(name: str) -> None:
    cell, init, advice, advised = ADVICE[name]
    with fallback("error"), pytest.raises(NotTraceableError) as refused:
        scan(cell, init, XS)
    assert advice in str(refused.value) and "test_reasons.py" in str(refused.value)
    assert "Dynamo" not in str(refused.value) or name not in HOOKS
    with fallback("allow"):
        expected = scan(cell, init, XS)
    for other in advised:
        is_captured(other, init)
        if name != "print":
            assert_same(scan(other, init, XS), expected)


@pytest.mark.torch_version
def test_compile_says_our_reason_first() -> None:
    run = torch.compile(lambda xs: scan(branch, H, xs), backend="eager")
    whole = torch.compile(lambda xs: scan(branch, H, xs), backend="eager", fullgraph=True)
    for program in (run, whole):
        with pytest.raises(Exception, match="scan: ") as refused:
            program(XS)
        first = str(refused.value).splitlines()[0]
        assert first.startswith("scan: combine_fn is not captured: "), first
        assert "test_reasons.py" in first and "if h.sum() > 0" in first
        assert "torch.where" in first


class Settings:
    """To assign an attribute is more than that."""

    def __init__(self, h: Tensor, n: int = 0) -> None:
        self.h, self.n = h, n

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value * 1)


@pytest.mark.torch_version
def test_an_object_in_an_attribute_names_the_line() -> None:
    def cell(c: Tensor, x: Tensor) -> Any:
        holder.memory = Settings(torch.tanh(holder.memory.h @ W + x), holder.memory.n + 1)
        return c, holder.memory.h

    holder = torch.nn.Module()
    holder.memory = Settings(H)  # type: ignore[assignment]
    with fallback("error"), pytest.raises(NotTraceableError) as refused:
        scan(cell, H, XS)
    assert "a Settings in attribute 'memory' of a Module" in str(refused.value)
    assert "test_reasons.py" in str(refused.value)


@pytest.mark.torch_version
@pytest.mark.parametrize("how", ["list", "attribute", "item", "tensor"])
def test_a_hook_that_notes_gradients(how: str) -> None:
    """It runs in the backward of a loop; what it would note is the gradient of zeros from xs."""
    holder = torch.nn.Module()
    holder.seen = torch.zeros(4)

    def note(g: Tensor) -> None:
        if how == "list":
            found.append(g)
        elif how == "attribute":
            holder.seen = holder.seen + g
        elif how == "item":
            items["g"] = items["g"] + g
        else:
            total.add_(g)

    def cell(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h @ W + x)
        h.register_hook(note)
        return h, h * 2

    def advised(h: Tensor, xs: Any) -> Any:
        x, zeros = xs
        h = torch.tanh(h @ W + x) + zeros
        return h, h * 2

    found: list[Tensor] = []
    items, total = {"g": torch.zeros(4)}, torch.zeros(4)
    with pytest.warns(UserWarning, match="add zeros to it that come from xs") as warned:
        scan(cell, H, XS)[1].square().sum().backward()
    assert "h.register_hook(note)" in str(warned[0].message)
    noted = {"list": sum(found), "attribute": holder.seen, "item": items["g"], "tensor": total}[how]
    zeros = torch.zeros(5, 4, requires_grad=True)
    with fallback("error"):
        scan(advised, H, (XS, zeros))[1].square().sum().backward()
    assert zeros.grad is not None
    torch.testing.assert_close(noted, zeros.grad.sum(0))


def test_a_hook_whose_changes_dynamo_comes_to_first() -> None:
    """It did, once in some runs of this file: which is first depends on addresses."""
    where = "<class 'torch._dynamo.variables.tensor.TensorVariable'>, at a.py:4: h.register_hook(f)"
    assert "add zeros to it that come from xs" in reason_of(AssertionError(where)).advice


# -- what is captured, since it is a constant ----------------------------------------------------


def _by_product(h: Tensor, x: Tensor) -> Any:
    return h + x, h[: int(np.prod((1, 2)))]


def _by_cumulated(h: Tensor, x: Tensor) -> Any:
    ends = np.cumsum([1, 2])
    return h + x / np.sqrt(h.shape[-1]), (h[: ends[0]], h[ends[0] : int(ends[-1])])


def _by_entries(h: Tensor, x: Tensor) -> Any:
    first, second = (np.arange(3) * 1 + 1).tolist()[:2]
    return h + x, [h[:first], h[:second], *(h[int(k) :] for k in np.array([1, 2]))]


def _by_condition(h: Tensor, x: Tensor) -> Any:
    weights = np.array([0.5, 0.25])
    if weights.sum() > 0.5 and np.argmax([1, 5, 2]) == 1:
        h = h * float(np.max(weights))
    return h + x, h


def _by_view_of_what_is_written(h: Tensor, x: Tensor) -> Any:
    entries = np.zeros(3)
    entries[1:][0] = 2
    return h + x * torch.from_numpy(entries).float()[1], h


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "cell",
    [_by_product, _by_cumulated, _by_entries, _by_condition, _by_view_of_what_is_written],
    ids=lambda cell: cell.__name__,
)
def test_what_numpy_makes_of_constants_is_one(cell: Any) -> None:
    is_captured(cell)


@pytest.mark.torch_version
@pytest.mark.parametrize("how", ["item", "operator", "view", "out", "torch"])
def test_what_is_written_to_is_no_constant(how: str) -> None:
    """Such a program is a loop, if a value of it is read; never a scan of the old value."""

    def cell(h: Tensor, x: Tensor) -> Any:
        entries = np.cumsum([1, 1])
        if how == "item":
            entries[0] = 3
        elif how == "operator":
            entries += 2
        elif how == "view":
            part = entries[:1]
            part[0] = 3
        elif how == "out":
            np.add(entries, 2, out=entries)
        else:
            torch.from_numpy(entries).add_(2)
        return h + x, h[: int(entries[0])]

    with fallback("allow"):
        _, ys = scan(cell, H, XS)
    assert ys.shape == (5, 3)


@pytest.mark.torch_version
def test_a_complex_view_of_a_leaf_is_captured() -> None:
    leaf = torch.ones(4, 2, requires_grad=True)
    z = torch.view_as_complex(leaf)
    is_captured(lambda h, x: (h * z + x, h), torch.zeros(4, dtype=torch.complex64))


@pytest.mark.torch_version
@pytest.mark.parametrize("how", ["method", "in place", "function"])
def test_the_derivative_of_a_filled_value(how: str) -> None:
    """Torch sums it over index.unique(), whose size a trace cannot know; one index is twice."""
    index = torch.tensor([1, 1, 3])

    def cell(h: Tensor, x: Tensor) -> Any:
        if how == "method":
            y = x.index_fill(-1, index, h.sum())
        elif how == "in place":
            y = x.clone()
            y.index_fill_(0, index, h.sum())
        else:
            y = torch.index_fill(x, 0, index, h.sum())
        return torch.tanh(h + y), y * h

    def gradients(steps: Any) -> Any:
        h, xs = H.double().requires_grad_(), XS.double().requires_grad_()
        last, ys = steps(h, xs)
        return torch.autograd.grad(last.sum() + (ys**2).sum(), (h, xs))

    expected = gradients(lambda h, xs: scan_loop(cell, h, xs, 5, False))
    with fallback("error"):
        assert_same(gradients(lambda h, xs: scan(cell, h, xs)), expected)
        assert_same(gradients(lambda h, xs: scan(cell, h, xs, compile=True)), expected)


@pytest.mark.torch_version
@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 refuses this backward")
def test_a_program_whose_backward_torch_compiles() -> None:
    """Compiled autograd takes part in each backward: in those of our traces it must not."""
    w = torch.eye(4).requires_grad_()

    def cell(h: Tensor, x: Tensor) -> Any:
        return torch.tanh(h @ w + x), h

    def train(xs: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        h, ys = scan(cell, H, xs)
        torch._dynamo.graph_break()
        (h.sum() + ys.sum()).backward()
        found, w.grad = w.grad, None
        return found

    expected = [train(xs) for xs in (XS, XS * 2, XS[:3])]
    with torch._dynamo.config.patch(compiled_autograd=True):
        run = torch.compile(train, backend="eager")
        assert_same([run(xs) for xs in (XS, XS * 2, XS[:3])], expected)


def test_a_dict_that_each_step_makes_longer() -> None:
    kept: dict[int, Tensor] = {}
    rows, count = torch.zeros(20, 4), {"n": 0}

    def cell(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h + x)
        kept[count["n"]] = h
        count["n"] += 1
        return h, h

    def advised(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h + x)
        rows[count["n"]] = h
        count["n"] += 1
        return h, h

    xs = torch.linspace(-1, 1, 80).reshape(20, 4)
    reason = "each step leaves something that the one before did not: item 8 of a dict"
    with pytest.warns(UserWarning, match=f"{reason}.* write to a row of a tensor"):
        carry, _ = scan(cell, H, xs)
    assert [*kept] == [*range(20)] and torch.equal(kept[19], carry)
    count["n"] = 0
    with fallback("error"):
        scan(advised, H, xs)
    torch.testing.assert_close(rows, torch.stack([*kept.values()]))


# -- forgotten in time ---------------------------------------------------------------------------


def _is_captured_now(cell: Any) -> None:
    with fallback("error"):
        scan(cell, H, XS)


@pytest.mark.torch_version
@pytest.mark.parametrize("kind", ["list", "dict"])
def test_a_flag_that_is_taken_back(kind: str) -> None:
    flags: Any = [True] if kind == "list" else {0: True}

    def cell(h: Tensor, x: Tensor) -> Any:
        if flags[0]:
            print(end="")
        return torch.tanh(h + x), h

    with fallback("allow"):
        scan(cell, H, XS)
    flags[0] = False
    _is_captured_now(cell)


@pytest.mark.torch_version
def test_inputs_of_another_kind() -> None:
    def cell(h: Tensor, x: Tensor) -> Any:
        if x.dim() and x.dtype == torch.float64:
            print(end="")
        return h + x, h

    with fallback("allow"):
        scan(cell, H.double(), XS.double())
    _is_captured_now(cell)


@pytest.mark.torch_version
def test_a_call_with_tangents() -> None:
    def cell(h: Tensor, x: Tensor) -> Any:
        return torch.tanh(h + x), h

    with fallback("allow"), forward_ad.dual_level():
        scan(cell, forward_ad.make_dual(H, torch.ones(4)), XS)
    _is_captured_now(cell)


@pytest.mark.torch_version
def test_a_call_under_inference_mode() -> None:
    def cell(h: Tensor, x: Tensor) -> Any:
        return torch.tanh(h + x), h

    with fallback("allow"), torch.inference_mode():
        torch.func.jvp(lambda h: scan(cell, h, XS)[0], (H,), (torch.ones(4),))
    _is_captured_now(cell)


def test_another_class_where_one_was() -> None:
    """A refusal is not that of the next class of this name, also if the first is gone, and this
    one has its address: what remembers the refusal tells them apart."""
    keys, addresses = set(), set()
    for _ in range(20):
        kind: Any = type("Cell", (), {})
        keys.add(callees_of(kind()))
        addresses.add(id(kind))
        del kind
        gc.collect()
    assert len(keys) == 20 > len(addresses)
