"""Small matrices, written out as scalars or as loops over entries: as the loop, in one kernel."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, gradients, loop, zeros_for_none
from oracle import randn_of_shape as randn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torch_scan_hop import scan
from torch_scan_hop.inductor import rewriter
from torch_scan_hop.inductor.scalars.interpreter import MOST_OPERATORS
from torch_scan_hop.inductor.scalars.rewrite import lanes_of
from torch_scan_hop.inductor.watch import watching
from torch_scan_hop.rewrites import using_options
from torch_scan_hop.signature import Signature

pytestmark = pytest.mark.torch_version

L, N = 3, 2
EYE = torch.eye(N, dtype=torch.float64)
MOVES = EYE + 0.1 * randn(N, N).double()


def definite(*shape):
    """Symmetric, with eigenvalues of at least one."""
    a = randn(*shape, N, N).double()
    return a @ a.mT + EYE


def kalman(state, seen):
    mean, spread = state
    mean, spread = mean @ MOVES.mT, MOVES @ spread @ MOVES.mT + 0.1 * EYE
    gain = torch.linalg.solve(spread + EYE, spread)
    mean = mean + ((seen - mean)[:, None] @ gain)[:, 0]
    return (mean, spread - spread @ gain), mean


def kalman_of_one(state, seen):
    mean, spread = state
    mean, spread = MOVES @ mean, MOVES @ spread @ MOVES.mT + 0.1 * EYE
    gain = spread @ torch.linalg.inv(spread + EYE)
    mean = mean + gain @ (seen - mean)
    return (mean, spread - gain @ spread), (mean, torch.linalg.det(spread))


def least_squares(spread, x):
    spread = 0.9 * spread + x[:, :, None] * x[:, None]
    lower = torch.linalg.cholesky(spread)
    half = torch.linalg.solve_triangular(lower, x[..., None], upper=False)
    return spread, (
        half[..., 0],
        torch.cholesky_solve(x[..., None], lower),
        lower.diagonal(0, 1, 2),
    )


def upper(h, x):
    factor = torch.linalg.cholesky(x + 0.1 * h @ h.mT, upper=True)
    return torch.linalg.solve_triangular(factor, h, upper=True, left=False), factor


def likelihood(spread, x):
    """Of a normal distribution, and its determinants otherwise."""
    spread = MOVES @ spread @ MOVES.mT + x[:, :, None] * x[:, None] + EYE
    scaled = torch.linalg.solve(spread, x[..., None])[..., 0]
    return spread, (torch.logdet(spread) + (scaled * x).sum(-1), *torch.linalg.slogdet(-spread))


def vectors(h, x):
    h = torch.linalg.solve(x + EYE, h)
    return h, (h * h).sum(-1)


def right_solve(h, x):
    return torch.tanh(torch.linalg.solve(x + EYE, h, left=False)), h


def factored(h, x):
    factors, pivots = torch.linalg.lu_factor(x)
    solved = torch.linalg.lu_solve(factors, pivots, h)
    return torch.tanh(solved), torch.linalg.lu_solve(factors, pivots, h, adjoint=True, left=False)


def exchanges(h, x):
    """Rows change places: its pivots are not on the diagonal."""
    x = torch.cat([x, x.flip(1)[:, :1] + 0.5], 1)
    matrix = torch.cat([x * 0.1, x.sum(-1, keepdim=True)], -1)
    matrix = torch.stack([matrix[:, 2] * 0.1, matrix[:, 0] * 9 + 1, matrix[:, 1] * 3], 1)
    return torch.tanh(torch.linalg.solve(matrix, h)), torch.linalg.det(matrix)


def rotation(q, w):
    """Attitude by exponential coordinates: views, products, norms."""
    zero = torch.zeros_like(w[:, 0])
    skew = torch.stack([zero, -w[:, 1], w[:, 1], w[:, 0]], -1).view(-1, 2, 2)
    angle = w.norm(dim=-1, keepdim=True)[..., None] + 1e-3
    turn = EYE + angle.sin() / angle * skew + (1 - angle.cos()) / angle**2 * skew @ skew
    q = turn @ q
    return q, (q.transpose(1, 2), q.sum((1, 2)), q.amax(-1))


def chain(alpha, seen):
    """The forward algorithm, of few states."""
    alpha = torch.logsumexp(alpha[:, :, None] + MOVES, 1) + seen
    best, mean = alpha.amax(-1, keepdim=True), alpha.mean(-1, keepdim=True)
    return alpha - best, torch.cat([alpha[:, 1:], best, mean], -1).flip(-1)


def counts(carry, x):
    n, h = carry
    h = torch.where((n % 2 == 0)[:, None, None], x @ h, h @ x) / N
    return (n + 1, h), h[:, 0] * n[:, None]


X, V = (lambda T: randn(T, L, N, N).double()), (lambda T: randn(T, L, N).double())
CASES = {
    "kalman": (kalman, lambda: (V(1)[0], definite(L)), V),
    "kalman of one": (kalman_of_one, lambda: (V(1)[0, 0], definite()), lambda T: V(T)[:, 0]),
    "least squares": (least_squares, lambda: definite(L), V),
    "likelihood": (likelihood, lambda: definite(L), V),
    "upper": (upper, lambda: X(1)[0], lambda T: definite(T, L)),
    "vectors": (vectors, lambda: V(1)[0], lambda T: definite(T, L)),
    "right solve": (right_solve, lambda: X(1)[0], lambda T: definite(T, L)),
    "factored": (factored, lambda: X(1)[0], X),
    "exchanges": (exchanges, lambda: randn(L, 3).double(), X),
    "rotation": (rotation, lambda: X(1)[0], V),
    "chain": (chain, lambda: V(1)[0], V),
    "counts": (counts, lambda: (torch.arange(L), X(1)[0]), X),
}
FAST = {"vectors"}
#: The derivative of LU's factors calls operators that are not written out.
CALLS_TORCH_BACKWARDS = {"factored"}


def cases_in_both_directions():
    for reverse in (False, True):
        for name in CASES:
            is_slow = name not in FAST or reverse
            yield pytest.param(name, reverse, marks=pytest.mark.slow if is_slow else ())


@pytest.fixture(autouse=True)
def no_caches():
    """Which kernel a scan is, is decided where it is compiled."""
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.fixture(params=["PointwiseKernel", "MatricesKernel"])
def kernel(request, monkeypatch):
    """The kernel of a body written out, of however many operators, and that of one which is not."""
    monkeypatch.setattr(rewriter, "FEW_OPERATORS", MOST_OPERATORS)
    with using_options(scalars=request.param == "PointwiseKernel"):
        yield request.param


def run_and_name_kernels(run, *args):
    names = []
    with watching(
        lambda _, kernel, __: names.append(type(kernel).__name__ if kernel else "a loop")
    ):
        return run(*args), names


def compiled(step, **options):
    return torch.compile(lambda init, xs: scan(step, init, xs, **options), fullgraph=True)


@pytest.mark.parametrize(("name", "reverse"), list(cases_in_both_directions()))
def test_a_kernel_each_way_computes_the_loop(name, reverse, kernel):
    step, init, xs = CASES[name]
    init, xs = init(), xs(4)
    given = [t for t in pytree.tree_leaves((init, xs)) if t.is_floating_point()]
    wrt = [t.requires_grad_() for t in (*given, MOVES)]

    def train(run):
        results = run(init, xs)
        return results, zeros_for_none(gradients(results, wrt), wrt)

    got, kernels = run_and_name_kernels(train, compiled(step, reverse=reverse))
    assert kernels == [kernel, "a loop" if name in CALLS_TORCH_BACKWARDS else kernel]
    assert_same(got, train(lambda i, x: loop(step, i, x, reverse=reverse)), 1e-9)


def test_any_trip_count_and_batch(kernel):
    def step(h, x):
        return torch.linalg.solve(x, h), h.sum(-1)

    run = compiled(step)
    for k, (T, B) in enumerate(((4, 5), (3, 7), (6, 3))):
        h, xs = randn(B, N).double(), definite(T, B)
        torch._dynamo.mark_dynamic(h, 0)
        torch._dynamo.mark_dynamic(xs, (0, 1))
        got, kernels = run_and_name_kernels(run, h, xs)
        assert kernels == ([] if k else [kernel])
        assert_same(got, loop(step, h, xs), 1e-9)


@pytest.mark.parametrize("has_batch", [False, True])
def test_as_many_lanes_as_rows(has_batch, kernel):
    """Which dimension is the batch is then a guess; the numbers are right whichever it is."""

    def step(h, x):
        return h @ torch.linalg.inv(x) + EYE, h.sum(0)

    h = randn(*[N] * (2 + has_batch)).double()
    xs = definite(3, *h.shape[:-2])
    got, kernels = run_and_name_kernels(compiled(step), h, xs)
    assert kernels == [kernel]
    assert_same(got, loop(step, h, xs), 1e-9)


SHARED = definite()
LOWER, (FACTORS, PIVOTS) = torch.linalg.cholesky(SHARED), torch.linalg.lu_factor(SHARED)
OF_ALL_LANES = {
    "triangular": lambda h, x: torch.linalg.solve_triangular(LOWER, h, upper=False),
    "right": lambda h, x: torch.linalg.solve_triangular(LOWER, h, upper=False, left=False),
    "solve": lambda h, x: torch.linalg.solve(SHARED, h),
    "solve of x": lambda h, x: torch.linalg.solve(0.1 * x[0] + SHARED, h),
    "cholesky": lambda h, x: torch.cholesky_solve(h, LOWER),
    "lu": lambda h, x: torch.linalg.lu_solve(FACTORS, PIVOTS, h),
}


@pytest.mark.parametrize("name", OF_ALL_LANES)
def test_one_matrix_of_all_lanes(name):
    """It lies otherwise than what each lane has of its own."""

    def step(h, x):
        return torch.tanh(OF_ALL_LANES[name](h, x)) + x, h

    h, xs = randn(L, N, N).double(), X(3)
    with using_options(scalars=False):
        got, kernels = run_and_name_kernels(compiled(step), h, xs)
    assert kernels == ["MatricesKernel"]
    assert_same(got, loop(step, h, xs), 1e-9)


WRITES = {
    "select": lambda h, x: h.select_scatter(x, 2, 1),
    "slice": lambda h, x: h.slice_scatter(x[:, :, None], 2, 1, 2),
    "diagonal": lambda h, x: h.diagonal_scatter(x, 0, 1, 2),
}


@pytest.mark.parametrize(
    "name", ["select", *(pytest.param(n, marks=pytest.mark.slow) for n in ("slice", "diagonal"))]
)
def test_what_is_written_has_its_lanes_elsewhere(name, kernel):
    """Its shape fits all the same, where rows are as many as lanes."""

    def step(h, x):
        return WRITES[name]((h @ h) * 0.1, x.t()), None

    h, xs = randn(N, N, N).double(), randn(4, N, N).double()
    got, _ = run_and_name_kernels(compiled(step), h, xs)
    assert_same(got, loop(step, h, xs), 1e-9)


SINGULAR = {
    "solve": (
        lambda h, a: (torch.linalg.solve(a, h), None),
        r"linalg\.solve.*Batch element 1.*singular",
    ),
    "cholesky": (lambda h, a: (torch.linalg.cholesky(a) @ h, None), r"Batch element 1.*order 2"),
}


@pytest.mark.parametrize("name", SINGULAR)
@pytest.mark.parametrize("reverse", [False, True])
def test_the_error_is_that_of_the_step_that_fails_first(name, reverse, kernel):
    step, message = SINGULAR[name]
    h, xs = randn(L, N, N).double(), definite(4, L)
    xs[1 if not reverse else 2, 1] = torch.diag(torch.tensor([1.0, 0.0]))
    xs[2 if not reverse else 1, 0] = 0
    run = compiled(step, reverse=reverse)
    for failing in (run, lambda *a: loop(step, *a, reverse=reverse)):
        with pytest.raises(torch.linalg.LinAlgError, match=message):
            failing(h, xs)
    good = definite(4, L)
    assert_same(run(h, good), loop(step, h, good, reverse=reverse), 1e-9)


def test_a_factorisation_that_fails_without_an_error(kernel):
    """What is selected has a finite gradient, though another lane's matrix has no factor."""

    def step(h, a):
        lower, info = torch.linalg.cholesky_ex(a)
        is_definite = (info == 0)[:, None, None]
        return torch.where(is_definite, lower @ h, h), info

    h, xs = randn(L, N, N).double().requires_grad_(), definite(3, L)
    xs[1, 0] = -EYE
    xs.requires_grad_()

    def train(run):
        results = run(h, xs)
        return results, gradients(results, [h, xs])

    got, kernels = run_and_name_kernels(train, compiled(step))
    assert kernels[0] == kernel
    assert_same(got, train(lambda *a: loop(step, *a)), 1e-9)


def test_what_is_not_written_out():
    def step(h, x):
        return torch.linalg.solve(x, h), None

    wide = torch.eye(12, dtype=torch.float64).expand(3, 2, 12, 12).contiguous()
    got, kernels = run_and_name_kernels(compiled(step), wide[0], wide)
    assert kernels == ["MatricesKernel"]
    assert_same(got, loop(step, wide[0], wide), 1e-9)
    wide = torch.eye(40, dtype=torch.float64).expand(3, 2, 40, 40).contiguous()
    got, kernels = run_and_name_kernels(compiled(step), wide[0], wide)
    assert kernels == ["a loop"]  # too many entries
    assert_same(got, loop(step, wide[0], wide), 1e-9)


def test_entries_of_all_lanes_are_counted_for_each():
    """The mean of 504 entries in a cell of 26 rows took minutes to compile: it had 504 operators,
    and not 504 / 26."""
    signature = Signature(n_carry=1, n_xs=1, n_additional=0)
    step = make_fx(lambda h, x: [torch.tanh(h * 0.5 + x.mean())], tracing_mode="fake")
    h = torch.randn(26, 5)
    assert not lanes_of(step(h, torch.randn(28, 18)), signature)
    assert lanes_of(step(h, torch.randn(4, 4)), signature)[0].size == 26
    assert lanes_of(step(h, torch.randn(26, 18)), signature)[0].size == 26


def test_no_lanes(caplog):
    def step(h, x):
        return torch.linalg.solve(x, h), h.sum()

    h, xs = torch.ones(0, 3, 3, dtype=torch.float64), torch.ones(5, 0, 3, 3, dtype=torch.float64)
    assert_same(compiled(step)(h, xs), loop(step, h, xs), 1e-9)
    said = [r.getMessage() for r in caplog.records if r.name.startswith("torch_scan_hop")]
    assert said == []
