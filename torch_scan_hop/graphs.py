"""Forward and backward FX graphs of a function, with a signature that can be learned.

::

    forward:  (arguments in pytree order, captured tensors by name)
                  -> (outputs in pytree order, residuals)
    backward: (residuals, cotangents of the differentiable outputs)
                  -> (one gradient per input of forward, None where there is none)

The function is traced on fake tensors only: it never runs on data. It may hold
``torch.utils.checkpoint`` (non-reentrant; the forward then saves what the checkpoint lets it
save, and the backward recomputes), ``torch.cond``, and ``scan``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop import tree
from torch_scan_hop._torch.dynamo.errors import DYNAMO_ERRORS
from torch_scan_hop._torch.dynamo.graph_of_call import capture_graph
from torch_scan_hop._torch.fakes import FakeTensorMode, fake_mode_of
from torch_scan_hop.autodiff.derive import partition_at
from torch_scan_hop.autodiff.differentiability import gradient_flow, needs_grad
from torch_scan_hop.autodiff.handover import Partition, Source
from torch_scan_hop.body.step_examples import like
from torch_scan_hop.errors import hint_about
from torch_scan_hop.rewrites.parts import extract
from torch_scan_hop.signature import Inputs, results_of


@dataclass(frozen=True)
class ForwardBackward:
    """The two graphs, and the names of what goes in and out.

    Attributes:
        forward: ``(*inputs) -> (*outputs, *residuals)``.
        backward: ``(*residuals, *cotangents) -> (*gradients)``.
        inputs: names of forward's inputs: argument leaves, then captured tensors.
        captured: the captured tensors themselves, in the order of their names.
        n_outputs: how many of forward's results are outputs; the rest are residuals.
        residuals: what each residual is: an input's name, or the name of the node saved.
        differentiable: for each output, whether backward takes a cotangent for it.
        out_spec: the pytree of the outputs; unflatten with ``torch.utils._pytree``.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    inputs: tuple[str, ...]
    captured: tuple[torch.Tensor, ...]
    n_outputs: int
    residuals: tuple[str, ...]
    differentiable: tuple[bool, ...]
    out_spec: Any


def forward_and_backward(fn: Callable[..., Any], *example_args: Any) -> ForwardBackward:
    """Return FX graphs of ``fn`` and of its vector-Jacobian product.

    Args:
        fn: a function of pytrees of tensors; it may close over tensors and modules.
        example_args: arguments of the right shapes and dtypes, ``requires_grad`` set where a
            gradient is wanted. Only their metadata is read.

    Raises:
        RuntimeError: ``fn`` cannot be captured as one graph; the message says where.

    Example:
        >>> w = torch.ones(3, requires_grad=True)
        >>> graphs = forward_and_backward(lambda x: torch.sin(x * w), torch.ones(3))
        >>> graphs.inputs, graphs.residuals
        (('args_0', 'w'), ('args_0', 'mul'))
        >>> out, *saved = graphs.forward(torch.ones(3), w.detach())
        >>> grad_x, grad_w = graphs.backward(*saved, torch.ones(3))
        >>> grad_x is None, bool((grad_w == torch.cos(torch.ones(3))).all())
        (True, True)
    """
    arguments = _named_arguments(fn, example_args)
    captured = _capture(fn, example_args)
    inputs, run, out_spec = _with_stable_inputs(captured, arguments)
    names = _unique([_identifier(name) for name, _ in inputs])
    partition, differentiable = _partition(run, [value for _, value in inputs])
    forward, saved = _forward_graph(partition, names)
    backward = _backward_graph(partition, saved, len(names))
    n_arguments = len(arguments)
    return ForwardBackward(
        forward=forward,
        backward=backward,
        inputs=tuple(names),
        captured=tuple(value for _, value in inputs[n_arguments:]),
        n_outputs=len(differentiable),
        residuals=tuple(saved),
        differentiable=differentiable,
        out_spec=out_spec,
    )


def _named_arguments(fn: Any, args: Sequence[Any]) -> list[tuple[str, Any]]:
    return [
        (path.replace("args[", "args_", 1).replace("]", "", 1), leaf)
        for path, leaf in tree.leaves_with_paths(tuple(args), "args")
        if leaf is not None
    ]


@dataclass(frozen=True)
class _Captured:
    module: fx.GraphModule
    values: list[Any]  # what stands for each placeholder
    names: list[str]
    results: list[Any]  # for each output leaf, where it is among the graph's, or an input
    out_spec: Any


def _capture(fn: Callable[..., Any], args: Sequence[Any]) -> _Captured:
    try:
        captured = capture_graph(fn, args)
    except DYNAMO_ERRORS as error:
        message = f"forward_and_backward: the function could not be captured as one graph:\n{error}"
        raise RuntimeError(f"{message}\n{hint_about(error)}".rstrip()) from error
    return _Captured(*captured)


def _with_stable_inputs(
    captured: _Captured, arguments: list[tuple[str, Any]]
) -> tuple[list[tuple[str, Any]], Callable[..., Any], Any]:
    """Return all inputs, arguments first, and the captured graph as a function of them."""
    position = {id(value): k for k, (_, value) in enumerate(arguments)}
    free = [
        (name, k)
        for k, (name, value) in enumerate(zip(captured.names, captured.values, strict=True))
        if id(value) not in position
    ]
    closures = sorted(free)
    inputs = [*arguments, *((name, captured.values[k]) for name, k in closures)]
    position |= {id(captured.values[k]): len(arguments) + n for n, (_, k) in enumerate(closures)}
    order = [position[id(value)] for value in captured.values]

    def run(*flat: Any) -> Any:
        # what Dynamo returns once, or not through the graph, is an output all the same
        outputs = captured.module(*(flat[k] for k in order))
        return tuple(
            outputs[place] if isinstance(place, int) else flat[position[id(place)]]
            for place in captured.results
        )

    return inputs, run, captured.out_spec


def _partition(
    run: Callable[..., Any], values: Sequence[Any]
) -> tuple[Partition, tuple[bool, ...]]:
    """Cut the graph as a scan's body is cut: every input is an x, so gradients come back as ys."""
    mode: FakeTensorMode = fake_mode_of(values)
    examples: Inputs[Any] = Inputs([], [like(mode, v) for v in values], [])
    wanted: Inputs[bool] = Inputs([], [needs_grad(v) for v in values], [])
    flow = gradient_flow(run, examples, wanted, mode)
    return partition_at(run, examples, flow, mode, None), flow.ys


def _identifier(path: str) -> str:
    """Return a name for a placeholder: ``args_0['carry']`` -> ``args_0_carry``.

    >>> _identifier("args_1['weights']")
    'args_1_weights'
    """
    return re.sub(r"\W+", "_", path).strip("_")


def _unique(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return result


def _forward_graph(partition: Partition, names: Sequence[str]) -> tuple[fx.GraphModule, list[str]]:
    """Return the forward with all that the backward is handed, and what each of that is."""
    placeholders = partition.forward.graph.find_nodes(op="placeholder")
    results = results_of(partition.forward.graph)
    n_outputs = len(results) - partition.n_residuals
    handed = [
        (placeholders if h.source is Source.X else results)[h.index] for h in partition.per_step
    ]
    outputs = [*results[:n_outputs], *handed]
    module = extract(partition.forward, placeholders, outputs, "Forward", names)
    saved = results_of(module.graph)[n_outputs:]
    return module, [str(n.target) if n.op == "placeholder" else n.name for n in saved]


def _backward_graph(partition: Partition, saved: Sequence[str], n_inputs: int) -> fx.GraphModule:
    placeholders = partition.backward.graph.find_nodes(op="placeholder")
    n_cotangents = len(placeholders) - len(saved)
    order = [*placeholders[n_cotangents:], *placeholders[:n_cotangents]]
    names = _unique([*saved, *(f"cotangent_{k}" for k in range(n_cotangents))])
    gradients: list[Any] = [None] * n_inputs
    results = results_of(partition.backward.graph)
    for k, gradient in zip(partition.x_gradients, results, strict=True):
        gradients[k] = gradient
    return extract(partition.backward, order, gradients, "Backward", names)
