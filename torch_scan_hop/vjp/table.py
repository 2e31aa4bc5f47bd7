"""The table of rules, and how the many spellings of an operation meet in one entry.

`x.sin()`, `torch.sin(x)` and `torch.ops.aten.sin.default(x)` are one operation with one rule;
so are `a + b`, `torch.add(a, b)` and `a.add(b)`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

Target = Callable[..., Any] | str


@dataclass(frozen=True)
class Rule:
    """Differentiates one operation.

    `fwd(*args) -> (value, saved)`: the operation, and what its backward will need. `saved` is any
    Python structure; the values of the graph in it (if `bwd` uses them) are what a scan over the
    function has to keep for each step, so this choice is one between memory and speed.

    `bwd(saved, d_value) -> d_args`: one cotangent for each parameter of `fwd`, in order; None for
    zero and for what is not differentiable; trailing ones may be left out. A tuple-valued
    operation receives a tuple of cotangents, with None where there is none.

    Both run once, on proxies, while the graph is being written. They may ask for `shape(x)`.
    """

    fwd: Callable[..., tuple[Any, Any]]
    bwd: Callable[[Any, Any], Any]


def saving_arguments(fn: Callable[..., Any], bwd: Callable[..., Any]) -> Rule:
    """Make the rule of `y = fn(*args)` with `d_args = bwd(d_y, *args)`; `bwd` has the defaults."""
    _, *parameters = inspect.signature(bwd).parameters.values()

    def fwd(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs), (args, kwargs)

    fwd.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return Rule(fwd, lambda saved, d: bwd(d, *saved[0], **saved[1]))


class MissingRule(NotImplementedError):
    """No rule for an operation through which a cotangent has to flow."""


_OVERLOAD = type(torch.ops.aten.sin.default)
_PACKET = type(torch.ops.aten.sin)

_OPERATORS: dict[Any, Target] = {
    operator.neg: torch.neg,
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.div,
    operator.pow: torch.pow,
    operator.matmul: torch.matmul,
    operator.abs: torch.abs,
    torch.negative: torch.neg,
    torch.subtract: torch.sub,
    torch.multiply: torch.mul,
    torch.divide: torch.div,
    torch.true_divide: torch.div,
    torch.absolute: torch.abs,
    torch.concat: torch.cat,
    torch.concatenate: torch.cat,
    F.relu: torch.relu,
}

_IN_PLACE_OPERATORS = frozenset({
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.imatmul,
    operator.ipow, operator.setitem,
})  # fmt: skip

# ATen operations without a function of the same name that has the same meaning.
_ATEN: dict[str, Target] = {
    # What functionalization or a decomposition made contiguous need not be so here.
    "view": torch.reshape,
    "view_copy": torch.reshape,
    "_unsafe_view": torch.reshape,
    "_to_copy": torch.Tensor.to,
    "index": torch.ops.aten.index,
    "slice": torch.ops.aten.slice,
    "alias": torch.clone,
    "lift_fresh_copy": torch.clone,
    "linear": F.linear,
}


_ATEN_VIEWS = frozenset({
    "diagonal", "expand", "permute", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unsqueeze",
})  # fmt: skip


def canonical(target: Target) -> Target:
    """Return the one spelling under which the table knows an operation.

    >>> canonical("sin") is canonical(torch.ops.aten.sin.default) is torch.sin
    True
    >>> canonical(operator.add) is canonical("add") is torch.add
    True
    >>> canonical(print) is print
    True
    """
    if isinstance(target, (_OVERLOAD, _PACKET)):
        namespace, name, *_ = str(target).split(".")
        packet = target if isinstance(target, _PACKET) else target.overloadpacket
        if namespace != "aten":
            return packet
        if name.removesuffix("_copy") in _ATEN_VIEWS:  # what functionalize makes of a view
            name = name.removesuffix("_copy")
        target = _ATEN.get(name) or _torch_function(name) or packet
    elif isinstance(target, str):
        target = _method(target)
    elif getattr(torch.Tensor, getattr(target, "__name__", ""), None) is target:
        target = _method(target.__name__)
    return _OPERATORS.get(target, target)


def _method(name: str) -> Target:
    # x.where(condition, y) and torch.where(condition, x, y) take their arguments in another order.
    return torch.Tensor.where if name == "where" else _torch_function(name) or name


def _torch_function(name: str) -> Target | None:
    """Return the function `torch.name`, or the method of that name, if there is one."""
    for owner in (torch, torch.Tensor):
        fn = getattr(owner, name, None)
        if callable(fn):
            return fn
    return None


class RuleTable(Mapping[Target, Rule]):
    """A mapping from operations, in any spelling, to rules.

    >>> import torch
    >>> table = RuleTable()
    >>> _ = table.register(torch.neg)(lambda x: (-x, None), lambda _, dy: -dy)
    >>> "neg" in table, operator.neg in table, torch.ops.aten.neg.default in table
    (True, True, True)
    >>> other = table.override({torch.neg: Rule(lambda x: (-x, x), lambda x, dy: -dy)})
    >>> other["neg"] is table["neg"]
    False
    """

    def __init__(
        self, rules: Mapping[Any, Rule] | None = None, constant: frozenset[Target] = frozenset()
    ) -> None:
        self._rules = {canonical(op): rule for op, rule in (rules or {}).items()}
        self._constant = frozenset(map(canonical, constant))

    def __getitem__(self, op: Target) -> Rule:
        return self._rules[canonical(op)]

    def __iter__(self) -> Iterator[Target]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def is_constant(self, op: Target) -> bool:
        """Return True if `op` needs no rule because its derivative is zero (`detach`, `floor`)."""
        return canonical(op) in self._constant

    def register(self, *ops: Target) -> Callable[[Callable[..., Any], Callable[..., Any]], Rule]:
        """Register a rule for one or more operations: `table.register(torch.sin)(fwd, bwd)`."""

        def add(fwd: Callable[..., Any], bwd: Callable[..., Any]) -> Rule:
            rule = Rule(fwd, bwd)
            self._rules.update((canonical(op), rule) for op in ops)
            self._constant -= set(map(canonical, ops))
            return rule

        return add

    def override(self, rules: Mapping[Any, Rule]) -> RuleTable:
        """Return a copy in which these rules replace or join the others."""
        new = {canonical(op): rule for op, rule in rules.items()}
        return RuleTable({**self._rules, **new}, self._constant - new.keys())


def missing_rule(node: fx.Node) -> MissingRule:
    """Return the error for a `node` without a rule: which operation, where, and what to do."""
    name = spelling(node)
    return MissingRule(
        f"no VJP rule for {name}, through which a gradient has to flow\n{where(node)}"
        "Give it one:\n"
        "    def fwd(*args): ...           # -> (value, saved)\n"
        "    def bwd(saved, d_value): ...  # -> one cotangent for each argument\n"
        f"    rules = vjp.DEFAULT_RULES.override({{{name}: vjp.Rule(fwd, bwd)}})\n"
        "    vjp.vjp_graph(fn, *args, rules=rules)"
    )


def where(node: fx.Node) -> str:
    """Name the node, and the line of the user's code that made it, if known."""
    lines = (node.stack_trace or "").rstrip().splitlines()[-2:]
    return "\n".join([f"    {node.format_node()}", *lines, ""])


def spelling(node: fx.Node) -> str:
    """Write the operation of a call as the user would: `torch.Tensor.cumsum`, `operator.or_`."""
    fn: Any = node.target
    if isinstance(fn, str):
        fn = getattr(torch.Tensor, fn, None)
        if fn is None:
            return repr(node.target)
    if isinstance(fn, (_OVERLOAD, _PACKET)):
        return f"torch.ops.{fn}"
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", str(fn))
    return torch.overrides.resolve_name(fn) or f"{fn.__module__.removeprefix('_')}.{name}"


def refuse_mutation(node: fx.Node) -> None:
    """A graph of values cannot say that a tensor changed: later uses would see the old one."""
    name = spelling(node)
    parts = [part for part in name.split(".") if not part.endswith("__")]
    if any(part.endswith("_") for part in parts) or node.target in _IN_PLACE_OPERATORS:
        raise MissingRule(
            f"{name} works in place, and has no VJP rule\n{where(node)}"
            "Write it without, or trace torch.func.functionalize(fn) with make_fx first."
        )
