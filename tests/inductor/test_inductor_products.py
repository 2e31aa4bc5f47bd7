"""Products in and around counted loops on the CPU: packed weights, and oneDNN's."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from cells import Draw
from oracle import assert_same, gradients, loop
from torch._inductor.utils import run_and_get_code

from torch_scan_hop import scan
from torch_scan_hop._torch import onednn
from torch_scan_hop.inductor.cpu import libraries, panels
from torch_scan_hop.rewrites import using_options

pytestmark = pytest.mark.torch_version

#: of a kernel of ours: rows and vectors at once
PANELS = re.compile(r"_product<(\d), (\d)>\(")


def run_and_count(fn, *args):
    """What ``fn`` gives, and of each graph: packed products, those of oneDNN, those of MKL."""
    with inductor_config.patch(force_disable_caches=True):
        result, codes = run_and_get_code(fn, *args)
    return result, [
        (len(PANELS.findall(code)), *(len(re.findall(call, code)) for call in CALLS))
        for code in codes
    ]


# in the Python wrapper and in the C++ one
CALLS = (
    r"ops\.mkldnn\._linear_pointwise\.default\(|aoti_torch_cpu__linear_pointwise\(",
    r"extern_kernels\.(?:add)?mm\(|aoti_torch_cpu_(?:add)?mm_out\(",
)


class Recurrent:
    """A product and a norm, so that it is no kernel of rows."""

    def __init__(self, B=8, D=240, H=272, T=17):
        draw = Draw(torch.float32)
        self.w, self.u = draw.normal(D, H, scale=0.06), draw.normal(H, H, scale=0.06)
        self.h, self.xs = draw.normal(B, H), draw.normal(T, B, D)
        self.given = [self.h, self.xs, self.w, self.u]
        for leaf in self.given:
            leaf.requires_grad_()

    def product(self, h, u):
        return h @ u

    def run(self, scan_, h, xs, w, u, **options):
        def cell(h, x):
            h = torch.tanh(F.layer_norm(self.product(h, u) + x @ w, h.shape[-1:]))
            return h, h * 2

        return scan_(cell, h, xs, **options)

    def expected(self, **options):
        with torch.no_grad():
            doubles = [leaf.double() for leaf in self.given]
        doubles = [leaf.requires_grad_() for leaf in doubles]
        results = self.run(loop, *doubles, **options)
        return results, gradients(results, doubles)


class TransposedWeight(Recurrent):
    def product(self, h, u):
        return F.linear(h, u)


class PartOfAWeight(Recurrent):
    """Its columns lie apart, and end within a vector."""

    def product(self, h, u):
        return F.pad(h[:, 1:] @ u[1:, 2:253], (0, 21))


class TwoProducts(Recurrent):
    def product(self, h, u):
        return h @ u - (h * h) @ u + 0.1 * h @ u.t()


def assert_close(got, expected, tolerance):
    assert_same(got, expected, tolerance, dtype=False)


class TransposedRows(Recurrent):
    """What is multiplied is a buffer read across."""

    def __init__(self):
        super().__init__(B=48)

    def product(self, h, u):
        return (h @ (h * 0.01).t()).t() @ u[:48]


def check(problem, results, grads, **options):
    expected, expected_grads = problem.expected(**options)
    assert_close(results, expected, 2e-4)
    assert_close(grads, expected_grads, 2e-3)


def run_compiled(problem, reverse=False, **how):
    compiled = torch.compile(
        lambda *given: problem.run(scan, *given, reverse=reverse), fullgraph=True, **how
    )
    got, forward = run_and_count(compiled, *problem.given)
    grads, backward = run_and_count(gradients, got, problem.given)
    check(problem, got, grads, reverse=reverse)
    return forward, backward


def run_forward(problem, given=None):
    """The results, and how many products of each kind the one graph has."""
    with torch.no_grad():
        got, (count,) = run_and_count(
            torch.compile(lambda *given: problem.run(scan, *given), fullgraph=True),
            *(given or problem.given),
        )
    return got, count


@pytest.mark.parametrize(
    ("problem", "reverse", "cpp_wrapper", "n_products"),
    [
        (Recurrent, False, False, 1),
        (TransposedWeight, True, True, 1),
        (PartOfAWeight, False, False, 1),
        (TransposedRows, False, False, 1),
        pytest.param(TwoProducts, True, False, 3, marks=pytest.mark.slow),
    ],
)
def test_weights_in_a_loop_are_packed(problem, reverse, cpp_wrapper, n_products):
    problem = problem()
    with using_options(onednn=False):
        ((forward, _, _),), ((backward, _, _),) = run_compiled(
            problem, reverse, options={"cpp_wrapper": cpp_wrapper}
        )
    assert forward == n_products
    # torch has the gradient of transposed rows made by a weight from the left
    assert (backward >= 1) == (type(problem) is not TransposedRows)


@pytest.mark.parametrize(
    ("B", "threads"),
    [
        (1, 2),
        (3, 1),
        (21, 2),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(21, 1, marks=pytest.mark.slow),
    ],
)
def test_rows_and_threads(B, threads):
    """More rows than a call takes at once, and fewer."""
    problem = Recurrent(B, D=16, H=720 if B == 1 else 416)
    with using_options(onednn=False), inductor_config.patch({"cpp.threads": threads}):
        got, (packed, _, _) = run_forward(problem)
    assert packed == 1
    assert_close(got, problem.expected()[0], 2e-4)


def test_any_batch_and_trip_count():
    problem = Recurrent()
    compiled = torch.compile(lambda *given: problem.run(scan, *given), fullgraph=True)

    def run_all():
        for B, T in ((8, 17), (5, 3), (11, 40), (2, 21)):
            made = Recurrent(B, T=T)
            problem.given = [made.h, made.xs, problem.w, problem.u]
            torch._dynamo.mark_dynamic(made.h, 0)
            for dim in (0, 1):
                torch._dynamo.mark_dynamic(made.xs, dim)
            got = compiled(*problem.given)
            check(problem, got, gradients(got, problem.given))

    with using_options(onednn=False):
        _, counts = run_and_count(run_all)
    assert [packed for packed, _, _ in counts] == [1, 1]


def test_weights_stay_as_they_are_for_a_few_steps():
    problem = Recurrent(T=9)
    with using_options(onednn=False):
        forward, backward = run_compiled(problem)
    assert [n for n, _, _ in forward + backward] == [0, 0]


def test_weights_stay_as_they_are_for_narrow_vectors(monkeypatch):
    monkeypatch.setattr(panels, "vector_lanes", lambda: 4)
    problem = Recurrent()
    with using_options(onednn=False):
        forward, backward = run_compiled(problem)
    assert [n for n, _, _ in forward + backward] == [0, 0]


@pytest.mark.parametrize("changes", [{"hoist_invariant": False}, {"memory_gate": 0.9}])
def test_weights_stay_as_they_are_where_the_packing_would_stay_in_the_loop(changes):
    problem = Recurrent(D=16)
    with using_options(onednn=False, **changes):
        got, (packed, _, _) = run_forward(problem)
    assert packed == 0
    assert_close(got, problem.expected()[0], 2e-4)


@pytest.mark.parametrize("beats_mkl", [False, True])
def test_many_rows_are_packed_where_mkl_is_slow(beats_mkl, monkeypatch):
    monkeypatch.setattr(panels, "onednn_is_faster", lambda sizes: beats_mkl)
    problem = Recurrent(B=65, D=16, H=96)
    with using_options(onednn=False):
        got, (packed, _, _) = run_forward(problem)
    assert packed == beats_mkl
    assert_close(got, problem.expected()[0], 2e-4)


def test_the_weights_of_a_scan_in_a_scan_are_packed_once():
    problem = Recurrent(T=16)

    def outer(scan_, h, xs, w, u):
        return scan_(lambda h, x: problem.run(scan_, h, x, w, u), h, xs)

    h, xs = problem.h, torch.stack([problem.xs, -problem.xs]).detach()
    given = [h, xs, problem.w, problem.u]
    with using_options(onednn=False), torch.no_grad():
        got, codes = run_and_get_code(
            torch.compile(lambda *given: outer(scan, *given), fullgraph=True), *given
        )
        assert_close(got, outer(loop, *(leaf.double() for leaf in given)), 2e-4)
    lines = codes[0].split("def call(")[1].splitlines()
    loops = [k for k, line in enumerate(lines) if line.strip().startswith("for u")]
    # a panel of 16 or 32 columns for each row of the weight
    packing = next(k for k, line in enumerate(lines) if re.search(r"\(\d+, 272, (16|32)\)", line))
    assert packing < loops[0]


needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@needs_onednn
@pytest.mark.parametrize(
    ("problem", "cpp_wrapper"),
    [
        (Recurrent, True),
        (TransposedWeight, False),
        pytest.param(Recurrent, False, marks=pytest.mark.slow),
        pytest.param(TransposedWeight, True, marks=pytest.mark.slow),
    ],
)
def test_large_products_of_a_scan_are_onednns_where_that_is_faster(problem, cpp_wrapper):
    problem = problem(B=16)
    with using_options(onednn=True):
        (forward,), (backward,) = run_compiled(problem, options={"cpp_wrapper": cpp_wrapper})
    # x @ w of all steps; the gradients of x, w and u
    assert forward == (1, 1, 0)
    assert backward == (1, 3, 0)


@needs_onednn
def test_weights_that_change_are_onednns_too():
    draw = Draw(torch.float32)
    h, ws = draw.normal(128, 200), draw.normal(5, 200, 200, scale=0.07).requires_grad_()

    def run(scan_, h, ws):
        return scan_(lambda h, w: (torch.tanh(h @ w), None), h, ws)

    with using_options(onednn=True):
        got, (forward,) = run_and_count(
            torch.compile(lambda h, ws: run(scan, h, ws), fullgraph=True), h, ws
        )
        grads, (backward,) = run_and_count(gradients, got, [ws])
    expected = run(loop, h.double(), ws.double())
    assert_close(got, expected, 2e-4)
    assert_close(grads, gradients(run(loop, h, ws), [ws]), 2e-4)
    # that of the weights is a batch of products
    assert forward == backward == (0, 1, 0)


@needs_onednn
def test_products_outside_of_scans_are_torchs():
    problem = Recurrent(B=16, T=17)

    def run(h, xs, w, u):
        before = torch.relu(xs.flatten(0, 1) @ w)
        return problem.run(scan, h, xs, w, u), before @ u

    with using_options(onednn=True), torch.no_grad():
        _, ((packed, fast, plain),) = run_and_count(
            torch.compile(run, fullgraph=True), *problem.given
        )
    assert (packed, fast, plain) == (1, 1, 2)


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_product_of_other_numbers_is_onednns(dtype):
    """Nor is it packed."""
    problem = Recurrent(B=16)
    given = [leaf.detach().to(dtype) for leaf in problem.given]
    with using_options(onednn=True):
        got, (packed, fast, plain) = run_forward(problem, given)
    assert (packed, fast) == (0, 0) and plain >= 2
    assert_same(got, problem.run(loop, *given), 0.1 if dtype is torch.bfloat16 else 1e-9)


#: of a weight of 80 rows and 96 columns: what it is part of, and how
PARTS = {
    "rows": ((80, 96), lambda w: w),
    "columns": ((96, 80), lambda w: w.t()),
    "an offset": ((80 * 96 + 1,), lambda w: w[1:].view(80, 96)),
    "columns of a wider one": ((80, 288), lambda w: w.chunk(3, 1)[1]),
    "every second row": ((160, 96), lambda w: w[::2]),
    "across, of a wider one": ((96, 160), lambda w: w[:, :80].t()),
    "a part of a complex one": ((80, 96, 2), lambda w: torch.view_as_complex(w).imag),
    "the same across": ((96, 80, 2), lambda w: torch.view_as_complex(w).real.t()),
    "one column for all": ((80, 1), lambda w: w.expand(80, 96)),
}


@needs_onednn
@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_onednn_is_given_dense_weights_only(cpp_wrapper, monkeypatch):
    """For others it has a reference kernel, which is hundreds of times slower."""
    draw = Draw(torch.float32)
    h, xs = draw.normal(8, 80), draw.normal(40, 8, 80)
    weights = [draw.normal(*shape, scale=0.1) for shape, _ in PARTS.values()]

    def run(scan_, h, xs, *weights):
        parts = [part(w) for (_, part), w in zip(PARTS.values(), weights, strict=True)]
        return scan_(lambda h, x: (h * 0.9 + x, [h @ w for w in parts]), h, xs)

    given = [h, xs, *weights]
    compiled = torch.compile(
        lambda *given: run(scan, *given), fullgraph=True, options={"cpp_wrapper": cpp_wrapper}
    )
    with using_options(onednn=True, blocks=False), torch.no_grad():
        got, ((_, fast, plain),) = run_and_count(compiled, *given)
    # all steps at once, each
    assert (fast, plain) == (len(PARTS), 0)
    assert_close(got, run(loop, *(leaf.double() for leaf in given)), 2e-4)
    if not cpp_wrapper:
        weights = []
        operator = torch.ops.mkldnn._linear_pointwise
        called = operator.default
        monkeypatch.setattr(
            operator, "default", lambda x, w, *rest: (weights.append(w), called(x, w, *rest))[1]
        )
        with torch.no_grad():
            assert_same(compiled(*given), got)
        assert len(weights) == len(PARTS)
        assert all(w.is_contiguous() or w.t().is_contiguous() for w in weights)


@needs_onednn
@pytest.mark.parametrize("part", PARTS)
def test_a_product_by_onednn_of_any_layout(part):
    draw = Draw(torch.float32)
    shape, view = PARTS[part]
    left, right = draw.normal(80, 5).t(), view(draw.normal(*shape))
    assert_close(onednn.product(left, right), left.double() @ right.double(), 1e-5)


@needs_onednn
@pytest.mark.parametrize("chosen", [None, True, False])
@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_the_faster_library_is_chosen_by_layout_or_by_hand(chosen, ratio, monkeypatch, tmp_path):
    """What is measured for some layouts decides for those."""
    monkeypatch.setattr(libraries, "compilers_folder", lambda: str(tmp_path))
    asked = []

    def measured(left, right):
        layouts = libraries.layout_of(left), libraries.layout_of(right)
        asked.append(layouts)
        return (ratio if layouts == ("rows", "rows apart") else 1.0) * 1e-6, 1e-6

    monkeypatch.setattr(libraries, "_best_seconds", measured)
    draw = Draw(torch.float32)
    h, xs, w = draw.normal(8, 80), draw.normal(40, 8, 80), draw.normal(80, 288)

    def run(h, xs, w):
        a, b = w[:, :96], w[:, 96:192] * 2
        return scan(lambda h, x: (h * 0.9 + x, (h @ a, h @ b)), h, xs)

    with using_options(onednn=chosen), torch.no_grad():
        _, ((_, fast, plain),) = run_and_count(torch.compile(run, fullgraph=True), h, xs, w)
    by_measure = 1 if ratio < 1 else 0
    assert fast == {None: by_measure, True: 2, False: 0}[chosen]
    assert plain == 2 - fast
    assert asked == ([("rows", "rows apart"), ("rows", "rows")] if chosen is None else [])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "step",
    [
        lambda c, x, w: torch.add(c, c @ w, alpha=-0.1),
        lambda c, x, w: c.clone().add_(x.t() @ x, alpha=-0.1).tanh(),
        lambda c, x, w: torch.sub(x.sum(), c @ w, alpha=2).sin(),
    ],
)
def test_a_scaled_product_is_added_scaled(step, compiled):
    """Inductor's addmm forgets alpha on torch 2.9 to 2.13."""
    w = (torch.randn(3, 3) / 3).requires_grad_()

    def fn(run):
        return lambda c, xs: run(lambda c, x: (step(c, x, w), c), c, xs)

    given = torch.randn(3, 3, requires_grad=True), torch.randn(3, 4, 3, requires_grad=True)
    expected = fn(loop)(*given)
    ours = functools.partial(scan, compile=not compiled)
    run = torch.compile(fn(scan), fullgraph=True) if compiled else fn(ours)
    got = run(*given)
    assert_same(got, expected, 1e-5)
    assert_same(gradients(got, [*given, w]), gradients(expected, [*given, w]), 1e-4)
