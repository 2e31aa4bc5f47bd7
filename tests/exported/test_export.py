"""torch.export of a scan: strict and not, any trip count, saved, loaded in another process."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import textwrap

import pytest
import torch
from cells import CELLS
from oracle import assert_same, gradients, loop, randn
from torch import nn
from transforms_in_a_body import STEPS

from torch_scan_hop import Binomial, NotTraceableError, fallback, scan
from torch_scan_hop._torch.captured_regions import running_regions

pytestmark = [pytest.mark.torch_version, pytest.mark.works("torch.export")]
SCAN = torch.ops.higher_order.scan


class RNN(nn.Module):
    def __init__(self, scan_=scan, reverse=False):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.scan_, self.reverse = scan_, reverse

    def forward(self, h, xs):
        def cell(h, x):
            h = torch.tanh(h @ self.w + x * self.scale)
            return h, {"h": h, "x": x}

        return self.scan_(cell, h, xs, reverse=self.reverse)


def inputs(T=5):
    return torch.randn(2, 3), torch.randn(T, 2, 3)


def expected(model, h, xs):
    model.scan_ = loop
    try:
        return model(h, xs)
    finally:
        model.scan_ = scan


def scan_nodes(program):
    return program.graph.find_nodes(op="call_function", target=SCAN)


class Hooked(nn.Module):
    def __init__(self, scan_):
        super().__init__()
        self.w, self.scan_ = nn.Parameter(torch.ones(3).double()), scan_

    def forward(self, h, xs):
        def cell(h, x):
            h = torch.tanh(x * self.w + (0 if h is None else h))
            h.register_hook(lambda gradient: gradient * 0.5)
            return h, h * 2

        return *self.scan_(cell, None, xs), *self.scan_(cell, h, xs)


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_has_no_hooks_as_that_of_a_loop(strict):
    given = randn(3).requires_grad_(), randn(5, 3)

    def run(scan_, strict):
        program = torch.export.export(Hooked(scan_), given, strict=strict).module()
        total = sum(value.pow(2).sum() for value in program(*given))
        return torch.autograd.grad(total, [given[0], *program.parameters()])

    assert_same(run(scan, strict), run(_written_out, False))


def _written_out(cell, h, xs):
    ys = []
    for x in xs:
        h, y = cell(h, x)
        ys.append(y)
    return h, torch.stack(ys)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_one_node_and_any_trip_count(strict, reverse):
    model = RNN(reverse=reverse)
    T = torch.export.Dim("T", min=2, max=100)
    program = torch.export.export(model, inputs(), dynamic_shapes=(None, {0: T}), strict=strict)
    assert len(scan_nodes(program)) == 1
    for steps in (3, 5, 17):
        h, xs = inputs(steps)
        assert_same(program.module()(h, xs), expected(model, h, xs), 1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_decompositions_keep_the_scan(strict):
    model = RNN()
    program = torch.export.export(model, inputs(), strict=strict).run_decompositions()
    assert len(scan_nodes(program)) == 1
    h, xs = inputs()
    assert_same(program.module()(h, xs), expected(model, h, xs), 1e-5)


def test_an_exported_program_trains():
    model = RNN()
    h, xs = inputs()
    module = torch.export.export(model, (h, xs), strict=False).module()
    module(h, xs)[1]["h"].sum().backward()
    got = dict(module.named_parameters())["w"].grad
    (want,) = torch.autograd.grad(expected(model, h, xs)[1]["h"].sum(), model.w)
    assert_same(got, want, 1e-5)


def test_an_exported_program_compiles():
    model = RNN()
    h, xs = inputs()
    module = torch.export.export(model, (h, xs), strict=False).module()
    compiled = torch.compile(module, backend="aot_eager")
    assert_same(compiled(h, xs), expected(model, h, xs), 1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_exports(cell):
    p = CELLS[cell].problem(torch.float64, T=4, B=2)

    class Program(nn.Module):
        def forward(self, init, xs):
            return scan(p.combine_fn, init, xs)

    with torch.no_grad():
        init, xs = torch.utils._pytree.tree_map(torch.Tensor.detach, (p.init, p.xs))
        for q in p.params.values():
            q.requires_grad_(False)
        program = torch.export.export(Program(), (init, xs), strict=False)
        assert_same(program.module()(init, xs), loop(p.combine_fn, init, xs))


LOAD = """
import sys, torch, torch_scan_hop
program = torch.export.load(sys.argv[1])
h, xs, want = torch.load(sys.argv[2])
torch.testing.assert_close(program.module()(h, xs), want)
assert len(program.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)) == 1
print("loaded")
"""


def test_saved_and_loaded_in_another_process(tmp_path):
    model = RNN()
    T = torch.export.Dim("T", min=2, max=100)
    program = torch.export.export(model, inputs(), dynamic_shapes=(None, {0: T}), strict=False)
    h, xs = inputs(9)
    with torch.no_grad():
        want = expected(model, h, xs)
    torch.export.save(program, tmp_path / "rnn.pt2")
    torch.save((h, xs, want), tmp_path / "data.pt")
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOAD), tmp_path / "rnn.pt2", tmp_path / "data.pt"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "loaded" in result.stdout, result.stderr[-3000:]


def test_a_body_exported_first_is_captured_in_eager_mode_later():
    # torch >= 2.13: torch.compile called during an export does nothing, also afterwards
    class Program(nn.Module):
        def forward(self, h, xs):
            return scan(lambda h, x: (torch.sin(h + x), h), h, xs)

    h, xs = inputs()
    torch.export.export(Program(), (h, xs), strict=False)
    assert Program()(h, xs)[1].shape == xs.shape  # a loop would warn, which is an error here


TRANSFORMED = {
    **{name: step for name, step in STEPS.items() if name != "hessian"},
    "grad_of_scan": lambda w, c, x: (
        c - torch.func.grad(lambda p: scan(lambda a, _: (a.sin() + p, None), p * w, c)[0].sum())(c)
    ),
}


def _transforms_and_modes():
    for name, step in TRANSFORMED.items():
        for strict in (False, True):
            # of a scan in the body: seconds
            marks = pytest.mark.slow if name == "grad_of_scan" and not strict else ()
            yield pytest.param(step, strict, id=f"{name}-{strict}", marks=marks)


@pytest.mark.parametrize(("step", "strict"), list(_transforms_and_modes()))
def test_transforms_in_a_body(step, strict):
    """An export wrote down the levels that they open, and the program computed something else."""

    class Program(nn.Module):
        def forward(self, w, h, xs):
            return scan(lambda c, x: (step(w, c, x), c * x), h, xs)

    torch.manual_seed(0)
    w, h, xs = (torch.randn(*shape, dtype=torch.float64) for shape in ((2,), (2,), (4, 2)))
    program = torch.export.export(Program(), (w, h, xs), strict=strict)

    def with_gradient(run):
        leaf = w.clone().requires_grad_()
        carry, ys = run(leaf)
        return carry, ys, torch.autograd.grad(carry.sum() + ys.sum(), leaf)

    wanted = with_gradient(lambda w: loop(lambda c, x: (step(w, c, x), c * x), h, xs))
    assert_same(with_gradient(lambda w: program.module()(w, h, xs)), wanted)
    assert_same(program.run_decompositions().module()(w, h, xs), wanted[:2])


def autocast_region(w):
    def step(h, x):
        with torch.autocast("cpu", torch.bfloat16):
            z = h @ w
        return torch.tanh(z.float() + x), z

    return step


def checkpointed_region(w):
    def step(h, x):
        h = torch.utils.checkpoint.checkpoint(
            lambda h, x: torch.tanh(h @ w + x), h, x, use_reentrant=False
        )
        return h, h

    return step


def autocast_in_a_checkpoint(w):
    inner = autocast_region(w)

    def step(h, x):
        return torch.utils.checkpoint.checkpoint(inner, h, x, use_reentrant=False)

    return step


@pytest.mark.parametrize("make", [autocast_region, checkpointed_region, autocast_in_a_checkpoint])
def test_regions_of_a_body(make):
    """A y has the dtype that autocast gives it, and nothing is left as Dynamo captured it."""
    step = make(torch.randn(3, 3))
    h, xs = inputs()

    class Model(nn.Module):
        def forward(self, h, xs):
            return scan(step, h, xs)

    program = torch.export.export(Model(), (h, xs))
    assert len(scan_nodes(program)) == 1
    for exported in (program, program.run_decompositions()):
        assert_same(exported.module()(h, xs), loop(step, h, xs), 1e-6)
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_in_a_region_leaves_autocast_off():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    region = graph.call_function(torch.amp._enter_autocast, ("cpu", torch.bfloat16, True, None))
    wrong = graph.call_function(torch.Tensor.view, (x, 7))
    graph.call_function(torch.amp._exit_autocast, (region,))
    graph.output(wrong)
    body = torch.fx.GraphModule({}, graph)
    with pytest.raises(RuntimeError, match="shape"):
        running_regions(body)(torch.randn(3))
    assert not torch.is_autocast_enabled("cpu")


def test_floats_that_have_varied():
    """Of one that varies, a capture reads a tensor; in a program for export it is a constant."""
    rate = [0.0]

    def step(h, x):
        h = h * rate[0] + x
        return h, h

    class Model(nn.Module):
        def forward(self, h, xs):
            return scan(step, h, xs)

    h, xs = inputs()
    for rate[0] in (0.5, 0.25, 0.125):
        scan(step, h, xs)
    for rate[0] in (0.75, 0.375):
        program = torch.export.export(Model(), (h, xs))
        assert next(n for n in program.graph.nodes if n.op == "call_function").target is SCAN
        assert_same(program.module()(h, xs), loop(step, h, xs), 1e-6)


def makes_constants(h, x):
    factors = torch.tensor([0.5, 0.25, 0.125], dtype=h.dtype)
    h = h * factors + x * h.new_tensor(2.0) + factors
    return h, h


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_program_with_constants_in_a_body_is_saved(strict, nested):
    class Model(torch.nn.Module):
        def forward(self, h, xs):
            if not nested:
                return scan(makes_constants, h, xs)
            return scan(lambda h, x: scan(makes_constants, h, x), h, torch.stack([xs, xs]))

    h, xs = torch.zeros(4, 3), torch.randn(5, 4, 3)
    T = torch.export.Dim("T", min=2, max=64)
    program = torch.export.export(Model(), (h, xs), dynamic_shapes=(None, {0: T}), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    xs = torch.randn(7, 4, 3)
    for run in (loaded.module(), loaded.run_decompositions().module()):
        assert_same(run(h, xs), Model()(h, xs))


SCHEDULES = [{"unroll": 2}, {"unroll": 3}, {"checkpoint": "sqrt"}, {"checkpoint": 3}]
SCHEDULES += [{"checkpoint": Binomial(2)}, {"checkpoint": 3, "unroll": 2}]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_any_trip_count_whatever_the_schedule(options, strict):
    """A split into blocks or segments holds for some trip counts only, which torch refuses."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(3, 3))

        def forward(self, h, xs, scan=scan, **options):
            def cell(h, x):
                h = torch.tanh(h @ self.w + x)
                return h, h

            return scan(cell, h, xs, **options)

    class Scheduled(Model):
        def forward(self, h, xs):
            return super().forward(h, xs, **options)

    model, h = Scheduled(), randn(2, 3)
    shapes = None, {0: torch.export.Dim("T", min=2, max=64)}
    program = torch.export.export(
        model, (h, randn(6, 2, 3)), dynamic_shapes=shapes, strict=strict
    ).module()
    for T in (2, 7, 13):
        xs = randn(T, 2, 3)
        actual, expected = program(h, xs), Model.forward(model, h, xs, loop)
        assert_same(actual, expected)
        grads = gradients(actual, list(program.parameters()))
        assert_same(grads, gradients(expected, [model.w]))


class Counting(torch.nn.Module):
    def __init__(self, assigns):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.assigns = assigns

    def forward(self, h, xs):
        def cell(h, x):
            if self.assigns:
                self.count = self.count + 1
            else:
                self.count += 1
            return torch.tanh(h + x * self.count), h

        return scan(cell, h, xs)


@pytest.mark.parametrize("strict", [False, True])
def test_a_body_that_adds_to_a_buffer_is_exported(strict):
    """Torch watches what is assigned to modules, by a hook that Dynamo cannot trace."""
    if strict and torch.__version__ < "2.10":
        pytest.skip("torch.export of 2.9 refuses it in a loop, too")
    model, h, xs = Counting(assigns=False), torch.zeros(4, 3), torch.randn(5, 4, 3)
    shapes = None, {0: torch.export.Dim("T", min=2, max=64)}
    program = torch.export.export(model, (h, xs), dynamic_shapes=shapes, strict=strict)
    reference = copy.deepcopy(model)
    exported = program.module()  # its buffer is the model's
    for T in (5, 7):
        xs = torch.randn(T, 4, 3)
        assert_same(exported(h, xs), reference(h, xs))
        assert exported.count == reference.count


class Normalising(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, h, xs):
        return scan(lambda h, x: (h, self.norm(x) + h), h, xs)


@pytest.mark.parametrize("strict", [False, True])
def test_running_statistics_are_exported(strict):
    """Autograd counts no writes to them; by way of ``.data``, torch.export takes no buffer."""
    model, args = Normalising(), (torch.zeros(4, 3), torch.randn(5, 4, 3))
    reference = copy.deepcopy(model)
    exported = torch.export.export(model, args, strict=strict).module()
    for _ in range(2):
        assert_same(exported(*args), loop_of_steps(reference, *args))
        ours = dict(exported.named_buffers())
        for name, theirs in reference.named_buffers():
            assert_same(ours[name], theirs)


def loop_of_steps(model, h, xs):
    return h, torch.stack([model.norm(x) + h for x in xs])


@pytest.fixture
def _no_hooks_stay():
    """What a failed export leaves on all modules stops torch.compile in later tests."""
    yield
    torch.nn.modules.module._global_buffer_registration_hooks.clear()


@pytest.mark.usefixtures("_no_hooks_stay")
def test_an_export_says_where_it_holds_every_step():
    args = torch.zeros(4, 3), torch.randn(5, 4, 3)
    grown: list = []

    class Growing(torch.nn.Module):
        def forward(self, h, xs):
            def cell(h, x):
                grown.append("a step")
                return torch.tanh(h + x), h

            return scan(cell, h, xs)

    with fallback("error"), pytest.raises(NotTraceableError, match="the length of a list"):
        torch.export.export(Growing(), args, strict=False)
    with pytest.warns(UserWarning, match="plain Python loop"):
        program = torch.export.export(Growing(), args, strict=False)
    assert_same(program.module()(*args), Growing()(*args))


@pytest.mark.parametrize("strict", [False, True])
def test_an_assigned_buffer_is_a_scan(strict):
    if strict and torch.__version__ < "2.10":
        pytest.skip("torch.export of 2.9 refuses it in a loop, too")
    args = torch.zeros(4, 3), torch.randn(5, 4, 3)
    with fallback("error"):
        program = torch.export.export(Counting(assigns=True), args, strict=strict)
    assert any("scan" in str(n.target) for n in program.graph.nodes)
    loaded = program.module()
    for module in (Counting(assigns=True),):
        for _ in range(2):
            assert_same(loaded(*args), module(*args))
        assert_same(loaded.count, module.count)


@pytest.mark.usefixtures("_no_hooks_stay")
def test_a_failed_export_leaves_later_captures_alone():
    """Torch 2.9 leaves its hook on all modules."""
    model = Counting(assigns=False)
    args = torch.zeros(4, 3), torch.randn(5, 4, 3)
    with pytest.raises(ZeroDivisionError):
        torch.export.export(Fails(), args, strict=False)
    model(*args)
    assert model.count == 5


class Fails(torch.nn.Module):
    def forward(self, h, xs):
        return 1 / 0
