"""What many steps do to the carries together, beside the loop from any carry; in one process."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, written_loop

from torch_scan_hop._torch.fakes import fake_mode_of, fake_tensor
from torch_scan_hop._torch.tracing import trace
from torch_scan_hop.errors import Refusal
from torch_scan_hop.op import FORWARD
from torch_scan_hop.sharding.composed import composed_steps
from torch_scan_hop.sharding.over_ranks import _roles
from torch_scan_hop.signature import Signature

T, B, D = 7, 2, 3


def reset(carry, x):
    (h,) = carry
    return (torch.where(x > 1, x, torch.sigmoid(x) * h + x),)


def moving_average(carry, x):
    (h,) = carry
    return (torch.lerp(h, x, 0.2) / 1.5,)


def driven(carry, x):
    h, g = carry
    h = 0.5 * h - x
    return h, torch.addcmul(x, h, x.cos()) - g


def never_changed(carry, x):
    h, g = carry
    return h, g + h


def not_read(carry, x):
    return (x * 2,)


def body_of(step, n_carry, dtype):
    mode = fake_mode_of([])
    shapes = [(B, D)] * (n_carry + 1)
    examples = [fake_tensor(mode, s, None, dtype, torch.device("cpu")) for s in shapes]
    return trace(lambda *flat: list(step(flat[:-1], flat[-1])), examples, mode)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("step", [reset, moving_average, driven, never_changed, not_read])
def test_steps_compose(step, dtype):
    if dtype.is_complex and step is reset:
        pytest.skip("complex numbers are not compared")
    n = 2 if step in (driven, never_changed) else 1
    body = body_of(step, n, dtype)
    composed = composed_steps(body, Signature(n, 1, 0), range(n))
    xs = torch.randn(T, B, D, dtype=dtype)
    together = composed.over([xs], [], FORWARD)
    carry = [torch.randn(B, D, dtype=dtype) for _ in range(n)]
    expected, _ = written_loop(lambda c, x: (step(c, x), x), tuple(carry), xs)
    assert_same(tuple(composed.applied(together, carry)), expected)


NOT = {
    "aten.tanh": lambda c, x: (torch.tanh(c[0] + x),),
    "aten.mul.Tensor, in which it is not linear": lambda c, x: (c[0] * c[0],),
    "aten.div.Tensor, in which it is not linear": lambda c, x: (x / c[0],),
    "aten.flip": lambda c, x: (c[0].flip(1),),
    "aten.sum": lambda c, x: (x + c[0].sum(1, keepdim=True),),
}


@pytest.mark.parametrize("reason", NOT)
def test_others_say_what_a_carry_goes_through(reason):
    with pytest.raises(Refusal, match=f"a carry goes through {reason}"):
        composed_steps(body_of(NOT[reason], 1, torch.float64), Signature(1, 1, 0), [0])


def test_whole_numbers_take_turns():
    with pytest.raises(Refusal, match=r"carry 0 is of torch.int64"):
        body = body_of(lambda c, x: (c[0] + x,), 1, torch.int64)
        composed_steps(body, Signature(1, 1, 0), [0])


@pytest.mark.parametrize("is_returned", [False, True])
def test_a_running_sum_that_is_returned_is_no_sum_of_ranks(is_returned):
    def step(carry, x):
        total = carry[0] + x
        return total, total if is_returned else x * 2

    roles = _roles(body_of(step, 1, torch.float64), Signature(1, 1, 0))
    assert (roles.sums, roles.states) == (([], [0]) if is_returned else ([0], []))
