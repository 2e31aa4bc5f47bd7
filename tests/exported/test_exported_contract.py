"""What an exported scan promises to a reader that knows torch's own: see ``body/for_export``.

The reader here is as simple as that lets it be. It writes the carry into buffers of its own before
it stacks the ys, one after another, it takes whatever the body returns as it lies, and it knows no
keyword.
"""

from __future__ import annotations

import io

import pytest
import torch
import torch.utils._pytree as pytree
from exportable import PROGRAMS, Program
from oracle import assert_same, gradients
from torch import fx

from torch_scan_hop import scan
from torch_scan_hop._torch.operators import storage_of
from torch_scan_hop.body import for_export
from torch_scan_hop.dispatch import proxy

pytestmark = [pytest.mark.torch_version, pytest.mark.works("torch.export")]
SCAN = torch.ops.higher_order.scan
T_DIM = torch.export.Dim("T", min=2, max=50)


class Reader(fx.Interpreter):
    """Runs a graph; of a scan, it does what the module says."""

    def call_function(self, target, args, kwargs):
        if target is not SCAN:
            return super().call_function(target, args, kwargs)
        body, init, xs, additional = args
        carry = [leaf.clone() for leaf in init]
        stacks = None
        for t in range(xs[0].shape[0]):
            results = Reader(body).run(*carry, *(x[t] for x in xs), *additional)
            for buffer, result in zip(carry, results[: len(carry)], strict=True):
                buffer.copy_(result)
            ys = results[len(carry) :]
            if stacks is None:
                stacks = [y.new_empty(xs[0].shape[0], *y.shape) for y in ys]
            for stack, y in zip(stacks, ys, strict=True):
                stack[t] = y
        return [*carry, *stacks]


def read(program, *inputs):
    """What the reader computes; written buffers are left out."""
    gm, signature = program.graph_module, program.graph_signature
    given = {**program.state_dict, **program.constants}
    lifted = [
        given[spec.target].clone() for spec in signature.input_specs if spec.target is not None
    ]
    results = Reader(gm).run(*lifted, *inputs)
    specs = zip(results, signature.output_specs, strict=True)
    return [result for result, spec in specs if spec.kind.name == "USER_OUTPUT"]


def graphs_with_scans(gm):
    for node in gm.graph.find_nodes(op="call_function", target=SCAN):
        body = getattr(gm, node.args[0].target)
        yield node, body
        yield from graphs_with_scans(body)


def check_contract(program):
    found = list(graphs_with_scans(program.graph_module))
    assert found
    for node, body in found:
        assert len(node.args) == 4 and not node.kwargs
        inputs = [n.meta["val"] for n in body.graph.find_nodes(op="placeholder")]
        memory = [storage_of(v) for v in inputs if isinstance(v, torch.Tensor)]
        results = [r.meta["val"] for r in next(iter(reversed(body.graph.nodes))).args[0]]
        own = [storage_of(result) for result in results]
        assert len({*own} - {*memory}) == len(own)


def export(name, strict, is_dynamic=True):
    model = Program(PROGRAMS[name]).eval()
    shapes = ({}, {0: T_DIM}) if is_dynamic else None
    inputs = torch.randn(2, 3), torch.randn(5, 2, 3)
    return model, torch.export.export(model, inputs, dynamic_shapes=shapes, strict=strict)


def saved_and_loaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_reader_of_torchs_scan_computes_the_loop(name, strict):
    model, program = export(name, strict)
    inputs = torch.randn(2, 3), torch.randn(7, 2, 3)
    expected = pytree.tree_leaves(model.with_loop(*inputs))
    decomposed = program.run_decompositions()
    forms = [decomposed, saved_and_loaded(decomposed), saved_and_loaded(program)]
    for form in [*forms, forms[-1].run_decompositions()]:
        check_contract(form)
        assert_same(read(form, *inputs), expected, 1e-5)
        with torch.no_grad():
            assert_same(pytree.tree_leaves(form.module()(*inputs)), expected, 1e-5)


def nodes(gm, target):
    found = gm.graph.find_nodes(op="call_function", target=target)
    return found + [n for _, body in graphs_with_scans(gm) for n in nodes_of(body, target)]


def nodes_of(gm, target):
    return gm.graph.find_nodes(op="call_function", target=target)


ADDED = (torch.ops.aten.flip.default, torch.ops.aten.clone.default)


@pytest.mark.parametrize("name", ["reversed", "reversed trees", "what came in", "two", "nested"])
def test_what_was_added_is_taken_out_where_this_package_runs_it(name, monkeypatch):
    _, program = export(name, strict=False)
    added = [node for target in ADDED for node in nodes(program.graph_module, target)]
    assert added
    monkeypatch.setattr(proxy, "is_making_a_program", lambda: False)
    _, plain = export(name, strict=False)
    for form in (program, saved_and_loaded(program)):
        module = form.module()
        assert not [node for target in ADDED for node in nodes(module, target)]
        kinds = [
            [(n.op, n.target, n.kwargs) for n in gm.graph.nodes if n.op != "get_attr"]
            for gm in (module, plain.module())
        ]
        assert kinds[0] == kinds[1]
    # the program itself stays what others read
    check_contract(program)


def test_a_copy_that_is_written_stays():
    class Model(torch.nn.Module):
        def forward(self, h, xs):
            def cell(h, x):
                a = h.clone()
                y = a.clone()
                return a.mul_(0.5).add_(x), (y, h.clone())

            return scan(cell, h, xs)

    inputs = torch.randn(3), torch.randn(5, 3)
    for strict in (False, True):
        program = torch.export.export(Model(), inputs, strict=strict)
        for form in (program, program.run_decompositions()):
            assert_same(form.module()(*inputs), Model()(*inputs))
            assert_same(read(form, *inputs), pytree.tree_leaves(Model()(*inputs)))


def test_programs_saved_by_earlier_versions(monkeypatch):
    """They have the keyword, and results that are inputs."""
    monkeypatch.setattr(proxy, "is_making_a_program", lambda: False)
    model, program = export("reversed trees", strict=False)
    loaded = saved_and_loaded(program)
    assert nodes_of(loaded.graph_module, SCAN)[0].kwargs == {"reverse": True}
    monkeypatch.undo()
    inputs = torch.randn(2, 3), torch.randn(7, 2, 3)
    expected = pytree.tree_leaves(model.with_loop(*inputs))
    with torch.no_grad():
        assert_same(pytree.tree_leaves(loaded.module()(*inputs)), expected, 1e-5)
    decomposed = loaded.run_decompositions()
    check_contract(decomposed)
    assert_same(read(decomposed, *inputs), expected, 1e-5)


def test_a_policy_is_no_keyword_and_holds_in_training():
    class Model(torch.nn.Module):
        def forward(self, h, xs):
            def cell(h, x):
                h = torch.sin(h * x)
                return h, h

            return scan(cell, h, xs, checkpoint="full", reverse=True)

    h, xs = torch.randn(3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    program = torch.export.export(Model(), (h, xs), strict=False)
    expected = gradients(Model()(h, xs), [h, xs])
    decomposed = saved_and_loaded(program).run_decompositions()
    for form in (program, saved_and_loaded(program), decomposed, saved_and_loaded(decomposed)):
        check_contract(form)
        module = form.module()
        (node,) = nodes_of(module, SCAN)
        assert node.kwargs == {"reverse": True, "checkpoint": "full"}
        assert_same(gradients(module(h, xs), [h, xs]), expected, 1e-6)


def test_flips_of_some_xs_or_ys_stay():
    """Another scan, of other numbers."""

    class Model(torch.nn.Module):
        def forward(self, h, xs):
            both = scan(lambda h, x: (h * 0.5 + x[0], (h, x[1])), h, (xs.flip(0), xs))
            one = scan(lambda h, x: (h * 0.5 + x, (h, x)), h, xs.flip(0))
            return both, (one[0], one[1][0].flip(0), one[1][1]), one[1][0]

    inputs = torch.randn(3), torch.randn(5, 3)
    program = torch.export.export(Model(), inputs, strict=False)
    assert not any(node.kwargs for node in nodes_of(program.module(), SCAN))
    assert_same(program.module()(*inputs), Model()(*inputs))


def test_a_program_that_cannot_be_changed_back_runs_as_others_would_run_it(monkeypatch, caplog):
    model, program = export("reversed", strict=False)

    def fails(node):
        raise RuntimeError("broken")

    monkeypatch.setattr(for_export, "_reverse_instead_of_flips", fails)
    inputs = torch.randn(2, 3), torch.randn(7, 2, 3)
    with torch.no_grad():
        assert_same(program.module()(*inputs), model.with_loop(*inputs), 1e-5)
    assert "runs as others would run it" in caplog.text
    caplog.clear()


@pytest.mark.slow
def test_ahead_of_time_nothing_is_added(monkeypatch):
    model, program = export("reversed", strict=False, is_dynamic=False)
    monkeypatch.setattr(proxy, "fit_for_readers", None)  # whoever calls it fails
    monkeypatch.setattr(proxy, "_flipped", None)
    inputs = torch.randn(2, 3), torch.randn(5, 2, 3)
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(program)
        run = torch._inductor.aoti_load_package(package)
        assert_same(run(*inputs), model.with_loop(*inputs), 1e-5)
