"""``checkpoint=`` on XLA: each policy means what the loop means, and saves what it says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = [pytest.mark.xla, pytest.mark.filterwarnings("error:.*could not be traced")]
pytest.importorskip("torch_xla")

from policies import ONE_OF_EACH  # noqa: E402
from xla_harness import check, count_of  # noqa: E402

from torch_scan_hop import scan  # noqa: E402

F64 = torch.float64
T, B, D = 9, 2, 3


POLICIES = {**ONE_OF_EACH, "segments": 2}
EACH_POLICY = pytest.mark.parametrize("policy", POLICIES)


@pytest.mark.parametrize("reverse", [False, True])
@EACH_POLICY
def test_values_and_gradients(policy, reverse):
    def program(p):
        w = p.randn(D, D, grad=True)

        def cell(h, x):
            h = torch.tanh(torch.sigmoid(h @ w) * x)
            return h, h.sum(-1)

        return p.scan(
            cell,
            p.randn(B, D, grad=True),
            p.randn(T, B, D, grad=True),
            reverse=reverse,
            checkpoint=POLICIES[policy],
        )

    check(program)


@pytest.mark.parametrize("policy", ["default", "full", "sqrt", "per operator"])
def test_double_backward(policy):
    def program(p):
        w, h = p.randn(D, D, grad=True), p.randn(D, grad=True)

        def cell(h, x):
            h = torch.tanh(h @ w + x)
            return h, h

        _, ys = p.scan(cell, h, p.randn(4, D), checkpoint=POLICIES[policy])
        first = torch.autograd.grad((ys**2).sum(), (w, h), create_graph=True)
        return [g**2 for g in first]

    check(program)


@EACH_POLICY
def test_a_mutated_buffer(policy):
    def program(p):
        mean = p.tensor(torch.zeros(D, dtype=F64))

        def cell(c, x):
            mean.mul_(0.9).add_(x.detach(), alpha=0.1)
            return torch.tanh(c + x - mean), None

        carry, _ = p.scan(
            cell,
            p.tensor(torch.zeros(D, dtype=F64)),
            p.randn(T, D, grad=True),
            checkpoint=POLICIES[policy],
        )
        return carry, mean

    check(program)


@EACH_POLICY
def test_dropout_masks_are_never_redrawn(policy):
    scale = torch.ones(64, dtype=F64).to("xla").requires_grad_()
    xs = torch.ones(T, 64, dtype=F64, device="xla")

    def cell(c, x):
        y = F.dropout(x * scale, 0.5)
        return c + y, y

    _, ys = scan(cell, torch.zeros(64, dtype=F64, device="xla"), xs, checkpoint=POLICIES[policy])
    (gradient,) = torch.autograd.grad(ys.sum(), scale)
    # d/dscale of mask * x * scale is what was drawn
    torch.testing.assert_close(gradient.cpu(), ys.detach().sum(0).cpu())
    assert len({tuple(y.tolist()) for y in ys.detach().cpu()}) == T


@EACH_POLICY
def test_residuals_can_be_offloaded(policy):
    w = torch.randn(D, D, dtype=F64).to("xla").requires_grad_()
    xs = torch.randn(T, B, D, dtype=F64).to("xla")

    def run():
        init = torch.zeros(B, D, dtype=F64, device="xla")
        return scan(
            lambda h, x: (torch.tanh(torch.sin(h @ w) + x), None),
            init,
            xs,
            checkpoint=POLICIES[policy],
        )[0]

    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.shape) or t.cpu(), lambda t: t.to("xla")
    ):
        carry = run()
    assert packed
    torch.testing.assert_close(
        torch.autograd.grad(carry.sum(), w), torch.autograd.grad(run().sum(), w)
    )


@pytest.mark.parametrize(
    "policy, whiles", [("default", 2), ("full", 2), ("per operator", 2), ("sqrt", 10)]
)
def test_the_loops_of_a_training_step(policy, whiles):
    """Segments are loops in loops: one forward; again, and backward, in the loop over segments.

    Nine steps are four segments of two, and one of the step that is left: five loops each.
    """
    w = torch.randn(D, D, dtype=F64).to("xla").requires_grad_()
    xs = torch.randn(T, B, D, dtype=F64).to("xla")
    init = torch.zeros(B, D, dtype=F64, device="xla")
    carry, _ = scan(
        lambda h, x: (torch.tanh(h @ w + x), None), init, xs, checkpoint=POLICIES[policy]
    )
    gradients = torch.autograd.grad(carry.sum(), w)
    assert count_of("while", carry, *gradients) == whiles
