"""A program as data that prints as a Python file, and that the shrinker can take apart."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


class Size(int):
    """A size that prints as the program's text for it, ``N`` or ``2 * M``.

    >>> f"{Size(3, 'N')} is {Size(3, 'N') + 0}"
    'N is 3'
    """

    text: str

    def __new__(cls, value: int, text: str) -> Size:
        size = super().__new__(cls, value)
        size.text = text
        return size

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return self.text


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Type:
    """``dtype`` is a letter: f (the program's float), c (its complex), s (float32), i, b.

    ``fresh``: made by an operator of its own, so that writing to it changes nothing else.
    ``high``: integers are in ``[0, high)``.
    """

    shape: Shape
    dtype: str = "f"
    fresh: bool = True
    high: int = 0

    def zeros(self) -> str:
        return f"torch.zeros({size_text(self.shape)}, dtype={DTYPE_TEXT[self.dtype]})"


DTYPE_TEXT = {
    "f": "dtype",
    "c": "cdtype",
    "s": "torch.float32",
    "i": "torch.int64",
    "b": "torch.bool",
}


def size_text(shape: Shape) -> str:
    """As an argument: ``()`` for no dimensions, for which ``torch.zeros()`` would not do."""
    return ", ".join(map(str, shape)) if shape else "()"


@dataclass(frozen=True)
class Var:
    name: str
    type: Type


@dataclass(frozen=True)
class Statement:
    """A line, or a block with statements beneath it and a line after them."""

    text: str
    defines: tuple[Var, ...] = ()
    body: tuple[Statement, ...] = ()
    tail: str = ""

    def lines(self, indent: str) -> Iterator[str]:
        yield from (indent + line for line in self.text.splitlines())
        for inner in self.body:
            yield from inner.lines(indent + "    ")
        yield from (indent + line for line in self.tail.splitlines())


@dataclass(frozen=True)
class Input:
    """A tensor made before the program: ``text`` makes it with the generator ``g``."""

    name: str
    type: Type
    text: str
    grad: bool = False


@dataclass(frozen=True)
class Carried:
    """A leaf of the carry: its name in the body, what it starts as, what the body returns."""

    name: str
    type: Type
    init: str
    result: str


@dataclass(frozen=True)
class Scanned:
    """A leaf of xs: its name in the body and the tensor that is scanned."""

    name: str
    type: Type
    text: str


@dataclass(frozen=True)
class Program:
    seed: int
    sizes: dict[str, int]
    base: str = "float64"
    helpers: tuple[str, ...] = ()
    inputs: tuple[Input, ...] = ()
    before: tuple[Statement, ...] = ()
    carry: tuple[Carried, ...] = ()
    carry_kind: str = "tuple"
    xs: tuple[Scanned, ...] = ()
    xs_kind: str = "tuple"
    body: tuple[Statement, ...] = ()
    ys: tuple[str, ...] = ()
    ys_kind: str = "tuple"
    options: tuple[tuple[str, str], ...] = ()
    after: str = ""
    #: what the scan is called again in, and whether that is the first call
    context: str = ""
    context_first: bool = False
    features: tuple[str, ...] = field(default=(), compare=False)

    @property
    def tolerance(self) -> float:
        return tolerance_of(self.text())

    def text(self) -> str:
        return "\n".join(_lines(self))

    def renamed(self, old: str, new: str) -> Program:
        """The program with every use of the name ``old`` as ``new``."""
        return self.rewritten(lambda text: re.sub(rf"(?<![\w.]){old}\b", new, text))

    def rewritten(self, change: Callable[[str], str]) -> Program:
        return dataclasses.replace(
            self,
            before=tuple(_rewritten(s, change) for s in self.before),
            body=tuple(_rewritten(s, change) for s in self.body),
            carry=tuple(
                dataclasses.replace(c, init=change(c.init), result=change(c.result))
                for c in self.carry
            ),
            xs=tuple(dataclasses.replace(x, text=change(x.text)) for x in self.xs),
            ys=tuple(change(y) for y in self.ys),
            after=change(self.after),
        )


def tolerance_of(text: str) -> float:
    """Relative; wide where the text computes in float32."""
    return 2e-3 if "float32" in text or ".float()" in text else 1e-7


def _rewritten(statement: Statement, change: Callable[[str], str]) -> Statement:
    return dataclasses.replace(
        statement,
        text=change(statement.text),
        body=tuple(_rewritten(s, change) for s in statement.body),
        tail=change(statement.tail),
    )


# --- text ---

HEADER = """\
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch_scan_hop import Binomial, scan
"""

NORMAL = """\
def normal(g, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=g).to(dtype)
"""


def _lines(p: Program) -> Iterator[str]:
    complex_base = {"float64": "complex128", "float32": "complex64"}[p.base]
    yield HEADER
    yield f"dtype, cdtype = torch.{p.base}, torch.{complex_base}"
    yield f"{', '.join(p.sizes)} = {', '.join(map(str, p.sizes.values()))}\n\n"
    yield NORMAL
    for helper in p.helpers:
        yield "\n" + helper
    yield "\ndef inputs(seed=0):"
    yield "    g = torch.Generator().manual_seed(seed)"
    yield "    return {"
    for made in p.inputs:
        yield f'        "{made.name}": {made.text}{".requires_grad_()" if made.grad else ""},'
    yield "    }\n\n"
    yield f"def program({', '.join(['scan', *(made.name for made in p.inputs)])}):"
    for statement in p.before:
        yield from statement.lines("    ")
    yield from _body_lines(p)
    yield from _call_lines(p)


def _body_lines(p: Program) -> Iterator[str]:
    carry, unpack_carry = _argument("carry", [c.name for c in p.carry], p.carry_kind)
    xs, unpack_xs = _argument("x", [x.name for x in p.xs], p.xs_kind)
    yield f"    def body({carry}, {xs}):"
    for line in (*unpack_carry, *unpack_xs):
        yield "        " + line
    for statement in p.body:
        yield from statement.lines("        ")
    results = tree_text([c.name for c in p.carry], [c.result for c in p.carry], p.carry_kind)
    names = [f"y{k}" for k in range(len(p.ys))]
    yield f"        return {results}, {tree_text(names, list(p.ys), p.ys_kind)}\n"


def _call_lines(p: Program) -> Iterator[str]:
    init = tree_text([c.name for c in p.carry], [c.init for c in p.carry], p.carry_kind)
    xs = tree_text([x.name for x in p.xs], [x.text for x in p.xs], p.xs_kind) if p.xs else "None"
    options = dict(p.options)
    if not p.xs:
        options["length"] = "T"
    arguments = ["body", init, xs, *(f"{k}={v}" for k, v in options.items())]
    call = f"scan({', '.join(arguments)})"
    plain = [f"    result = {call}"]
    if not p.context:
        yield from plain
        yield f"    return {p.after or 'result'}\n"
        return
    again = [f"    with {p.context}:", f"        again = {call}"]
    yield from [*again, *plain] if p.context_first else [*plain, *again]
    yield f"    return {p.after or 'result'}, again\n"


def _argument(name: str, leaves: list[str], kind: str) -> tuple[str, list[str]]:
    """The parameter's name in the body, and the lines that take it apart."""
    if not leaves:
        return name, []
    if kind == "single":
        return leaves[0], []
    path = {
        "tuple": lambda k: f"[{k}]",
        "list": lambda k: f"[{k}]",
        "none": lambda k: f"[{k + 1}]",
        "dict": lambda k: f'["{leaves[k]}"]',
        "nested": lambda k: '["first"]' if k == 0 else f'["rest"][{k - 1}]',
        "named": lambda k: f".p{k}",
    }[kind]
    return name, [f"{leaf} = {name}{path(k)}" for k, leaf in enumerate(leaves)]


def tree_text(names: list[str], values: list[str], kind: str) -> str:
    """``values`` in a container of this kind; None where there are none."""
    joined = ", ".join(values)
    if not values:
        return "None"
    if kind == "single":
        return values[0]
    if kind == "dict":
        return "{" + ", ".join(f'"{n}": {v}' for n, v in zip(names, values, strict=True)) + "}"
    if kind == "nested":
        return (
            f'{{"first": {values[0]}, "rest": ({", ".join(values[1:])}{"," * (len(values) == 2)})}}'
        )
    return {
        "tuple": f"({joined},)" if len(values) == 1 else f"({joined})",
        "list": f"[{joined}]",
        "none": f"(None, {joined})",
        "named": f"State{len(values)}({joined})",
    }[kind]
