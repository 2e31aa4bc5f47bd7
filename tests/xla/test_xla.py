"""Scan on XLA means what the Python loop on the CPU means, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytestmark = [
    pytest.mark.xla,
    pytest.mark.works("XLA"),
    pytest.mark.filterwarnings("error:.*could not be traced"),
]
pytest.importorskip("torch_xla")

from xla_harness import Program, check, loop  # noqa: E402

from torch_scan_hop import fallback, scan  # noqa: E402
from torch_scan_hop.fallback import forget_reasons  # noqa: E402
from torch_scan_hop.xla import lower  # noqa: E402

F64 = torch.float64


@pytest.fixture(autouse=True, params=["CPU", "another device"])
def _products_stay_or_leave(request, monkeypatch):
    """On a CPU those with small weights stay in the loop."""
    if request.param != "CPU":
        monkeypatch.setattr(lower, "LEAST_WEIGHT_ON_A_CPU", 0)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_rnn_with_closed_over_weights(length, reverse):
    def program(p):
        w, b = p.randn(3, 3, grad=True), p.randn(3, grad=True)

        def cell(h, x):
            h = torch.tanh(h @ w + x * 0.5 + b)
            return h, h

        return p.scan(
            cell, p.randn(2, 3, grad=True), p.randn(length, 2, 3, grad=True), reverse=reverse
        )

    check(program)


def test_zeros_as_init_do_not_stop_gradients():
    def program(p):
        w = p.randn(3, 3, grad=True)

        def cell(h, x):
            h = torch.tanh(h @ w + x)
            return h, None

        return p.scan(cell, p.tensor(torch.zeros(2, 3, dtype=F64)), p.randn(4, 2, 3))

    check(program)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_cells_of_torch_nn(cell):
    def program(p):
        module = p.module(cell(3, 4, dtype=F64))
        h = p.randn(2, 4, grad=True)

        def step(state, x):
            state = module(x, state)
            return state, (state[0] if isinstance(state, tuple) else state)

        init = (h, h.tanh()) if cell is nn.LSTMCell else h
        return p.scan(step, init, p.randn(5, 2, 3, grad=True))

    check(program)


def test_pytrees_and_none():
    def program(p):
        def step(carry, x):
            a, (b, none) = carry["a"], carry["b"]
            u, v = x["u"], x["v"][0]
            return {"b": [b + v, none], "a": a * u}, {"sum": a + b, "nothing": None, "pair": (a, v)}

        init = {"a": p.randn(3, grad=True), "b": [p.randn(3), None]}
        return p.scan(step, init, {"u": p.randn(4, 3, grad=True), "v": (p.randn(4, 3), None)})

    check(program)


def test_carries_of_every_kind():
    def program(p):
        def step(carry, x):
            n, seen, low, h, z = carry
            h = h * 0.5 + x * n
            carry = (n + 1, seen | (x.sum() > 0), low + h.to(torch.bfloat16), h, z * (1 + 1j))
            return carry, (n * 3, h > 0)

        init = (
            p.tensor(0), p.tensor(False), p.tensor(torch.zeros(3, dtype=torch.bfloat16)),
            p.randn(3, grad=True), p.tensor(torch.ones(2, dtype=torch.complex64)),
        )  # fmt: skip
        (n, seen, low, h, z), ys = p.scan(step, init, p.randn(5, 3, grad=True))
        return n, seen, low.detach(), h, torch.view_as_real(z), ys

    check(program)


def test_numbers_and_length_without_xs():
    def program(p):
        a = p.randn(3, grad=True)

        def step(carry, _):
            h, n = carry
            return (h * a, n + 1), h.sum()

        return p.scan(step, (p.randn(3), p.tensor(0)), None, 4)

    check(program)


@pytest.mark.parametrize("length", [1, 4])
def test_everything_may_alias(length):
    def program(p):
        w = p.randn(3, grad=True)

        def step(carry, x):
            a, b = carry
            return (b, a), (a, a, x, w, b.view(3, 1), x[:2])

        return p.scan(step, (p.randn(3, grad=True), p.randn(3)), p.randn(length, 3, grad=True))

    check(program)


def test_same_tensor_in_every_role():
    def program(p):
        t = p.randn(3, 3, grad=True)
        return p.scan(lambda c, x: (c + x * t, t @ c), t, t[None].expand(4, 3, 3))

    check(program)


def test_in_place_inside_the_body():
    def program(p):
        def step(h, x):
            buffer = torch.zeros_like(h)
            buffer[0] = x[0]
            buffer.add_(h).mul_(0.5)
            h = h.clone()
            h[:, 1] += buffer[:, 1].detach()
            return h, buffer

        return p.scan(step, p.randn(2, 3, grad=True), p.randn(4, 2, 3, grad=True))

    check(program)


def test_in_place_on_the_carry_and_x_is_not_seen_outside():
    def program(p):
        h, x = p.randn(3), p.randn(4, 3)

        def step(c, row):
            c += row
            row *= 2
            return c, row

        return p.scan(step, h, x), h, x

    check(program)


def test_mutated_buffers():
    def program(p):
        count = p.tensor(torch.zeros(3, dtype=F64))
        cache = p.tensor(torch.zeros(4, 3, dtype=F64))
        w = p.randn(3, grad=True)

        def step(carry, x):
            h, n = carry
            count.add_(x.detach().abs())
            cache.index_copy_(0, n.view(1), x.detach().view(1, 3))
            return (h * w + x, n + 1), h * count.clone()

        out = p.scan(step, (p.randn(3), p.tensor(0)), p.randn(4, 3, grad=True))
        return out, count, cache

    check(program)


def test_batch_norm_statistics():
    def program(p):
        norm = p.module(nn.BatchNorm1d(3, dtype=F64))

        def step(h, x):
            h = norm(h + x)
            return h, h

        out = p.scan(step, p.randn(5, 3, grad=True), p.randn(4, 5, 3))
        variances.append(norm.running_var.cpu())
        return out, norm.running_mean.clone(), norm.num_batches_tracked.clone()

    variances: list[torch.Tensor] = []
    check(program)
    program(Program(loop, "xla"))
    on_cpu, of_scan, on_xla = variances
    # torch_xla's own running_var is of the biased variance, in a scan or not
    torch.testing.assert_close(of_scan, on_xla, rtol=1e-10, atol=1e-10)
    kept = 0.9**4  # of the initial ones
    torch.testing.assert_close((of_scan - kept) * 5 / 4, on_cpu - kept, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_in_a_scan(reverse):
    def program(p):
        w = p.randn(3, 3, grad=True)

        def inner(h, x):
            h = torch.tanh(h @ w + x)
            return h, h.sum()

        def outer(h, xs):
            h, sums = p.scan(inner, h, xs, reverse=not reverse)
            return h * 0.9, sums

        return p.scan(outer, p.randn(3, grad=True), p.randn(4, 5, 3, grad=True), reverse=reverse)

    check(program)


@pytest.mark.parametrize("checkpoint", [None, "full"])
def test_checkpoint(checkpoint):
    def program(p):
        w = p.randn(3, 3, grad=True)

        def cell(h, x):
            h = torch.tanh(torch.sigmoid(h @ w) * x)
            return h, h

        return p.scan(cell, p.randn(2, 3, grad=True), p.randn(4, 2, 3), checkpoint=checkpoint)

    check(program)


def test_double_backward():
    def program(p):
        w, h = p.randn(3, 3, grad=True), p.randn(3, grad=True)

        def cell(h, x):
            h = torch.tanh(h @ w + x)
            return h, h

        _, ys = p.scan(cell, h, p.randn(4, 3))
        first = torch.autograd.grad((ys**2).sum(), (w, h), create_graph=True)
        return [g**2 for g in first]

    check(program)


def test_vmap():
    def program(p):
        w = p.randn(3, 3, grad=True)
        h, x = p.randn(6, 2, 3, grad=True), p.randn(4, 6, 2, 3)

        def one(h, x):
            def cell(h, x):
                h = torch.tanh(h @ w + x)
                return h, h

            return p.scan(cell, h, x)

        return torch.vmap(one, in_dims=(0, 1))(h, x)

    check(program)


def test_vmap_with_vector_states():
    def program(p):
        w = p.randn(3, 3, grad=True)
        h, x = p.randn(6, 3, grad=True), p.randn(4, 3)

        def one(h, scale):
            def cell(h, x):
                h = torch.tanh(w @ h * scale + x)
                return h, h @ h

            return p.scan(cell, h, x)

        return torch.vmap(one)(h, p.randn(6))

    check(program)


@pytest.mark.filterwarnings("default:.*could not be traced")  # by the loop, and right
def test_func_grad():
    def program(p):
        x = p.randn(4, 3)

        def loss(w, h):
            def cell(h, x):
                h = torch.tanh(h @ w + x)
                return h, h

            return p.scan(cell, h, x)[1].square().sum()

        return torch.func.grad(loss, argnums=(0, 1))(p.randn(3, 3), p.randn(3))

    check(program)


def test_embedding_lookup_and_where():
    def program(p):
        table = p.randn(7, 3, grad=True)

        def step(carry, x):
            h, total = carry
            h = torch.where(x > 3, h + table.index_select(0, x.view(1))[0], h * 0.5)
            return (h, total + x), torch.nn.functional.embedding(x, table) + h

        init = (p.randn(3, grad=True), p.tensor(0))
        return p.scan(step, init, p.tensor([1, 5, 0, 6]))

    check(program)


def test_softmax_layer_norm_and_attention():
    def program(p):
        q = p.randn(2, 4, 8, grad=True)
        norm = p.module(nn.LayerNorm(8, dtype=F64))

        def step(h, x):
            scores = torch.softmax((h @ q.transpose(-1, -2)) / 8**0.5, -1)
            h = norm(h + torch.nn.functional.gelu(scores @ q) + x)
            return h, scores.amax(-1)

        return p.scan(step, p.randn(2, 4, 8), p.randn(3, 2, 4, 8, grad=True))

    check(program, 1e-7)


def test_constants_made_in_the_body():
    def program(p):
        def step(h, x):
            ramp = torch.arange(3, device=x.device)
            table = torch.tensor([1.5, 2.5, 3.5], dtype=F64, device=x.device)
            return h * table + torch.ones(3, device=x.device, dtype=F64) * 7.25 + ramp, x + 2.5

        return p.scan(step, p.randn(3, grad=True), p.randn(4, 3))

    check(program)


@pytest.mark.parametrize(
    ("of_init", "of_xs"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_gradients_of_either_input(of_init, of_xs):
    def program(p):
        def step(c, x):
            c = c * x
            return c, c + x

        return p.scan(step, p.randn(2, grad=of_init), p.randn(3, 2, grad=of_xs))

    check(program)


def test_a_running_sum_is_cumsum():
    h, x = torch.randn(2, device="xla"), torch.randn(5, 2, device="xla")

    def add(c, x):
        return c + x, c + x

    total, ys = scan(add, h, x)
    torch.testing.assert_close(ys, h + x.cumsum(0))
    torch.testing.assert_close(total, h + x.sum(0))


@pytest.mark.parametrize("nothing", [None, (), {}], ids=repr)
def test_no_output_keeps_its_structure(nothing):
    h = torch.ones(2, device="xla", requires_grad=True)
    carry, ys = scan(lambda c, x: (c * x, nothing), h, torch.full((3, 2), 2.0, device="xla"))
    assert ys == nothing
    (gradient,) = torch.autograd.grad(carry.sum(), h)
    assert gradient.tolist() == [8, 8]


def test_wrong_arguments_are_refused():
    h, x = torch.zeros(2, device="xla"), torch.zeros(3, 2, device="xla")
    with pytest.raises(TypeError, match="combine_fn must be callable"):
        scan(1000, h, x)
    with pytest.raises(ValueError, match="one size along dim=0"):
        scan(lambda c, x: (c, None), h, (x, x[:2]))


# Torch composes these of others; torch_xla has kernels for them, of which autograd knows nothing.
COMPOSED = {
    "inverse": lambda z: torch.inverse(z + 4 * torch.eye(3, dtype=F64, device=z.device)),
    "diag": torch.diag,
    "std": lambda z: torch.std(z, 0),
    "std of all": torch.std,
    "kl_div": lambda z: nn.functional.kl_div(z.log_softmax(0), z.softmax(1), reduction="sum"),
    "svd": lambda z: torch.svd(z)[1],
    "selu in place": lambda z: nn.functional.selu(z * 1, inplace=True),
    "einsum": lambda z: torch.einsum("ij,kj->ik", z, z),
}


@pytest.mark.filterwarnings("ignore:.*autograd kernel was not registered")
@pytest.mark.parametrize("name", COMPOSED)
def test_gradients_through_composed_operators(name):
    def program(p):
        w = p.randn(3, 3, grad=True)

        def cell(h, x):
            h = torch.tanh(h * 0.5 + COMPOSED[name](w + x).sum())
            return h, h

        return p.scan(cell, p.randn(3, grad=True), p.randn(4, 3, 3, grad=True))

    check(program)


def solves(p):
    return lambda h, x: (torch.linalg.solve(x @ x.mT + 4 * torch.eye(3, device=x.device), h), h)


def crosses(p):
    w = p.randn(3, 3, grad=True)
    return lambda h, x: (h + torch.cross(w, x, dim=1), x)  # composed of what has no lowering


def in_an_inner_scan(p):
    w = p.randn(3, 3, grad=True)

    def inner(h, x):
        return h + torch.cross(w, x[None].expand(3, 3), dim=1), x.sum()

    return lambda h, x: p.scan(inner, h, x)


def complex_decay(p):
    a, b = (p.randn(3, grad=True, dtype=torch.float32) for _ in range(2))

    def cell(h, x):
        z = torch.complex(a.cos(), b.sin()) * torch.complex(h[0], h[1]) + x[0]
        h = torch.stack([z.real, z.imag, h[2] + x[1]])
        return h, h

    return cell


@pytest.mark.filterwarnings("ignore:torch_scan_hop. a scan on XLA runs step by step")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cell_of", [solves, crosses, in_an_inner_scan, complex_decay])
def test_what_has_no_lowering_runs_step_by_step(cell_of, reverse):
    # torch_xla drops the imaginary parts of complex128
    dtype, tolerance = (torch.float32, 1e-4) if cell_of is complex_decay else (F64, 1e-10)

    def program(p):
        h, xs = (p.randn(*s, 3, 3, grad=True, dtype=dtype) for s in ((), (4,)))
        return p.scan(cell_of(p), h, xs, reverse=reverse)

    check(program, tolerance)


def test_what_has_no_lowering_is_told_of_once_or_refused():
    forget_reasons()

    def cell(h, x):
        return h + torch.histc(x, 3), None

    h, xs = torch.zeros(3, device="xla"), torch.randn(4, 3, device="xla")
    with pytest.warns(UserWarning, match=r"step by step.*aten::histc.*cannot lower"):
        scan(cell, h, xs)
    scan(lambda h, x: cell(h, x), h, xs)
    with fallback("error"), pytest.raises(NotImplementedError, match=r"aten::histc.*cannot lower"):
        scan(lambda h, x: cell(h, 2 * x), h, xs)
    with fallback("error"), pytest.raises(NotImplementedError, match=r"aten::histc.*cannot lower"):
        scan(cell, h, xs)  # which has run step by step


@pytest.mark.parametrize("wide", [torch.float64, torch.float32])
def test_a_0d_tensor_of_a_wider_dtype_does_not_widen_a_step(wide):
    """``half + 0-d float64`` is half: also if the step has computed it, or read it as a number."""

    def program(p):
        xs, total = p.randn(5, 3, dtype=torch.float16), p.tensor(torch.tensor(0.5, dtype=wide))

        def cell(carry, x):
            h, total = carry
            h = h * 0.5 + total.exp()
            ys = x + total.sum(), torch.maximum(x, total * 2), torch.where(x > 0, x, -total)
            return (h, total * 0.5 + x.sum().item() * 0.1), (*ys, h - (total + 1))

        return p.scan(cell, (xs[0], total), xs)

    check(program, 2e-2)


def test_a_value_is_written_by_a_mask_in_the_loop():
    def program(p):
        h, xs, w = p.randn(2, 3, grad=True), p.randn(5, 2, 3, grad=True), p.tensor(0.3, grad=True)

        def cell(h, x):
            h = torch.sin(h + x)
            y = h * 2
            y[x > 0] = w * 2
            y[:, x[0] > 0.5] = 1.5
            y[x[:, 1] > 0] = x[0, 1]
            return h, y

        return p.scan(cell, h, xs)

    with fallback("error"):
        check(program)
