"""Lists that steps append to and do not read."""

from __future__ import annotations

from .builder import Builder, rule
from .program import Statement, Type, Var
from .rules_counters import condition
from .rules_state import holder

#: what is appended of a float ``a``, another value ``b`` and the shape's zeros
_ITEMS = [
    *["{a}"] * 4, "{b}", "{a} * 2", "{a}.detach()", "({a}, {b} * 3)", '{{"a": {a}, "b": ({b}, {a} - 1)}}',
    "[{a}, {b}]", "{a} > 0.0137", "{a}.sum()", "{a}[..., None]", "{zeros}", "{a}.clone()", "{a}.expand(2, *{a}.shape)",
    "(None, {a})", "{a}.to(torch.float32)", "{a}.reshape(-1)", "({a}, {a})", "({a},) * 2",
    "{a}.sum().item()", "({a}.detach().mean().item() / 3, {b})", "0.1", "{a}.detach().numpy()",
]  # fmt: skip
_WAYS = [
    *["{t}.append({i})"] * 4, "{t} += [{i}]", "{t} += [{i}, {j}]", "{t}.extend([{i}, {j}])", "{t}.extend(({i},))",
    "{t}.append({i}); {t}.append({j})", "grown = {t}\ngrown.append({i})", "{t}.extend(v for v in ({i}, {j}))",
    "getattr({t}, 'append')({i})", "{t}.extend([])\n{t}.append({i})",
]  # fmt: skip


def _item(g: Builder) -> str:
    a = g.float()
    b = g.find(lambda t: t.dtype in "fibc")
    return g.choose(_ITEMS).format(a=a.name, b=b.name, zeros=a.type.zeros())


def _list(g: Builder) -> str:
    """A list of the program's: one in scope, or a new one in an attribute, a closure or a container."""
    if g.lists and g.chance(0.3):
        return g.choose(g.lists)
    name = f"t{len(g.before)}"
    kind = g.choose(["attribute", "attribute", "closure", "dict", "list", "attributes"])
    if kind != "closure":
        holder(g)
    places = {"attribute": f"holder.{name}", "closure": name, "dict": f'holder.{name}["k"]',
              "list": f"holder.{name}[1]", "attributes": f"holder.{name}[0].t"}  # fmt: skip
    starts = {"attribute": f"holder.{name} = []", "closure": f"{name} = []",
              "dict": f'holder.{name} = {{"j": [], "k": []}}', "list": f"holder.{name} = [[], []]",
              "attributes": f"holder.{name} = [type('Box', (), {{}})()]\nholder.{name}[0].t = []"}  # fmt: skip
    g.before.append(Statement(starts[kind]))
    if g.chance(0.3):  # it has items before the first scan
        g.before.append(Statement(f"{places[kind]}.extend([torch.ones(2), 0.25])"))
    g.lists.append(places[kind])
    g.extras.append(places[kind])
    return places[kind]


def _append(g: Builder, place: str) -> str:
    ways = [way for way in _WAYS if place.startswith("holder") or "+=" not in way]
    return g.choose(ways).format(t=place, i=_item(g), j=_item(g))


@rule("lists")
def appended(g: Builder) -> None:
    g.do(_append(g, _list(g)))


@rule("lists")
def appended_and_used(g: Builder) -> None:
    """A value of which there is a further use, in the step or in the next one."""
    a = g.float()
    place = _list(g)
    made = g.let(f"torch.tanh({a.name} * 1.3)", a.type.shape)
    g.do(f"{place}.append({made.name})")
    if g.chance(0.3):
        holder(g)
        with_name = f"s{len(g.before)}"
        g.before.append(Statement(f"holder.{with_name} = None"))
        g.do(f"holder.{with_name} = {made.name}")
        g.extras.append(f"holder.{with_name}")
    elif g.chance(0.3):
        g.do(f"{made.name}.mul_(0.5)")  # of what the list has
    g.let(f"torch.sin({made.name}) * 0.9", a.type.shape)


@rule("lists")
def appended_without_gradients(g: Builder) -> None:
    lines = tuple(Statement(_append(g, _list(g))) for _ in range(g.choose([1, 2])))
    g.statements.append(Statement("with torch.no_grad():", (), lines))


@rule("lists")
def appended_by_a_hook(g: Builder) -> None:
    """A forward hook of a module that keeps what the module gives."""
    a = g.float(1)
    name = f"layer{len(g.before)}"
    place = _list(g)
    kept = g.choose(["output", "output.detach()", "(output, args[0])", "output * 2"])
    g.before.append(Statement(
        f"{name} = torch.nn.{g.choose(['Tanh', 'Softplus', 'Identity', 'GELU'])}()\n"
        f"{name}.register_forward_hook(lambda module, args, output: {place}.append({kept}))"
    ))  # fmt: skip
    g.let(f"{name}({a.name} * 0.7) + 0.1", a.type.shape)


@rule("lists")
def appended_in_a_nested_scan(g: Builder) -> None:
    if g.depth >= 1:
        return
    a = g.float(1)
    width = a.type.shape[1:]
    place = _list(g)
    name = f"inner{len(g.vars)}"
    kept = g.choose(["c", "y", "(c, y * 2)", "c.detach()"])
    body = (
        Statement("c = torch.tanh(0.5 * c + y)"),
        Statement(f"{place}.append({kept})"),
        Statement("return c, c * 0.3"),
    )
    g.statements.append(Statement(f"def {name}(c, y):", (), body))
    zeros = Type(width).zeros()
    last, ys = g.name(), g.name()
    made = (Var(last, Type(width)), Var(ys, Type(a.type.shape)))
    how = g.choose(["", "", ", reverse=True"])
    g.statements.append(Statement(f"{last}, {ys} = scan({name}, {zeros}, {a.name}{how})", made))
    g.vars += made


@rule("lists")
def appended_at_a_count(g: Builder) -> None:
    """In some steps, or something else in others."""
    place = _list(g)
    branch = Statement(f"if {condition(g)}:", (), (Statement(_append(g, place)),))
    g.statements.append(branch)
    if g.chance(0.6):
        g.statements.append(Statement("else:", (), (Statement(_append(g, place)),)))
