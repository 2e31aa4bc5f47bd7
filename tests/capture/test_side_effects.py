"""A body with side effects that no graph can hold runs as a loop, or is refused: never
silently without them."""

from __future__ import annotations

import functools
import gc
import weakref

import numpy as np
import pytest
import torch
from oracle import assert_same, loop, written_loop
from torch._dynamo.variables import ConstantVariable, ListVariable
from torch._dynamo.variables.lists import BaseListVariable

from torch_scan_hop import fallback, scan
from torch_scan_hop._torch.dynamo.deques import _deques_are_rotated
from torch_scan_hop._torch.dynamo.side_effects import _Watch
from torch_scan_hop._torch.dynamo.tables import methods_that_change

pytestmark = pytest.mark.torch_version


class ReassignedBuffer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, c, x):
        self.mean = 0.9 * self.mean + x
        c = c + self.mean
        return c, c


def by_hand(xs):
    module, c = ReassignedBuffer(), torch.zeros(3)
    for x in xs:
        c, _ = module(c, x)
    return c, module.mean


@pytest.mark.parametrize("compiled", [False, True])
def test_a_reassigned_buffer_is_carried(compiled):
    module, xs = ReassignedBuffer(), torch.ones(4, 3)
    run = torch.compile(scan, backend="eager", fullgraph=True) if compiled else scan
    with fallback("error"):
        carry, _ = run(module, torch.zeros(3), xs)
    expected, mean = by_hand(xs)
    torch.testing.assert_close(carry, expected)
    torch.testing.assert_close(module.mean, mean)


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_a_reassigned_buffer_under_functional_call_is_not_lost():
    def cell_and_buffers():
        module, buffers = ReassignedBuffer(), {"mean": torch.zeros(3)}
        return lambda c, x: torch.func.functional_call(module, buffers, (c, x)), buffers

    cell, buffers = cell_and_buffers()
    carry, _ = scan(cell, torch.zeros(3), torch.ones(4, 3))
    cell, expected = cell_and_buffers()
    c = torch.zeros(3)
    for x in torch.ones(4, 3):
        c, _ = cell(c, x)
    torch.testing.assert_close(carry, c)
    torch.testing.assert_close(buffers, expected)


def test_an_appended_list_runs_as_a_loop():
    seen = []

    def cell(c, x):
        seen.append((x.shape, x))
        return c + x, None

    with pytest.warns(UserWarning, match="ran as a plain Python loop"):
        scan(cell, torch.zeros(3), torch.ones(4, 3))
    assert [(type(shape), [*x]) for shape, x in seen] == [(torch.Size, [1] * 3)] * 4


def test_compiled_side_effects_are_refused():
    seen = []

    def cell(c, x):
        seen.append(x.shape)
        return c + x, None

    run = torch.compile(lambda xs: scan(cell, torch.zeros(3), xs), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="changes the length of a list"):
        run(torch.ones(4, 3))


def masked(h, x):
    h = h.clone()
    h[x > 0] = x[x > 0].cumsum(0)
    return h, h


@pytest.mark.parametrize("with_grad", [False, True])
def test_a_read_by_a_mask_names_its_line_and_what_to_write(with_grad):
    xs = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_(with_grad)
    fix = r"test_side_effects.py:\d+: h\[x > 0\] = .*cumsum\(0\)\. Rows .* torch\.where"
    with pytest.warns(UserWarning, match=fix):
        carry, _ = scan(masked, torch.zeros(3), xs)
    torch.testing.assert_close(carry, xs[-1].cumsum(0).where(xs[-1] > 0, carry))
    with pytest.raises(Exception, match=r"test_side_effects.py:?.*\n?.*h\[x > 0\] = "):
        torch.compile(lambda xs: scan(masked, torch.zeros(3), xs), fullgraph=True)(xs)


@pytest.mark.parametrize("compiled", [False, True])
def test_random_numbers_of_numpy_are_numpys(compiled):
    """Dynamo draws them from torch's generator, which numpy's seed says nothing about."""

    def cell(c, x):
        noise = torch.from_numpy(np.random.rand(3)).to(x.dtype)
        return c + noise * x, noise

    np.random.seed(0)
    expected = torch.from_numpy(np.random.rand(4, 3)).float()
    np.random.seed(0)
    with pytest.warns(UserWarning, match="ran as a plain Python loop"):
        carry, noise = scan(cell, torch.zeros(3), torch.ones(4, 3), compile=compiled)
    torch.testing.assert_close(noise, expected)
    torch.testing.assert_close(carry, expected.sum(0))


class CountsInPlace(torch.nn.Module):
    def __init__(self, dtype) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0, dtype=dtype))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, c, x):
        self.steps += 1
        self.total += x
        return torch.tanh(c + self.total), self.steps * 2


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_augmented_assignment_to_a_buffer_assigns_what_was_there(dtype, backend):
    """It runs as one operator, and the program after it finds the buffers changed."""
    torch._dynamo.reset()
    module, expected = CountsInPlace(dtype), CountsInPlace(dtype)
    xs = torch.linspace(0, 1, 12).reshape(4, 3)

    def program(run, module):
        carry, ys = run(module, torch.zeros(3), xs)
        return carry, ys, module.steps * 3, module.total + 1

    run = functools.partial(program, scan, module)
    if backend is not None:
        run = torch.compile(run, backend=backend, fullgraph=True)
    with fallback("error"):
        for _ in range(2):
            assert_same(run(), program(loop, expected), 1e-5)
            assert_same(dict(module.named_buffers()), dict(expected.named_buffers()), 1e-5)


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("run", ["eager", "compile=True", "aot_eager"])
@pytest.mark.filterwarnings("error:torch_scan_hop")
def test_a_parameter_may_be_changed_without_gradients(run, is_leaf):
    """As by an optimiser's step in the body: later steps read it, and gradients go past."""

    def results(scan):
        weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
        changed = weight if is_leaf else weight * 2

        def cell(h, x):
            with torch.no_grad():
                changed.add_(x)
            return 0.5 * h + changed, h

        h, ys = scan(cell, torch.zeros(3, dtype=torch.float64), xs)
        (gradient,) = torch.autograd.grad(h.sum() + ys.sum(), weight)
        return h, ys, gradient, changed

    xs = torch.randn(4, 3, dtype=torch.float64)
    ours = functools.partial(scan, compile=run == "compile=True")
    if run == "aot_eager":
        ours = lambda *args: torch.compile(lambda: scan(*args), backend=run, fullgraph=True)()  # noqa: E731
    assert_same(results(ours), results(loop))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_number_of_numpy_is_read(compiled):
    """It is a tensor to Dynamo, whose value may be another one at the next call."""
    factor = np.float64(0.5)

    def cell(h, x):
        return h * float(factor) + x, None

    def run(*args):
        return scan(cell, *args)

    run = torch.compile(run, backend="eager", fullgraph=True) if compiled else run
    h, xs = torch.zeros(3), torch.ones(4, 3)
    for factor in (np.float64(0.5), np.float64(0.25)):  # noqa: B007
        with fallback("error"):
            assert_same(run(h, xs), loop(cell, h, xs))


class Absent:
    """Where a step looks for what no step has left there."""

    def attribute(self, x):
        try:
            h = self.h
        except AttributeError:
            h = torch.zeros_like(x)
        self.h = h + x
        return h

    def by_name(self, x):
        try:
            h = getattr(self, "h")  # noqa: B009
        except AttributeError:
            h = torch.zeros_like(x)
        self.h = h + x
        return h

    def own_dict(self, x):
        h = self.__dict__.get("h", torch.zeros_like(x))
        self.__dict__["h"] = h + x
        return h

    def only_read(self, x):
        try:
            return x * self.h
        except AttributeError:
            return x

    def global_variable(self, x):
        global total
        try:
            h = total
        except NameError:
            h = torch.zeros_like(x)
        total = h + x
        return h


@pytest.mark.parametrize("how", ["attribute", "by_name", "own_dict", "only_read"])
@pytest.mark.parametrize("kind", [Absent, type("Module", (Absent, torch.nn.Module), {})])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_attribute_that_was_absent_is_found_later(kind, how, compiled):
    def results(scan):
        state = kind()
        for _ in range(2):
            yield scan(lambda c, x: (c, getattr(state, how)(x)), None, torch.ones(3, 2))[1]
        state.h = torch.full((2,), 7.0)
        yield scan(lambda c, x: (c, getattr(state, how)(x)), None, torch.ones(3, 2))[1]

    torch._dynamo.reset()
    run = torch.compile(scan, backend="eager", fullgraph=True) if compiled else scan
    with fallback("error"):
        assert_same(list(results(run)), list(results(loop)))


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_a_global_variable_that_was_absent_is_found_by_the_next_step():
    def result(scan):
        globals().pop("total", None)
        return scan(lambda c, x: (c, Absent().global_variable(x)), None, torch.ones(3, 2))[1]

    assert_same(result(scan), result(loop))


@pytest.mark.parametrize("compiled", [False, True])
def test_new_data_of_a_tensor_is_refused(compiled):
    """``tensor.data = value`` is no write to the memory that the tensor has."""
    module, xs = torch.nn.Linear(2, 2), torch.ones(3, 2)

    def cell(h, x):
        module.bias.data = module.bias.data * 0.5 + x
        return h + module.bias, None

    run = torch.compile(scan, backend="eager", fullgraph=True) if compiled else scan
    with (
        fallback("error"),
        pytest.raises(Exception, match=r"data of a tensor.*side_effects.*copy_"),
    ):
        run(cell, torch.zeros(2), xs)


def test_a_tensor_may_be_the_key_of_state():
    """As in the state of an optimiser."""

    def results(scan):
        weight, state = torch.ones(2), {}

        def cell(h, x):
            buffer = state.get(weight)
            state[weight] = x if buffer is None else 0.9 * buffer + x
            weight.sub_(0.1 * state[weight])
            return h + weight, None

        carries = [scan(cell, torch.zeros(2), torch.ones(3, 2))[0] for _ in range(2)]
        return carries, weight, state[weight]

    with fallback("error"):
        assert_same(results(scan), results(loop))


def test_a_change_of_shared_memory_is_refused_by_its_line():
    buffer = torch.zeros(2, 3)
    row = buffer[0]

    def cell(h, x):
        mine = h * 2
        mine += 1
        buffer.add_(x)  # here
        return h + row, mine

    with fallback("error"), pytest.raises(Exception, match=r"in place.*add_\(x\)  # here\. Give"):
        scan(cell, torch.zeros(3), torch.ones(4, 3))


def test_what_a_list_held_is_not_taken_for_that_of_another_at_its_address():
    """A list that a step makes and drops, and one of the program's that it meets afterwards."""
    watch, dropped = _Watch(), ListVariable([ConstantVariable.create(1)])
    watch.may_change(dropped)
    found = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert found() is not None


@pytest.mark.parametrize("compiled", [False, True])
def test_state_beside_a_cond(compiled):
    """Dynamo's trace of a branch leaves other side effects behind than there were before."""

    def results(run):
        state = torch.nn.Module()
        state.w, state.d = torch.ones(()), 1.0

        def cell(h, x):
            state.w = state.w * 0.9
            state.d *= 0.5
            d = state.d
            y = torch.cond(x > 0, lambda h: h * state.w, lambda h: h - state.w, (h * d,))
            state.w = state.w + y.detach().mean()
            return h + 1, y

        found = [run(cell, torch.ones(2), torch.tensor([1.0, -1.0, 1.0, 1.0])) for _ in range(2)]
        return found, state.w, state.d

    run = torch.compile(scan, backend="aot_eager", fullgraph=True) if compiled else scan
    with fallback("error"):
        found = results(run)
    torch.testing.assert_close(found, results(loop))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_attribute_that_a_step_leaves_and_deletes_is_no_state(compiled):
    class Cell:
        def __init__(self):
            self.h = torch.zeros(3)

        def __call__(self, c, x):
            self.temporary = x * 2
            self.h = self.h * 0.5 + self.temporary
            del self.temporary
            return c + self.h, self.h

    run = torch.compile(scan, backend="eager", fullgraph=True) if compiled else scan
    cell, other = Cell(), Cell()
    for _ in range(2):
        with fallback("error"):
            found = run(cell, torch.zeros(3), torch.ones(4, 3))
        assert_same(found, loop(other, torch.zeros(3), torch.ones(4, 3)))
        assert [*vars(cell)] == ["h"] and torch.equal(cell.h, other.h)


class CountsOfWrites(torch.nn.Module):
    """Running statistics, and an average by way of ``data``: autograd counts writes to neither."""

    def __init__(self, momentum):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3, momentum=momentum).double()
        self.average = torch.rand(3, dtype=torch.float64)
        self.h = 0.0

    def forward(self, x):
        self.average.data.lerp_(x.detach().mean(0), 0.1)
        self.h = torch.tanh(self.norm(x) + self.h)
        return self.h


@pytest.mark.parametrize(
    "before, momentum", [("a first step", 0.1), ("a call", 0.1), ("a call", None)]
)
def test_writes_that_autograd_does_not_count(before, momentum):
    """What reads running statistics before a scan writes them has its derivative after it."""

    def outcome(run):
        torch.manual_seed(0)
        module, xs = CountsOfWrites(momentum), torch.randn(9, 4, 3, dtype=torch.float64)
        total = 0
        if before == "a call":
            module.h = torch.zeros(4, 3, dtype=torch.float64)
            total = module(xs[0]).sum() + (module.average * module.norm.weight).sum()
        _, ys = run(lambda _, x: (None, module(x)), None, xs)
        versions = [b._version for b in (module.norm.running_var, module.average)]
        (total + ys.square().sum()).backward()
        return [ys, *module.buffers(), *(p.grad for p in module.parameters())], versions

    with fallback("error"):
        found, versions = outcome(scan)
    expected, versions_after_the_loop = outcome(written_loop)
    assert_same(found, expected)
    assert versions == versions_after_the_loop


class CopiesWhatItReads(torch.nn.BatchNorm1d):
    """torch's own derivative reads statistics that a later call has written."""

    def forward(self, x):
        if self.training:
            return super().forward(x)
        statistics = self.running_mean.clone(), self.running_var.clone()
        return torch.nn.functional.batch_norm(x, *statistics, self.weight, self.bias)


@pytest.mark.parametrize("trip_count", [1, 2, 9])
@pytest.mark.parametrize("is_read_first", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_that_a_step_reads_and_writes(trip_count, is_read_first, momentum):
    """The derivative of a norm that reads statistics was that by those which another has written."""

    def outcome(kind, run):
        torch.manual_seed(0)
        norm = kind(3, momentum=momentum).double().train(is_read_first)
        xs = torch.randn(trip_count, 4, 3, dtype=torch.float64, requires_grad=True)

        def read(h):
            norm.eval()
            return norm(h)

        def write(h):
            norm.train()
            return norm(h)

        def body(h, x):
            h = torch.tanh(x + h)
            h = write(read(h) + 2 * x) if is_read_first else read(h) + 0 * write(h + 2 * x)
            h = h if is_read_first else read(h)
            return h, h

        _, ys = run(body, torch.zeros(4, 3, dtype=torch.float64), xs)
        ys.sin().sum().backward()
        return [ys.detach(), norm.running_mean, xs.grad, norm.weight.grad, norm.bias.grad]

    assert_same(outcome(torch.nn.BatchNorm1d, scan), outcome(CopiesWhatItReads, written_loop))


def test_methods_that_change_are_found_while_one_is_wrapped():
    """They are looked for once, which may be within a capture that wraps one of a deque."""
    find = methods_that_change.__wrapped__
    with _deques_are_rotated():
        within = find(BaseListVariable)
    assert within == find(BaseListVariable) and within
