"""Python numbers that steps change: computed with, branched on, and positions in lists."""

from __future__ import annotations

from .builder import Builder, NoOperandError, rule
from .program import Statement, Var
from .rules_special import PLAIN, attempt
from .rules_state import holder

#: what a factor is, in double precision, of a number that is counted, or a float that decays
FACTORS = [
    "1 - 0.9 ** {n}", "1 / (1 + {n} * {n})", "0.5 * ({n} % 3) + (1 + abs({n})) ** -0.5", "-{n} // 2",
    "0.5 + 0.1 * {n}", "0.7137 * 0.9 ** {n}", "({n} > 2) + 0.5", "float({n}) - 0.3", "max({n}, 2) % 5",
    "1 - (not {n})", "int({n} / 2) + 0.1", "divmod({n}, 3)[1] - 0.5", "min(abs({n}), 4) ** 2",
]  # fmt: skip
#: a tensor of Python numbers alone has the default dtype, which rounds it, among doubles
ROUNDED = [
    "torch.tensor({n})", "torch.tensor([{n}, 1.0]).mean()", "torch.full((2,), {n}).sum()",
    "torch.where({a} > 0.0137, {n}, 0.1)", "F.leaky_relu(torch.tensor(-1.0), {n})",
]  # fmt: skip


@rule("attributes")
@rule("counters")
def computed_of_a_number(g: Builder) -> None:
    """Under two names, too."""
    a = g.float()
    holder(g)
    name = f"holder.n{len(g.before)}"
    start, step = g.choose([("0", "+= 1"), ("1.0", "+= 1"), ("0.7137", "*= 0.9")])
    g.before.append(Statement(f"{name} = {start}"))
    g.do(f"{name} {step}")
    if g.chance(0.3):
        other = f"k{len(g.before)}"
        g.do(f"{other} = {name}")
        g.do(f"{other} *= 3")
    if start == "0.7137":  # a phase shows in which digit it was rounded
        text = g.choose(ROUNDED).format(n=name, a=a.name)
        g.let(f"torch.sin({a.name} + 1e7 * {text}.to(dtype))", a.type.shape)
    else:
        g.let(f"torch.tanh({a.name} * ({g.choose(FACTORS).format(n=name)}))", a.type.shape)
    g.extras.append(f"float({name})")


@rule("counters")
def kept_beside_a_number(g: Builder) -> None:
    a = g.float(fresh=True)
    holder(g)
    name = f"holder.p{len(g.vars)}"
    g.before.append(Statement(f"{name} = ({a.type.zeros()}, 0)"))
    before = g.let(f"{name}[0]", a.type.shape, fresh=False)
    g.do(f"{name} = (torch.tanh({before.name} * 0.9 ** {name}[1] + {a.name}), {name}[1] + 1)")
    g.let(f"{name}[0] * 0.7", a.type.shape)
    g.extras += [f"{name}[0]", f"float({name}[1])"]


@rule("counters")
def delayed(g: Builder) -> None:
    a = g.float(fresh=True)
    holder(g)
    g.helpers["deque"] = "from collections import deque\n"
    name, n = f"holder.d{len(g.vars)}", g.choose([1, 2, 3])
    g.before.append(Statement(f"{name} = deque([{a.type.zeros()}] * {n}, maxlen={n})"))
    before = g.let(f"{name}[0]", a.type.shape, fresh=False)
    g.do(f"{name}.append(torch.tanh({a.name} - 0.5 * {before.name}))")
    g.extras.append(f"{name}[-1]")


#: how a number is counted on, as an expression
NEXT = [
    *["{n} + 1"] * 12, *["{n} + 2", "{n} - 1", "({n} + 1) % {m}"] * 2, "{n} - 1", "({n} + 1) % {m}", "({n} + 2) % {m}",
    "{n} + 1 if {n} < {k} else 0", "1 - {n}", "max({n} - 1, 0)", "min({n} + 1, {k})", "{n} * 2 + 1",
]  # fmt: skip
CONDITIONS = [
    "{n} == {k}", "{n} < {k}", "{n} >= {k}", "{n} != {k}", "{n} % {m} == {r}", "{n} % {m} == {r}",
    "{n} % {m}", "not {n} % {m}", "not {n}", "{n}", "{n} & 1", "1 < {n} < {k}", "{n} in (0, {k})",
    "{n} % 2 == 0 and {n} > {k}", "{n} > {k} or {o} % 2", "(2 * {n} + 1) % {m} == {r}", "{n} < {o}",
    "1 - {n} > -{k}", "{n} // 2 % 2 == 0", "divmod({n}, {m})[1] == {r}", "-{n} % {m} == 1",
    "({n} + {o}) % {m} == 0", "bool({n}) and {o} < {k}", "{n} is not None and {n} > 0",
]  # fmt: skip


def next_number(g: Builder, name: str) -> str:
    return g.choose(NEXT).format(n=name, m=g.choose([2, 3, 4, 5]), k=g.choose([2, 3, 6]))


def number(g: Builder) -> str:
    """An int that steps count: one in scope, or a new one, counted on at once or last of all."""
    if g.counters and g.chance(0.8):
        return g.choose(g.counters)
    holder(g)
    name = f"holder.i{len(g.before)}"
    g.before.append(Statement(f"{name} = {g.choose([0, 0, 0, 1, 3, -2])}"))
    g.extras.append(f"float({name})")
    g.counters.append(name)
    step = Statement(f"{name} = {next_number(g, name)}")
    (g.last if g.chance(0.5) else g.statements).append(step)
    return name


def condition(g: Builder) -> str:
    m = g.choose([2, 2, 3, 4])
    values = {
        "n": number(g),
        "o": number(g),
        "m": m,
        "r": g.choose(range(m)),
        "k": g.choose(range(6)),
    }
    return g.choose(CONDITIONS).format(**values)


@rule("branches")
def branched(g: Builder) -> None:
    if g.depth >= 2:
        raise NoOperandError
    a = g.float()
    made = g.let(f"{a.name} * 0.7", a.type.shape)
    words = g.choose([["if"], ["if", "else"], ["if", "elif", "else"]])
    # a condition may count a number anew, which takes a statement before all of them
    heads = ["else:" if word == "else" else f"{word} {condition(g)}:" for word in words]
    for head in heads:
        g.statements.append(Statement(head, (), _block(g, made)))


def _block(g: Builder, made: Var) -> tuple[Statement, ...]:
    """Statements of a branch, the last of which makes ``made`` something else."""
    outer, scope, g.statements = g.statements, list(g.vars), []
    g.depth += 1
    try:
        for _ in range(g.choose([0, 0, 1, 2])):
            attempt(g, [*PLAIN, *g.within])
        v = g.like(made.type.shape).name
        texts = [
            "{v} * 0.9",
            "torch.tanh({v} + {m})",
            "{v}.detach() + 0.5 * {m}",
            "{m}.detach() * {v}",
        ]
        g.do(f"{made.name} = {g.choose(texts).format(v=v, m=made.name)}")
        return tuple(g.statements)
    finally:
        g.depth -= 1
        g.statements, g.vars = outer, scope


@rule("branches")
def one_or_the_other(g: Builder) -> None:
    a = g.float()
    texts = [
        "{a} * 0.5 if {c} else torch.sin({a})", "{a}.detach() if {c} else {a}",
        "{a} - 0.3 * {b} if not ({c}) else {b}", "torch.where(torch.tensor({c} > 0), {a}, {b})",
        "{a} * (0.5, 0.9)[bool({c})]", "torch.tanh({a}) if {c} else {a} * {n}",
    ]  # fmt: skip
    values = {"a": a.name, "b": g.like(a.type.shape).name, "c": condition(g), "n": number(g)}
    g.let(f"torch.sin({g.choose(texts).format(**values)})", a.type.shape, fresh=True)


@rule("branches")
def computed_of_a_count(g: Builder) -> None:
    a = g.float()
    n = number(g)
    if g.chance(0.2):
        text = f"for _ in range({n} % {g.choose([2, 3])}):"
        made = g.let(f"{a.name} * 0.7", a.type.shape)
        g.statements.append(Statement(text, (), (Statement(f"{made.name} = {made.name}.sin()"),)))
        return
    texts = ["{a} * {n}", "{n} - {a}", "{a} + torch.tensor({n}, dtype=dtype)", "{a} ** (1 + {n} % 2)",
             "torch.full_like({a}, {n}) * {a}", "{a} + {n} * 0.1"]  # fmt: skip
    texts += [f"{{a}} * ({factor})" for factor in FACTORS]
    g.let(f"torch.sin({g.choose(texts).format(a=a.name, n=n)})", a.type.shape)


@rule("branches")
def taken_from_a_list(g: Builder) -> None:
    """A function, a number, a weight or a row of one, at a position that steps count."""
    a = g.float()
    at = g.choose(["{n} % 3", "{n} % 2", "-1 - {n} % 3", "{n} % 3 - 1", "({n} + 1) % 3", "{n}"])
    at, name = at.format(n=number(g)), f"list{len(g.before)}"
    w = g.find(lambda t: t.dtype == "f") if g.chance(0.6) else a
    text, shape = f"{a.name} * {name}[{at}]", a.type.shape
    items = g.choose(["0.1, 0.7137, -0.3", "1, 3, 2", "True, False, True"])
    if w.name[0] == "w":
        items, shape = f"{w.name}, {w.name} * 0.5, {w.name}.sin()", w.type.shape
        text = f"{name}[{at}]"
    elif g.chance(0.4):
        items, text = "torch.tanh, torch.sin, torch.cos", f"{name}[{at}]({a.name})"
    repeats = 4 if at == at.strip("%()+- 123") else 1
    made = f"[{items}]" + (f" * {repeats}" if repeats > 1 else "")
    if w.name[0] == "w" and g.chance(0.5):
        made = f"torch.stack({made})"
    elif g.chance(0.3):
        made = f"tuple({made})"
    g.before.append(Statement(f"{name} = {made}"))
    g.let(f"torch.tanh({text})", shape)


@rule("branches")
def turned_flag(g: Builder) -> None:
    """A bool in an attribute, or in a closure, that some steps turn."""
    a = g.float()
    holder(g)
    name = f"holder.f{len(g.before)}"
    if g.chance(0.3):
        name = f"f{len(g.before)}"
        g.do(f"nonlocal {name}")
    g.before.append(Statement(f"{name} = {g.choose(['True', 'False'])}"))
    turn = Statement(
        f"{name} = "
        + g.choose(["not {f}", "{c} > 0", *["False", "True"] * 6]).format(f=name, c=condition(g))
    )
    (g.last if g.chance(0.5) else g.statements).append(turn)
    texts = [
        "{a}.detach() if {f} else {a}",
        "{a} * 0.5 if not {f} else {a}.sin()",
        "{a} * {f}",
        "{a} + {f}",
    ]
    g.let("torch.tanh(" + g.choose(texts).format(a=a.name, f=name) + ")", a.type.shape)
    g.extras.append(f"float({name})")


@rule("branches")
def kept_by_some_steps(g: Builder) -> None:
    """State that is made when it is first asked for, or anew every few steps, and aged between."""
    a = g.float(fresh=True)
    holder(g)
    name = f"holder.k{len(g.before)}"
    start = g.choose(["None", a.type.zeros()])
    g.before.append(Statement(f"{name} = {start}"))
    asked = f"{name} is None or {condition(g)}" if start == "None" else condition(g)
    g.statements.append(Statement(f"if {asked}:", (), (
        Statement(f"{name} = " + g.choose(["{a} * 2", "{a}.detach() * 0.5", "torch.zeros_like({a})"]).format(a=a.name)),
    )))  # fmt: skip
    if g.chance(0.5):
        g.statements.append(Statement("else:", (), (Statement(f"{name} = {name} * 0.9"),)))
    g.let(f"torch.tanh({name} + 0.3 * {a.name})", a.type.shape)
    if g.chance(0.7):
        g.extras.append(name)


@rule("branches")
def written_at_a_count(g: Builder) -> None:
    """An item of a list or a dict, or a row of a buffer without gradients."""
    a = g.float(fresh=True)
    holder(g)
    name = f"holder.c{len(g.before)}"
    at = g.choose(["{n} % 3", "{n} % 2", "-1 - {n} % 3", "0", "{n}"]).format(n=number(g))
    zeros = a.type.zeros()
    starts = [f"[{zeros} for _ in range(12)]", f"torch.stack([{zeros}] * 12)",
              f"{{k: {zeros} for k in range(-3, 12)}}"]  # fmt: skip
    start = g.choose(starts)
    if start == starts[2]:
        at = g.choose(["0", "1"])
    g.before.append(Statement(f"{name} = {start}"))
    value = f"{a.name}.detach()" if start == starts[1] else a.name
    g.do(f"{name}[{at}] = torch.sin({value}) - 0.5 * {name}[{at}]")
    k = g.choose([0, 1, 2])
    g.let(f"torch.tanh({name}[{k}] + {a.name})", a.type.shape)
    g.extras.append(name if start == starts[1] else f"torch.stack([{name}[k] for k in (0, 1, 2)])")
