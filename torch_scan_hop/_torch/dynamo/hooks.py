"""Hooks that a body registers on its tensors (checked on torch 2.9.1, 2.13.0, 2.15.0).

Dynamo registers a hook once, when the program has run, on a tensor of the program; or not at all.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo.exc import Unsupported
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import RemovableHandleVariable
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.higher_order_ops import discard_graph_changes, speculate_subgraph
from torch._dynamo.variables.tensor import TensorVariable

from torch_scan_hop._torch.dynamo.differences import seen_tensor
from torch_scan_hop._torch.dynamo.left import StateAssigned, contents_of, items_of
from torch_scan_hop._torch.dynamo.places import users_line
from torch_scan_hop._torch.dynamo.side_effects import (
    check_at_the_end,
    lasting_changes_are_refused,
    refuse_unless_carried,
)
from torch_scan_hop._torch.dynamo.speculation import forget_changes
from torch_scan_hop._torch.dynamo.variables import (
    example_value,
    install_body,
    known_modules,
    make_attr,
)
from torch_scan_hop._torch.replaced import wrapped
from torch_scan_hop._torch.sizes import is_exporting

#: ``hooked(tensor, hook, *captured)``: its result, for whoever reads the tensor after it
Hooked = Callable[..., torch.Tensor]


def hooks_are_captured(hooked: Hooked, operator: Any) -> AbstractContextManager[None]:
    """Let a tensor that ``operator``, a scan, makes get its hook from a call of ``hooked``."""

    def register_hook(original: Any, self: TensorVariable, *args: Any) -> VariableTracker:
        kind, hook = args[-2:]  # after the translator, which torch 2.9 does not pass
        tx: Any = InstructionTranslator.current_tx()
        if kind != "register_hook" or _is_outer(tx, self):
            refuse_unless_carried(
                Unsupported(
                    "the body registers a hook on a tensor that it did not make, which the loop "
                    f"does at every step, at {users_line()}. Register it before the scan, or on a "
                    "tensor that the body makes"
                )
            )
        else:
            _register(tx, self, hook, hooked, operator)
        return _Handle(mutation_type=ValueMutationNew())

    return wrapped(TensorVariable, _method_register_hook=register_hook)


class _Handle(RemovableHandleVariable):
    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> VariableTracker:
        raise Unsupported(f"the body removes a hook that it registers ({name}), at {users_line()}")


def _is_outer(tx: Any, variable: TensorVariable) -> bool:
    proxy = variable.as_proxy()
    return variable.source is not None or proxy.tracer is not tx.output.current_tracer


def _register(
    tx: Any, tensor: TensorVariable, hook: VariableTracker, hooked: Hooked, operator: Any
) -> None:
    if peek_interpreter_stack() is not None:
        raise Unsupported("a transform of the whole loop would lose a hook that the body registers")
    proxy = tensor.as_proxy()
    if not proxy.node.meta["example_value"].requires_grad:
        raise Unsupported("the body registers a hook on a tensor that does not require gradient")
    with discard_graph_changes(tx):
        gradient = tensor.call_method(tx, "detach", [], {}).call_method(tx, "clone", [], {})
    with _reads_noted() as reads:
        result, graph, lifted = _traced(tx, hook, gradient, operator)
    _check_reads(tx, reads, {id(example_value(proxy)) for proxy in lifted})
    # None: the gradient stays what it is; and no exported program has the hooks of its source
    if result.is_python_constant() or is_exporting():
        return
    module = fx.GraphModule(known_modules(tx), graph, "Hook")
    name = make_attr(tx, install_body(tx, "hook", module))
    made = tx.output.create_proxy("call_function", hooked, (proxy, name, *lifted), {})
    made.node.meta["example_value"] = proxy.node.meta["example_value"]
    _let_all_read(proxy.node, made.node)
    tensor.proxy = made


def _traced(tx: Any, hook: VariableTracker, gradient: VariableTracker, operator: Any) -> Any:
    before = tx.output.side_effects.clone()
    try:
        with lasting_changes_are_refused():
            (result, _), graph, lifted = speculate_subgraph(
                tx,
                hook,
                [gradient],
                {},
                "a hook of a scan's body",
                source_target=operator,
                set_subgraph_inputs="flatten_manual",
                restore_side_effects=False,
                supports_input_mutation=False,
                supports_aliasing=True,
            )
        forget_changes(tx.output.side_effects, before)
        return result, graph, lifted
    except Unsupported as error:
        why = error
    # outside of the handler: what a hook changes is nothing that the next step finds
    if re.search(r"the body changes|input mutation|side effect", str(why)) is None:
        raise why
    what = why.first if isinstance(why, StateAssigned) else "a tensor or an object"
    raise Unsupported(
        f"a hook that the body registers changes {what}, in the backward, at {users_line()}"
    )


@contextlib.contextmanager
def _reads_noted() -> Iterator[list[tuple[Any, str, Any]]]:
    """Note what a hook reads of what the body has assigned: attributes, and variables of others."""
    reads = []

    def note(load: Any, self: Any, item: Any, name: str, *how: Any, **named: Any) -> Any:
        value = load(self, item, name, *how, **named)
        reads.append((item, name, value))
        return value

    with wrapped(SideEffects, load_attr=note):
        yield reads


def _check_reads(tx: Any, reads: Sequence[tuple[Any, str, Any]], tensors: set[int]) -> None:
    """Refuse a hook that reads what steps change: in a loop, the backward finds there what the last
    step has left, and the trace what the hook's own step had. ``tensors``: ids of examples."""
    line = users_line()

    def check(watch: Any) -> None:
        stored = tx.output.side_effects.store_attr_mutations
        is_changed = any(
            (id(item), name) in watch.attributes or stored.get(item, {}).get(name) is not value
            for item, name, value in reads
        )
        contents = watch.contents.values()
        items = [v for c in contents for v in (*items_of(c.before), *contents_of(c.variable))]
        changed = {id(seen) for seen in map(seen_tensor, items) if seen is not None}
        if is_changed or changed & tensors:
            raise Unsupported(
                f"a hook that the body registers reads what steps change, at {line}: in a loop, "
                "the backward finds there what the last step left. Read it before, as in scale = "
                "self.scale; h.register_hook(lambda g: g * scale)"
            )

    check_at_the_end(check)


def _let_all_read(node: fx.Node, made: fx.Node) -> None:
    """Let all uses of a tensor read the hooked one, those before the hook as well."""
    earlier = [user for user in node.users if user is not made]
    if not earlier:
        return
    inputs = {made, *(n for n in made.all_input_nodes if n is not node)}
    place = node
    while place.next is not made:
        place = place.next
        if place in inputs and place.op != "get_attr":
            raise Unsupported("a hook closes over what the body makes after the tensor's first use")
    last = node
    for moved in [n for n in made.all_input_nodes if n.op == "get_attr"] + [made]:
        last.append(moved)
        last = moved
    for user in earlier:
        user.replace_input_with(node, made)
