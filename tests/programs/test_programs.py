"""Programs that people write, each once wrong or a crash where the loop works.

Named for what they hold. The oracle is the loop, in float64, values and every gradient; a body that
is captured must not run as a loop (``conftest`` turns that warning into an error).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Mapping

import pytest
import torch
import torch.autograd.forward_ad as fad
import torch.utils._pytree as pytree
from oracle import (
    Variant,
    assert_same,
    check,
    differentiable,
    gradients,
    loop,
    require_grad,
    scalar,
    sum_with_weights_backwards,
)
from threads import results_of_threads
from transforms_in_a_body import STEPS

from torch_scan_hop import Binomial, scan, tree
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.rewrites import using_options

pytestmark = pytest.mark.torch_version

F64 = torch.float64
MODES = {
    "eager": Variant(),
    "aot_eager": Variant("aot_eager"),
    "inductor": Variant("inductor"),
    "checkpoint": Variant(options={"checkpoint": "full"}),
}


def real(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=F64, generator=generator)


def complex_(*shape):
    return torch.complex(real(*shape), real(*shape, seed=1))


def definite(*lead, n=3):
    a = real(*lead, n, n)
    return a @ a.mT + n * torch.eye(n, dtype=F64)


# --- bodies: (body, init, xs) or (body, init, xs, closed-over tensors) ---


def row_of_a_weight():
    w = real(2, 3).requires_grad_()
    return lambda h, i: (h + w[i].sum(0), h), torch.zeros(3, dtype=F64), index_rows(), (w,)


def index_rows():
    return torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]])


def row_of_the_carry():
    return lambda h, i: (torch.sin(h) + h[i].sum() * 0.1, h[i]), real(3), index_rows()


def buffer_written_by_index():
    def body(h, i):
        z = torch.zeros(3, dtype=F64)
        z[i] = h[0] + 1
        return h * 0.5 + z, z

    return body, real(3), index_rows()


def buffer_index_put_accumulate():
    def body(h, i):
        return h + torch.zeros(3, dtype=F64).index_put((i,), h[:2], accumulate=True), None

    return body, real(3), index_rows()


def buffer_index_add():
    return (
        lambda h, i: (h + torch.zeros(3, dtype=F64).index_add(0, i, h[:2]), None),
        real(3),
        index_rows(),
    )


def buffer_scatter_add():
    return (
        lambda h, i: (torch.tanh(h) + torch.zeros(3, dtype=F64).scatter_add(0, i, h[:2]), h),
        real(3),
        index_rows(),
    )


def diagonal_of_a_buffer():
    def body(h, x):
        v = torch.ones(2, 2, dtype=F64)
        v.fill_diagonal_(0.2)
        return h + x, v

    return body, real(2), real(4, 2)


def diagonal_of_transposed_xs():
    return lambda h, x: (h, torch.diagonal(x)), real(1), real(7, 2, 5).transpose(0, 1)


def emission_of_an_hmm():
    emission, transition = real(3, 4).requires_grad_(), real(3, 3).requires_grad_()

    def body(alpha, symbol):
        alpha = torch.logsumexp(alpha.unsqueeze(-1) + transition, 0) + emission[:, symbol].sum(-1)
        return alpha, alpha

    return body, real(3), torch.tensor([[0], [3], [1], [0], [2]]), (emission, transition)


def trace_of_xs():
    return lambda h, x: (h, x.trace()), torch.zeros((), dtype=F64), real(4, 2, 2)


def trace_of_a_weight():
    w = torch.tensor(0.3, dtype=F64, requires_grad=True)
    return (
        lambda h, x: (torch.sigmoid(torch.trace(torch.sin(w).expand(1, 1))) * h + x, None),
        real(1),
        real(4, 1),
        (w,),
    )


def index_select_by_a_counter():
    w = real(3, 3).requires_grad_()
    return (
        lambda c, x: ((c[0] + 1, c[1] * x), torch.index_select(w, 0, c[0])),
        (torch.zeros((), dtype=torch.long), real(2)),
        real(3, 2),
        (w,),
    )


def solve():
    return lambda h, a: (torch.tanh(torch.linalg.solve(a, h)), h), real(3), definite(4)


def cholesky():
    return (
        lambda h, a: (torch.linalg.cholesky(a + h @ h.mT * 0.01), h),
        real(3, 3) * 0.1,
        definite(4),
    )


def inverse():
    return lambda h, a: (torch.linalg.inv(a) @ h, torch.linalg.inv(a)), real(3), definite(4)


def lu_factor():
    return lambda h, a: (torch.linalg.lu_factor(a)[0] @ h * 0.1, h), real(3), definite(4)


def multivariate_normal():
    def body(h, a):
        d = torch.distributions.MultivariateNormal(h, covariance_matrix=a, validate_args=False)
        return h * 0.9 + d.log_prob(h * 0.5) * 0.01, d.log_prob(torch.ones_like(h))

    return body, real(3), definite(4)


def kalman_filter():
    transition = (torch.eye(2, dtype=F64) * 0.9).requires_grad_()
    noise, sensor = torch.eye(2, dtype=F64) * 0.1, torch.ones(1, 2, dtype=F64)

    def body(state, z):
        mean, cov = state
        mean, cov = transition @ mean, transition @ cov @ transition.mT + noise
        innovation = sensor @ cov @ sensor.mT + 0.2
        gain = torch.linalg.solve(innovation, sensor @ cov).mT
        mean, cov = mean + gain @ (z - sensor @ mean), cov - gain @ sensor @ cov
        return (mean, cov), mean

    return body, (torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64)), real(5, 1), (transition,)


def linear_attention():
    heads = [real(2, 6, 8, seed=k).view(2, 6, 2, 4).transpose(0, 1) for k in range(3)]

    def body(s, x):
        q, k, v = x
        s = s * 0.9 + torch.einsum("bhd,bhe->bhde", k, v)
        return s, torch.einsum("bhd,bhde->bhe", q, s)

    return body, torch.zeros(2, 2, 4, 4, dtype=F64), tuple(heads)


def heads_flattened():
    w = real(8, 8).requires_grad_()
    return (
        lambda h, x: (torch.tanh(h + x.reshape(2, -1) @ w), x.flatten(1) * h),
        torch.zeros(2, 8, dtype=F64),
        real(2, 6, 8).view(2, 6, 2, 4).transpose(0, 1),
        (w,),
    )


def mask_assigned():
    def body(h, x):
        x = x.clone()
        x[x > 0] = 0
        return h + x, x

    return body, real(3), real(4, 3)


def kl_divergence():
    def body(h, x):
        p = torch.distributions.Categorical(logits=x, validate_args=False)
        q = torch.distributions.Categorical(logits=x * 0.5, validate_args=False)
        return torch.tanh(h + x), torch.distributions.kl_divergence(p, q)

    return body, real(3), real(4, 3)


def slice_written_for_a_y():
    def body(h, x):
        z = h.clone()
        z[1:].add_(x[:-1])
        return h * 0.9, z

    return body, real(3), real(4, 3)


def empty_filled_by_slices():
    def body(h, x):
        z = torch.empty(3, dtype=F64)
        z[:2] = x[:2]
        z[2:] = x[2:] * 2
        return h * 0.9 + z, z

    return body, real(3), real(4, 3)


def as_strided_x():
    def body(h, x):
        z = x.as_strided((2, 2), (1, 1))
        return h + z, z

    return body, real(2, 2), real(4, 3)


def conjugate_imaginary():
    def body(h, x):
        return h.conj() * x, (h.conj().imag, x.conj().imag, (x.conj() * 2).real)

    return body, complex_(3), complex_(4, 3)


def conjugate_init():
    body, init, xs = conjugate_imaginary()
    return body, init.conj(), xs


def complex_recurrence():
    lam = torch.polar(torch.full((4,), 0.9, dtype=F64), real(4)).requires_grad_()
    b, c = complex_(4, 3).requires_grad_(), complex_(3, 4).requires_grad_()

    def body(h, u):
        h = lam * h + u.to(torch.complex128) @ b.T
        return h, (h @ c.T).real

    return body, torch.zeros(2, 4, dtype=torch.complex128), real(6, 2, 3), (lam, b, c)


def complex_arithmetic():
    def body(h, x):
        a = torch.exp(h * 0.1) / (x + 3) - x.conj() + 1j * h.abs()
        b = torch.cat([a, h]).sum() + torch.stack([a, x]).mean()
        return torch.where(a.real > 0, a, -a) * 0.5, (b, torch.view_as_real(a))

    return body, complex_(3), complex_(5, 3)


def reduction_of_nothing_varying():
    return (
        lambda h, x: (0.5 * h + torch.sin(torch.zeros(2, dtype=F64).mean()), None),
        torch.ones((), dtype=F64),
        real(3, 1),
    )


def small_integers_added():
    return (
        lambda c, x: ((c[0] + x, c[1] | (x > 0)), c[0]),
        (torch.zeros(2, dtype=torch.int8), torch.zeros(2, dtype=torch.bool)),
        torch.ones(5, 2, dtype=torch.int8) * 30,
    )


def identity_under_no_grad():
    def body(h, x):
        with torch.no_grad():
            read = h.contiguous().to(F64) + x.reshape(2)
        return torch.tanh(h * 0.5 + x), read

    return body, real(2), real(4, 2)


BODIES = [
    identity_under_no_grad,
    row_of_a_weight, row_of_the_carry, buffer_written_by_index, buffer_index_put_accumulate,
    buffer_index_add, buffer_scatter_add, diagonal_of_a_buffer, diagonal_of_transposed_xs,
    emission_of_an_hmm, trace_of_xs, trace_of_a_weight, index_select_by_a_counter, solve, cholesky,
    inverse, lu_factor, multivariate_normal, kalman_filter, linear_attention, heads_flattened,
    mask_assigned, kl_divergence, slice_written_for_a_y, empty_filled_by_slices, as_strided_x,
    conjugate_imaginary, conjugate_init, complex_recurrence, complex_arithmetic,
    reduction_of_nothing_varying, small_integers_added,
]  # fmt: skip


#: Bodies that Inductor makes into something of their own: indexing, memory that is changed or has
#: other strides, products, numbers that it has no kernels for. The others are slow tests there.
UNDER_INDUCTOR = {
    row_of_a_weight, buffer_written_by_index, diagonal_of_transposed_xs, emission_of_an_hmm,
    index_select_by_a_counter, solve, linear_attention, mask_assigned, slice_written_for_a_y,
    as_strided_x, conjugate_init, complex_arithmetic, reduction_of_nothing_varying,
    small_integers_added,
}  # fmt: skip


def _bodies_and_modes(bodies, modes, fast_under_inductor):
    """Each body with a compiler: the graph that aot_eager runs is the one that Inductor lowers."""
    for make in bodies:
        for mode in modes:
            is_slow = mode == ("aot_eager" if make in fast_under_inductor else "inductor")
            marks = pytest.mark.slow if is_slow else ()
            yield pytest.param(make, mode, marks=marks, id=f"{make.__name__}-{mode}")


@pytest.mark.parametrize(("make", "mode"), list(_bodies_and_modes(BODIES, MODES, UNDER_INDUCTOR)))
def test_a_body(make, mode):
    body, init, xs, *closed = make()
    if mode == "checkpoint" and not differentiable((init, xs)):
        pytest.skip("nothing to differentiate")
    check(body, init, xs, variant=MODES[mode], params=(closed or [()])[0])


IN_BLOCKS = [row_of_a_weight, buffer_index_add, complex_recurrence, solve]


@pytest.mark.parametrize(
    ("make", "mode"),
    list(_bodies_and_modes(IN_BLOCKS, ["eager", "inductor"], {row_of_a_weight, solve})),
)
def test_a_body_in_blocks(make, mode, monkeypatch):
    from torch_scan_hop.rewrites import blocks

    for name, value in (("BLOCK_BYTES", 64), ("MIN_BLOCKS", 2), ("MIN_BLOCK", 2)):
        monkeypatch.setattr(blocks, name, value)
    body, init, xs, *closed = make()
    xs = tree.map_leaves(lambda x: torch.cat([x, x, x, x]), xs)
    check(body, init, xs, variant=MODES[mode], params=(closed or [()])[0])


def test_xs_that_are_views_made_in_the_compiled_function():
    def run(s, x):
        q = x.view(2, 6, 2, 4).transpose(0, 1)

        def body(state, q):
            state = state * 0.9 + torch.einsum("bhd,bhe->bhde", q, q * 2)
            return state, torch.einsum("bhd,bhde->bhe", q, state)

        return s(body, torch.zeros(2, 2, 4, 4, dtype=F64), q)[1].transpose(0, 1).reshape(2, 6, 8)

    def results(fn):
        x = real(2, 6, 8).requires_grad_()
        out = fn(x)
        return out, torch.autograd.grad(out.square().sum(), x)

    assert_same(
        results(torch.compile(lambda x: run(scan, x), fullgraph=True)),
        results(lambda x: run(loop, x)),
    )


@torch.library.custom_op("torch_scan_hop_tests::add_into", mutates_args={"out"})
def add_into(out: torch.Tensor, x: torch.Tensor) -> None:
    out.add_(x)


@pytest.mark.parametrize("mode", ["eager", "aot_eager", "inductor"])
def test_a_custom_operator_that_mutates_a_buffer_of_the_step(mode):
    def body(h, x):
        z = torch.zeros(3, dtype=F64)
        add_into(z, x)
        h = h.clone()
        add_into(h, z)
        return h * 0.5 + z, z

    xs = real(4, 3)
    assert_same(MODES[mode](body, real(3), xs), loop(body, real(3), xs))


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
@pytest.mark.parametrize("given", ["xs", "closure", "init"])
def test_what_a_nested_scan_was_given_is_written_afterwards(mode, given):
    w, constant = real(3).requires_grad_(), real(3, seed=1)

    def body(scan, h, x):
        v = w + x
        kept = {"xs": constant, "closure": constant, "init": constant} | {given: v}

        def inner(c, z):
            # copies: autograd saves nothing that the body is about to write to
            c, z, k = c.clone(), z.clone(), kept["closure"].clone()
            return torch.tanh(c + z), torch.sin(k) * torch.cos(c) * z

        c, ys = scan(inner, kept["init"], kept["xs"])
        v += v
        v.tanh_()
        return h * 0.5 + c + v, ys.sum(0)

    xs = real(4, 3).requires_grad_()
    results = [
        s(functools.partial(body, i), real(3), xs) for s, i in ((MODES[mode], scan), (loop, loop))
    ]
    assert_same(*results)
    found = [torch.autograd.grad([v.sum() for v in r], [w, xs]) for r in results]
    assert_same(*found)


@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_errors_of_singular_matrices_are_raised(mode):
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        MODES[mode](
            lambda h, a: (torch.linalg.solve(a, h), h),
            torch.ones(3, dtype=F64),
            torch.zeros(4, 3, 3, dtype=F64),
        )


# --- trip counts ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outputs", [1, 2])
def test_no_steps(mode, outputs):
    def body(h, x):
        n = torch.tanh(h[0] + x), h[1] * 2
        return n, (h[0], x * h[1]) if outputs == 2 else h[0]

    check(body, (real(2), real(2)), real(1, 2)[:0], variant=MODES[mode])


def test_a_dynamic_trip_count_below_unroll():
    run = torch.compile(
        lambda h, x: scan(lambda h, x: (torch.tanh(h + x), h), h, x, unroll=4),
        fullgraph=True,
        dynamic=True,
    )
    for steps in (9, 5, 3):
        h, x = real(2), real(steps, 2)
        assert_same(run(h, x), loop(lambda h, x: (torch.tanh(h + x), h), h, x))


@pytest.mark.torch_version
@pytest.mark.parametrize("trip_counts", [(4, 5, 6), (5, 4), (1, 2, 3)])
def test_training_with_unroll_and_a_dynamic_trip_count(trip_counts):
    """Of trip counts that it divides, and that it does not: no stack has no steps."""
    w = real(2, 2).requires_grad_()

    def run(h, x, scan=scan):
        step = lambda h, x: (torch.tanh(h @ w + x),) * 2  # noqa: E731
        return scan(step, h, x, dim=1, reverse=True, unroll=2)

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for steps in trip_counts:
        h, x = require_grad(real(3, 2)), require_grad(real(3, steps, 2))
        actual, expected = compiled(h, x), run(h, x, loop)
        assert_same(gradients(actual, [w, h, x]), gradients(expected, [w, h, x]))


@pytest.mark.parametrize("compiled", [False, True])
def test_sqrt_checkpoints_at_several_trip_counts(compiled):
    def run(h, x):
        return scan(lambda h, x: (torch.tanh(h + x), h), h, x, checkpoint="sqrt")

    if compiled:
        run = torch.compile(run, backend="aot_eager", dynamic=True, fullgraph=True)
    for steps in (9, 16, 25, 3):
        h, x = require_grad(real(2)), require_grad(real(steps, 2))
        actual, expected = run(h, x), loop(lambda h, x: (torch.tanh(h + x), h), h, x)
        assert_same(actual, expected)
        assert_same(gradients(actual, [h, x]), gradients(expected, [h, x]))


# --- aliases ---


def view_and_base():
    buffer = torch.zeros(2)
    row = buffer[0]

    def body(c, x):
        buffer.add_(x)
        return c + row, None

    return body, torch.zeros(()), torch.ones(3), buffer


def two_views():
    buffer = torch.zeros(2)
    one, other = buffer[0], buffer[:1]

    def body(c, x):
        other.add_(x)
        return c + one, None

    return body, torch.zeros(()), torch.ones(3), buffer


def detached():
    w = torch.zeros(2, requires_grad=True)
    d = w.detach()

    def body(c, x):
        d.add_(x)
        return c + w, None

    return body, torch.zeros(2), torch.ones(3), d


def the_xs_themselves():
    xs = torch.arange(4.0)

    def body(c, x):
        xs.add_(1)
        return c + x, None

    return body, torch.zeros(()), xs, xs


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
@pytest.mark.parametrize("make", [view_and_base, two_views, detached, the_xs_themselves])
def test_memory_that_a_body_changes_under_two_names(make):
    body, init, xs, changed = make()
    carry, _ = scan(body, init, xs)
    body, after, xs, expected = make()
    for x in xs:  # written by hand: a change of the xs is seen in x
        after, _ = body(after, x)
    assert_same(carry, after)
    assert_same(changed, expected)


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_memory_shared_at_the_second_call_only():
    def run(s, buffer, row):
        def body(c, x):
            buffer.add_(x)
            return c + row, None

        return s(body, torch.zeros(()), torch.ones(3))[0]

    run(scan, torch.zeros(2), torch.zeros(()))
    a, b = torch.zeros(2), torch.zeros(2)
    assert_same(run(scan, a, a[0]), run(loop, b, b[0]))


@pytest.mark.parametrize(
    "body",
    [
        lambda h, x: (h, x.view(2, 2)),
        lambda h, x: (h, (x, x.view(2, 2))),
        lambda h, x: (h + 1, (h.view(1, 1), h)),
        lambda h, x: (h, (x * 2).view(2, 2)),
        lambda h, x: (h, (lambda z: (z, z.view(2, 2)))(x * 2)),
    ],
)
def test_results_share_no_memory(body):
    xs = torch.ones(3, 4)
    carry, ys = scan(body, torch.zeros(1), xs)
    tensors = [carry, *tree.tensors(ys), xs]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


def test_ys_may_be_changed_before_the_backward():
    def gradient(s):
        w = torch.tensor(0.7, dtype=F64, requires_grad=True)
        c, y = s(lambda c, x: (torch.tanh(c * w + x),) * 2, real(1)[0], real(3))
        y.mul_(2)
        return torch.autograd.grad(c + y.sum(), w)[0], c, y

    assert_same(gradient(scan), gradient(loop))


# --- numbers ---

NUMBER_BODIES = {
    "add": lambda c, x: (c + x, c),
    "mul": lambda c, x: (c * x, x),
    "returned": lambda c, x: (0.1, c),
    "kept": lambda c, x: (c, x + c),
    "halved": lambda c, x: (c * 0.5, c + x),
    "method": lambda c, x: (torch.as_tensor(c).sin() + x, None),
}


@pytest.mark.parametrize("body", NUMBER_BODIES)
@pytest.mark.parametrize("number", [0, 0.1, True])
def test_numbers_have_all_their_digits_and_no_dtype_of_their_own(body, number):
    if number is True and body in ("halved", "method"):
        pytest.skip("the first step alone sees a bool")
    for dtype in (torch.int8, torch.float32, torch.float64, torch.bool):
        xs = torch.ones(3).to(dtype)
        try:
            expected = scan_loop(NUMBER_BODIES[body], number, xs, 3, False)
        except RuntimeError:
            continue
        actual = scan(NUMBER_BODIES[body], number, xs)
        # a carry that stays a number has the default dtype, in the loop from the second step on
        assert_same(actual, expected, 0 if body in ("add", "mul", "returned") else 2e-9)
    assert scan(lambda c, x: (c + x.double(), None), 0.1, torch.zeros(3))[0].item() == 0.1


@pytest.mark.parametrize(
    "options",
    [{"checkpoint": "sqrt"}, {"checkpoint": Binomial(2)}, {"checkpoint": "full"}, {"unroll": 2}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_numbers_in_scans_in_parts(options, dtype):
    xs = torch.linspace(0.1, 0.9, 5, dtype=dtype, requires_grad=True)
    w = torch.tensor(0.7, dtype=dtype, requires_grad=True)

    def results(scan, **options):
        carry, _ = scan(lambda c, x: (c + 0.3 * torch.tanh(x * w), None), 0.1, xs, **options)
        return carry, torch.autograd.grad(carry, [xs, w])

    expected = results(lambda f, init, xs: scan_loop(f, init, xs, 5, False))
    assert_same(results(scan, **options), expected, 1e-6 if dtype != F64 else 1e-9)


# --- differentiation of every kind ---


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, g):
        return g


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        y = torch.exp(x * k)
        ctx.save_for_backward(y, x)
        ctx.k = k
        return y, x.sin()

    @staticmethod
    def backward(ctx, g, h):
        y, x = ctx.saved_tensors
        return ctx.k * y * g + h * x.cos(), None


CUSTOM_BODIES = {
    "square": lambda w: lambda c, x: (torch.sin(Square.apply(c * w)), None),
    "straight_through": lambda w: lambda c, x: (torch.sin(StraightThrough.apply(c * w) * w), c),
    "two_results": lambda w: lambda c, x: (torch.sin(sum(TwoResults.apply(c * w, 0.5))) + x, c),
    "of_a_weight": lambda w: lambda c, x: (torch.tanh(c + torch.tanh(Square.apply(w))), None),
}


@pytest.mark.parametrize("name", CUSTOM_BODIES)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_custom_function_differentiated_three_times(name, steps):
    def derivatives(s):
        w = torch.tensor(1.7, dtype=F64, requires_grad=True)
        value = s(CUSTOM_BODIES[name](w), torch.tensor(1.1, dtype=F64), real(steps))[0]
        found = []
        for _ in range(3):
            (value,) = torch.autograd.grad(value, w, create_graph=True)
            found.append(value)
        return found

    assert_same(derivatives(scan), derivatives(loop))


@pytest.mark.filterwarnings("ignore:torch_scan_hop")  # 2.15's Dynamo takes no dual tensors
def test_forward_over_reverse():
    def tangents(s):
        w, xs = real(2).requires_grad_(), real(4, 2).requires_grad_()
        with fad.dual_level():
            init = fad.make_dual(real(2, seed=1), torch.ones(2, dtype=F64))
            duals = fad.make_dual(xs, torch.full_like(xs, 0.5))
            c, y = s(lambda c, x: (lambda n: (n, n * x))(torch.sin(c * w + x)), init, duals)
            total = (c * c).sum() + (y * y).sum()
            found = torch.autograd.grad(total, [w, xs], create_graph=True)
            return [fad.unpack_dual(t).tangent for t in (total, *found)]

    assert_same(tangents(scan), tangents(loop))


def inner_body(name, w):
    return lambda c, x: (STEPS[name](w, c, x), None)


OUTER = {
    "value": lambda f, w: f(w),
    "autograd": lambda f, w: torch.autograd.grad(f(w.requires_grad_()), w)[0],
    "autograd_twice": lambda f, w: torch.autograd.grad(
        torch.autograd.grad(f(w.requires_grad_()), w, create_graph=True)[0].sum(), w
    )[0],
    "grad": lambda f, w: torch.func.grad(f)(w),
    "jvp": lambda f, w: torch.func.jvp(f, (w,), (torch.ones_like(w),))[1],
    "vmap": lambda f, w: torch.vmap(f)(torch.stack([w, w * 2])),
    "vmap_of_grad": lambda f, w: torch.vmap(torch.func.grad(f))(torch.stack([w, w * 2])),
    "grad_of_grad": lambda f, w: torch.func.grad(lambda v: torch.func.grad(f)(v).sum())(w),
    "hessian": lambda f, w: torch.func.hessian(f)(w),
    "compiled": lambda f, w: torch.compile(f, backend="aot_eager")(w),
}


def _pairs_of_transforms():
    """Each inner one with some of the outer ones; the other pairs are slow tests."""
    for k, inner in enumerate(STEPS):
        for j, outer in enumerate(OUTER):
            marks = () if (k + j) % 3 == 0 else pytest.mark.slow
            yield pytest.param(inner, outer, marks=marks)


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
@pytest.mark.parametrize(("inner", "outer"), list(_pairs_of_transforms()))
def test_transforms_in_and_around_a_body(inner, outer):
    xs = real(3, 2)

    def result(s):
        def f(w):
            return s(inner_body(inner, w), torch.full((2,), 0.5, dtype=F64), xs)[0].sum()

        return OUTER[outer](f, real(2))

    try:
        expected = result(loop)
    except RuntimeError:
        pytest.skip("the loop cannot")
    assert_same(result(scan), expected)


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_a_failed_capture_leaves_nothing_that_its_collection_undoes():
    """What Dynamo of torch 2.13 leaves of this trace changed the dispatcher's keys when freed."""
    xs = real(3, 2)

    def f(w):
        return scan(inner_body("hessian", w), torch.full((2,), 0.5, dtype=F64), xs)[0]

    gc.collect()
    before = dispatcher_state()
    torch.vmap(f)(real(2, 2))
    gc.collect()
    assert dispatcher_state() == before


def dispatcher_state():
    included = torch._C._dispatch_tls_local_include_set()
    return str(included), str(torch._C._dispatch_tls_local_exclude_set())


@pytest.mark.filterwarnings("ignore:torch_scan_hop")  # duals on torch 2.15 are a loop
def test_tangents_of_what_no_grad_made():
    """It has a tangent and no gradient, which autograd does not allow of one Function."""
    w, init = real(2, 3), real(1)[0]

    def result(s):
        leaves = w.clone().requires_grad_(), init.clone().requires_grad_()
        with fad.dual_level():
            v, h = (fad.make_dual(t, torch.ones_like(t)) for t in leaves)

            def body(c, _):
                with torch.no_grad():
                    constant, y = torch.lerp(v, v, 0.3), c * 2
                return torch.sigmoid(constant.mean()) * c.sin() + (v * constant).sum(), y

            total, ys = s(body, h, torch.zeros(3, dtype=F64))
            assert not ys.requires_grad
            gradients = torch.autograd.grad(
                total + (ys.sum() * total).cos(), (h, v), create_graph=True
            )
            found = [fad.unpack_dual(t) for t in (total, ys, *gradients)]
            tangents = [t.tangent for t in found]
            return tangents, torch.autograd.grad(sum(t.sum() for t in tangents), leaves)

    assert_same(result(scan), result(loop))


@pytest.mark.parametrize("inner", ["grad", "vmap_of_grad"])
def test_tasks_of_maml_are_captured(inner):
    xs = real(3, 2)

    def result(s):
        def task(w):
            return s(inner_body(inner, w), torch.full((2,), 0.5, dtype=F64), xs)[0].sum()

        return torch.vmap(torch.func.grad(task))(real(4, 2))

    assert_same(result(scan), result(loop))


def test_init_and_xs_computed_inside_of_grad():
    def gradient(s):
        def f(x):
            ones = torch.ones(3, 2, dtype=F64)
            return s(lambda h, x: (torch.sin(h * x), h), x * ones[0], x * ones)[0].sum()

        return torch.func.grad(f)(torch.tensor(0.5, dtype=F64))

    assert_same(gradient(scan), gradient(loop))


def test_batched_gradients():
    def results(s):
        def f(w):
            return s(lambda c, x: (torch.sin(c * w + x), c), real(2, seed=1), real(3, 2))[0]

        w = real(2).requires_grad_()
        (batched,) = torch.autograd.grad(
            f(w), w, torch.eye(2, dtype=F64), is_grads_batched=True, retain_graph=True
        )
        functional = torch.autograd.functional
        return (
            batched,
            functional.jacobian(f, w.detach(), vectorize=True),
            functional.hessian(lambda w: f(w).sum(), w.detach(), vectorize=True),
        )

    assert_same(results(scan), results(loop))


def test_anomaly_detection():
    def gradient(s):
        w = torch.tensor(0.7, dtype=F64, requires_grad=True)
        c, _ = s(lambda c, x: (torch.sin(c * w + x), None), real(1)[0], real(3))
        return torch.autograd.grad(c, w)

    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        assert_same(gradient(scan), gradient(loop))


def test_fallback_random():
    def results(run):
        torch.manual_seed(0)
        x = torch.ones(5, 4, requires_grad=True)
        h, y = run(x)
        return h, y, torch.autograd.grad(h.sum(), x)

    def run(x):
        return scan(lambda h, x: (h + x * torch.rand_like(x), h), torch.zeros(4), x)

    with torch._inductor.config.patch(fallback_random=True):
        assert_same(results(torch.compile(run, fullgraph=True)), results(run), 1e-6)


# --- the rest of the house ---


def test_none_among_the_results_of_the_operator():
    c, none, y = torch.ops.higher_order.scan(
        lambda c, x: (c + x, None, c), [torch.zeros(2)], [torch.ones(3, 2)], ()
    )
    assert none is None and y.shape == (3, 2) and c.tolist() == [3, 3]


class Batch(Mapping):
    """As a TensorDict: a mapping by name, and a sequence of its batch."""

    def __init__(self, parts):
        self.parts = parts

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.parts[key]
        return Batch({name: value[key] for name, value in self.parts.items()})

    def __iter__(self):
        return iter(range(len(self)))

    def __len__(self):
        return len(next(iter(self.parts.values())))


pytree.register_pytree_node(
    Batch,
    lambda batch: (list(batch.parts.values()), tuple(batch.parts)),
    lambda values, names: Batch(dict(zip(names, values, strict=True))),
)


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_a_registered_pytree_that_is_a_mapping(mode):
    carry, ys = MODES[mode](
        lambda c, x: (Batch({"h": c["h"] + x["a"]}), x),
        Batch({"h": torch.zeros(2)}),
        Batch({"a": torch.ones(3, 2)}),
    )
    assert carry["h"].tolist() == [3, 3] and ys["a"].shape == (3, 2)


def test_eight_threads_cold():
    module = torch.nn.Linear(3, 3).double()
    x = real(5, 3)

    def work(_):
        c, _ = scan(lambda h, x: (torch.tanh(module(h) + x), h), torch.zeros(3, dtype=F64), x)
        c.sum().backward()
        return c.tolist()

    found = results_of_threads(work, 8)
    assert all(f == found[0] for f in found)

    class Program(torch.nn.Module):
        def forward(self, x):
            return scan(lambda h, x: (h + x, None), torch.zeros(3, dtype=F64), x)[0]

    assert_same(torch.export.export(Program(), (x,)).module()(x), x.sum(0))


def test_a_failed_capture_leaves_nothing_behind():
    def body(h, x):
        hessian = torch.func.hessian(lambda p: (torch.sin(p) * x).sum())(h)
        if h.sum() > 1e9:
            raise AssertionError
        return h * 0.9 + hessian.sum(0), None

    with pytest.warns(UserWarning, match="plain Python loop"):
        scan(body, real(3), real(4, 3))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    with fad.dual_level():
        pass


def test_autocast_of_every_device_is_part_of_a_traces_key():
    from torch_scan_hop.body.cache import autocast_state

    states = {autocast_state()}
    for device in ("cpu", "cuda", "xpu", "mps"):
        before = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, True)
        states.add(autocast_state())
        torch.set_autocast_enabled(device, before)
    assert len(states) == 5


@pytest.mark.parametrize(
    "option", ["hoist_invariant", "batch_xs", "sink_outputs", "contract_accumulators", "drop_dead"]
)
@pytest.mark.parametrize("make", [row_of_a_weight, trace_of_xs, mask_assigned, solve])
def test_a_body_without_one_rewrite(make, option):
    body, init, xs, *closed = make()
    with using_options(**{option: False}):
        check(body, init, xs, params=(closed or [()])[0])


def test_a_diagonal_filled_in_place_of_a_y_that_is_permuted():
    """Its backward reads memory (as_strided), and autograd's cotangent is an expanded scalar."""
    w = torch.randn(4, dtype=F64, requires_grad=True)

    def body(h, x):
        z = torch.outer(w, h)
        z.fill_diagonal_(0.2)
        return torch.tanh(h + x), z.T

    init, xs = torch.ones(2, dtype=F64), torch.randn(5, 2, dtype=F64)
    check(body, init, xs, params=[w])
    got, want = (torch.autograd.grad(run(body, init, xs)[1].sum(), w) for run in (scan, loop))
    assert_same(got, want)


def fills_a_diagonal(h, x):
    z = torch.outer(h * x, x)
    z.fill_diagonal_(0.3)
    return torch.tanh(h + z.sum(0)), z.T * h[:, None]


def scales_strided_memory(h, x):
    z = torch.outer(h * x, x)
    z.as_strided((2,), (2,), 1).mul_(0.5)
    return torch.tanh(h + z.sum(0)), z.t()


def reads_strided_memory(h, x):
    z = torch.outer(h, x).t()
    return torch.tanh(h + z.as_strided((3,), (2,), 1)), z


@pytest.mark.torch_version
@pytest.mark.parametrize("body", [fills_a_diagonal, scales_strided_memory, reads_strided_memory])
@pytest.mark.parametrize("is_expanded", [False, True], ids=["stacked", "expanded"])
def test_second_derivatives_of_operators_of_memory(body, is_expanded):
    """torch's derivative of as_strided_scatter, which functionalization writes, is wrong."""
    init, xs = torch.randn(3, dtype=F64), torch.randn(4, 3, dtype=F64)

    def second(run):
        leaves = [init.clone().requires_grad_(), xs.clone().requires_grad_()]
        h, ys = run(body, *leaves)
        total = h.square().sum() + (ys.sum() if is_expanded else scalar(ys))
        first = torch.autograd.grad(total, leaves, create_graph=True)
        return torch.autograd.grad(sum((g**3).sum() for g in first), leaves)

    assert_same(second(scan), second(loop))


W3 = torch.randn(3, 4, dtype=F64, requires_grad=True)
READ_FROM_MEMORY = {
    "from a position": lambda x: torch.tanh(x @ W3).as_strided((2, 2), (1, 1), 1),
    "before a view": lambda x: torch.tanh(x @ W3)[1:].as_strided((2, 2), (1, 1), 0),
    "beyond a view": lambda x: torch.tanh(x @ W3)[2:].as_strided((2, 2), (1, 1), 1),
    "of a part": lambda x: torch.tanh(x @ W3).split(2)[1].as_strided((2, 2), (1, 1), 1),
    "of a view by strides": lambda x: (
        torch.sin(x @ W3).as_strided((3, 2), (1, 1)).as_strided((2, 2), (1, 1), 1)
    ),
    "transposed": lambda x: torch.outer(x, x).t().as_strided((2, 2), (3, 1), 2),
    "one element": lambda x: torch.tanh(x @ W3).as_strided((), (), 2).expand(2, 2),
    # its derivative has a view by strides, since F.linear works in place on a view
    "grad of a linear": lambda x: torch.func.grad(
        lambda w: torch.nn.functional.linear(x, w, x).square().sum()
    )(W3[:, :3])[:2, :2],
}


@pytest.mark.torch_version
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("of", READ_FROM_MEMORY)
def test_memory_is_read_at_each_step(of, backend):
    """What is computed before the loop is a row of a stack, and as_strided counts from its begin."""

    def body(h, x):
        h = 0.5 * h + READ_FROM_MEMORY[of](x)
        return h, h * 2

    init, xs = torch.zeros(2, 2, dtype=F64), torch.randn(17, 3, dtype=F64, requires_grad=True)

    def outcome(run):
        h, ys = run(body, init, xs)
        leaves = [xs, W3]
        gradients = torch.autograd.grad(scalar((h, ys)), leaves, allow_unused=True)
        return h, ys, [g for g in gradients if g is not None]

    compiled = backend and torch.compile(scan, backend=backend, fullgraph=True)
    assert_same(outcome(compiled or scan), outcome(loop))


W2 = torch.tensor([0.3, 0.5], dtype=F64, requires_grad=True)


def writes_an_element_of_a_constant(h, x):
    with torch.no_grad():
        z = torch.clamp(torch.sin(W2) * h, -2.0, 2.0)
    z[0] = torch.cos(W2[0])
    return torch.sigmoid(z) * h + x, z * 2


def adds_to_a_constant(h, x):
    with torch.no_grad():
        z = h * 2
    z.add_(h * x)
    return torch.tanh(z + h), z


def writes_to_a_view_of_a_constant(h, x):
    with torch.no_grad():
        z = torch.outer(h, h)
    z[0].mul_(W2)
    return torch.tanh(z.sum(0) + h), z


def writes_to_the_base_of_a_view(h, x):
    with torch.no_grad():
        z = h * 2
    row = z[:1]
    z.mul_(W2)
    return torch.tanh(row + h), z


def writes_twice(h, x):
    with torch.no_grad():
        z = h * 2
        z.mul_(W2)
    z.mul_(3.0)
    y = z + 1
    z.mul_(W2)
    return torch.tanh(z + h), y


def writes_beside_a_custom_function(h, x):
    z = torch.zeros(2, dtype=F64)
    z.add_(2.0)
    return torch.sigmoid(z.mean()) * h + Square.apply(W2) * x, z


def solves(h, x):
    a = torch.outer(h, x) + 3 * torch.eye(2, dtype=F64)
    return torch.tanh(torch.linalg.solve(a, W2)), h * x


def takes_determinants(h, x):
    a = torch.outer(h, x) + 3 * torch.eye(2, dtype=F64) + torch.diag(W2)
    return torch.tanh(h * torch.slogdet(a)[1] + torch.det(a) / 9), h * x


def inverts(h, x):
    a = torch.outer(h, x) + 3 * torch.eye(2, dtype=F64) + torch.diag(W2)
    return torch.tanh(torch.linalg.inv(a) @ h), h * x


def filters_a_spectrum(h, x):
    return torch.fft.irfft(torch.fft.rfft(h * x) * W2, n=2), h * x


def writes_to_complex_slices(h, x):
    z = torch.complex(h, x).repeat(2)
    z[1:3] = z[:2].conj().clone() * W2
    z[..., -1] = z[0].clone() * 2
    return torch.tanh(z.real[:2] + z.imag[2:]), torch.view_as_real(z)


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "body",
    [
        writes_an_element_of_a_constant,
        adds_to_a_constant,
        writes_to_a_view_of_a_constant,
        writes_to_the_base_of_a_view,
        writes_twice,
        writes_beside_a_custom_function,
        solves,
        takes_determinants,
        inverts,
        filters_a_spectrum,
        writes_to_complex_slices,
    ],
)
def test_first_and_second_derivatives(body):
    """Of what eager+double programs of the fuzzer found, and its kind."""
    init, xs = torch.ones(2, dtype=F64), torch.randn(4, 2, dtype=F64)

    def derivatives(run):
        leaves = [init.clone().requires_grad_(), xs.clone().requires_grad_(), W2]
        zeros = {"allow_unused": True, "materialize_grads": True}
        total = scalar(run(body, *leaves[:2]))
        first = torch.autograd.grad(total, leaves, create_graph=True, **zeros)
        return first, torch.autograd.grad(sum((g**3).sum() for g in first), leaves, **zeros)

    assert_same(derivatives(scan), derivatives(loop))
    check(body, init, xs, params=[W2])


def pairs_of_a_complex_carry(h, x):
    z = torch.complex(h, x)
    return torch.tanh(z.real * z.imag), torch.view_as_real(z)


def norms_groups(h, x):
    y = (h * x)[None, :, None] * torch.linspace(1, 2, 12, dtype=F64).reshape(3, 1, 4)
    return torch.tanh(h * x), torch.nn.functional.group_norm(y.sin() * W2[:, None], 2)


COTANGENTS = {
    "expanded": lambda h, ys: ys.sum(),
    "permuted": lambda h, ys: sum_with_weights_backwards(ys),
    "none": lambda h, ys: h.sum(),
    "of some steps": lambda h, ys: ys[1:, ..., :1].sum() + h.sum(),
}


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "backend",
    # aot_eager runs the graph that Inductor lowers, which asks for layouts of its own as well
    [None, pytest.param("aot_eager", marks=pytest.mark.slow), "inductor"],
)
@pytest.mark.parametrize("cotangent", COTANGENTS)
@pytest.mark.parametrize("body", [pairs_of_a_complex_carry, norms_groups])
def test_cotangents_of_any_layout(body, cotangent, backend):
    """Operators that take one layout alone were given whatever autograd brought."""

    def gradients_of(run):
        leaves = [torch.ones(2, dtype=F64), torch.linspace(-1, 2, 8, dtype=F64).reshape(4, 2), W2]
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves[:2]] + [W2]
        if backend is not None and run is scan:
            run = torch.compile(functools.partial(scan, body), backend=backend, fullgraph=True)
        else:
            run = functools.partial(run, body)
        total = COTANGENTS[cotangent](*run(*leaves[:2]))
        return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)

    assert_same(gradients_of(scan), gradients_of(loop))


@pytest.mark.torch_version
def test_one_layout_of_symbolic_sizes():
    """No copy was made of what a norm reads where its strides were symbols (fuzz, seed 111018)."""

    def channels_last_norm(v, groups):
        moved = v.reshape(1, -1, v.shape[-1]).movedim(-1, 1)
        normed = torch.nn.functional.group_norm(moved, groups, eps=0.1)
        return normed.movedim(1, -1).reshape(v.shape)

    def body(h, x):
        y = channels_last_norm(x, 1)
        z = channels_last_norm(y, y.shape[-1])
        return torch.sigmoid(z.mean()) * h + y.sin().mean(), z - 0.5 * y

    def gradients_of(run, rows):
        values = torch.linspace(-2, 3, 3 * rows * 4, dtype=F64).sin().reshape(3, rows, 4)
        leaves = [torch.ones(2, dtype=F64).requires_grad_(), values.requires_grad_()]
        h, ys = run(*leaves)
        return h, ys, *torch.autograd.grad(h.sum() + sum_with_weights_backwards(ys), leaves)

    compiled = torch.compile(functools.partial(scan, body), dynamic=True, fullgraph=True)
    for rows in (7, 5):
        expected = gradients_of(functools.partial(loop, body), rows)
        assert_same(gradients_of(compiled, rows), expected)


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "operator",
    [
        torch.nn.functional.silu,
        torch.nn.functional.mish,
        lambda v: torch.logit(torch.sigmoid(v), 1e-6),
        lambda v: torch.nn.functional.group_norm(v[None].expand(2, 4), 2).sum(0),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)).double(),
    ],
    ids=["silu", "mish", "logit", "group_norm", "weight_norm"],
)
def test_backwards_without_a_derivative_of_their_own(operator):
    """torch writes another formula where a backward is differentiated again, and so does a scan."""

    def body(h, x):
        h = operator(h * x)
        return h, h

    init, xs = torch.linspace(0.3, 0.9, 4, dtype=F64), torch.linspace(0.5, 1.5, 12, dtype=F64)

    def second(run):
        leaves = [init.clone().requires_grad_(), xs.reshape(3, 4).clone().requires_grad_()]
        first = torch.autograd.grad(scalar(run(body, *leaves)), leaves, create_graph=True)
        return torch.autograd.grad(sum((g**3).sum() for g in first), leaves)

    assert_same(second(scan), second(loop))
