"""State in attributes, facts that change after the first step, hooks, and carries that grow."""

from __future__ import annotations

from .builder import Builder, rule
from .program import Carried, Statement, Type, Var, size_text

HOLDER = """\
class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.items = {}

"""


def holder(g: Builder) -> None:
    if "Holder" not in g.helpers:
        g.helpers["Holder"] = HOLDER
        g.before.append(Statement("holder = Holder()"))


@rule("attributes")
def kept_in_an_attribute(g: Builder) -> None:
    """Read in the next step; None, a tensor, a buffer or an item of a dict before the scan."""
    a = g.float(fresh=True)
    holder(g)
    name = f"s{len(g.vars)}"
    place = g.choose([f"holder.{name}"] * 3 + [f'holder.items["{name}"]'])
    zeros = a.type.zeros()
    kind = g.choose(["none", "none", "tensor", "buffer"]) if "items" not in place else "item"
    starts = {
        "none": f"{place} = None",
        "tensor": f"{place} = {zeros}",
        "buffer": f'holder.register_buffer("{name}", {zeros}, persistent={g.chance(0.5)})',
        "item": f"{place} = {zeros}",
    }
    g.before.append(Statement(starts[kind]))
    old = f"{zeros} if {place} is None else {place}" if kind == "none" else place
    before = g.let(old, a.type.shape, fresh=False)
    g.do(f"{place} = torch.tanh(0.5 * {before.name} + {a.name})")
    g.let(f"{place} * 0.7", a.type.shape)
    if g.chance(0.7):
        g.extras.append(place)


@rule("attributes")
def stashed(g: Builder) -> None:
    """Of the last step, afterwards."""
    a, b = g.float(), g.float()
    holder(g)
    name = f"holder.s{len(g.vars)}"
    g.before.append(Statement(f"{name} = None"))
    pair = g.chance(0.4)
    g.do(f"{name} = ({a.name} * 2, {b.name})" if pair else f"{name} = {a.name} * 2")
    g.extras += [f"{name}[0]", f"{name}[1]"] if pair else [name]


MEMORY = """\
import dataclasses
import typing

class Pair(typing.NamedTuple):
    h: torch.Tensor
    n: float

@dataclasses.dataclass
class Memory:
    h: torch.Tensor
    n: float

torch.export.register_dataclass(Memory)

"""
#: what a step keeps in ``m``, beside a number: how it begins, where it is, what a step does
_KEPT = {
    "tuple": ("Pair({zeros}, {n})", "h n", "{m} = Pair({new}, {next})"),
    "new": ("Memory({zeros}, {n})", "h n", "{m} = Memory(n={next}, h={new})"),
    "attributes": ("Memory({zeros}, {n})", "h n", "{m}.h = {new}\n{m}.n = {next}"),
    "items": ('{{"h": {zeros}, "n": {n}}}', '["h"] ["n"]', '{m}["h"] = {new}\n{m}["n"] = {next}'),
    "list": ("[{zeros}, {n}]", "[0] [1]", "{m}[:] = [{new}, {next}]"),
    "dict": ("dict(h={zeros}, n={n})", '["h"] ["n"]', "{m}.update(n={next}, h={new})"),
}


@rule("attributes")
def remembered(g: Builder) -> None:
    """A tensor and a number in a tuple, a dataclass or a container; in a closure at times."""
    a = g.float(fresh=True)
    holder(g)
    g.helpers["Memory"] = MEMORY
    m = f"holder.m{len(g.before)}"
    start, names, step = _KEPT[g.choose(list(_KEPT))]
    n, following = g.choose([("0", "{n} + 1"), ("1.0", "{n} * 0.9"), ("3", "{n}")])
    g.before.append(Statement(f"{m} = {start.format(zeros=a.type.zeros(), n=n)}"))
    if g.chance(0.3):
        g.before.append(Statement(f"m{len(g.before)} = {m}"))
        m = f"m{len(g.before) - 1}"
        g.do(f"nonlocal {m}")
    h, n = (m + (f".{name}" if name.isalpha() else name) for name in names.split())
    before = g.let(f"{h} * 0.5", a.type.shape, fresh=False)
    new = f"torch.tanh({before.name} * 0.9 ** {n} + {a.name})"
    g.do(step.format(m=m, new=new, next=following.format(n=n)))
    g.let(f"{h} * (0.5 + 0.1 * {n})", a.type.shape)
    g.extras += [h, f"float({n})"]


@rule("attributes")
def returned_in_a_container(g: Builder) -> None:
    """A list or a dict of the program's is a y, and steps write to it."""
    a = g.float(fresh=True)
    holder(g)
    m, zeros = f"holder.r{len(g.before)}", a.type.zeros()
    start, item = g.choose([(f"[{zeros}]", "[0]"), (f'{{"h": {zeros}}}', '["h"]')])
    g.before.append(Statement(f"{m} = {start}"))
    before = g.let(f"{m}{item} * 0.5", a.type.shape, fresh=False)
    g.do(f"{m}{item} = torch.tanh({before.name} + {a.name})")
    g.returned.append(m)
    g.extras.append(f"{m}{item}")


@rule("attributes")
def averaged(g: Builder) -> None:
    """A buffer, or a tensor of a closure, that steps write to without gradients."""
    a = g.float(fresh=True)
    holder(g)
    name = f"b{len(g.before)}"
    start = f'holder.register_buffer("{name}", {a.type.zeros()})'
    place = f"holder.{name}"
    if g.chance(0.3):
        place, start = name, f"{name} = {a.type.zeros()}"
    g.before.append(Statement(start))
    texts = ["{b}.mul_(0.9).add_(0.1 * {a})", "{b}.copy_(torch.sin({b} + {a}))", "{b} += 0.3 * {a}",
             "{b}.lerp_({a}, 0.3)", "{b}.add_({a}.detach(), alpha=0.1)"]  # fmt: skip
    g.statements.append(Statement("with torch.no_grad():", (), (
        Statement(g.choose(texts if "." in place else texts[:2]).format(b=place, a=a.name)),
    )))  # fmt: skip
    g.let(f"torch.tanh({a.name} - {place})", a.type.shape)
    g.extras.append(place)


@rule("shared")
def known_by_two_names(g: Builder) -> None:
    """State that is one tensor by two names, in all steps or some, and that steps write to."""
    a = g.float(fresh=True)
    holder(g)
    one, other = f"holder.one{len(g.vars)}", f"holder.other{len(g.vars)}"
    names = {"one": one, "other": other, "a": a.name, "zeros": a.type.zeros()}
    starts = ["{other} = {one}", "{other} = {zeros}", "{other} = {zeros}"]
    writes = ["{one}.mul_(0.5).add_({a})", "{one} += 0.3 * {a}", "{other}.add_(0.1)",
              "{one} = {one} * 0.5 + {a}"]  # fmt: skip
    links = ["{other} = {one}", "{one} = {other} = {a} * 0.7", "{one}, {other} = {other}, {one}",
             "{other} = {one}[...]", "{other} = {one} * 0.9", "pass"]  # fmt: skip
    g.before += [Statement(text.format(**names)) for text in ("{one} = {zeros}", g.choose(starts))]
    g.do(g.choose(writes).format(**names))
    g.let(f"{other} * 0.7", a.type.shape)  # saves nothing that a later step would overwrite
    g.do(g.choose(links).format(**names))
    g.extras += [one, other]


@rule("facts")
def asked_of_a_value(g: Builder) -> None:
    """A carry whose init needs no gradient needs one after a step."""
    a = g.find(lambda t: t.dtype == "f" and not t.fresh)
    texts = [
        "{a}.detach() * 0.5 if {a}.requires_grad else {a} * 2.0",
        "{a} * 0.5 if {a}.requires_grad else torch.sin({a})",
        "({a} if not {a}.requires_grad else {a} - {a}.detach() * 0.3)",
    ]
    g.let(g.choose(texts).format(a=a.name), a.type.shape, fresh=False)


HOOKS = [
    "lambda grad: grad * 0.5",
    "lambda grad: torch.tanh(grad)",
    "lambda grad: grad.clamp(-0.1, 0.1)",
    "lambda grad: None",
]


@rule("hooks")
def hooked(g: Builder) -> None:
    a = g.float()
    v = g.let(f"torch.sin({a.name} * 1.1)", a.type.shape)
    g.statements.append(Statement(f"if {v.name}.requires_grad:", (), (
        Statement(f"{v.name}.register_hook({g.choose(HOOKS)})"),
    )))  # fmt: skip


def growing_leaf(g: Builder, shape: tuple[int, ...], k: int) -> Carried:
    """A leaf of the carry that is None, or a number, before the first step."""
    name, type_ = f"p{k}", Type(shape, "f", fresh=False)
    init = g.choose(["None", "None", "0.0"] if shape else ["None"])
    if init == "None":
        g.do(f"{name} = {type_.zeros()} if {name} is None else {name}")
    else:
        g.do(f"{name} = {name} + torch.zeros({size_text(shape)}, dtype=dtype)")
    g.vars.append(Var(name, type_))
    return Carried(name, type_, init, name)
