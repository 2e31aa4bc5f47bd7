"""Whatever fails on the way, the program runs: each part is made to raise, and results stay right.

A rewrite that fails is dropped, a kernel that fails is a counted loop, a capture that fails is a
Python loop with a warning; and what a capture patches in torch is put back.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from cells import CELLS
from oracle import assert_same, check, gradients, loop
from torch._dynamo.side_effects import SideEffects
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.meta_utils import MetaTensorDescriber

from torch_scan_hop import NotTraceableError, fallback, scan
from torch_scan_hop._torch import tracing
from torch_scan_hop._torch.dynamo import captures, speculation
from torch_scan_hop.autodiff import derive
from torch_scan_hop.eager import run as dense
from torch_scan_hop.inductor import plans, rewriter
from torch_scan_hop.inductor.cpu import PointwiseKernel, RowsKernel
from torch_scan_hop.rewrites import parts, planner
from torch_scan_hop.rewrites.plan import ScanPlan
from torch_scan_hop.xla.if_loaded import prepare_xla_if_loaded

pytestmark = [
    pytest.mark.faults,
    pytest.mark.torch_version,
    pytest.mark.filterwarnings("ignore:torch_scan_hop"),
]


class Fault(Exception):
    pass


def fault(*args, **kwargs):
    raise Fault("on purpose")


REWRITES = {
    "plan": (planner.Planner, "plan"),
    "sinks": (planner.Planner, "_sinks"),
    "batched": (planner.Planner, "_batched"),
    "invariants": (planner.Planner, "_invariants"),
    "accumulators": (planner.Planner, "_accumulators"),
    "over_steps": (parts.Part, "over_steps"),
    "run_steps": (ScanPlan, "run_steps"),
    "gather": (ScanPlan, "gather"),
}
LOWERING = {
    "pointwise": (PointwiseKernel, "lower"),
    "rows": (RowsKernel, "lower"),
    "blocks": (rewriter, "scan_of_blocks"),
    "pairs": (plans, "Planner"),
}
CAPTURE = {
    "trace": (tracing, "make_fx"),
    "derivative": (derive, "trace_joint"),
    "plan_of": (dense, "plan_of"),
    "speculate": (speculation, "speculate_subgraph"),
    "hop_capture": (captures, "hop_capture"),
    "functorch_views": (captures, "functorch_views"),
    "more_captures": (captures, "more_captures"),
}


def patched_by_us():
    """What captures patch for a while; what XLA's first scan patches, it patches for good."""
    prepare_xla_if_loaded()
    config = torch._dynamo.config
    return (
        SideEffects.check_allowed_side_effect,
        SideEffects.store_attr,
        MetaTensorDescriber.describe_tensor,
        FakeTensor.__dict__.get("nbytes"),
        speculation.AutogradFunctionVariable.call_apply,
        config.recompile_limit,
        config.automatic_dynamic_shapes,
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        torch.is_grad_enabled(),
    )


def cell_problem(cell="lstm"):
    p = CELLS[cell].problem(torch.float64, T=5, B=2)
    return p, list(p.params.values())


@pytest.mark.parametrize("name", [*REWRITES, *CAPTURE])
def test_in_eager_mode(name, monkeypatch):
    before = patched_by_us()
    owner, attribute = {**REWRITES, **CAPTURE}[name]
    p, params = cell_problem()
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, fault)
        check(p.combine_fn, p.init, p.xs, params=params)
    assert patched_by_us() == before
    check(p.combine_fn, p.init, p.xs, params=params)


# one before, in, and after a rewrite, and one of the lowering; the rest in the slow tests
SHORT = {"plan", "run_steps", "pairs", "rows"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SHORT else pytest.mark.slow)
        for name in [*REWRITES, *LOWERING]
    ],
)
def test_under_inductor(name, monkeypatch):
    owner, attribute = {**REWRITES, **LOWERING}[name]
    p, params = cell_problem("linear_recurrence" if name == "pointwise" else "lstm")
    calls = []

    def counted_fault(*args, **kwargs):
        calls.append(name)
        raise Fault("on purpose")

    monkeypatch.setattr(owner, attribute, counted_fault)
    run = torch.compile(lambda h, xs: scan(p.combine_fn, h, xs), fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        actual = run(p.init, p.xs)
        expected = loop(p.combine_fn, p.init, p.xs)
        assert_same(actual, expected)
        assert_same(gradients(actual, params), gradients(expected, params))
    assert calls or name in ("blocks", "gather", "run_steps", "over_steps")


def test_the_bodys_own_error_is_the_bodys():
    def body(h, x):
        return h + torch.ones(3)[x], None

    with pytest.raises(IndexError, match="out of"):
        scan(body, torch.zeros(1), torch.tensor([[0], [7], [1]]))


# --- what is said ---


def printing(h, x):
    print(end="")
    return h + x, None


def branching(h, x):
    if h.sum() > 100:
        return h, None
    return h + x, None


def appending(h, x, log=[]):  # noqa: B006
    log.append("a step")
    return h + x, None


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "body, reason, line",
    [
        (printing, "print|builtin|reorderable", "print(end"),
        (branching, "decides by the value", "if h.sum() > 100"),
        (appending, "changes the length of a list", "log.append("),
    ],
)
def test_the_warning_has_the_reason_and_the_users_line(body, reason, line):
    with pytest.warns(UserWarning, match=f"(?s)plain Python loop: .*({reason})") as caught:
        scan(body, torch.zeros(2), torch.ones(3, 2))
    text = str(caught[0].message)
    assert line in text and "test_faults.py:" in text
    assert caught[0].filename == __file__


def test_the_decision_is_remembered_until_the_body_is_another(monkeypatch):
    calls = []
    original = captures.CapturedFunction

    def counting(*args, **options):
        run = original(*args, **options)

        def counted(*arguments):
            calls.append(1)
            return run(*arguments)

        return counted

    monkeypatch.setattr(captures, "CapturedFunction", counting)

    def cell(loud):
        def body(h, x):
            if loud:
                print(end="")
            return h + x, None

        return body

    for _ in range(5):
        scan(cell(True), torch.zeros(2), torch.ones(3, 2))
    assert len(calls) == 1
    scan(cell(False), torch.zeros(2), torch.ones(3, 2))
    assert len(calls) == 2


@pytest.mark.filterwarnings("default")
def test_fallback_is_a_setting_and_a_context():
    arguments = (branching, torch.zeros(2), torch.ones(3, 2))
    with warnings.catch_warnings(), fallback("allow"):
        warnings.simplefilter("error")
        assert scan(*arguments)[0].tolist() == [3, 3]
    with (
        fallback("error"),
        pytest.raises(NotTraceableError, match=r"(?s)forbids.*decides by the value"),
    ):
        scan(*arguments)
    with fallback("error"), fallback("allow"):
        scan(*arguments)
    with pytest.warns(UserWarning, match="plain Python loop"):
        scan(*arguments)
    with pytest.raises(ValueError, match="mode must be one of"):
        fallback("never")


@pytest.mark.filterwarnings("default")
def test_a_body_captured_at_each_call_is_named_once():
    def body_with(value):
        return lambda h, x: (h + x * len(value), None)

    with pytest.warns(UserWarning, match="captured anew at each of its last 8 calls") as caught:
        for k in range(12):
            scan(body_with("a" * k), torch.zeros(2), torch.ones(3, 2))
    ours = [w for w in caught if "torch_scan_hop" in str(w.message)]
    assert len(ours) == 1
    # the condition on the string's length, and no line of ours
    guard = str(ours[0].message).partition("What was different the last time: ")[2]
    assert "len" in guard or "==" in guard
    assert "scan_op(" not in guard


@pytest.mark.filterwarnings("default")
def test_schedules_that_differ_are_not_to_be_tensors():
    def body(h, x):
        return h + x, None

    with pytest.warns(UserWarning, match="Each value of reverse=, unroll= and checkpoint= is"):
        for k in range(1, 10):
            scan(body, torch.zeros(2), torch.ones(12, 2), unroll=k)
