"""Where Python makes something else of numbers than torch does of scalars: an error, a complex
number, or an int of more than 64 bits.

A scan computes with such numbers for all steps, and returns of each step if Python would have made
the same. After the scan that is checked. In eager mode the Python loop runs the call if not: it
raises Python's error at its line, or has the complex number. A compiled program fails.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.variables import VariableTracker, create_proxy, example_value
from torch_scan_hop._torch.functorch_levels import unwrapped
from torch_scan_hop._torch.operators import FlatOperator, assert_on_device, under_tracer
from torch_scan_hop.capture.user_code import users_line
from torch_scan_hop.rewrites.classify import ancestors
from torch_scan_hop.signature import output_node

#: in the meta of a node that checks a scan: what it says if the check fails
CHECK = "torch_scan_hop.check_of_numbers"
#: ints beyond are not a scalar's
_MOST = 2.0**63
#: a counter that grows by so much in a step does not reach that
_SMALL = 2**32

Number = Any
Rule = Callable[..., torch.Tensor]


def _double(number: Number) -> Number:
    return number.to(torch.float64) if isinstance(number, torch.Tensor) else float(number)


def _is_infinite(number: Number) -> Number:
    return abs(_double(number)) == torch.inf


def _does_not_overflow(made: torch.Tensor, *given: Number) -> torch.Tensor:
    fine = ~_is_infinite(made)
    for number in given:
        fine = fine | _is_infinite(number)
    return fine


def _power(made: torch.Tensor, base: Number, exponent: Number) -> torch.Tensor:
    if not made.is_floating_point():
        size = abs(_double(base)) ** abs(_double(exponent))
        return (size < _MOST) & (exponent >= 0)
    fine = _does_not_overflow(made, base, exponent)
    if isinstance(base, torch.Tensor) or base <= 0:
        if isinstance(exponent, torch.Tensor) or exponent != int(exponent):
            fine = fine & ((base >= 0) | (exponent == exponent // 1))
        fine = fine & ((base != 0) | (exponent >= 0))
    return fine


def _left_shift(made: torch.Tensor, number: Number, by: Number) -> torch.Tensor:
    return (by >= 0) & (by < 63) & ((made >> by) == number)


def _sum(made: torch.Tensor, a: Number, b: Number) -> torch.Tensor:
    return abs(_double(a)) + abs(_double(b)) < _MOST  # type: ignore[no-any-return]


def _product(made: torch.Tensor, a: Number, b: Number) -> torch.Tensor:
    return abs(_double(a) * _double(b)) < _MOST  # type: ignore[no-any-return]


def _above(least: float) -> Rule:
    return lambda made, number: ~(number <= least)


def _has_divisor(made: torch.Tensor, number: Number, divisor: Number) -> torch.Tensor:
    return divisor != 0  # type: ignore[no-any-return]


#: by the name of what is computed: if Python makes ``made`` of the numbers, too
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("truediv", "floordiv", "mod"), _has_divisor),
    **dict.fromkeys(("exp", "expm1", "sinh", "cosh"), _does_not_overflow),
    **dict.fromkeys(("sin", "cos", "tan"), lambda made, number: ~_is_infinite(number)),
    **dict.fromkeys(("log", "log2", "log10"), _above(0)),
    **dict.fromkeys(("asin", "acos"), lambda made, number: ~(abs(number) > 1)),
    **dict.fromkeys(("int", "floor", "ceil", "round"), lambda _, number: abs(number) < _MOST),
    **{"log1p": _above(-1), "sqrt": lambda made, number: ~(number < 0)},
    **{"pow": _power, "lshift": _left_shift, "add": _sum, "sub": _sum, "mul": _product},
    # made is a tensor, and so is the answer, where both others are Python's
    "rshift": lambda made, number, by: (made == made) & (by >= 0) & (by < 64),
}


def python_makes(made: torch.Tensor, name: str, *given: Number) -> torch.Tensor:
    """Return if Python makes ``made`` of the numbers ``given``, as torch did.

    >>> root, number = torch.tensor(float("nan")), torch.tensor(-2.0)
    >>> python_makes(root, "sqrt", number)
    tensor(False)
    """
    return _RULES[name](made, *given)


def add_conditions(graph: fx.Graph, n_carry: int, numbers: Iterable[fx.Node]) -> str | None:
    """Let a step return, as its last y, if Python makes the same ``numbers``; return the line that
    may make others, or None if none does, and nothing is returned."""
    output: Any = output_node(graph)
    carried = ancestors(output.args[0][:n_carry])
    conditions, lines = [], []
    for node in sorted(numbers):
        if name := _name_of_rule(node, node in carried):
            operands = [a for a in node.args if a != name]
            with graph.inserting_after(node):
                condition = graph.call_function(python_makes, (node, name, *operands))
            conditions.append(condition)
            lines.append(users_line(node.stack_trace or ""))
    for check in [n for n in graph.nodes if CHECK in n.meta]:  # of a scan in the body
        conditions.append(check.args[0])
        lines.append(check.meta[CHECK])
        graph.erase_node(check)
    if not conditions:
        return None
    fine = conditions[0]
    for condition in conditions[1:]:
        with graph.inserting_before(output):
            fine = graph.call_function(operator.and_, (fine, condition))
    output.args = ((*output.args[0], fine),)
    return next(filter(None, lines), "")


def _name_of_rule(node: fx.Node, is_carried: bool) -> str:
    """Return the name of the rule for ``node``; "" if Python makes the same of all numbers."""
    if node.op != "call_function" or node.target is getattr:
        return ""
    args: tuple[Any, ...] = node.args
    name = args[0] if isinstance(args[0], str) else getattr(node.target, "__name__", "")
    if name not in _RULES or any(map(_is_complex, [node, *args])):
        return ""
    is_float = _is_float(node)
    constants = [a for a in args[-2:] if isinstance(a, (int, float))]
    if name in ("add", "sub", "mul"):
        is_small = name != "mul" and any(abs(c) <= _SMALL for c in constants)
        is_product = name == "mul" and not constants
        return name if not is_float and (is_product or (is_carried and not is_small)) else ""
    if name in ("int", "floor", "ceil", "round"):
        return name if _is_float(args[-1]) else ""
    if isinstance(args[-1], (int, float)) and name in ("truediv", "floordiv", "mod", "pow"):
        if (args[-1] == 0 and name != "pow") or (name == "pow" and args[-1] < 0 and not is_float):
            raise Unsupported(_ALWAYS.format(users_line(node.stack_trace or "")))
        return name if name == "pow" else ""
    if name == "rshift" and isinstance(args[-1], int) and 0 <= args[-1] < 64:
        return ""
    return name


def _is_float(node: fx.Node) -> bool:
    return bool(example_value(node).is_floating_point())


def _is_complex(value: Any) -> bool:
    example = example_value(value)
    return isinstance(example, complex) or (torch.is_tensor(example) and example.is_complex())


_ALWAYS = "a step divides a number by zero, or raises an int to a negative power{}"
_REASON = (
    "of a number that steps carry Python makes an error, a complex number or an int of more than "
    "64 bits, which a scalar tensor is not{}"
)


class CheckOperator(FlatOperator):
    """Raises with ``message`` if not ``fine``, where a value can be read; else the program fails
    later. (A function in its place would keep torch from caching what it compiles.)"""

    def __call__(self, fine: torch.Tensor, message: str) -> None:  # type: ignore[override]
        if under_tracer() or type(fine) is not torch.Tensor:
            # Inductor writes the text into strings of C++ and Python as it is
            assert_on_device(fine, re.sub(r"[\"'\\]", "`", message))
        elif not unwrapped(fine).all():
            raise RuntimeError(message)


check_scan = CheckOperator("check_scan_of_numbers", cacheable=True)


def check_after(tx: Any, flags: VariableTracker, line: str) -> None:
    """Check in the program, after a scan, what :func:`add_conditions` let its steps return."""
    if example_value(flags).device.type == "xla":  # has no values to read
        return
    fine = flags.call_method(tx, "all", [], {}).as_proxy()
    check = create_proxy(tx, "call_function", check_scan, (fine, _REASON.format(line)))
    check.node.meta[CHECK] = line
