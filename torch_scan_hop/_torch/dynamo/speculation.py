"""A function traced to a graph of its own, within the graph that Dynamo is capturing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    AttributeMutationNew,
    VariableTracker,
)
from torch._dynamo.variables.higher_order_ops import speculate_subgraph
from torch._dynamo.variables.misc import AutogradFunctionVariable, GetAttrVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import PendingUnbackedSymbolNotFound

from torch_scan_hop._torch.dynamo.attempts import keep_known_objects, restore_changes
from torch_scan_hop._torch.dynamo.draws import draws_are_refused
from torch_scan_hop._torch.dynamo.match_statements import sequences_are_matched
from torch_scan_hop._torch.dynamo.methods import methods_are_guarded
from torch_scan_hop._torch.dynamo.side_effects import lasting_changes_are_refused
from torch_scan_hop._torch.dynamo.trees import FlatResults
from torch_scan_hop._torch.dynamo.variables import example_value, sequence_items
from torch_scan_hop._torch.replaced import replaced, wrapped
from torch_scan_hop._torch.tracing import lstm_in_parts
from torch_scan_hop.errors import CUSTOM_FUNCTION_UNDER_TRANSFORM, NUMBER_OF_TENSOR


def speculate(
    tx: Any, fn: VariableTracker, args: list[VariableTracker], op: Any
) -> tuple[list[VariableTracker], FlatResults, fx.Graph, dict[fx.Proxy, fx.Proxy]]:
    """Trace ``fn(*args)`` to a graph of its own, closures lifted to placeholders at the end.

    Returns (flat results, how to unflatten others, graph, outer proxy -> placeholder of each
    closure).
    """
    flat = FlatResults(fn)
    config: Any = dynamo_config
    before = tx.output.side_effects.clone()
    with (
        lasting_changes_are_refused(),
        draws_are_refused(tx),
        methods_are_guarded(),
        sequences_are_matched(),
        _custom_functions_are_nodes(),
        _attributes_are_read_by_the_body(tx),
        # a body may read the weights of an nn.LSTM; Dynamo breaks the graph at its mention
        config.patch(allow_rnn=True),
        lstm_in_parts(),
    ):
        (result, _), graph, lifted = speculate_subgraph(
            tx,
            flat,
            args,
            {},
            "torch.ops.higher_order.scan",
            source_target=op,
            set_subgraph_inputs="manual",
            should_flatten_outputs=False,
            restore_side_effects=False,
            supports_input_mutation=True,
            supports_aliasing=True,
            **_ALIASED_INPUTS,
        )
    forget_changes(tx.output.side_effects, before)
    return sequence_items(tx, result), flat, graph, lifted


@contextlib.contextmanager
def numbers_of_tensors_are_refused(where: Callable[[], str] = str) -> Iterator[None]:
    """Refuse a number that is read from a tensor, a NumPy scalar included, in the body that is
    traced.

    Such a number is a symbol of the body's graph, and unknown in the program's. A NumPy scalar is a
    tensor to Dynamo. ``where`` says at which line, if the trace has left the body.
    """
    try:
        yield
    except (DataDependentOutputException, PendingUnbackedSymbolNotFound) as error:
        raise Unsupported(NUMBER_OF_TENSOR + where()) from error


def _custom_functions_are_nodes() -> contextlib.AbstractContextManager[None]:
    """A custom ``autograd.Function`` is captured with its backward.

    Dynamo inlines its forward if no argument requires grad; but a carry may from the second
    step on, and a functorch level may want its derivative.
    """

    def call_apply(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if peek_interpreter_stack() is not None:
            raise Unsupported(CUSTOM_FUNCTION_UNDER_TRANSFORM)
        args = [_as_requiring_grad(a.realize()) for a in args]
        return original(self, tx, args, kwargs)

    return wrapped(AutogradFunctionVariable, call_apply=call_apply)


def _attributes_are_read_by_the_body(tx: Any) -> contextlib.AbstractContextManager[None]:
    """``buffer.T`` of a closed-over tensor is a node of the body, as it is since torch 2.15.

    Before, it is one of the graph around it: a view that is at hand before the first step, and
    that a body which writes to ``buffer`` shares memory with.
    """
    original = GetAttrVariable.create_getattr_proxy

    def create_getattr_proxy(base: Any, name: str) -> Any:
        tracer = tx.output.current_tracer
        if not isinstance(base, fx.Proxy) or base.tracer is tracer:  # a class is its own
            return original(base, name)
        return tracer.create_proxy("call_function", getattr, (base, name), {})

    return replaced(GetAttrVariable, create_getattr_proxy=staticmethod(create_getattr_proxy))


def _as_requiring_grad(variable: VariableTracker) -> VariableTracker:
    value = example_value(variable) if isinstance(variable, TensorVariable) else None
    if value is None or not (value.is_floating_point() or value.is_complex()):
        return variable
    return variable.clone(requires_grad=True)


def forget_changes(effects: Any, before: Any) -> None:
    """Forget what a function, which has been traced since ``before``, assigned to attributes.

    Dynamo does so for its own operators (``module.steps += 1`` assigns what was there). But the
    objects that the function made stay known, or it could return no dataclass, and so do those
    that it was the first to read, or a body around it could not assign to them. And ``effects``
    stays the same object (``restore_changes``): so Dynamo's own way does not do.
    """
    before.track_runahead_tensor_and_symvar_side_effects(effects)
    for name in ("store_attr_mutations", "attr_mutation_kinds"):  # the second since 2.13
        known = getattr(before, name, {})
        for variable, attributes in getattr(effects, name, {}).items():
            if not isinstance(variable.mutation_type, AttributeMutationExisting):
                known.setdefault(variable, attributes)
    keep_known_objects(before, effects, AttributeMutationNew)
    restore_changes(effects, before)


_ALIASED_INPUTS: dict[str, Any] = (
    {"supports_input_input_aliasing": True}
    if "supports_input_input_aliasing" in speculate_subgraph.__code__.co_varnames
    else {}
)
