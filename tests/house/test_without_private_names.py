"""The package on a torch that lacks a private name: something else runs, and one warning says so.

``without_each_name.txt`` has the outcome of each name, written by ``without_each_name.py``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from private_names import (
    CHECKED,
    SHIMS,
    capabilities_of,
    used_by_capability,
    used_by_shim,
    written,
)
from private_names import TABLE as NAMES_OF_SHIMS
from without_each_name import forbidden, tables

import torch_scan_hop
from torch_scan_hop._torch import capabilities, forms
from torch_scan_hop._torch.forms import CALLED, NAMES, ONLY_IN, REPLACED

HERE = Path(__file__).parents[1]


VERSION = torch.__version__.partition("+")[0]


def test_the_package_knows_the_names_that_it_uses():
    """``python tests/private_names.py`` writes them anew."""
    assert used_by_capability() == NAMES
    if VERSION in CHECKED:  # and how it calls and replaces them
        assert NAMES_OF_SHIMS.read_text() == written()


def test_every_shim_belongs_to_a_capability():
    assert SHIMS.keys() <= capabilities.CAPABILITIES.keys()
    assert all(map(capabilities_of, used_by_shim()))


def test_the_table_has_each_name():
    used = {name for names in used_by_shim().values() for name in names}
    assert all(outcomes.keys() == used for outcomes in tables().values())


def test_nothing_is_worse_than_refused():
    for outcomes in tables().values():
        assert not forbidden(outcomes)


def outcomes(*names: str) -> dict[str, str]:
    result = subprocess.run(
        [sys.executable, "without_each_name.py", *names],
        capture_output=True, text=True, timeout=3600, cwd=HERE,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    return dict(line.split(": ", 1) for line in lines)  # type: ignore[misc]


#: one of each capability, and what was the worst of each kind
SAMPLE = (
    "torch._C.DispatchKey",
    "torch._dynamo.variables.higher_order_ops._hop_name_to_variable_class",
    "torch._inductor.codegen.triton.TritonCSE",
    "torch._inductor.lowering.register_lowering",
    *(["torch._C.DispatchKey.AutogradXLA"] if torch.__version__ < "2.10" else []),
)


@pytest.mark.torch_version
def test_a_sample_of_names():
    found = outcomes(*SAMPLE)
    assert not forbidden(found)
    if VERSION in tables():
        assert found == {name: tables()[VERSION][name] for name in SAMPLE}


@pytest.mark.slow
def test_every_name():
    every = outcomes(*tables()[CHECKED[-1]])
    assert not forbidden(every)
    if VERSION in tables():
        assert every == tables()[VERSION]


# --- by hand ---


def cell(h, x):
    new = torch.tanh(h + x)
    return new, new * 2


@contextlib.contextmanager
def without(*names):
    """Capabilities are switched off for a while, as by hand."""
    off = capabilities._by_hand | capabilities._expanded(names)
    captures = capabilities.captures and not off & {"operator", "capture"}
    with mock.patch.multiple(capabilities, _by_hand=off, captures=captures):
        yield


H, XS = torch.zeros(2, 3), torch.linspace(-1, 1, 24).reshape(4, 2, 3)


@pytest.mark.parametrize(
    "names", [(), ("cpu_kernels",), ("kernels",), ("counted_loop",), ("capture",)]
)
def test_each_rung_computes_the_loop(names):
    want = torch_scan_hop.reference.scan_loop(cell, H, XS, 4, False)
    torch._dynamo.reset()
    with without(*names):
        compiled = torch.compile(lambda h, xs: torch_scan_hop.scan(cell, h, xs), fullgraph=True)
        for got in (compiled(H, XS), torch_scan_hop.scan(cell, H, XS)):
            torch.testing.assert_close(got, want)


def graph_of(names):
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    with without(*names):
        program = torch.compile(lambda h, xs: torch_scan_hop.scan(cell, h, xs), backend=backend)
        program(H, XS)
    (graph,) = graphs
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_without_capture_a_program_holds_the_steps():
    assert torch.ops.higher_order.scan in graph_of(())
    assert torch.ops.higher_order.scan not in graph_of(("capture",))


def test_a_capability_that_does_not_exist():
    with pytest.raises(ValueError, match="no capability is called 'wings'; operator, "):
        with without("wings"):
            pass


def run(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(HERE.parent), **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


PLAIN = """
import torch, torch_scan_hop
from torch_scan_hop import accelerate_torch, debug, explain, scan, scan_layers, show_versions
h, ys = scan(lambda h, x: (h + x, h * x), torch.zeros(2), torch.ones(2, 3), dim=1, reverse=True)
assert h.tolist() == [3, 3] and ys.tolist() == [[2, 1, 0]] * 2, (h, ys)
w = torch.ones(2, requires_grad=True)
scan(lambda h, x: (h * w + x, None), torch.zeros(2), torch.ones(3, 2))[0].sum().backward()
assert w.grad.tolist() == [3, 3]
layers = [torch.nn.Linear(2, 2) for _ in range(2)]
assert scan_layers(layers, h).equal(torch.nn.Sequential(*layers)(h))
with debug():
    scan(lambda h, x: (h + x, x), h, torch.ones(3, 2))
gru = torch_scan_hop.nn.GRU(3, 4)
assert torch_scan_hop.nn.Recurrent(torch.nn.GRUCell(3, 4))(torch.ones(5, 2, 3))[0].shape == (5, 2, 4)
ys, h_n = torch.compile(gru, backend="eager")(torch.ones(5, 2, 3))
assert torch.allclose(ys, gru(torch.ones(5, 2, 3))[0]) and torch.allclose(h_n[0], ys[-1])
h = torch.full((2,), 3.0)
for refused in (
    lambda: explain(lambda h, x: (h, x), h, h), accelerate_torch, lambda: torch_scan_hop.graphs
):
    try:
        refused()
    except RuntimeError as error:
        assert "(operator) is switched off: by hand" in str(error), error
    else:
        raise AssertionError("not refused")
assert torch.compile(lambda x: x + 1, backend="eager")(h).tolist() == [4, 4]
show_versions()
"""


LOADED = """
import sys
import torch_scan_hop
prefix = "torch_scan_hop._torch."
print(*sorted(m.removeprefix(prefix) for m in sys.modules if m.startswith(prefix)))
"""


def test_without_the_operator_nothing_private_is_imported():
    loaded = run(LOADED, TORCH_SCAN_HOP_WITHOUT="operator").split()
    # these read their names when they are called
    assert [name for name in loaded if name in used_by_shim()] == ["function_modes", "sizes"]


def test_without_the_operator_the_package_is_the_loop():
    said = run(PLAIN, TORCH_SCAN_HOP_WITHOUT="operator")
    assert "can: operator" in said and "by hand" in said


WARNED_OF_ONCE = """
import warnings
import torch
name = "torch._sync"
del torch._sync
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch_scan_hop
    import torch_scan_hop.op  # what else asks whether it may do what needs the operator
    torch_scan_hop.scan(lambda h, x: (h + x, h), torch.zeros(2), torch.ones(3, 2))
said = [str(w.message) for w in caught if "torch_scan_hop" in str(w.message)]
assert len(said) == 1 and "(operator)" in said[0] and name in said[0], said
try:
    torch_scan_hop.graphs
except RuntimeError as error:
    assert name in str(error)
"""


def test_one_name_is_warned_of_once():
    run(WARNED_OF_ONCE)


def test_the_variable_names_capabilities():
    code = "from torch_scan_hop._torch.capabilities import report; print(report())"
    said = run(f"import torch_scan_hop; {code}", TORCH_SCAN_HOP_WITHOUT="kernels, huge_pages")
    assert said.count("by hand") == 3


# --- of another form ---


def test_what_is_here_has_its_form_also_once_it_is_patched():
    torch._dynamo.reset()
    torch.compile(lambda h, xs: torch_scan_hop.scan(cell, h, xs), fullgraph=True)(H, XS)
    capabilities._missing.cache_clear()
    by_hand = {name: said for name, said in capabilities.report().items() if said != "there"}
    assert not by_hand


FORMS = {
    # arguments in another order, one that must be given, one that is gone, one more of an override
    "torch._dynamo.variables.higher_order_ops.make_attr": lambda name, tx: 0,
    "torch._functorch.vmap.restore_vmap": lambda func, in_dims, batch_size, randomness, chunk: 0,
    "torch._dynamo.variables.builder.wrap_fx_proxy": lambda proxy: 0,
    "torch._dynamo.side_effects.SideEffects.store_attr": lambda self, item, name, kind, value: 0,
    "torch._inductor.fx_passes.post_grad.decompose_scan_to_while_loop": lambda graph, module: 0,
    "torch._inductor.ir.ExternKernel.codegen": lambda self, wrapper, graph: 0,
    "torch._dynamo.output_graph.OutputGraph.install_subgraph": lambda self, sub_gm, name: 0,
}


@pytest.mark.parametrize("path", FORMS)
def test_what_has_another_form_is_not_there(path, monkeypatch):
    names = {name for names in NAMES.values() for name in names}
    used = path if path in names else path.rpartition(".")[0]
    assert used in names and forms.why_not(used) is None
    other = FORMS[path]
    monkeypatch.setattr(forms.resolve(path.rpartition(".")[0]), path.rpartition(".")[2], other)
    parameters = ", ".join(other.__code__.co_varnames)
    said = forms.why_not(used)
    assert said == f"has another {path}, of ({parameters}) (torch 2.9 to 2.15 have it)"


def test_a_new_argument_that_may_be_left_out_is_no_other_form():
    form = "tx f sub_args"
    assert not forms.why_not_of_form(lambda tx, f, sub_args, more=None: 0, form, form)
    assert forms.why_not_of_form(lambda tx, f, sub_args, more: 0, form, "")
    assert forms.why_not_of_form(lambda tx, f, sub_args, more: 0, "", form)
    # another name at the same place is the same argument to a call, not to what overrides it
    assert not forms.why_not_of_form(lambda tx, fn, sub_args: 0, form, "")
    assert forms.why_not_of_form(lambda tx, fn, sub_args: 0, "", form)


def test_what_some_versions_have_is_expected_of_those_like_them(monkeypatch):
    name = "torch.fx._symbolic_trace._get_is_fx_tracing"
    assert ONLY_IN[name] == "2.15.0"
    for version, expected in {
        "2.9.1": False,
        "2.14.0": False,
        "2.15.0": True,
        "2.17.0": True,
    }.items():
        monkeypatch.setattr(torch, "__version__", f"{version}+cpu")
        assert forms._is_expected(name) is expected, version


def test_what_is_replaced_has_a_form():
    """A patch by a name that a variable holds is listed by hand (``private_forms.BY_HAND``)."""
    for name in ("SideEffects.store_attr", "TensorVariable._method_register_hook"):
        assert any(path.endswith(name) for path in REPLACED)
    assert len(CALLED) > 100 and len(REPLACED) > 50


OF_ANOTHER_FORM = """
import torch, torch._dynamo, warnings
from torch._dynamo.variables import higher_order_ops
{change}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch_scan_hop
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    h, ys = torch_scan_hop.scan(lambda h, x: (h + x, h), torch.zeros(2), torch.ones(3, 2))
    assert h.tolist() == [3, 3] and ys[:, 0].tolist() == [0, 1, 2]
told = [str(w.message) for w in caught if "torch_scan_hop" in str(w.message)]
assert len(told) == 1 and "(capture) is switched off: " in told[0], told
print(told)
"""


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "change, said",
    [
        ("higher_order_ops._hop_name_to_variable_class = ()", "not as expected"),
        ("higher_order_ops.make_attr = lambda name, tx: None", "has another torch._dynamo."),
    ],
)
def test_a_registry_of_another_form_is_nobody_elses_matter(change, said):
    code = OF_ANOTHER_FORM.format(change=change)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert said in result.stdout


def test_a_graph_without_a_scan_is_left_to_torch():
    from torch._inductor.fx_passes import post_grad

    torch._dynamo.reset()
    torch.compile(lambda h, xs: torch_scan_hop.scan(cell, h, xs))(H, XS)  # all is patched
    gm = torch.fx.symbolic_trace(lambda x: (x + 1, x * 2)[0])
    before = gm.code
    gm.graph.lint()
    post_grad.decompose_scan_to_while_loop(gm)
    assert gm.code == before and any(
        node.target.__name__ == "mul" for node in gm.graph.nodes if node.op == "call_function"
    )


# --- failures that no name foretells ---


def failing(*args):
    raise AttributeError("it has no wings")


#: as a line of the package would raise it
failing = type(failing)(
    failing.__code__.replace(co_filename=str(Path(torch_scan_hop.__file__).parent / "x.py")),
    globals(),
)


@pytest.mark.torch_version
def test_a_capture_that_fails_is_no_internal_error(monkeypatch):
    from torch_scan_hop.capture import variables

    want = torch_scan_hop.reference.scan_loop(cell, H, XS, 4, False)
    monkeypatch.setattr(variables, "install_body", failing)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="the capture failed on torch 2.*it has no wings"):
        torch.testing.assert_close(torch_scan_hop.scan(cell, H, XS), want)
    program = torch.compile(
        lambda h, xs: torch_scan_hop.scan(cell, h, xs), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="the capture failed on torch 2") as info:
        program(H, XS)
    assert "Internal" not in type(info.value).__name__
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "where, what",
    [
        ("loop._counted_loop", "the lowering of a scan"),
        ("loop.uses_cpp_wrapper", "the code of a scan"),
        ("passes.mark_joined_parts", "the rewriting of a scan"),
    ],
)
def test_a_lowering_that_fails_is_refused_in_a_line(where, what, monkeypatch):
    import torch_scan_hop.inductor.loop
    import torch_scan_hop.inductor.passes

    module, name = where.split(".")
    monkeypatch.setattr(getattr(torch_scan_hop.inductor, module), name, failing)
    torch._dynamo.reset()
    program = torch.compile(lambda h, xs: torch_scan_hop.scan(cell, h, xs))
    line = rf"{what} failed on torch 2\S* \(AttributeError: it has no wings\). With .*=counted_loop"
    with without("kernels"):
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            pytest.raises(Exception, match=line),
        ):
            program(H, XS)
    torch._dynamo.reset()
    with without("counted_loop"):  # as the line says
        want = torch_scan_hop.reference.scan_loop(cell, H, XS, 4, False)
        torch.testing.assert_close(program(H, XS), want)


def test_a_body_that_a_compiled_program_cannot_hold_is_refused():
    """Torch 2.9 would break its graph within a call of ours."""

    def noisy(h, x):
        print("a step")
        return h + x, h

    torch._dynamo.reset()
    program = torch.compile(lambda h, xs: torch_scan_hop.scan(noisy, h, xs), backend="eager")
    refusal = "^scan: combine_fn is not captured"
    with pytest.raises(torch._dynamo.exc.UncapturedHigherOrderOpError, match=refusal):
        program(H, XS)
