"""A failing program made small: what can go while it still fails in the same way, goes.

Every candidate is checked against the loop again, so no step has to keep the program's meaning,
or even that it runs: a candidate that the loop rejects is discarded.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator

from .program import Carried, Input, Program, Statement, Type, Var, size_text

Fails = Callable[[Program], bool]
Path = tuple[int, ...]


def shrink(program: Program, fails: Fails, seconds: float) -> Program:
    """The smallest program found in that time that still ``fails``."""
    deadline = time.monotonic() + seconds
    tried: set[str] = set()
    while True:
        smaller = _first_smaller(program, fails, deadline, tried)
        if smaller is None:
            return program
        program = smaller


def _first_smaller(
    program: Program, fails: Fails, deadline: float, tried: set[str]
) -> Program | None:
    for candidate in candidates(program):
        if time.monotonic() > deadline:
            return None
        candidate = tidied(candidate)
        text = candidate.text()
        if text in tried or not _is_smaller(candidate, program):
            continue
        tried.add(text)
        if fails(candidate):
            return candidate
    return None


def _is_smaller(candidate: Program, program: Program) -> bool:
    return _measure(candidate) < _measure(program)


def _measure(p: Program) -> tuple[float, int]:
    """Characters without the fixed lines, and sizes: both fall as a program gets simpler."""
    text = p.text()
    weight = len(re.sub(r"\s+", "", text)) + 12 * len(text.splitlines())
    return weight + 2 * sum(min(s, 40) for s in p.sizes.values()), len(text)


def candidates(p: Program) -> Iterator[Program]:
    """Large steps first."""
    yield from _without_runs(p)
    yield from _without_statements(p)
    yield from _without_leaves(p)
    yield from _without_options(p)
    yield from _with_simpler_results(p)
    yield from _with_smaller_sizes(p)
    yield from _with_simpler_inputs(p)
    yield from _with_flat_blocks(p)
    yield from _with_simpler_text(p)


# --- statements ---


def _without_runs(p: Program) -> Iterator[Program]:
    """Half of the statements, then a quarter of them."""
    n = len(p.body)
    for length in (n // 2, n // 4):
        if length < 2:
            return
        for start in range(0, n, length):
            candidate = p
            for k in reversed(range(start, min(start + length, n))):
                candidate = next(_dropped(candidate, (k,)), candidate)
            yield candidate


def _paths(statements: tuple[Statement, ...], prefix: Path = ()) -> Iterator[Path]:
    for k in reversed(range(len(statements))):
        yield (*prefix, k)
        yield from _paths(statements[k].body, (*prefix, k))


def _without_statements(p: Program) -> Iterator[Program]:
    for path in _paths(p.body):
        yield from _dropped(p, path)
    for k in reversed(range(len(p.before))):
        yield dataclasses.replace(p, before=p.before[:k] + p.before[k + 1 :])


def _dropped(p: Program, path: Path) -> Iterator[Program]:
    """Without the statement; something of the same type stands for what it defines."""
    statement = _at(p.body, path)
    without = dataclasses.replace(p, body=_edited(p.body, path, ()))
    if not statement.defines:
        yield without
        return
    choices = [list(_stand_ins(p, path, var, statement)) for var in statement.defines]
    for k in range(max(map(len, choices))):
        candidate = without
        for var, texts in zip(statement.defines, choices, strict=True):
            candidate = candidate.renamed(var.name, texts[min(k, len(texts) - 1)])
        yield candidate


def _stand_ins(p: Program, path: Path, var: Var, statement: Statement) -> Iterator[str]:
    if var.type.dtype == "tuple":
        yield "None"
        return
    text = "\n".join(statement.lines(""))
    same = [v for v in _scope(p, path) if _are_alike(v.type, var.type)]
    operands = [v.name for v in same if re.search(rf"\b{v.name}\b", text)]
    others = [v.name for v in same if v.name not in operands]
    yield from [*operands[:2], *others[:2]]
    yield var.type.zeros()
    if var.type.dtype == "f":
        yield f"torch.ones({size_text(var.type.shape)}, dtype=dtype)"


def _are_alike(a: Type, b: Type) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and (a.dtype != "i" or a.high <= b.high)


def _scope(p: Program, path: Path) -> list[Var]:
    """What has a name before the statement at ``path``."""
    scanned = {x.text for x in p.xs} | {c.init for c in p.carry}
    found = [Var(c.name, c.type) for c in p.carry] + [Var(x.name, x.type) for x in p.xs]
    found += [Var(i.name, i.type) for i in p.inputs if i.name[0] in "wk" and i.name not in scanned]
    statements = p.body
    for k in path:
        for earlier in statements[:k]:
            found += earlier.defines
        statements = statements[k].body if k < len(statements) else ()
    return found


def _at(statements: tuple[Statement, ...], path: Path) -> Statement:
    for k in path[:-1]:
        statements = statements[k].body
    return statements[path[-1]]


def _edited(
    statements: tuple[Statement, ...], path: Path, new: tuple[Statement, ...]
) -> tuple[Statement, ...]:
    k, *rest = path
    if not rest:
        return statements[:k] + new + statements[k + 1 :]
    inner = dataclasses.replace(statements[k], body=_edited(statements[k].body, tuple(rest), new))
    if not inner.body:  # a block of nothing
        return statements[:k] + statements[k + 1 :]
    return (*statements[:k], inner, *statements[k + 1 :])


def _with_flat_blocks(p: Program) -> Iterator[Program]:
    """The statements of a ``with`` block without the block."""
    for path in _paths(p.body):
        statement = _at(p.body, path)
        if statement.body and statement.text.startswith("with "):
            yield dataclasses.replace(p, body=_edited(p.body, path, statement.body))


# --- leaves ---


def _without_leaves(p: Program) -> Iterator[Program]:
    for k in reversed(range(len(p.ys))):
        yield _with_kinds(dataclasses.replace(p, ys=_without(p.ys, k)))
    for k in reversed(range(len(p.carry))):
        leaf = p.carry[k]
        if len(p.carry) > 1:
            rest = dataclasses.replace(p, carry=_without(p.carry, k))
            for text in (leaf.type.zeros(), leaf.init):
                yield _with_kinds(rest.renamed(leaf.name, text))
    for k in reversed(range(len(p.xs))):
        x = p.xs[k]
        rest = dataclasses.replace(p, xs=_without(p.xs, k))
        others = [v.name for v in _scope(rest, ()) if _are_alike(v.type, x.type)]
        for text in (*others[:2], x.type.zeros()):
            yield _with_kinds(rest.renamed(x.name, text))
    for k in reversed(range(len(p.inputs))):
        made = p.inputs[k]
        rest = dataclasses.replace(p, inputs=_without(p.inputs, k))
        if made.name[0] in "wk":
            others = [v.name for v in _scope(rest, ()) if _are_alike(v.type, made.type)]
            for text in (*others[:2], made.type.zeros()):
                yield rest.renamed(made.name, text)


def _without(leaves: tuple, k: int) -> tuple:
    return leaves[:k] + leaves[k + 1 :]


def _with_kinds(p: Program) -> Program:
    """``single`` is for one leaf."""
    changes = {}
    for name in ("carry", "xs", "ys"):
        if getattr(p, f"{name}_kind") == "single" and len(getattr(p, name)) != 1:
            changes[f"{name}_kind"] = "tuple"
    return dataclasses.replace(p, **changes)  # type: ignore[arg-type]


# --- the rest ---


def _without_options(p: Program) -> Iterator[Program]:
    for k in range(len(p.options)):
        yield dataclasses.replace(p, options=_without(p.options, k))
    for name in ("carry", "xs", "ys"):
        simplest = "single" if len(getattr(p, name)) == 1 else "tuple"
        yield dataclasses.replace(p, **{f"{name}_kind": simplest})  # type: ignore[arg-type]
    if p.after:
        yield dataclasses.replace(p, after="")


def _with_simpler_results(p: Program) -> Iterator[Program]:
    for k, leaf in enumerate(p.carry):
        names = re.findall(r"\bv\d+\b", leaf.result)
        texts = [leaf.name, *names, *(f"{leaf.name} + {n}" for n in names)]
        for text in texts:
            if len(text) < len(leaf.result):
                yield dataclasses.replace(p, carry=_replaced(p.carry, k, leaf, text))


def _replaced(carry: tuple[Carried, ...], k: int, leaf: Carried, text: str) -> tuple[Carried, ...]:
    return (*carry[:k], dataclasses.replace(leaf, result=text), *carry[k + 1 :])


def _with_smaller_sizes(p: Program) -> Iterator[Program]:
    for name, size in p.sizes.items():
        for smaller in (1, 2, 3, 4, size // 2, size - 1):
            if 0 < smaller < size:
                yield dataclasses.replace(p, sizes={**p.sizes, name: smaller})


def _with_simpler_inputs(p: Program) -> Iterator[Program]:
    scanned = {x.text.partition(".")[0].partition("[")[0] for x in p.xs}
    for k, made in enumerate(p.inputs):
        if made.grad:
            yield _with_input(p, k, dataclasses.replace(made, grad=False))
        if made.type.dtype != "f":
            continue
        steps = "T, " if made.name in scanned else ""
        sizes = size_text(made.type.shape)
        shape = steps + (sizes if sizes != "()" else "") if steps else sizes
        for text in (f"torch.ones({shape}, dtype=dtype)", f"normal(g, {shape})"):
            if text != made.text:
                yield _with_input(p, k, dataclasses.replace(made, text=text))
                if made.name in scanned:  # without the view that the program makes of it, too
                    plain = _with_input(p, k, dataclasses.replace(made, text=text))
                    xs = tuple(
                        dataclasses.replace(x, text=made.name)
                        if re.match(rf"{made.name}\b", x.text)
                        else x
                        for x in p.xs
                    )
                    yield dataclasses.replace(plain, xs=xs, options=_without_dim(p))


def _without_dim(p: Program) -> tuple[tuple[str, str], ...]:
    return tuple(o for o in p.options if o[0] != "dim")


def _with_input(p: Program, k: int, new: Input) -> Program:
    return dataclasses.replace(p, inputs=(*p.inputs[:k], new, *p.inputs[k + 1 :]))


#: pieces of expressions that only keep values small or apart
_NOISE = [
    (r"torch\.(?:tanh|sin)\((.*)\)$", r"\1"),
    (r"\((v\d+|[cxw]\d+) \+ torch\.linspace\([^()]*\)\.reshape\([^()]*\)\)", r"\1"),
    (r" \* torch\.linspace\([^()]*\)", ""),
    (r" [*] 0\.\d+$", ""),
    (r"\.tanh\(\)$", ""),
]


def _with_simpler_text(p: Program) -> Iterator[Program]:
    for path in _paths(p.body):
        statement = _at(p.body, path)
        head, sep, right = statement.text.partition(" = ")
        if not sep or "\n" in right:
            continue
        for pattern, new in _NOISE:
            text = re.sub(pattern, new, right)
            if text != right:
                edited = dataclasses.replace(statement, text=f"{head} = {text}")
                yield dataclasses.replace(p, body=_edited(p.body, path, (edited,)))


def tidied(p: Program) -> Program:
    """Without inputs, helpers and sizes that nothing reads."""
    for made in reversed(p.inputs):
        if not _is_read(made.name, _without_inputs(p)):
            p = dataclasses.replace(p, inputs=tuple(i for i in p.inputs if i is not made))
    used = _without_inputs(p)
    kept = tuple(h for h in p.helpers if any(_is_read(n, used) for n in _names_of(h)))
    if any("namedtuple(" in h for h in kept):
        kept = ("from collections import namedtuple\n", *(h for h in kept if "import" not in h))
    p = dataclasses.replace(p, helpers=kept)
    sizes = {n: s for n, s in p.sizes.items() if n == "T" or _is_read(n, _after_sizes(p))}
    return dataclasses.replace(p, sizes=sizes)


def _names_of(helper: str) -> list[str]:
    found = re.findall(r"^class (\w+)|^(\w+) = ", helper, flags=re.M)
    return [a or b for a, b in found]


def _without_inputs(p: Program) -> str:
    """The program's own text, without its parameters."""
    return p.text().partition("def program(")[2].partition(":")[2]


def _after_sizes(p: Program) -> str:
    return p.text().partition("def inputs")[2]


def _is_read(name: str, text: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None
