"""``checkpoint=``: what each policy saves, what it runs again and in which order, and that
values and gradients do not depend on it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from policies import ONE_OF_EACH, keep_products
from torch.utils.checkpoint import CheckpointPolicy

from torch_scan_hop import scan
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.schedule.policy import Binomial
from torch_scan_hop.schedule.segments import segment_length

T, B, D, H = 37, 2, 3, 4


POLICIES = {
    "default": None,
    "full": "full",
    "sqrt": "sqrt",
    "segments": 5,
    "one segment": 1,
    "binomial": Binomial(snapshots=3),
    "binomial deep": Binomial(snapshots=2, sweeps=3),
    "per operator": keep_products,
}


# each level of nesting is traced at each order of differentiation; "sqrt" makes segments, too
RARE = {"binomial", "binomial deep", "sqrt"}
SOME_SLOW = [pytest.param(p, marks=pytest.mark.slow) if p in RARE else p for p in POLICIES]


class Problem:
    """A cell that keeps several values per step, for a state of one ``[B, H]`` tensor."""

    def __init__(self, steps: int = T) -> None:
        make = torch.Generator().manual_seed(1)
        self.w = torch.randn(D, H, dtype=torch.float64, generator=make, requires_grad=True)
        self.u = torch.randn(H, H, dtype=torch.float64, generator=make).mul_(0.5).requires_grad_()
        self.xs = torch.randn(steps, B, D, dtype=torch.float64, generator=make, requires_grad=True)
        self.init = torch.zeros(B, H, dtype=torch.float64)
        self.wanted = [self.w, self.u, self.xs]

    def cell(self, h, x):
        a = torch.sin(x @ self.w + h @ self.u)
        h = torch.tanh(a) * torch.cos(a)
        return h, h.sum(-1)

    def loss(self, results):
        carry, ys = results
        return carry.sum() + ys.square().sum()

    def run(self, checkpoint, reverse=False):
        return scan(self.cell, self.init, self.xs, reverse=reverse, checkpoint=checkpoint)

    def expected(self, reverse=False):
        return scan_loop(self.cell, self.init, self.xs, self.xs.shape[0], reverse)


def saved_carries(problem: Problem, run) -> float:
    """Bytes saved by ``run``, without inputs, in units of a carry."""
    inputs = {t.untyped_storage().data_ptr() for t in [*problem.wanted, problem.init]}
    sizes = {}
    kept = []

    def pack(tensor):
        kept.append(tensor)  # alive, so that addresses stay distinct
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in inputs:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        results = run()
    del results
    return sum(sizes.values()) / problem.init.untyped_storage().nbytes()


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("policy", SOME_SLOW)
def test_values_and_gradients_do_not_depend_on_the_policy(policy, reverse):
    problem = Problem()
    results, expected = problem.run(POLICIES[policy], reverse), problem.expected(reverse)
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(
        torch.autograd.grad(problem.loss(results), problem.wanted),
        torch.autograd.grad(problem.loss(expected), problem.wanted),
    )


@pytest.mark.parametrize("policy", SOME_SLOW)
def test_double_backward(policy):
    problem = Problem(steps=7)

    def second(results):
        first = torch.autograd.grad(problem.loss(results), problem.wanted, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), problem.wanted)

    torch.testing.assert_close(second(problem.run(POLICIES[policy])), second(problem.expected()))


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "policy", ["default", "full", "sqrt", "segments", "binomial", "per operator"]
)
def test_compiled(policy):
    problem = Problem(steps=11)
    run = torch.compile(lambda: problem.run(POLICIES[policy]), backend="aot_eager", fullgraph=True)
    results, expected = run(), problem.expected()
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(
        torch.autograd.grad(problem.loss(results), problem.wanted),
        torch.autograd.grad(problem.loss(expected), problem.wanted),
    )


@pytest.mark.parametrize(
    "policy, most",
    [
        ("full", T + 1),
        ("sqrt", 3 * math.sqrt(T)),
        ("segments", 5 + 1),
        ("one segment", 2),
        # ys of the segments are results, not residuals; the snapshots are the carries
        ("binomial", Binomial(3).leaves()),
    ],
)
def test_saved_carries(policy, most):
    problem = Problem()
    assert saved_carries(problem, lambda: problem.run(POLICIES[policy])) <= most


def test_saved_carries_of_the_default():
    problem = Problem()
    assert saved_carries(problem, lambda: problem.run(None)) > T + 1


def test_saved_by_a_policy_per_operator():
    problem = Problem()
    saved = saved_carries(problem, lambda: problem.run(keep_products))
    # the carry and two products of each step
    assert saved == 3 * T


@pytest.mark.parametrize("op", ["add", "cos"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_policy_decides_whether_sin_saves_x_or_cos_x(op, backend):
    saved = {"add": torch.ops.aten.add.Tensor, "cos": torch.ops.aten.cos.default}[op]

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is saved else CheckpointPolicy.MUST_RECOMPUTE

    u = torch.randn(H, H, dtype=torch.float64, requires_grad=True)
    xs = torch.randn(6, B, H, dtype=torch.float64, requires_grad=True)
    init = torch.zeros(B, H, dtype=torch.float64)

    def cell(h, x):
        return torch.sin(h @ u + x), None

    def run():
        return scan(cell, init, xs, checkpoint=policy)[0]

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        carry = (torch.compile(run, backend=backend, fullgraph=True) if backend else run)()
    arguments = {"add": lambda h, x: h @ u + x, "cos": lambda h, x: torch.cos(h @ u + x)}[op]
    _, expected = scan_loop(lambda h, x: (cell(h, x)[0], arguments(h, x)), init, xs, 6, False)
    assert sum(t.shape == expected.shape and torch.allclose(t, expected) for t in kept) == 1
    torch.testing.assert_close(
        torch.autograd.grad(carry.sum(), [u, xs]),
        torch.autograd.grad(scan_loop(cell, init, xs, 6, False)[0].sum(), [u, xs]),
    )


class StepRecorder(torch.utils._python_dispatch.TorchDispatchMode):
    """The order in which steps are run, forward and again: x holds the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.erf.default:
            self.steps.append(int(args[0].flatten()[0]))
        return func(*args, **(kwargs or {}))


def recorded_steps(checkpoint, steps):
    xs = torch.arange(steps, dtype=torch.float64).reshape(steps, 1)
    init = torch.ones(1, dtype=torch.float64, requires_grad=True)

    def cell(c, x):
        # erf(x) marks the step; it depends on c so that it is run where the carry is
        return torch.sin(c) * torch.erf(x + 0 * c.detach()), None

    def run():
        return scan(cell, init, xs, checkpoint=checkpoint)[0]

    run()  # traced
    recorder = StepRecorder()
    carry = run()
    with recorder:
        torch.autograd.grad(carry.sum(), init)
    return recorder.steps


def test_recomputation_order_of_segments():
    assert recorded_steps(None, 9) == []
    # the last segment first, each from its first step to its last
    assert recorded_steps("sqrt", 9) == [8, 6, 7, 4, 5, 2, 3, 0, 1]
    assert recorded_steps(2, 5) == [3, 4, 0, 1, 2]


def test_recomputation_order_of_full():
    assert recorded_steps("full", 4) == [3, 2, 1, 0]


def test_recomputation_order_of_binomial():
    # six leaves of one step: [0 1 2] again, then [3 4] again, then 5, which is kept;
    # [3 4] is 3 again, then 4; [0 1 2] is 0 again, then 1 again, then 2
    policy = Binomial(snapshots=2, sweeps=2)
    assert policy.leaves() == 6
    assert recorded_steps(policy, 6) == [3, 4, 3, 0, 1, 2, 1, 0]


EAGER_AND_COMPILED = pytest.mark.parametrize("backend", [None, "aot_eager"])
EACH_POLICY = pytest.mark.parametrize("policy", ONE_OF_EACH)


def compiled(fn, backend):
    return torch.compile(fn, backend=backend, fullgraph=True) if backend else fn


@EAGER_AND_COMPILED
@EACH_POLICY
def test_dropout_masks_are_never_redrawn(policy, backend):
    xs = torch.ones(12, 64, dtype=torch.float64)
    scale = torch.ones(64, dtype=torch.float64, requires_grad=True)

    def cell(c, x):
        y = F.dropout(x * scale, 0.5)
        return c + y, y

    init = torch.zeros(64, dtype=torch.float64)
    run = compiled(lambda: scan(cell, init, xs, checkpoint=ONE_OF_EACH[policy])[1], backend)
    ys = run()
    (gradient,) = torch.autograd.grad(ys.sum(), scale)
    # d/dscale of mask * x * scale is what was drawn
    torch.testing.assert_close(gradient, ys.detach().sum(0))
    assert len({tuple(y.tolist()) for y in ys.detach()}) == 12


@pytest.mark.parametrize("policy", ["default", "full", "sqrt", "per operator"])
def test_dropout_masks_are_never_redrawn_by_a_double_backward(policy):
    xs = torch.ones(9, 64, dtype=torch.float64)
    scale = torch.ones(64, dtype=torch.float64, requires_grad=True)

    def cell(c, x):
        y = F.dropout(x * scale, 0.5)
        return c, y**2

    _, ys = scan(cell, torch.zeros(64, dtype=torch.float64), xs, checkpoint=ONE_OF_EACH[policy])
    (first,) = torch.autograd.grad(ys.sum(), scale, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), scale)
    # y = (mask * scale)^2 at scale 1: its derivatives are 2 y and 2 y
    torch.testing.assert_close(first, 2 * ys.sum(0))
    torch.testing.assert_close(second, 2 * ys.detach().sum(0))


@EACH_POLICY
def test_residuals_can_be_offloaded(policy):
    """``save_on_cpu``, and that the backward reads what the hooks gave back and nothing else."""
    problem = Problem(steps=6)
    expected = torch.autograd.grad(problem.loss(problem.expected()), problem.wanted)
    with torch.autograd.graph.save_on_cpu():
        results = problem.run(ONE_OF_EACH[policy])
    torch.testing.assert_close(torch.autograd.grad(problem.loss(results), problem.wanted), expected)

    packed, unpacked = [], []

    def unpack(k):
        unpacked.append(k)
        return torch.zeros_like(packed[k])

    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or len(packed) - 1, unpack
    ):
        carry, _ = problem.run(ONE_OF_EACH[policy])
    gradients = torch.autograd.grad(carry.sum(), problem.wanted)
    assert sorted(unpacked) == list(range(len(packed)))
    # weights, xs and carries were all zeros to it
    assert not any(g.any() for g in gradients)


@EAGER_AND_COMPILED
@EACH_POLICY
def test_a_mutated_buffer_is_carried_through(policy, backend):
    mean = torch.zeros(3, dtype=torch.float64)
    reference = torch.zeros(3, dtype=torch.float64)
    xs = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)

    def cell_with(buffer):
        def cell(c, x):
            buffer.mul_(0.9).add_(x.detach(), alpha=0.1)
            return torch.tanh(c + x - buffer), None

        return cell

    init = torch.zeros(3, dtype=torch.float64)
    cell = cell_with(mean)
    run = compiled(lambda: scan(cell, init, xs, checkpoint=ONE_OF_EACH[policy])[0], backend)
    carry = run()
    expected, _ = scan_loop(cell_with(reference), init, xs, 10, False)
    torch.testing.assert_close(carry, expected)
    torch.testing.assert_close(mean, reference)
    torch.testing.assert_close(
        torch.autograd.grad(carry.sum(), xs), torch.autograd.grad(expected.sum(), xs)
    )
    # the backward ran steps again, and changed nothing
    torch.testing.assert_close(mean, reference)


@pytest.mark.parametrize(
    "checkpoint, error", [("half", TypeError), (0, ValueError), (True, TypeError), (1.5, TypeError)]
)
def test_bad_policies_are_named(checkpoint, error):
    with pytest.raises(error, match="checkpoint must be"):
        Problem(steps=2).run(checkpoint)


def test_segment_lengths():
    assert [segment_length(n, "sqrt") for n in (1, 2, 16, 17)] == [1, 1, 4, 4]
    assert segment_length(10, 4) == 3
