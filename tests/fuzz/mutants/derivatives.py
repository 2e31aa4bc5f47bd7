"""Mends of derivatives: custom functions, forward over reverse, functorch in a body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from .registry import mutant


@mutant("none", "eager", "pointwise")
def gradient_of_init_lost() -> Iterator[object]:
    """No mend, but the simplest mutant: what init is made of gets no gradient."""
    import torch_scan_hop
    from torch_scan_hop import tree

    real = torch_scan_hop.scan

    def scan(body: Any, init: Any, *args: Any, **kwargs: Any) -> Any:
        init = tree.map_leaves(lambda v: v.detach() if hasattr(v, "detach") else v, init)
        return real(body, init, *args, **kwargs)

    with mock.patch.object(torch_scan_hop, "scan", scan):
        yield None


@mutant("d", "eager+double", "pointwise,custom")
def saved_values_are_disconnected() -> Iterator[object]:
    """A second derivative runs custom functions as Dynamo wrote them: what they save is cut off."""
    from torch_scan_hop.autodiff import custom

    with mock.patch.object(custom, "with_connected_functions", lambda body: body):
        yield None


@mutant("e", "eager+forward_over_reverse", "pointwise")
def tangents_of_gradients_lost() -> Iterator[object]:
    """Dual tensors that require grad go through a scan of duals, whose gradients have no tangent."""
    from torch_scan_hop._torch.operators import DispatchKey
    from torch_scan_hop._torch.transforms import has_tangents
    from torch_scan_hop.dispatch.jvp import scan_of_duals
    from torch_scan_hop.op import ScanOptions, scan_op
    from torch_scan_hop.signature import Inputs

    real = scan_op.py_kernels[DispatchKey.Autograd]

    def autograd(body: Any, init: Any, xs: Any, additional: Any, **options: Any) -> Any:
        if has_tangents([*init, *xs, *additional]):
            inputs = Inputs(list(init), list(xs), list(additional))
            return scan_of_duals(body, inputs, ScanOptions(**options))
        return real(body, init, xs, additional, **options)

    scan_op._dispatch_cache.clear()
    try:
        with mock.patch.dict(scan_op.py_kernels, {DispatchKey.Autograd: autograd}):
            yield None
    finally:
        scan_op._dispatch_cache.clear()


@mutant("e", "eager+func_grad", "inner_jvp")
def levels_are_constants() -> Iterator[object]:
    """A body with torch.func in it keeps the numbers of the functorch levels it was traced at."""
    from torch_scan_hop.capture import variables

    with mock.patch.object(variables, "make_levels_relative", lambda graph, outside: None):
        yield None


# --- found by the fuzzer itself, and no issue's ---


@mutant("-", "eager+double", "pointwise,custom,buffers,inplace")
def writes_beside_functions_are_dead() -> Iterator[object]:
    """Second derivatives of bodies with custom functions drop writes whose results nobody names."""
    from torch_scan_hop.autodiff import custom

    real = custom.with_connected_functions

    def eliminated(body: Any) -> Any:
        connected = real(body)
        connected.graph.eliminate_dead_code()
        connected.recompile()
        return connected

    with mock.patch.object(custom, "with_connected_functions", eliminated):
        yield None


@mutant("-", "eager+double", "pointwise,linalg")
def factors_are_constants() -> Iterator[object]:
    """Second derivatives go through formulas that are for the first: they read factors of LU."""
    from torch_scan_hop.autodiff import joint

    with mock.patch.object(joint, "_DIFFERENTIATED_ONCE", set()):
        yield None


@mutant("-", "eager+double", "pointwise,products,buffers,inplace")
def scattered_memory_has_torchs_derivative() -> Iterator[object]:
    """``as_strided_scatter``, which fill_diagonal_ becomes, is differentiated by torch's formula."""
    from torch_scan_hop.body import cleanup

    left = [p for p in cleanup._CLEAN_UP if p.__name__ != "index_strided_scatters"]
    with mock.patch.object(cleanup, "_CLEAN_UP", tuple(left)):
        yield None


@mutant("-", "eager", "pointwise,products,views")
def memory_is_read_from_its_begin() -> Iterator[object]:
    """``as_strided`` of what is computed before the loop reads the row of the first step."""
    from torch_scan_hop.body import cleanup

    left = [p for p in cleanup._CLEAN_UP if p.__name__ != "index_strided_reads"]
    with mock.patch.object(cleanup, "_CLEAN_UP", tuple(left)):
        yield None


@mutant("-", "eager", "pointwise,reductions")
def operators_of_one_layout_get_any() -> Iterator[object]:
    """What group_norm's backward and view_as_complex read has the layout of whatever comes back."""
    from torch_scan_hop.body import strided

    with mock.patch.dict(strided.ONE_LAYOUT, clear=True):
        yield None


@mutant("-", "export", "inner_jvp")
def exports_keep_levels() -> Iterator[object]:
    """An export writes down what opens functorch's levels in a body, and not what they do."""
    from torch_scan_hop.dispatch import proxy

    with mock.patch.object(proxy, "opens_levels", lambda body: False):
        yield None
