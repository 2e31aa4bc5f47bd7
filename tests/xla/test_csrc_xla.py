"""Assembled scans, compiled and run by XLA, against a Python loop."""

from __future__ import annotations

import pytest
import torch
from hlo_bodies import loop_opcode_counts, lower, opcode_counts, python_loop, run_on_xla

from torch_scan_hop.xla._hlo import INVARIANT, SLICED, assemble_scan

pytestmark = pytest.mark.xla
pytest.importorskip("torch_xla")

LENGTHS = [1, 2, 7]


def check(body, init, xs, invariants=(), *, length, reverse=False):
    actual = run_on_xla(body, init, xs, invariants, length=length, reverse=reverse)
    expected = python_loop(body, init, xs, invariants, length=length, reverse=reverse)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def rnn(h, x, w):
    h = torch.tanh(h @ w + x)
    return h, 2 * h


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_rnn(length, reverse):
    h, x, w = torch.randn(3, 4), torch.randn(length, 3, 4), torch.randn(4, 4)
    check(rnn, [h], [x], [w], length=length, reverse=reverse)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_as_carry_slice_and_y(dtype):
    def body(c, x):
        return (c ^ x if dtype == torch.bool else c + x), c

    c, x = (torch.arange(6).reshape(2, 3) % 2).to(dtype), (torch.ones(4, 2, 3)).to(dtype)
    check(body, [c], [x], length=4)


@pytest.mark.parametrize("reverse", [False, True])
def test_carries_of_different_dtypes(reverse):
    def body(step, seen, low, h, x):
        h = h * 0.5 + x
        return step + 1, seen | (x.sum() > 0), low + h.bfloat16(), h, step * 3, h > 0

    init = [
        torch.tensor(2**40),
        torch.tensor(False),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.randn(3),
    ]
    check(body, init, [torch.randn(5, 3)], length=5, reverse=reverse)


def test_swapped_carries():
    init = [torch.tensor(1.0), torch.tensor(2.0)]
    check(lambda a, b, x: (b, a, a + x), init, [torch.randn(5)], length=5)


def test_a_swap_of_different_shapes_is_refused():
    lowered = lower(lambda a, b: (b.clone(), a.clone()), [torch.zeros(2), torch.zeros(3)], [])
    with pytest.raises(ValueError, match=r"the body changes carry \d from f32\[\d\] to f32\[\d\]"):
        assemble_scan(lowered.hlo, 2, 4, False, lowered.roles)


def test_carry_the_body_never_reads():
    check(lambda c, x: (x * 2, x), [torch.randn(3)], [torch.randn(4, 3)], length=4)


def test_unused_slice_and_invariant():
    def body(c, x, unused_x, w, unused_w):
        return (c + x * w,)

    xs = [torch.randn(4, 3), torch.randn(4, 2)]
    check(body, [torch.zeros(3)], xs, [torch.tensor(3.0), torch.zeros(9)], length=4)


def test_unchanged_carry_and_forwarded_values():
    check(lambda c, d, x, w: (c, c, x, w, d), [torch.randn(3), torch.randn(3)],
          [torch.randn(4, 3)], [torch.randn(2)], length=4)  # fmt: skip


def test_no_inputs_at_all():
    check(lambda c: (c * 2, c), [torch.tensor(1)], [], length=6)


def test_no_carry():
    check(lambda x: (x * 2,), [], [torch.randn(4, 3)], length=4)


def test_empty_arrays():
    check(lambda c, x: (c + 1, x), [torch.zeros(0, 2)], [torch.zeros(4, 3, 0)], length=4)


def test_scan_in_a_scan_in_a_scan():
    import torch_xla
    import torch_xla.core.xla_builder as xb

    def nested(body, depth):
        """Runs ``body(c) -> c`` two times per level, each level one While."""
        if depth == 0:
            return body
        lowered = lower(nested(body, depth - 1), [torch.zeros(3)], [])
        module = assemble_scan(lowered.hlo, 1, 2, False, lowered.roles)
        computation = xb.computation_from_module_proto("scan", module)

        def scan(c):
            arguments = [c, *[v.to("xla") for v in lowered.inputs]]
            return torch_xla._XLAC._xla_user_computation("xla::scan", arguments, computation)

        return scan

    actual = run_on_xla(nested(lambda c: (c + 1,), 2), [torch.zeros(3)], [], length=2)
    torch.testing.assert_close(actual, [torch.full((3,), 8.0)])


def test_body_is_copied_and_runs_inside_the_loop():
    lowered = lower(rnn, [torch.zeros(3, 4)], [torch.zeros(5, 3, 4)], [torch.zeros(4, 4)])
    assert sorted(lowered.roles) == sorted([0, SLICED, INVARIANT, INVARIANT])  # w, and the 2
    module = assemble_scan(lowered.hlo, 1, 5, False, lowered.roles)
    body, everything, loop = (
        opcode_counts(lowered.hlo), opcode_counts(module), loop_opcode_counts(module)
    )  # fmt: skip
    for opcode in ("dot", "tanh", "multiply"):
        assert body[opcode] == everything[opcode] == loop[opcode] > 0
    assert everything["while"] == 1 and loop["while"] == 0
    assert loop["dynamic-slice"] == loop["dynamic-update-slice"] == loop["call"] == 1
