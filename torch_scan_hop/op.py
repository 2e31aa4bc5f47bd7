"""The operator: ``torch.ops.higher_order.scan(combine_fn, init, xs, additional_inputs)``.

Everything is flat here. With ``n`` carries, ``m`` xs and trip count ``T``::

    combine_fn: (carry_0..n-1, x_0..m-1, *additional_inputs) -> (carry'_0..n-1, y_0..)
    scan:       (carry_0..n-1 at the end, ys_0.. stacked to [T, ...])

``combine_fn`` is a GraphModule (or a callable that the dispatcher made of one); it mutates
none of its inputs and may return any of them, the same tensor twice, or views. Results are
contiguous and alias neither the inputs nor one another.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import fx

from torch_scan_hop._torch.capabilities import attempt, is_there, require
from torch_scan_hop._torch.dtensors import mesh_of
from torch_scan_hop._torch.operators import (
    DispatchKey,
    FlatOperator,
    current_dispatch_mode,
    symbolic_tracer_of,
    take_operator_name,
    trace_symbolically,
)
from torch_scan_hop._torch.own_scan import is_torchs, name_in_graphs, torchs_operator
from torch_scan_hop._torch.selective_checkpoints import call_as_one_operator, is_mode_of_checkpoint
from torch_scan_hop._torch.tracing import is_traced
from torch_scan_hop._torch.transforms import unwrap_if_dead
from torch_scan_hop.body.cache import remember
from torch_scan_hop.body.copies import copied
from torch_scan_hop.errors import ScanTypeError, ScanValueError, describe
from torch_scan_hop.signature import Inputs, results_of

Body = Callable[..., Any]


def scan_options(reverse: bool, checkpoint: Any) -> dict[str, Any]:
    """Return the keywords that differ from their defaults, so that graphs stay readable."""
    options: dict[str, Any] = {}
    if reverse:
        options["reverse"] = True
    if checkpoint is not None:
        options["checkpoint"] = checkpoint
    return options


@dataclass(frozen=True)
class ScanOptions:
    """Options that say how a scan runs, but not over what."""

    reverse: bool = False
    checkpoint: Any = None

    def non_defaults(self) -> dict[str, Any]:
        return scan_options(self.reverse, self.checkpoint)


FORWARD = ScanOptions()
REVERSE = ScanOptions(reverse=True)

#: runs a scan: the operator, or one of its kernels
RunScan = Callable[[Body, Inputs[Any], ScanOptions], Sequence[Any]]


KernelFn = TypeVar("KernelFn", bound=Callable[..., Any])


def _with_roles(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` as the dispatcher calls it: here alone the order of arguments is known."""

    def entry(*arguments: Any, **options: Any) -> Any:
        *context, body, init, xs, additional = arguments
        inputs: Inputs[Any] = Inputs(init, xs, list(additional))
        return run(*context, body, inputs, ScanOptions(**options) if options else FORWARD)

    return entry


class ScanOperator(FlatOperator):
    """``scan``, dispatched like any torch operator; one file per key in ``dispatch/``."""

    def __init__(self) -> None:
        super().__init__("scan", cacheable=True)
        self.under_users_modes: Callable[..., Any]
        self.on_shards: Callable[..., Any]

    def kernel(self, key: Any) -> Callable[[KernelFn], KernelFn]:
        """Register ``run(body, inputs, options)``; a mode, or an interpreter, comes first."""

        def register(run: KernelFn) -> KernelFn:
            self.py_impl(key)(_with_roles(run))
            return run

        return register

    def functionalize_kernel(self, run: KernelFn) -> KernelFn:
        self.py_functionalize_impl(_with_roles(run))
        return run

    def users_modes_kernel(self, run: KernelFn) -> KernelFn:
        """Register ``run`` for calls under a user's dispatch mode, which wants operators."""
        self.under_users_modes = _with_roles(run)
        return run

    def sharded_kernel(self, run: KernelFn) -> KernelFn:
        """Register ``run`` for DTensors. Dispatch modes see the operators on their shards."""
        self.on_shards = _with_roles(run)
        return run

    def run_at(
        self, key: DispatchKey, body: Body, inputs: Inputs[Any], options: ScanOptions
    ) -> Any:
        """Run the kernel at ``key``, whatever the inputs are."""
        arguments = (body, inputs.carry, inputs.xs, tuple(inputs.additional))
        return self.dispatch(key, *arguments, **options.non_defaults())

    def __call__(  # type: ignore[override]
        self,
        combine_fn: Body,
        init: Sequence[Any],
        xs: Sequence[Any],
        additional_inputs: Sequence[Any] = (),
        *,
        reverse: bool = False,
        checkpoint: Any = None,
        **of_torchs_own: Any,
    ) -> tuple[Any, ...]:
        options = scan_options(reverse, checkpoint)
        if of_torchs_own or is_torchs(combine_fn):
            options.update(of_torchs_own)
            return _call_torchs(combine_fn, init, xs, additional_inputs, **options)
        if not isinstance(combine_fn, fx.GraphModule):
            _check_arguments(combine_fn, init=init, xs=xs, additional_inputs=additional_inputs)
        if not xs:
            raise ValueError(
                "torch.ops.higher_order.scan: xs is empty, so there is no trip count. Pass a "
                "tensor of shape [T, 0], or call torch_scan_hop.scan(..., length=T)."
            )
        kept = _results_kept(combine_fn)
        if kept is not None:
            body, positions = kept
            results = iter(
                self(body, init, xs, additional_inputs, reverse=reverse, checkpoint=checkpoint)
            )
            return tuple(next(results) if keep else None for keep in positions)
        arguments = (combine_fn, list(init), list(xs), tuple(additional_inputs))
        flat = (*init, *xs, *additional_inputs)
        tracer = symbolic_tracer_of((combine_fn, *flat))
        if tracer is not None:
            return trace_symbolically(tracer, self, arguments, options)  # type: ignore[return-value]
        return self.call_flat(flat, *arguments, **options)

    def gen_schema(self, *arguments: Any, **options: Any) -> Any:
        """Return a schema that torch asks for in graphs of its ``scan()``: nothing is mutated."""
        for own in ("reverse", "checkpoint"):
            options.pop(own, None)
        return torchs_operator().gen_schema(*arguments, **options)

    def dispatch(self, /, dispatch_key: DispatchKey, *args: Any, **kwargs: Any) -> Any:
        if dispatch_key == DispatchKey.Python:
            if mesh_of(pytree.tree_leaves(args[1:])) is not None:
                require("sharding")
                return self.on_shards(*args, **kwargs)
            mode = current_dispatch_mode()
            if is_mode_of_checkpoint(mode) and is_traced(pytree.tree_leaves(args[1:])):
                return call_as_one_operator(self, args, kwargs)
            if mode is not None and type(mode) not in self.python_key_table:
                # a mode that knows nothing of scans (a FLOP counter, a logger) is to see operators
                return self.under_users_modes(*args, **kwargs)
        if dispatch_key == DispatchKey.FuncTorchGradWrapper:
            # saved by a functorch level that has ended: vjp's function is called after it
            args, kwargs = pytree.tree_map(unwrap_if_dead, (args, kwargs))
            return self(*args, **kwargs)
        return super().dispatch(dispatch_key, *args, **kwargs)

    def __deepcopy__(self, memo: Any = None) -> ScanOperator:
        return self

    def __reduce__(self) -> Any:
        return _the_operator, ()


def _call_torchs(*arguments: Any, **options: Any) -> Any:
    """Pass on a call made by a graph of torch's own ``scan()``, under the name that is ours."""
    tracer = symbolic_tracer_of(tuple(pytree.tree_leaves(arguments)))
    if tracer is not None:
        return trace_symbolically(tracer, scan_op, arguments, options)
    return torchs_operator()(*arguments, **options)


def _check_arguments(combine_fn: Any, **groups: Any) -> None:
    """Check what a person who calls the operator directly may get wrong."""
    name = "torch.ops.higher_order.scan"
    if not callable(combine_fn):
        raise ScanTypeError(f"{name}: combine_fn must be callable, but got {describe(combine_fn)}.")
    for group, leaves in groups.items():
        if not isinstance(leaves, (list, tuple)):
            raise ScanTypeError(
                f"{name}: {group} must be a list or tuple of tensors, but got {describe(leaves)}. "
                "For pytrees there is torch_scan_hop.scan."
            )
    sizes = [x.shape[:1] for x in groups["xs"] if isinstance(x, torch.Tensor)]
    for k, size in enumerate(sizes):
        if not size or size != sizes[0]:
            raise ScanValueError(
                f"{name}: all xs must have one size along dimension 0, but xs[0] is "
                f"{describe(groups['xs'][0])} and xs[{k}] is {describe(groups['xs'][k])}."
            )


def _results_kept(body: Any) -> tuple[fx.GraphModule, list[bool]] | None:
    """Return a body without the Nones that it returns, and which results those are not."""
    if not isinstance(body, fx.GraphModule):
        return None
    return remember(body, ("results kept",), lambda: _without_nones(body))


def _without_nones(body: fx.GraphModule) -> tuple[fx.GraphModule, list[bool]] | None:
    results = results_of(body.graph)
    if not isinstance(results, (tuple, list)) or None not in results:
        return None
    kept = [r for r in results if r is not None]
    return copied(body, kept, "ScanBody"), [r is not None for r in results]


def _the_operator() -> ScanOperator:
    return scan_op


scan_op = ScanOperator()
take_operator_name(scan_op)
if is_there("own_scan", imports=False):
    with attempt("own_scan"):
        name_in_graphs(scan_op)


def call_scan(body: Body, inputs: Inputs[Any], options: ScanOptions = FORWARD) -> tuple[Any, ...]:
    """Call the operator with its inputs whole.

    This is a function, and no method, because compiled autograd has Dynamo trace the backward,
    which calls it.
    """
    additional = tuple(inputs.additional)
    return scan_op(body, inputs.carry, inputs.xs, additional, **options.non_defaults())


def scans_in(module: fx.GraphModule) -> list[tuple[fx.Node, fx.GraphModule]]:
    """Return the scans in a graph, each with its body."""
    nodes = module.graph.find_nodes(op="call_function", target=scan_op)
    return [(node, operator.attrgetter(str(node.args[0].target))(module)) for node in nodes]
