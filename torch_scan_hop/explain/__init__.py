"""``explain``: what became of a cell.

``collect``      finds the facts about a call or a program; ``sites`` finds the scans
``loops``        the facts about a loop: ``places`` asks the plan, ``costs`` counts
``training``     the loops of reverse mode, and what is kept between them
``kernels``      the kernels that Inductor would choose
``facts``        the facts, as plain data
``text``, ``html``  the facts, for people
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from torch_scan_hop._torch.isolation import isolated
from torch_scan_hop.arguments import checked_call
from torch_scan_hop.errors import ScanTypeError, ScanValueError, describe
from torch_scan_hop.explain.device import as_if_there, device_of_fakes, on_device
from torch_scan_hop.explain.explanation import Explanation
from torch_scan_hop.schedule.strategies import Schedule

__all__ = ["Explanation", "explain"]

_NOT_GIVEN: Any = object()


def explain(
    combine_fn: Any,
    init: Any = _NOT_GIVEN,
    xs: Any = None,
    length: int | None = None,
    *,
    dim: int = 0,
    reverse: bool = False,
    unroll: int = 1,
    checkpoint: Any = None,
    limits: tuple[float, float] | None = None,
    kernels: bool = True,
    device: str | None = None,
) -> Explanation:
    """Say what became of a cell: what leaves the loop, what is saved, what it costs, and why.

    Nothing is run: the body is captured on fake tensors, and nothing of that is kept, so that later
    calls of :func:`torch_scan_hop.scan` are not affected.

    Args:
        combine_fn: the body of a scan, as for :func:`torch_scan_hop.scan`. Or a program that
            holds scans: a ``torch.export.ExportedProgram``, a ``GraphModule``, or what
            ``torch.compile`` returned.
        init: the first carry. For what ``torch.compile`` returned, the tuple of its arguments;
            nothing for other programs.
        xs, length, dim, reverse, unroll, checkpoint: as for :func:`torch_scan_hop.scan`.
        limits: ``(flops_per_s, bytes_per_s)`` of the machine: adds the time that the operators
            need, the least that the limits allow, and which limit that is.
        device: "cuda" says what would become of it on a GPU, which need not be there: whatever is
            on the CPU, modules and closures included, is taken for what is on a GPU.
        kernels: ask Inductor which kernels it would choose, which takes a few seconds.

    Returns:
        An :class:`Explanation`. If the body cannot be captured it says that the body runs as a
        loop, why, at which line, and what to write instead.

    Raises:
        TypeError, ValueError: arguments that :func:`torch_scan_hop.scan` refuses; ``init``
            missing for a body or given for a program; ``limits`` that are no two positive numbers;
            a ``device`` that is not "cuda", or is given with a traced program.
        RuntimeError: a GPU that is not there, and nothing can stand in for it with this
            build of torch.

    Example:
        >>> def cell(h, x):
        ...     h = torch.tanh(torch.exp(x) + h)
        ...     return h, h
        >>> found = explain(cell, torch.zeros(2), torch.ones(4, 2), kernels=False)
        >>> for op in found.scans[0].loops[0].operators:
        ...     print(f"{op.call}: {op.place}")
        exp(x): before the loop, for all steps at once
        add(exp, carry): in the loop
        tanh(add): in the loop
    """
    _check_limits(limits)
    if device not in (None, "cuda"):
        raise ScanValueError(f'explain: device must be None or "cuda", but got {device!r}.')
    if not isinstance(kernels, bool):
        raise ScanTypeError(f"explain: kernels must be True or False, but got {describe(kernels)}.")
    program = _program_of(combine_fn, init)
    if program is not None:
        _check_not_traced(combine_fn, device)
        if xs is not None or length is not None:
            raise ScanTypeError("explain: xs and length are for a body; a program has its own.")
        with _aside(_given_to(combine_fn, init), device):
            return program(limits, kernels)
    if init is _NOT_GIVEN:
        raise ScanTypeError(
            "explain: init is missing. Pass what scan is given: explain(fn, init, xs)."
        )
    from torch_scan_hop.explain.collect import explain_call

    call = checked_call(combine_fn, init, xs, length, dim, Schedule(reverse, unroll, checkpoint))
    with _aside((init, xs), device):
        return explain_call(combine_fn, init, call, limits, kernels)


@contextlib.contextmanager
def _aside(given: Any, device: str | None) -> Iterator[None]:
    """Hide the work from the caller's modes: a mode of fakes would mix with those made here.

    Random numbers go on as before, though modules of torch draw some when they are imported, and so
    do some compilers' passes. If ``given`` has fakes of a GPU that is not there, something stands
    in for it.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    fakes = as_if_there(device_of_fakes(pytree.tree_leaves(given)))
    there = fakes if device is None else on_device(device)
    with isolated(), torch.random.fork_rng(devices), there:
        yield


def _given_to(program: Any, arguments: Any) -> Any:
    """Return the tensors that a program was traced with, or will be."""
    graph = getattr(program, "graph", None)
    if not isinstance(graph, fx.Graph):
        return arguments
    return [n.meta.get("val") for n in graph.find_nodes(op="placeholder")]


def _check_not_traced(program: Any, device: str | None) -> None:
    if device is not None and isinstance(getattr(program, "graph", None), fx.Graph):
        raise ScanTypeError(
            "explain: device is for a body, or for what torch.compile returned; a program that is "
            "traced already is for the device that it was traced on."
        )


def _check_limits(limits: Any) -> None:
    if limits is None:
        return
    if not isinstance(limits, (tuple, list)) or len(limits) != 2:
        raise ScanTypeError(
            f"explain: limits must be (flops_per_s, bytes_per_s), but got {limits!r}."
        )
    if not all(isinstance(v, (int, float)) and v > 0 for v in limits):
        raise ScanValueError(f"explain: limits must be two positive numbers, but got {limits!r}.")


def _program_of(fn: Any, init: Any) -> Any:
    """Return a function ``(limits, kernels) -> Explanation`` for a program; None for a body."""
    from torch_scan_hop.explain.collect import explain_compiled, explain_program

    if isinstance(fn, torch.export.ExportedProgram):
        if init is not _NOT_GIVEN:
            raise ScanTypeError("explain: init is for a body, and an exported program has its own.")
        gm = fn.graph_module
        names = _exported_names(fn)
        return lambda *how: explain_program(gm, names, "an exported program", *how)
    if isinstance(fn, fx.GraphModule) and init is _NOT_GIVEN:
        names = [n.name for n in fn.graph.find_nodes(op="placeholder")]
        return lambda *how: explain_program(fn, names, type(fn).__name__, *how)
    original = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None)
    if original is None:
        return None
    if not isinstance(init, tuple):
        raise ScanTypeError(
            "explain: init must be the tuple of its arguments for what torch.compile returned: "
            "explain(model, (batch,)). For a body, pass what torch.compile was given."
        )
    name = getattr(original, "__name__", type(original).__name__)
    return lambda *how: explain_compiled(original, init, f"compiled {name}", *how)


def _exported_names(program: torch.export.ExportedProgram) -> list[str]:
    signature = program.graph_signature
    known = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    nodes = program.graph.find_nodes(op="placeholder")
    return [known.get(n.name, n.name) for n in nodes]
