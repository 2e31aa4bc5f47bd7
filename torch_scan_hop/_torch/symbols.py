"""Numbers that stand for any, as a trace sees them (checked on torch 2.9.1, 2.13.0, 2.15.0).

What imports sympy is imported on first use: it takes longer than all of this package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torch_scan_hop._torch.fakes import FakeTensorMode

Number = int | float
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# torch takes a symbolic size to be at least this: 0 and 1 are sizes of their own
SMALLEST_SIZE = 2
# sizes that differ by this factor may want another plan
NEAR = 16


@functools.cache
def _printer() -> Any:
    from torch.utils._sympy.printers import PythonPrinter

    class Printer(PythonPrinter):
        def _print_Float(self, expr: Any) -> str:
            return repr(float(expr))  # all digits: a guard may compare with it

    return Printer()


def is_symbolic(value: Any) -> bool:
    """Return True if ``value`` is a number that its trace left open."""
    return open_number(value) is not None


def open_number(value: Any) -> str | None:
    """Return the name of a number that its trace left open, None for any other.

    Numbers of one name are one number.
    """
    if not isinstance(value, SYMBOLS):
        return None
    expression = value.node.expr
    return None if expression.is_number else str(expression)


def unknown_dims(value: torch.Tensor) -> list[tuple[int, str | None]]:
    """Return the dimensions whose size depends on values, with the symbol that it is, or None."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    sizes: list[Any] = list(value.shape)
    return [
        (dim, str(size.node.expr) if size.node.expr.is_symbol else None)
        for dim, size in enumerate(sizes)
        if isinstance(size, torch.SymInt) and free_unbacked_symbols(size)
    ]


def is_unknown_number(value: Any) -> bool:
    """Return True if ``value`` is a number that the values of a tensor decide."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return isinstance(value, SYMBOLS) and bool(free_unbacked_symbols(value))


def tracked(number: Any) -> Any:
    """Return ``number`` as the trace at hand knows it, computed anew if it was computed elsewhere.

    A body is traced apart, and so are the numbers that it computes. The trace around it knows
    symbols, and what it has computed itself; from torch 2.13 on most other expressions, too.
    """
    mode = get_proxy_mode() if is_symbolic(number) else None
    if mode is None:
        return number
    tracer: Any = mode.tracer
    # proxy_tensor.get_proxy_slot() would write the expression out, a product of three wrongly
    if number in tracer.symnode_tracker or number.node.expr in tracer.sympy_expr_tracker:
        return number
    from torch.utils._sympy.interp import sympy_interp

    expression = number.node.expr
    known = {s: tracer.sympy_expr_tracker.get(s) for s in expression.free_symbols}
    if None in known.values():
        return number
    values = {symbol: _number_of(entry) for symbol, entry in known.items()}
    return sympy_interp(_operations_of_numbers(), values, expression)


@functools.cache
def _operations_of_numbers() -> Any:
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    class Operations(PythonReferenceAnalysis):
        """Divides sizes to a number; torch's own makes an expression of a quotient."""

        @staticmethod
        def int_truediv(a: Any, b: Any) -> Any:
            return a / b

    return Operations


def _number_of(entry: Any) -> Any:
    """Return what a trace knows of a symbol; before torch 2.13 that is its proxy alone."""
    return entry.value if hasattr(entry, "value") else entry.force().node.meta["val"]


class Symbols:
    """Symbols for the numbers of a call, in a shape environment of their own.

    No two symbols are the same because their numbers happen to be: only where a trace before this
    one has found that they always are. Where this trace needs two to be equal, or decides anything
    else by a number, its environment keeps that as a guard.
    """

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self.dynamic = DimDynamic.DYNAMIC
        self.env = ShapeEnv(
            duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
        )
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.env)
        self.names: list[str] = []  # of all numbers of a call
        self.conditions: list[str] = []
        self.near: list[str] = []
        self.known: dict[str, tuple[Any, str]] = {}

    def size(self, open_number: str, value: int) -> Any:
        """Return a symbol for a tensor's size; 0 and 1 are left as they are."""
        if open_number in self.known:
            return self._again(open_number)
        if value < SMALLEST_SIZE:
            return self._known(open_number, value, f"fixed_{len(self.names)}", f"== {value}")
        source = self._source()
        symbol = self.env.create_symbol(value, source, self.dynamic)
        self.near.append(f"{value} <= {NEAR} * {symbol} <= {NEAR**2 * value}")
        made = self.env.create_symintnode(symbol, hint=value, source=source)
        return self._known(open_number, made, str(symbol), f">= {SMALLEST_SIZE}")

    def number(self, open_number: str, value: Number) -> Any:
        """Return a symbol for a number that may be any of its type."""
        if open_number in self.known:
            return self._again(open_number)
        source = self._source()
        symbol = self.env.create_unspecified_symbol(value, source, self.dynamic)
        make = (
            self.env.create_symfloatnode if isinstance(value, float) else self.env.create_symintnode
        )
        made = make(symbol, hint=value, source=source)
        return self._known(open_number, made, str(symbol))

    def _source(self) -> Any:
        from torch._dynamo.source import ConstantSource  # imports Dynamo

        return ConstantSource(f"__scan_{len(self.names)}")

    def _known(self, open_number: str, made: Any, name: str, condition: str = "") -> Any:
        self.names.append(name)
        self.known[open_number] = (made, name)
        if condition:
            self.conditions.append(f"{name} {condition}")
        return made

    def _again(self, open_number: str) -> Any:
        made, first = self.known[open_number]
        self.names.append(f"again_{len(self.names)}")
        self.conditions.append(f"{self.names[-1]} == {first}")
        return made

    def are_near(self) -> Callable[..., bool]:
        """Return a test if the same work pays for these sizes as for those that were traced."""
        return self._compiled(" and ".join(self.near) or "True")

    def guards(self) -> Callable[..., bool]:
        """Return a test if what was traced holds for these numbers."""
        if self.env.deferred_runtime_asserts:
            raise ValueError("a trace that must be checked as it runs")
        found = [*self.conditions, *(self._printed(g.expr) for g in self.env.guards)]
        return self._compiled(" and ".join(f"({c})" for c in dict.fromkeys(found)) or "True")

    def function(self, values: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
        """Return ``values`` (numbers, symbolic or not) as a function of the symbols' numbers."""
        import sympy

        printed = [self._printed(sympy.sympify(_expression(v))) for v in values]
        return self._compiled("(" + "".join(f"{p}, " for p in printed) + ")")

    def _printed(self, expression: Any) -> str:
        unknown = {str(s) for s in expression.free_symbols} - set(self.names)
        if unknown:
            raise ValueError(f"{unknown} are not numbers of the call")
        return str(_printer().doprint(expression))

    def _compiled(self, source: str) -> Callable[..., Any]:
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

        found: Callable[..., Any] = eval(f"lambda {', '.join(self.names)}: {source}", SYMPY_INTERP)
        return found


def _expression(value: Any) -> Any:
    return value.node.expr if hasattr(value, "node") else value
