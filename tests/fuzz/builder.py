"""The typed environment in which a random body grows, one statement at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from .program import DTYPE_TEXT, Shape, Size, Statement, Type, Var, size_text

T = TypeVar("T")


class NoOperandError(Exception):
    """A rule does not apply: nothing in scope has the type that it wants."""


Rule = Callable[["Builder"], None]
RULES: dict[str, list[Rule]] = {}


def rule(feature: str) -> Callable[[Rule], Rule]:
    """Register a rule of the grammar; ``--features`` chooses among the features."""

    def register(function: Rule) -> Rule:
        RULES.setdefault(feature, []).append(function)
        return function

    return register


class Builder:
    """Names and their types in scope, and the statements so far."""

    def __init__(self, rng: random.Random, sizes: dict[str, int], trip_count: int) -> None:
        self.rng = rng
        self.sizes = [Size(value, name) for name, value in sizes.items() if name != "T"]
        self.trip_count = Size(trip_count, "T")
        self.vars: list[Var] = []
        self.statements: list[Statement] = []
        self.helpers: dict[str, str] = {}
        self.before: list[Statement] = []
        self.extras: list[str] = []
        #: leaves of the carry that are Python numbers at first, or after a step
        self.numbers: list[str] = []
        #: Python floats that the program is given
        self.floats: list[str] = []
        #: Python ints that steps count, and what each step ends with
        self.counters: list[str] = []
        #: containers that are ys
        self.returned: list[str] = []
        #: lists that steps append to
        self.lists: list[str] = []
        self.last: list[Statement] = []
        #: features of blocks within the body, beside the plain ones
        self.within: list[str] = []
        #: what the scan is called again in
        self.context = ""
        self.depth = 0
        self._count = 0

    # --- choices ---

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def choose(self, options: Sequence[T]) -> T:
        if not options:
            raise NoOperandError
        return self.rng.choice(options)

    def size(self) -> int:
        return self.choose(self.sizes)

    def shape(self, ndim: int) -> Shape:
        return tuple(self.size() for _ in range(ndim))

    def number(self) -> float:
        """Not a round number: no value in a program is likely to meet it exactly."""
        return round(self.rng.uniform(-0.9, 0.9), 2) + 0.0037

    # --- operands ---

    def find(self, accepts: Callable[[Type], bool]) -> Var:
        """Any value in scope with an accepted type; later ones are likelier."""
        found = [v for v in self.vars if accepts(v.type)]
        if not found:
            raise NoOperandError
        k = max(self.rng.randrange(len(found)), self.rng.randrange(len(found)))
        return found[k]

    def float(self, low: int = 0, high: int = 3, fresh: bool | None = None) -> Var:
        """A float with this many dimensions, and no more elements than keep programs fast."""
        return self.find(
            lambda t: (
                t.dtype == "f"
                and low <= len(t.shape) <= high
                and (fresh is None or t.fresh == fresh)
            )
        )

    def like(self, shape: Shape, dtype: str = "f") -> Var:
        """A value of exactly this shape, made of another one if need be."""
        try:
            return self.find(lambda t: t.dtype == dtype and t.shape == shape)
        except NoOperandError:
            pass
        if dtype == "b":
            return self.let(f"{self.like(shape).name} > {self.number():.4f}", shape, "b")
        source = self.float()
        return self.let(
            f"torch.sin({source.name}.mean()).expand({size_text(shape) if shape else '()'}) * {self.tilt(shape)}",
            shape,
        )

    def tilt(self, shape: Shape) -> str:
        """Weights that differ along the last dimension, so that no two elements stay tied."""
        if not shape:
            return "0.8"
        return f"torch.linspace(0.5, 0.9, {shape[-1]}, dtype=dtype)"

    def untied(self, v: Var) -> str:
        """``v`` without ties along any dimension."""
        shape = v.type.shape
        if not shape:
            return v.name
        count = " * ".join(map(str, shape))
        return (
            f"({v.name} + torch.linspace(0, 0.071, {count}, dtype=dtype)"
            f".reshape({size_text(shape)}))"
        )

    def index(self, high: int, ndim: int = 0) -> Var:
        """Integers in ``[0, high)`` of this rank."""
        try:
            return self.find(
                lambda t: t.dtype == "i" and len(t.shape) == ndim and 0 < t.high <= high
            )
        except NoOperandError:
            pass
        if high < 1:
            raise NoOperandError
        source = self.find(lambda t: t.dtype == "i" and len(t.shape) == ndim and 0 < t.high)
        return self.let(f"{source.name} % {high}", source.type.shape, "i", high=high)

    # --- statements ---

    def name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def let(
        self, text: str, shape: Shape, dtype: str = "f", fresh: bool = True, high: int = 0
    ) -> Var:
        """``v7 = text``."""
        var = Var(self.name(), Type(tuple(shape), dtype, fresh, high))
        self.statements.append(Statement(f"{var.name} = {text}", (var,)))
        self.vars.append(var)
        return var

    def bounded(self, text: str, shape: Shape) -> Var:
        """As ``let``, for a text whose values may be large."""
        return self.let(f"torch.{self.choose(['tanh', 'sin', 'tanh'])}({text})", shape)

    def do(self, text: str) -> None:
        """A line that defines nothing."""
        self.statements.append(Statement(text))

    def axis(self, shape: Shape) -> int:
        return self.choose(range(len(shape)))

    def axis_text(self, axis: int, ndim: int) -> int:
        """From the front or from the back."""
        return axis - ndim if self.chance(0.4) else axis

    def dtype_text(self, dtype: str) -> str:
        return DTYPE_TEXT[dtype]


def times(a: int, b: int) -> int:
    """A product of sizes that remembers its factors."""
    return Size(int(a) * int(b), f"{a} * {b}")


def plus(a: int, b: int) -> int:
    return Size(int(a) + int(b), f"({a} + {b})")


def without(shape: Shape, axis: int) -> Shape:
    return shape[:axis] + shape[axis + 1 :]


def replaced(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def product(shape: Shape) -> int:
    total: int = 1
    for size in shape:
        total = times(total, size) if total != 1 else size
    return total


def count(shape: Shape) -> int:
    total = 1
    for size in shape:
        total *= int(size)
    return total
