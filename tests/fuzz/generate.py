"""A random program from a seed: its inputs, its body, the containers and the options of its scan."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from . import (
    rules_affine,
    rules_context,
    rules_counters,
    rules_floats,
    rules_lists,
    rules_math,
    rules_shape,
    rules_special,
    rules_state,
    rules_write,
    rules_write_rows,
)
from .builder import RULES, Builder, NoOperandError
from .program import Carried, Input, Program, Scanned, Shape, Size, Statement, Type, Var, size_text
from .rules_special import DRAWS, MADE, WAYS_OF_MAKING, attempt
from .rules_state import growing_leaf

_REGISTERED = (
    rules_context, rules_counters, rules_floats, rules_lists, rules_math, rules_shape, rules_special,
    rules_state, rules_write, rules_write_rows,
)  # fmt: skip

#: what a program may hold unless ``--features`` says otherwise; the rest are switches
DEFAULT = (
    "pointwise", "products", "reductions", "views", "indexing", "buffers", "inplace", "casts",
    "complex", "linalg", "stops", "custom", "nested", "layouts", "trees",
)  # fmt: skip
#: ``kernel``: leaves of one shape, as the kernel of a pointwise body wants them; ``rows``: those of
#: one batch in float32, with weights, which ``cells`` multiplies carries with;
#: ``norms``: of their rows; ``long``: every
#: program has many steps; ``contexts``: the scan is called a second time, in another context;
#: ``complex_carry``: most carries are complex; ``floats``: closed-over Python floats; ``regions``:
#: ``attributes``: state in objects; ``facts``: what is asked of a value changes after a step;
#: ``first_steps``: a leaf of the carry is None, or a number, at first; ``counters``: Python numbers
#: in attributes, alone and beside tensors, and what Python makes of them; delay lines;
#: ``branches``: on what steps count, in blocks and nested scans, too, and lists at such positions;
#: ``masks``: rows that a mask selects; ``shared``: state that is one tensor by two names;
#: ``lists``: lists that grow; ``unread``: draws, most of which nothing reads;
#: ``made``: carries begin with, and steps read, what the program itself makes of no input;
#: of autocast, and of checkpoints; ``affine``: so are all carries; ``inner_cells``: scans of
#: recurrent cells within a step; ``sums``: a carry that steps only add sums to
SWITCHES = (
    "random", "state", "draws", "func", "aliases", "numbers", "rows", "kernel", "long", "summed",
    "contexts", "complex_carry", "fills", "inner_jvp", "floats", "cells", "norms", "regions",
    "affine", "inner_cells", "sums", "attributes", "facts", "hooks", "first_steps",
    "counters", "masks", "shared", "branches", "lists", "unread", "made",
)  # fmt: skip

SIZES = [1, 2, 2, 3, 3, 3, 4, 4, 7, 8, 9, 15, 16, 17, 33]
TRIP_COUNTS = [0, 1, 2, 3, 3, 3, 4, 4, 5, 5]
WEIGHTS = {
    "pointwise": 3, "indexing": 3, "buffers": 2, "floats": 8, "cells": 6, "regions": 6,
    "inner_cells": 8, "norms": 6, "masks": 8,
    "shared": 12, "branches": 5, "lists": 8, "unread": 8,
}  # fmt: skip


def generate(seed: int, features: Sequence[str] = DEFAULT) -> Program:
    """The program of this seed: the same text on every machine and every torch."""
    return _Generator(seed, features).program()


class _Generator:
    def __init__(self, seed: int, features: Sequence[str]) -> None:
        self.seed = seed
        self.features = tuple(features)
        self.rng = rng = random.Random(f"torch_scan_hop {seed}")
        self.long = rng.random() < 0.06 or "long" in features
        trip_count = rng.choice([33, 64, 256] if self.long else TRIP_COUNTS)
        if "branches" in features and not self.long:
            trip_count = rng.choice([1, 2, 3, 3, 4, 5, 6, 7, 9, 13])
        if {"attributes", "first_steps", "counters", "shared", "lists"} & set(features):
            trip_count = max(1, trip_count)  # what comes of no step is known to a step that runs
        pool = [1, 2, 3, 4, 8] if self.long else SIZES
        self.sizes = {name: rng.choice(pool) for name in "NMK"} | {"T": trip_count}
        self.base = "float32" if "rows" in features else "float64"
        self.g = Builder(rng, self.sizes, trip_count)
        if "branches" in features:
            stateful = ("branches", "attributes", "counters", "stops", "inplace", "hooks")
            self.g.within = [f for f in stateful if f in features]
        self.inputs: list[Input] = []
        self.dim = 0
        if "layouts" in features and rng.random() < 0.1:
            self.dim = rng.choice([1, -1])

    def has(self, feature: str) -> bool:
        return feature in self.features

    # --- the program ---

    def program(self) -> Program:
        g = self.g
        if self.has("contexts"):
            g.context = rules_context.choose_context(self.rng)
        elif self.has("branches") and self.rng.random() < 0.4:
            g.context = "torch.enable_grad()"  # which changes nothing: counts go on
        carry = self._carry()
        xs = self._xs()
        self._closed()
        self._statements()
        carry = [self._affine(c, carry) or self._next(c) for c in carry]
        ys = self._ys()
        return Program(
            seed=self.seed,
            sizes=self.sizes,
            base=self.base,
            helpers=(
                *g.helpers.values(),
                *self._state_classes(len(carry), len(xs), len(ys)),
                *([rules_context.HELPERS] if self.has("contexts") else []),
            ),
            inputs=tuple(self.inputs),
            before=tuple(g.before),
            carry=tuple(carry),
            carry_kind=self._kind(len(carry)),
            xs=tuple(xs),
            xs_kind=self._kind(len(xs)),
            body=(*g.statements, *g.last),
            ys=tuple(ys),
            ys_kind=self._kind(len(ys)),
            options=self._options(bool(xs)),
            after=self._after(),
            context=g.context,
            context_first=bool(g.context) and self.rng.random() < 0.5,
            features=self.features,
        )

    def _state_classes(self, *counts: int) -> tuple[str, ...]:
        """The named tuples that a container may be."""
        import_line = "from collections import namedtuple\n"
        made = [
            f'State{n} = namedtuple("State{n}", {[f"p{k}" for k in range(n)]!r})\n'.replace(
                "'", '"'
            )
            for n in sorted({n for n in counts if n > 0})
        ]
        return (import_line, *made) if self.has("trees") and made else ()

    def _kind(self, n: int) -> str:
        if not self.has("trees") or n == 0:
            return "single" if n == 1 else "tuple"
        kinds = ["tuple", "tuple", "dict", "list", "named", "none", "nested"]
        return self.rng.choice(["single"] * 6 + kinds if n == 1 else kinds)

    def _options(self, has_xs: bool) -> tuple[tuple[str, str], ...]:
        options = []
        if self.dim and has_xs:
            options.append(("dim", str(self.dim)))
        if self.rng.random() < 0.25:
            options.append(("reverse", "True"))
        if self.rng.random() < 0.12:
            options.append(("unroll", self.rng.choice(["2", "3"])))
        if self.rng.random() < 0.15:
            policies = ['"full"', '"full"', '"sqrt"', "3", "Binomial(2)"]
            options.append(("checkpoint", self.rng.choice(policies)))
        return tuple(options)

    def _after(self) -> str:
        extras = ", ".join(self.g.extras)
        if extras:
            return f"(*result, {extras})"
        if self.has("summed") and self.rng.random() < 0.5:
            return "[v.sum() for v in torch.utils._pytree.tree_leaves(result) if v is not None]"
        return ""

    # --- inputs ---

    def _input(self, prefix: str, type_: Type, text: str, grad: bool = False) -> Input:
        made = Input(f"{prefix}{len(self.inputs)}", type_, text, grad)
        self.inputs.append(made)
        return made

    def _shape(self) -> Shape:
        if self.has("kernel") or self.has("rows") or self.has("affine"):
            return tuple(self.g.sizes[:2])
        shape = self.g.shape(self.rng.choice([0, 1, 1, 2, 2, 2, 3]))
        while _numel(shape) > 3000:
            shape = shape[:-1]
        return shape

    def _carry(self) -> list[Carried]:
        leaves = []
        for k in range(self.rng.choice([1, 1, 1, 2, 2, 3])):
            leaves.append(self._carried(k))
        if self.has("numbers") and len(leaves) == 1:
            leaves.append(self._number())
        if self.has("indexing") and self.rng.random() < 0.3:
            leaves.append(self._counter())
        if self.has("sums"):
            leaves.append(self._total())
        if self.has("first_steps") and self.rng.random() < 0.7:
            leaves.append(growing_leaf(self.g, self._shape(), len(leaves)))
        if self.has("branches") and self.rng.random() < 0.4:
            self.g.counters.append("count")
            start = self.rng.choice(["0", "0", "1", "3", "-2"])
            leaves.append(Carried("count", Type((), "i", fresh=False), start, "count"))
        return leaves

    def _total(self) -> Carried:
        """A leaf that steps add to, and that nothing reads."""
        shape = self.rng.choice([(), self._shape()[-1:], self._shape()])
        made = self._input("h", Type(shape, "f"), f"normal(g, {size_text(shape)})", grad=True)
        return Carried("total", Type(shape, "f", fresh=False), made.name, "total")

    def _next_total(self, c: Carried) -> str:
        """Of one to three sums; of all dimensions in one of the ways to say that."""
        shape = c.type.shape
        n = len(shape)
        floats = [v for v in self.g.vars if v.type.dtype == "f"]
        found = [v for v in floats if v.type.shape[len(v.type.shape) - n :] == shape]
        terms = []
        for _ in range(self.rng.choice([1, 1, 2, 3]) if found else 0):
            v = self.rng.choice(found)
            dims = tuple(range(len(v.type.shape) - n))
            ways = [f"{v.name}.sum({dims})"] if dims else [v.name]
            if not n:
                ways += [f"{v.name}.sum(())", f"torch.sum({v.name}, None)", f"{v.name}.sum()"]
            scale = self.rng.choice(["", "0.5 * ", "-"])
            terms.append(scale + self.rng.choice(ways))
        return " + ".join([c.name, f"({' + '.join(terms)})" if terms else "1.0"])

    def _carried(self, k: int) -> Carried:
        shape, dtype = self._shape(), "f"
        if self.has("complex_carry") and self.rng.random() < 0.6:
            dtype = "c"
        elif k and self.has("complex") and self.rng.random() < 0.15:
            dtype = "c"
        elif k and self.has("casts") and self.rng.random() < 0.1:
            dtype = "b"
        elif k and self.has("numbers") and not self.g.numbers and self.rng.random() < 0.8:
            return self._number()
        sizes = size_text(shape)
        texts = {
            "f": [f"normal(g, {sizes})"] * 3 + [f"torch.zeros({sizes}, dtype=dtype)"],
            "c": [f"torch.complex(normal(g, {sizes}), normal(g, {sizes}))"],
            "b": [f"normal(g, {sizes}) > 0"],
        }[dtype]
        if dtype == "f" and self.has("made") and self.rng.random() < 0.7:
            return self._leaf(f"c{k}", Type(shape, dtype, fresh=False), self._made(shape))
        grad = dtype in "fc" and self.rng.random() < 0.75
        made = self._input("h", Type(shape, dtype), self.rng.choice(texts), grad)
        return self._leaf(f"c{k}", Type(shape, dtype, fresh=False), made.name)

    def _made(self, shape: Shape) -> str:
        """A tensor that the program makes of no input."""
        self.g.helpers["made"] = MADE
        return f"made({self.rng.choice(WAYS_OF_MAKING)!r}, [{', '.join(map(str, shape))}])"

    def _number(self) -> Carried:
        """A leaf that starts as a Python number, or that a step returns as one."""
        kind = self.rng.choice(["c_number", "c_number", "n_small", "c_fixed"])
        if kind == "n_small":
            made = Carried(kind, Type((), "i", fresh=False), self.rng.choice(["0", "1"]), kind)
        elif kind == "c_fixed":
            init = self._input("h", Type((), "f"), "torch.zeros((), dtype=dtype)").name
            made = Carried(kind, Type((), "f", fresh=False), init, kind)
        else:
            init = self.rng.choice(["0.1", "0.7", "0.3", "1.5", "0"])
            made = Carried(kind, Type((), "f", fresh=False), init, kind)
        self.g.numbers.append(kind)
        return made

    def _counter(self) -> Carried:
        """A step counter: the commonest index there is."""
        high = Size(max(self.sizes["T"], 1), "max(T, 1)")
        made = self._input("h", Type((), "i"), "torch.zeros((), dtype=torch.long)")
        return self._leaf("t", Type((), "i", fresh=False, high=high), made.name)

    def _leaf(self, name: str, type_: Type, init: str) -> Carried:
        self.g.vars.append(Var(name, type_))
        return Carried(name, type_, init, name)

    def _xs(self) -> list[Scanned]:
        leaves = []
        least = 1 if self.has("affine") else 0
        for k in range(max(least, self.rng.choice([0, 1, 1, 1, 2, 2, 3]))):
            leaves.append(self._scanned(f"x{k}"))
        if "n_small" in self.g.numbers:
            leaves.append(self._small_integers())
        return leaves

    def _small_integers(self) -> Scanned:
        dtype = self.rng.choice(["int8", "uint8", "int16", "int32"])
        text = f"torch.randint(0, 4, (T,), generator=g, dtype=torch.{dtype})"
        return Scanned("x_small", Type((), "i"), self._input("i", Type((), "i"), text).name)

    def _scanned(self, name: str) -> Scanned:
        roll = self.rng.random()
        if roll < 0.3 and self.has("indexing") and not self.dim:
            return self._scanned_indices(name)
        shape = self._shape()
        while self.long and _numel(shape) > 64 and not self.has("affine"):
            shape = shape[:-1]
        if self.dim and not shape:
            shape = (self.g.size(),)
        text, view = self._layout(shape)
        grad = self.rng.random() < 0.7
        made = self._input("a", Type(shape, "f"), text, grad)
        self.g.vars.append(Var(name, Type(shape, "f", fresh=False)))
        return Scanned(name, Type(shape, "f"), made.name + view)

    def _scanned_indices(self, name: str) -> Scanned:
        n = self.g.size()
        shape = self.rng.choice([(), (), (self.g.size(),), (2,)])
        text = f"torch.randint(0, {n}, {_tuple((self.g.trip_count, *shape))}, generator=g)"
        made = self._input("i", Type(shape, "i"), text)
        self.g.vars.append(Var(name, Type(shape, "i", False, high=n)))
        return Scanned(name, Type(shape, "i"), made.name)

    def _layout(self, shape: Shape) -> tuple[str, str]:
        """How the tensor is made, and the view of it that the program takes before the scan."""
        steps = self.g.trip_count
        if self.dim:
            place = self.dim if self.dim > 0 else len(shape)
            moved = (*shape[:place], steps, *shape[place:])
            return f"normal(g, {size_text(moved)})", ""
        plain = f"normal(g, {size_text((steps, *shape))})"
        if not self.has("layouts") or self.rng.random() < 0.5:
            return plain, ""
        rest = size_text(shape) if shape else ""
        comma = ", " if rest else ""
        options = [
            (f"normal(g, 1{comma}{rest})", f".expand(T{comma}{rest})"),
            (f"normal(g, 2 * T{comma}{rest})", "[::2]"),
            (plain, ".flip(0)"),
            (f"normal(g, T + 1{comma}{rest})", "[1:]"),
        ]
        if shape:
            swapped = size_text((shape[0], steps, *shape[1:]))
            options += [(f"normal(g, {swapped})", ".transpose(0, 1)")] * 3
            options += [
                (
                    f"normal(g, T, {', '.join(map(str, (*shape[:-1], f'2 * {shape[-1]}')))})",
                    "[..., ::2]",
                )
            ]
        if len(shape) >= 2:
            n, m = shape[0], shape[1]
            tail = "".join(f", {s}" for s in shape[2:])
            flat = f"normal(g, {n}, T, {m}{''.join(f' * {s}' for s in shape[2:])})"
            options += [(flat, f".view({n}, T, {m}{tail}).transpose(0, 1)")] * 3
            options += [(plain, ".mT.contiguous().mT")]
        text, view = self.rng.choice(options)
        # a leaf that is such a view itself, or one that the program makes
        return (text + view, "") if self.rng.random() < 0.4 else (text, view)

    def _closed(self) -> None:
        rng = self.rng
        for k in range(rng.choice([0, 1, 2]) if self.has("made") else 0):
            var = Var(f"m{k}", Type(self._shape(), "f", fresh=False))
            self.g.before.append(Statement(f"{var.name} = {self._made(var.type.shape)}", (var,)))
            self.g.vars.append(var)
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            shape = self._shape()
            if self.has("sums") and rng.random() < 0.7:
                shape = shape[rng.choice([1, len(shape)]) :]  # its gradient is a sum
            made = self._input(
                "w", Type(shape, "f"), f"normal(g, {size_text(shape)})", rng.random() < 0.8
            )
            self.g.vars.append(Var(made.name, Type(shape, "f", fresh=False)))
        for _ in range(2):
            if self.has("products") and rng.random() < (0.9 if self.has("rows") else 0.4):
                self._weight()
        if self.has("indexing") and rng.random() < 0.4:
            n, m = self.g.size(), self.g.size()
            text = f"torch.randint(0, {n}, ({m},), generator=g)"
            made = self._input("k", Type((m,), "i"), text)
            self.g.vars.append(Var(made.name, Type((m,), "i", False, high=n)))
        if self.has("aliases") and rng.random() < 0.5:
            self._alias()
        for _ in range(2 if self.has("floats") else 0):
            self.g.floats.append(self._input("f", Type((), "f"), f"{self.g.number():.4f}").name)

    def _weight(self) -> None:
        """A matrix that fits the last dimension of something in scope."""
        try:
            a = self.g.float(1, 3)
        except NoOperandError:
            return
        width = a.type.shape[-1]
        shape = (width, width if self.has("rows") else self.g.choose([width, self.g.size()]))
        text = f"normal(g, {size_text(shape)}) * {shape[0]} ** -0.5"
        made = self._input("w", Type(shape, "f"), f"({text})", self.rng.random() < 0.9)
        self.g.vars.append(Var(made.name, Type(shape, "f", fresh=False)))

    def _alias(self) -> None:
        """A view of a tensor that is closed over, too."""
        if not self._has_float():
            return
        source = self.g.find(lambda t: t.dtype == "f")
        if source.name[0] != "w" or not source.type.shape:
            return
        text, shape = self.rng.choice(
            [("[0]", source.type.shape[1:]), (".detach()", source.type.shape)]
        )
        alias = Var(f"alias_{source.name}", Type(shape, "f", fresh=False))
        self.g.before.append(Statement(f"{alias.name} = {source.name}{text}", (alias,)))
        self.g.vars.append(alias)

    # --- the body ---

    def _statements(self) -> None:
        weighted = [f for f in self.features if f in RULES for _ in range(WEIGHTS.get(f, 1))]
        n = self.rng.choice([1, 2, 3, 3, 4, 4, 5, 6, 8])
        for _ in range(n):
            attempt(self.g, weighted)

    def _affine(self, c: Carried, carries: list[Carried]) -> Carried | None:
        result = rules_affine.next_carry(self.g, c, carries) if self.has("affine") else None
        return None if result is None else _with_result(c, result)

    def _next(self, c: Carried) -> Carried:
        """What the body returns for this leaf: the old value and something of the body."""
        g = self.g
        if c.name == "total":
            return _with_result(c, self._next_total(c))
        if c.name in g.numbers:
            return _with_result(c, self._next_number(c))
        if c.name in g.counters:
            return _with_result(c, rules_counters.next_number(g, c.name))
        if c.type.dtype == "i":
            result = f"{c.name} + 1"
            return _with_result(c, result if g.chance(0.5) else f"({result}) % {c.type.high}")
        if c.type.dtype == "b":
            return _with_result(c, f"{c.name} ^ {g.like(c.type.shape, 'b').name}")
        if c.type.dtype == "c":
            kind = g.choose("cf")
            other = g.like(c.type.shape, kind if self._has_float() else "c").name
            return _with_result(c, f"{c.name} * (0.6 + 0.3j) + {other} * 0.3")
        if self.has("random") and c.name == "c0":
            drawn = g.choose(DRAWS).format(a=c.name)
            return _with_result(c, f"0.5 * {drawn} + 0.5 * ({self._next_float(c)})")
        return _with_result(c, self._next_float(c))

    def _next_number(self, c: Carried) -> str:
        if c.name == "n_small":
            return self.g.choose(
                ["n_small + x_small", "x_small - n_small", "n_small * 2 + x_small"]
            )
        if c.name == "c_fixed":
            return self.g.choose(["0.1", "0.7", "1"])
        if not self._has_float():
            return f"0.5 * {c.name}"
        return self.g.choose(
            ["0.5 * {c} + {v}", "{c} + 0.3 * {v}", "{v} - {c}", "torch.sin({v} + 50.0 * {c})"]
        ).format(c=c.name, v=f"torch.tanh({self.g.float().name}.mean())")

    def _has_float(self) -> bool:
        return any(v.type.dtype == "f" for v in self.g.vars)

    def _next_float(self, c: Carried) -> str:
        g = self.g
        if g.chance(0.05):
            return c.name
        value = self._recent(c)
        texts = [
            "torch.tanh({h} * 0.5 + {v})",
            "0.5 * {h} + torch.sin({v})",
            "torch.sigmoid({v}) * {h} + 0.1",
            "0.9 * {h} + 0.1 * {v}",
        ]
        if not value.endswith(".mean()"):
            texts += ["torch.tanh({v})", "{v} * 0.5"]
        return g.choose(texts).format(h=c.name, v=value)

    def _recent(self, c: Carried) -> str:
        """Something that the body made, as late as there is; x or a closed-over tensor else."""
        floats = [v for v in self.g.vars if v.type.dtype == "f" and v.name != c.name]
        made = [v for v in floats if v.name[0] == "v"] or floats
        same = [v for v in made if v.type.shape == c.type.shape]
        if same and self.g.chance(0.7):
            return self.g.choose(same[-3:]).name
        return f"{self.g.choose(made[-3:]).name}.mean()" if made else c.name

    def _ys(self) -> list[str]:
        """What the body made and does not read again comes first."""
        found = [v for v in self.g.vars if v.type.dtype in "fcib"]
        made = [v for v in found if v.name[0] == "v"]
        text = "\n".join(line for s in self.g.statements for line in s.lines(""))
        unread = [v for v in made if len(re.findall(rf"\b{v.name}\b", text)) < 2]
        late = [*unread[::-1], *(v for v in made[::-1] if v not in unread)]
        ys = [v.name for v in late[: self.rng.choice([0, 1, 1, 2, 3])]]
        if found and self.rng.random() < 0.2:
            ys.append(self.rng.choice(found).name)
        return ys + self.g.returned


def _with_result(c: Carried, result: str) -> Carried:
    return Carried(c.name, c.type, c.init, result)


def _numel(shape: Shape) -> int:
    total = 1
    for size in shape:
        total *= int(size)
    return total


def _tuple(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
