"""Hooks that a body registers on its carry.

Its carry is what the step before returned. In the loop, a hook on it sees all of its gradient: from
the steps after, and from what the step before made of it besides, a y, say. A hook of the body's
input would see the first of them only, so it is moved::

    # before: carry -> hooked(carry) -> ... -> result, of which there are other uses
    # after:  carry -> ... -> hooked(result), at all steps but the last
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.variables import (
    ConstantVariable,
    VariableTracker,
    call_inlined,
    create_proxy,
    example_value,
    install_body,
    known_modules,
    make_attr,
)
from torch_scan_hop._torch.operators import HigherOrderOperator
from torch_scan_hop.capture.hooks import hooked, with_flag
from torch_scan_hop.capture.user_code import PACKAGE, users_line
from torch_scan_hop.signature import Inputs, output_node


def _goes_on(xs: torch.Tensor, reverse: bool) -> torch.Tensor:
    """Return for each step if there is one after it."""
    steps = torch.arange(xs.shape[0], device=xs.device)
    return steps != (0 if reverse else xs.shape[0] - 1)


class HooksOfCarries:
    """The hooks that a body, whose graph is ``graph``, registers on its carries.

    ``lifted`` has for each tensor that the body closes over its placeholder, and ``wants_grad``
    says which leaves of init require grad and belong to the program.
    """

    def __init__(
        self,
        tx: Any,
        graph: fx.Graph,
        given: Inputs[VariableTracker],
        lifted: Mapping[fx.Proxy, fx.Proxy],
        wants_grad: Sequence[bool],
    ) -> None:
        self.tx, self.graph, self.given, self.wants_grad = tx, graph, given, wants_grad
        self.outer = {inner.node: outer for outer, inner in lifted.items()}
        #: for each step if there is one after it: an x that the body has besides
        self.flags: list[fx.Proxy] = []
        self._flag: fx.Node | None = None

    def move(self, inputs: list[Any], reverse: bool) -> None:
        """Move the hooks that must be, and give ``inputs`` of the scan those of init."""
        for node in self.graph.nodes:
            if node.target is hooked and _is_unrolled(node.args[0]) and not _is_alone(node.args[0]):
                raise HookOfUsedCarry(node)
        placeholders = self.graph.find_nodes(op="placeholder")
        for k in range(len(self.given.carry)):
            hooks = _hooks_on(placeholders[k])
            if not hooks:
                continue
            where = users_line(hooks[0].stack_trace or "")
            if self.wants_grad[k]:
                raise Unsupported(
                    "the body registers a hook on its carry, which is init at first, and init may "
                    f"be used elsewhere{where}. Register it on carry.clone()"
                )
            if self._is_carry_alone(k):
                continue
            if not self._may_move(k, hooks):
                raise HookOfUsedCarry(hooks[0])
            for hook in hooks:
                inputs[k] = self._hook_init(inputs[k], hook)
                self._hook_result(k, hook, reverse)
                hook.replace_all_uses_with(placeholders[k])
                self.graph.erase_node(hook)
        step = len(self.given.carry) + len(self.given.xs)
        inputs[step:step] = self.flags

    def _results(self) -> list[Any]:
        output: Any = output_node(self.graph)
        return list(output.args[0])

    def _is_carry_alone(self, k: int) -> bool:
        results = self._results()
        return results.count(results[k]) == 1 and _is_alone(results[k])

    def _may_move(self, k: int, hooks: list[fx.Node]) -> bool:
        result, init = self._results()[k], self.given.carry[k].as_proxy().node
        both = (result, init)
        made = all(
            n.op.startswith("call_") and not (_is_of_scan(n) or _is_unrolled(n)) for n in both
        )
        return made and all(n in self.outer for hook in hooks for n in hook.args[2:])

    def _hook_init(self, init: fx.Proxy, hook: fx.Node) -> fx.Proxy:
        """Hook what the first step returned, which is nobody's but ours."""
        name, *captured = hook.all_input_nodes[1:]
        given = (make_attr(self.tx, str(name.target)), *(self.outer[node] for node in captured))
        made = create_proxy(self.tx, "call_function", hooked, (init, *given))
        made.node.meta["example_value"] = init.node.meta["example_value"]
        return made

    def _hook_result(self, k: int, hook: fx.Node, reverse: bool) -> None:
        flag = self._flag_of_step(reverse)
        name, *captured = hook.all_input_nodes[1:]
        module = with_flag(known_modules(self.tx)[str(name.target)])
        output, result = output_node(self.graph), self._results()[k]
        with self.graph.inserting_before(output):
            attribute = self.graph.get_attr(install_body(self.tx, "hook", module))
            made = self.graph.call_function(hooked, (result, attribute, flag, *captured))
        made.meta = dict(result.meta)
        output.replace_input_with(result, made)

    def _flag_of_step(self, reverse: bool) -> fx.Node:
        if self._flag is None:
            xs = self.given.xs
            flags = call_inlined(self.tx, _goes_on, xs[0], ConstantVariable.create(reverse))
            last = self.graph.find_nodes(op="placeholder")[len(self.given.carry) + len(xs) - 1]
            with self.graph.inserting_after(last):
                self._flag = self.graph.placeholder("goes_on")
            self._flag.meta["example_value"] = example_value(flags).new_empty(())
            self.flags.append(flags.as_proxy())
        return self._flag


def _hooks_on(placeholder: fx.Node) -> list[fx.Node]:
    """Return the hooks in the order in which they were registered."""
    found: list[fx.Node] = []
    node = placeholder
    while (user := next((u for u in node.users if u.target is hooked), None)) is not None:
        found.append(user)
        node = user
    return found


class HookOfUsedCarry(Unsupported):
    """Raised for a hook that cannot be moved; in one scan of all steps, perhaps it can."""

    def __init__(self, hook: fx.Node) -> None:
        where = users_line(hook.stack_trace or "")
        super().__init__(
            "the body registers a hook on its carry, which the step before has used besides "
            f"returning it, in y or elsewhere{where}. Return carry.clone() as the carry"
        )


def _is_unrolled(node: fx.Node) -> bool:
    """Return True if ``node`` is the copy that stands between two steps of an unrolled body."""
    files = re.findall(r'File "([^"]+)"', node.stack_trace or "")
    return node.target == "clone" and bool(files) and files[-1].startswith(f"{PACKAGE}/schedule")


def _is_alone(node: fx.Node) -> bool:
    """Return True if there is one use of ``node``, and of what it is a copy of."""
    if len(node.users) > 1 or _is_of_several(node):
        return False
    return not _is_unrolled(node) or _is_alone(node.all_input_nodes[0])


def _is_of_several(node: fx.Node) -> bool:
    """Return True if others of the results of one operator may depend on ``node``, as the h of an
    LSTM cell depends on its c."""
    return node.target is operator.getitem and not node.meta["example_value"]._is_view()


def _is_of_scan(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(getattr(source, "target", None), HigherOrderOperator)
