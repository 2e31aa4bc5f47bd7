"""Each invariant of ``tests/legality``: a rewrite that breaks it is caught, and named."""

from __future__ import annotations

import pytest
import torch
from cells import CELLS
from legality import IllegalRewrite
from legality.checker import Checker, checking
from oracle import gradients
from test_rewrites import body_of, make
from torch.fx.experimental.proxy_tensor import make_fx

from torch_scan_hop import fallback, inductor, scan
from torch_scan_hop import legality as hook
from torch_scan_hop.autodiff import cut
from torch_scan_hop.body.cleanup import clean_up
from torch_scan_hop.eager import fuse
from torch_scan_hop.eager.loop import EagerLoop
from torch_scan_hop.inductor import body as inductor_body
from torch_scan_hop.inductor.rewriter import ScanRewriter
from torch_scan_hop.op import call_scan, scan_op
from torch_scan_hop.rewrites import Options, Planner, classify, plan, planner
from torch_scan_hop.rewrites.products import split_fused_products
from torch_scan_hop.signature import Inputs, Signature
from torch_scan_hop.xla import graph as xla_graph

aten = torch.ops.aten
T, B, H = 6, 2, 3


@pytest.fixture
def checker():
    """Of this test: what it is to find fails no test."""
    with checking(Checker()) as own:
        yield own


def plan_of(body, signature, pays=True):
    return Planner(body, signature, Options(), pointwise_pays=pays).plan()


def the_violation(checker):
    assert len(checker.violations) >= 1
    return str(checker.violations[0])


# --- structure ---


def test_a_target_that_is_no_operator(checker):
    body = body_of(lambda h, x: (h + x, h), make(H), make(H))
    next(n for n in body.graph.nodes if n.op == "call_function").target = torch.add
    with pytest.raises(IllegalRewrite, match=r"rewrite: add: expected an operator of torch"):
        checker.graph("rewrite", body, Signature(1, 1, 0))


def test_inputs_and_outputs_are_the_signatures(checker):
    body = body_of(lambda h, x: (h + x,), make(H), make(H))
    with pytest.raises(IllegalRewrite, match="expected 3 inputs, got 2: h_1, x_1"):
        checker.graph("rewrite", body, Signature(1, 1, 1))
    with pytest.raises(IllegalRewrite, match="expected at least 2 outputs, got 1"):
        checker.graph("rewrite", body, Signature(2, 0, 0))


def test_a_carry_keeps_its_dtype(checker):
    body = body_of(lambda h, x: ((h + x).float(), h), make(H), make(H))
    with pytest.raises(IllegalRewrite, match=r"_to_copy: expected float64\[3\].*got float32"):
        checker.graph("rewrite", body, Signature(1, 1, 0))


# --- writes ---


def writing(h, x):
    """Makes a buffer and writes it in place: the same buffer at every step, and so hoisted."""
    buffer = torch.zeros(H, dtype=torch.float64)
    return h + x, aten.index_put_.default(buffer, [x[:1].long()], h[:1])


def test_a_buffer_that_left_the_loop_is_not_written_in_it(checker):
    with checking(None):
        body = body_of(writing, make(H), make(H))
        hoisted = plan_of(body, Signature(1, 1, 0)).body
    with pytest.raises(
        IllegalRewrite, match=r"index_put_ .*writes in place to zeros: expected a func"
    ):
        checker.graph("rewrite", body)
    assert "zeros" in [n.name for n in hoisted.graph.find_nodes(op="placeholder")]
    with pytest.raises(IllegalRewrite, match="zeros: expected no write to what is from outside"):
        checker.graph("plan", hoisted)


def test_a_view_of_an_input_is_not_written(checker):
    with checking(None):
        body = body_of(lambda h, x: (aten.mul_.Tensor(h.view(H), x), x), make(H), make(H))
    with pytest.raises(IllegalRewrite, match=r"mul_ .* to view, a view of h_1: expected no write"):
        checker.graph("rewrite", body, functional=False)


def test_bodies_that_inductor_made_write_in_place(checker, monkeypatch):
    """As it was before Inductor was told to leave bodies functional."""
    from torch_scan_hop._torch import inductor_passes as private

    inductor.register()
    for name, run_pass in private._mutating_passes.items():
        monkeypatch.setattr(private.post_grad, name, run_pass)
    monkeypatch.setattr(ScanRewriter, "make_functional", lambda self: None)

    def step(h, x):
        buffer = torch.zeros(3)
        buffer[x] = h.sum()
        return h + buffer, buffer

    xs = torch.tensor([[0], [2], [1], [0]])
    with torch._inductor.config.patch(force_disable_caches=True), pytest.raises(Exception):  # noqa: B017
        torch.compile(lambda h, xs: scan(step, h, xs), fullgraph=True)(torch.ones(3), xs)
    assert "Inductor's passes: in the body of scan" in the_violation(checker)
    assert "writes in place to" in the_violation(checker)


def test_a_step_writes_where_it_declares(checker, monkeypatch):
    def to_the_carry(self, destination, source):
        carry = next(n for n in self.graph.nodes if n.name == "carry_0")
        self.call(aten.copy_.default, (carry, source), carry.meta["val"])

    monkeypatch.setattr(inductor_body._Writer, "copy", to_the_carry)
    examples = inductor_body.StepExamples(0, Inputs([torch.ones(H)], [torch.ones(T, H)], []), [])
    body = body_of(lambda h, x: (h + x,), torch.ones(H), torch.ones(H))
    with (
        pytest.raises(IllegalRewrite, match=r"copy__default .* writes in place to carry_0"),
        torch._subclasses.FakeTensorMode() as mode,
    ):
        inductor_body.destination_passing(body, examples, mode)


def test_results_are_tensors_of_their_own(checker, monkeypatch):
    own_stack = plan._own_stack
    monkeypatch.setattr(plan, "_own_stack", lambda *args, copy: own_stack(*args, copy=False))
    body = body_of(lambda h, x: (h + x, x), make(H), make(H))
    found = plan_of(body, Signature(1, 1, 0))
    graph = make_fx(lambda h, xs: found.run(call_scan, Inputs([h], [xs], [])))(make(H), make(T, H))
    with pytest.raises(IllegalRewrite, match="xs_1: expected memory of its own, got xs_1's"):
        checker.replacement("rewrite", graph)
    xs = make(T, H)
    with pytest.raises(
        IllegalRewrite, match=r"result 0: expected memory of its own, got .* input 0"
    ):
        checker.results("run", [xs], [xs[1:]])


# --- values ---


def test_records_are_what_runs(checker):
    body = body_of(lambda h, x: (h + x, x.sum()), make(H), make(H))
    node = next(n for n in body.graph.nodes if n.target is aten.add.Tensor)
    node.meta["val"] = node.meta["val"].float()
    with pytest.raises(IllegalRewrite, match=r"add \(aten.add.Tensor\): running it gives float64"):
        checker.graph("rewrite", body)


def test_one_operator_for_two_keeps_their_layout(checker, monkeypatch):
    body = body_of(lambda h, x: (h, h * h + x.t()), make(H, H), make(H, H))
    EagerLoop(body, Signature(1, 1, 0))
    monkeypatch.setattr(fuse, "_keeps_layout", lambda replacement: True)
    with pytest.raises(IllegalRewrite, match=r"fused: addcmul_default .* with strides"):
        EagerLoop(body, Signature(1, 1, 0))


def test_a_pass_is_checked_by_its_name(checker):
    def comparing(graph):
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            node.target = aten.eq.Tensor

    body = body_of(lambda h, x: (h + x, x), make(H), make(H))
    with pytest.raises(IllegalRewrite, match=r"comparing: add \(aten.eq.Tensor\): .* gives bool"):
        hook.run_passes(body, [comparing])


def test_what_is_added_lays_out_a_sum(checker):
    """A fused product is contiguous; an addition is laid out like its first operand."""
    examples = make(H, H), make(H, H).t()
    body = body_of(lambda h, x: (h, torch.addmm(x, h, h) * 2), *examples)
    hook.run_passes(body, [split_fused_products])
    (output,) = body.graph.find_nodes(op="output")
    assert output.args[0][1].meta["val"].stride() == (1, H)


def test_a_copy_that_is_dropped_leaves_its_strides(checker):
    body = body_of(lambda h, x: (h, aten.clone(x) * 2), make(H), make(2 * H)[::2])
    (output,) = body.graph.find_nodes(op="output")
    assert output.args[0][1].meta["val"].stride() == (1,)


def test_examples_have_the_strides_of_what_runs(checker):
    def run(h, xs):
        return scan_op(body, [h], [xs], ())

    body = body_of(lambda h, x: (h + x, h), make(B, H), make(B, H))
    graph = make_fx(run)(make(B, H), make(T, B, H))
    xs = graph.graph.find_nodes(op="placeholder")[1]
    xs.meta["val"] = make(T, H, B).transpose(1, 2)
    with pytest.raises(
        IllegalRewrite,
        match=r"expected an example with the strides of what runs, \[1, 2\], got \[3, 1\]",
    ):
        checker.bodies("rewrite", graph)


@pytest.mark.parametrize("T", [1, 4])
def test_inductor_keeps_a_carry_contiguous(T):
    """It took the strides of ``init`` for those of the carry into a step."""
    init, w = torch.randn(8, 5).t(), torch.randn(8, 8)
    step = lambda h, x: (torch.tanh(h @ w + x) * h.reshape(-1)[0], h.sum(0))  # noqa: E731
    xs = torch.randn(T, 5, 8)
    with torch._inductor.config.patch(force_disable_caches=True):
        run = torch.compile(lambda h, xs: scan(step, h, xs), fullgraph=True)
        torch.testing.assert_close(run(init, xs), scan(step, init, xs))


def test_a_loop_is_given_what_its_body_was_traced_for(checker):
    body = body_of(lambda h, x: (h + x, h), make(H), make(H))
    found = plan_of(body, Signature(1, 1, 0))
    with pytest.raises(IllegalRewrite, match=r"loop: x_1: expected torch.float64\[3\]"):
        found.run(call_scan, Inputs([make(H)], [make(T, H).float()], []))


def test_a_body_for_any_strides_views_none(checker, monkeypatch):
    from torch_scan_hop.body import cleanup

    monkeypatch.setattr(cleanup, "_VIEWS_OF_ANY_STRIDE", {})
    with pytest.raises(
        IllegalRewrite, match=r"clean_up: view \(aten.view.default\): expected resh"
    ):
        body_of(lambda h, x: (h, x.view(H * B)), make(H), make(H, B))


# --- moves ---


def drawing(h, x):
    return h + x, torch.bernoulli(torch.sigmoid(x))


def test_random_draws_stay_in_the_loop(checker, monkeypatch):
    body = body_of(drawing, make(H), make(H))
    monkeypatch.setattr(planner, "is_pinned", lambda node: False)
    monkeypatch.setattr("torch_scan_hop.rewrites.classify.is_pinned", lambda node: False)
    monkeypatch.setattr(planner, "is_batchable", lambda node, any_trip_count: True)
    monkeypatch.setattr(classify, "is_batchable", lambda node, any_trip_count: True)
    with pytest.raises(IllegalRewrite, match=r"bernoulli .*expected it to stay in the loop"):
        plan_of(body, Signature(1, 1, 0))


def test_what_is_batched_has_a_rule_that_was_checked(checker, monkeypatch):
    def reading_x(h, x, index):
        return h + torch.index_fill(x * 2, 0, index, 1.0).exp(), h

    body = body_of(reading_x, make(H), make(H), torch.tensor([1]))
    batched = plan_of(body, Signature(1, 1, 1)).decisions.batched
    assert [n.name for n in batched] == ["mul"]
    monkeypatch.setattr(planner, "is_batchable", lambda node, any_trip_count: True)
    monkeypatch.setattr(classify, "is_batchable", lambda node, any_trip_count: True)
    with pytest.raises(IllegalRewrite, match=r"index_fill .*expected an operator whose batching"):
        plan_of(body, Signature(1, 1, 1))


def test_what_is_made_before_the_loop_reads_no_carry(checker, monkeypatch):
    body = body_of(lambda h, x: (h.sin() + x, h), make(H), make(H))
    sin = next(n for n in body.graph.nodes if n.target is aten.sin.default)
    monkeypatch.setattr(planner.Planner, "_batched", lambda self, roots, in_loop: [sin])
    with pytest.raises(IllegalRewrite, match="decisions: h_1 is not known before the loop"):
        plan_of(body, Signature(1, 1, 0))


def test_a_stack_has_a_row_for_each_step(checker, monkeypatch):
    from torch_scan_hop.rewrites.parts import Part

    over_steps = Part.over_steps
    monkeypatch.setattr(
        Part, "over_steps", lambda *args: {n: v[1:] for n, v in over_steps(*args).items()}
    )
    body = body_of(lambda h, x: (h + x, (h * 2).exp()), make(H), make(H))
    found = plan_of(body, Signature(1, 1, 0))
    assert found.decisions.sunk
    with pytest.raises(IllegalRewrite, match="stacks: exp: expected a stack of 6 rows"):
        found.run(call_scan, Inputs([make(H)], [make(T, H)], []))


def test_masks_are_not_drawn_again(checker, monkeypatch):
    monkeypatch.setattr(cut, "is_random", lambda node: False)
    monkeypatch.setattr(cut, "wants_recompute", lambda policy, node, producer: True)

    def step(h, x):
        h = torch.dropout(h + x, 0.5, train=True)
        return h, h

    with fallback("allow"):
        scan(step, make(H).requires_grad_(), make(T, H))
    assert "partition, backward: native_dropout" in the_violation(checker)
    assert "expected the value that the forward drew" in the_violation(checker)


# --- the check itself ---

IN_EAGER = {
    "trace", "drop_detaches", "thread_linalg_checks", "drop_copies", "drop_lazy_values",
    "drop_identities", "own_strided_memory", "allow_any_stride", "clean_up", "trim_scans",
    "partition", "drop_stops", "decisions", "plan", "loop", "stacks", "carries", "fused", "run",
}  # fmt: skip
UNDER_INDUCTOR = {
    "capture", "Inductor's passes", "prepare_scans", "lift_sizes", "split_fused_products",
    "decisions", "plan", "loop", "stacks", "carries", "rewrite", "destination_passing",
}  # fmt: skip


def names_of(run):
    with checking(Checker()) as own:
        p = CELLS["lstm"].problem(torch.float32, T=5, B=2)
        gradients(run(p), list(p.params.values()))
    return own.counts


def test_every_rewrite_is_checked_in_eager_mode():
    found = names_of(lambda p: scan(p.combine_fn, p.init, p.xs))
    assert {*found} >= IN_EAGER, IN_EAGER - {*found}
    # a joint graph for each derivative, and a plan for the forward and the backward
    assert found["partition"] >= 2 and found["plan"] == 2


def test_every_rewrite_is_checked_under_inductor():
    from torch_scan_hop.rewrites import using_options

    def run(p):
        compiled = torch.compile(lambda h, xs: scan(p.combine_fn, h, xs), fullgraph=True)
        return compiled(p.init, p.xs)

    with using_options(one_kernel=False), torch._inductor.config.patch(force_disable_caches=True):
        found = names_of(run)
    assert {*found} >= UNDER_INDUCTOR, UNDER_INDUCTOR - {*found}
    assert found["rewrite"] == 2


def test_every_rewrite_is_checked_on_its_way_to_xla():
    body = body_of(drawing, make(H), make(H))
    with checking(Checker()) as own:
        xla_graph.trace_step(body, Inputs([make(H)], [make(T, H)], []))
    assert own.counts["_spell_out_dropout"] == own.counts["attributes_as_inputs"] == 1


def test_transforms_are_checked():
    with checking(Checker()) as own:
        run = lambda h, xs: scan(lambda h, x: (h * x, h), h, xs)[0]  # noqa: E731
        torch.func.vmap(run)(make(B, H), make(B, T, H))
        torch.func.jvp(run, (make(H), make(T, H)), (make(H), make(T, H)))
    assert own.counts["vmap"] and own.counts["jvp"]


@pytest.mark.faults
def test_a_violation_is_kept_where_the_program_goes_on(checker, monkeypatch):
    monkeypatch.setattr(fuse, "_keeps_layout", lambda replacement: True)

    def step(h, x):
        return h * h + x.t(), h

    scan(step, make(H, H), make(T, H, H))
    assert "fused: addcmul_default" in the_violation(checker)


def test_nothing_is_checked_in_production():
    with checking(None):
        assert hook.check_after_each is None
        body = body_of(writing, make(H), make(H))
        clean_up(body)
        split_fused_products(body.graph)
