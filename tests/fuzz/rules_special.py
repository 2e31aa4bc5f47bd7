"""Blocks and what is not an operator: nested scans, stops, custom functions, random, state."""

from __future__ import annotations

from .builder import RULES, Builder, NoOperandError, rule
from .program import Statement, Type, Var

SQUARE = """\
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        return 2 * a * grad

"""

STRAIGHT = """\
class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return torch.round(a * 3 + 0.0713) / 3

    @staticmethod
    def backward(ctx, grad):
        return grad

"""


def inner_statements(g: Builder, n: int, features: list[str]) -> tuple[Statement, ...]:
    """``n`` statements of a block; what they define goes out of scope with it."""
    outer, g.statements = g.statements, []
    try:
        for _ in range(n):
            attempt(g, features)
        return tuple(g.statements)
    finally:
        g.statements = outer


def attempt(g: Builder, features: list[str]) -> None:
    """One random rule of these features that applies, if a few tries find it."""
    for _ in range(20):
        before, n = list(g.statements), len(g.vars)
        try:
            g.choose(RULES[g.choose(features)])(g)
            return
        except NoOperandError:
            g.statements[:] = before
            del g.vars[n:]


PLAIN = ["pointwise", "pointwise", "products", "reductions", "views"]


WAYS_OF_MAKING = ("remainder", "mask", "lower", "written", "filled", "scattered", "one")
MADE = """\
def made(way, shape):
    n = torch.Size(shape).numel()
    flat, zeros = torch.arange(n), torch.zeros(shape, dtype=dtype)
    if way == "remainder":
        return (flat % 3).to(dtype).reshape(shape)
    if way == "mask":
        return (flat % 3 == 1).to(dtype).reshape(shape)
    if way == "lower" and len(shape) > 1:
        return torch.ones(shape, dtype=dtype).tril()
    if way == "written" and shape:
        zeros[..., shape[-1] // 2] = 1.0
        return zeros
    if way == "filled" and shape:
        return zeros.index_fill(-1, torch.tensor([0]), 0.5)
    if way == "scattered" and shape:
        return zeros.scatter(-1, torch.full(shape, shape[-1] - 1), 0.7)
    return torch.ones(shape, dtype=dtype)


"""


@rule("stops")
def detached(g: Builder) -> None:
    a = g.float()
    texts = [
        "{a}.detach()",
        "{a} - {a}.detach() * 0.5",
        "{a}.detach() * {a}",
        "torch.tanh({a}).detach()",
    ]
    g.let(g.choose(texts).format(a=a.name), a.type.shape, fresh=False)


@rule("stops")
def without_gradients(g: Builder) -> None:
    header = g.choose(
        ["with torch.no_grad():", "with torch.no_grad():", "with torch.set_grad_enabled(False):"]
    )
    body = inner_statements(g, g.choose([1, 2]), PLAIN)
    if body:
        g.statements.append(Statement(header, (), body))


@rule("custom")
def custom_function(g: Builder) -> None:
    a = g.float()
    name, text = g.choose([("Square", SQUARE), ("Straight", STRAIGHT)])
    g.helpers[name] = text
    g.let(f"torch.tanh({name}.apply({a.name}))", a.type.shape)


@rule("regions")
def checkpointed(g: Builder) -> None:
    a = g.float()
    b = g.like(a.type.shape)
    texts = ["torch.tanh(a) * b", "torch.sin(a * b) + a", "(a - b).square().cos()"]
    function = f"lambda a, b: {g.choose(texts)}"
    g.let(f"checkpoint({function}, {a.name}, {b.name}, use_reentrant=False)", a.type.shape)


@rule("regions")
def in_autocast(g: Builder) -> None:
    """Whether it is on is what an operator's result says; its digits would be those of bfloat16."""
    a = g.float()
    g.statements.append(
        Statement(
            'with torch.autocast("cpu", torch.bfloat16):',
            (),
            (Statement(f"cast = F.linear({a.name}.float().view(-1, 1), torch.ones(1, 1))"),),
        )
    )
    g.let(f"{a.name} * torch.zeros_like(cast).element_size()", a.type.shape)


@rule("nested")
def nested_scan(g: Builder) -> None:
    """A scan over the first dimension of a value in scope, with a small body of its own."""
    if g.depth >= 2:
        raise NoOperandError
    xs = g.float(1, 3)
    h = g.like(xs.type.shape[1:])
    scope = list(g.vars)
    carry, x = Var(g.name(), h.type), Var(g.name(), Type(xs.type.shape[1:], "f", False))
    g.vars += [carry, x]
    g.depth += 1
    body = inner_statements(g, g.choose([1, 2, 2, 3]), [*PLAIN, *g.within])
    last = [v for v in g.vars if v.type.dtype == "f" and v.type.shape == carry.type.shape][-1]
    y = [v for v in g.vars if v.type.dtype == "f"][-1]
    g.depth -= 1
    g.vars = scope
    body += (
        Statement(f"return torch.tanh({carry.name} * 0.5 + {last.name} + {x.name}), {y.name}"),
    )
    inner, out, ys = (
        g.name(),
        Var(g.name(), h.type),
        Var(g.name(), Type((xs.type.shape[0], *y.type.shape))),
    )
    options = g.choose(["", "", ", reverse=True", ", unroll=2", ', checkpoint="full"'])
    call = f"{out.name}, {ys.name} = scan(inner_{inner}, {h.name}, {xs.name}{options})"
    g.statements.append(
        Statement(f"def inner_{inner}({carry.name}, {x.name}):", (out, ys), body, call)
    )
    g.vars += [out, ys]


#: The next carry of an inner cell, from ``h``, ``x`` and a weight.
INNER_CELLS = [
    "torch.tanh({h} @ {w} + {x})",
    "torch.tanh(({h}.flip(-1) + {x}) @ {w})",
    "torch.tanh({h} @ {w} + {x}) + {h}.flip(-1) * 0.3",
    "torch.sigmoid({h} @ {w} + {x}) * {h} + 0.1",
    "torch.tanh(torch.add({x}, {h} @ {w}, alpha=-0.7))",
    "torch.tanh(torch.tanh({h} @ {w}) @ {w} + {x} * {h})",
    "torch.tanh({h}.flip(-1) * 0.5 + {x})",
    "torch.tanh({h} * 0.5 + {x})",
]


@rule("inner_cells")
def inner_cell(g: Builder) -> None:
    """A recurrent cell over a few values of one shape; its last carry goes wherever values go."""
    if g.depth >= 2:
        raise NoOperandError
    w = g.choose([v for v in g.vars if v.name[0] == "w" and len({*v.type.shape}) == 1])
    rows = [v for v in g.vars if v.type.dtype == "f" and len(v.type.shape) == 2]
    fitting = [v for v in rows if v.type.shape[1] == w.type.shape[0]]
    start = g.choose([v for v in fitting if v.name[0] in "cv"] or fitting)
    shape = start.type.shape
    xs = ", ".join(g.like(shape).name for _ in range(g.choose([2, 2, 3])))
    carry, x, made = g.name(), g.name(), g.name()
    text = g.choose(INNER_CELLS).format(h=carry, x=x, w=w.name)
    y = g.choose(["None", made, f"{made} * 0.5", carry])
    inner, out = g.name(), Var(g.name(), Type(shape))
    ys = Var(g.name(), Type((xs.count(",") + 1, *shape)))
    options = g.choose(["", ", reverse=True"])
    call = (
        f"{out.name}, {ys.name} = scan(inner_{inner}, {start.name}, torch.stack([{xs}]){options})"
    )
    body = (Statement(f"{made} = {text}"), Statement(f"return {made}, {y}"))
    given = (out,) if y == "None" else (out, ys)
    g.statements.append(Statement(f"def inner_{inner}({carry}, {x}):", given, body, call))
    g.vars += given


#: One draw per step, of a value that depends on the carry: the order of draws is the loop's then.
DRAWS = [
    "F.dropout({a}, 0.4)",
    "{a} + 0.1 * torch.randn_like({a})",
    "{a} * torch.rand_like({a})",
    "{a} * torch.bernoulli(torch.sigmoid({a}).detach())",
    "{a} * (torch.rand_like({a}) > 0.3)",
]


COUNTER = """\
class Counter:
    def __init__(self):
        self.n, self.k = 0, 0.5
        self.log = []

"""


HITS = """\
HITS = 0.0

def reset():
    global HITS
    HITS = 0.0

def hits():
    return HITS

"""


@rule("state")
def counted(g: Builder) -> None:
    """Python state that a body changes: the loop sees every change."""
    a = g.float()
    if "Counter" not in g.helpers:
        g.helpers["Counter"] = COUNTER
        g.before.append(Statement("state = Counter()"))
        g.extras += ["float(state.n)", "float(state.k)", "float(len(state.log))"]
    lines = ["state.n += 1", "state.k = state.k + 0.25", "state.n = state.n + 2", "state.log.append(1)",
             "setattr(state, 'k', state.k * 0.5)"]  # fmt: skip
    g.do(g.choose(lines))
    if g.chance(0.5):
        text = g.choose(["{a} * state.k", "{a} + 0.1 * state.n", "{a} * (0.1 * state.n + state.k)"])
        g.let("torch.tanh(" + text.format(a=a.name) + ")", a.type.shape)


@rule("state")
def counted_globally(g: Builder) -> None:
    a = g.float()
    g.helpers["G"] = "G = [0.0]\n\n"
    if not any("G[0] = 0.0" in s.text for s in g.before):
        g.before.append(Statement("G[0] = 0.0"))
        g.extras += ["G[0]"]
    g.do(g.choose(["G[0] += 1.0", "G[0] = G[0] + 0.5"]))
    if g.chance(0.5):
        g.let(f"torch.tanh({a.name} + 0.1 * G[0])", a.type.shape)


@rule("state")
def assigned_global(g: Builder) -> None:
    a = g.float()
    g.helpers["H"] = HITS
    if "reset()" not in [s.text for s in g.before]:
        g.before.append(Statement("reset()"))
        g.extras += ["hits()"]
    if "global HITS" not in [s.text for s in g.statements]:
        g.statements.insert(0, Statement("global HITS"))
    g.do(g.choose(["HITS += 1.0", "HITS = HITS + 0.5", "HITS = HITS * 0.5 + 1.0"]))
    if g.chance(0.5):
        g.let(f"torch.tanh({a.name} + 0.1 * HITS)", a.type.shape)


@rule("unread")
def unread_draw(g: Builder) -> None:
    """A draw that changes those after it, whether or not anything reads it."""
    a = g.float()
    text = g.choose(["torch.rand(2)", "torch.randperm(3)", "torch.normal({a}, 0.5)", *DRAWS])
    if g.chance(0.4) and "{a}" in text:
        g.let("torch.tanh(" + text.format(a=a.name) + ")", a.type.shape)
    else:
        g.do(text.format(a=a.name))


@rule("draws")
def drawn_number(g: Builder) -> None:
    """Python's own random numbers: one for each step."""
    a = g.float()
    g.helpers["random"] = "import random\n\n"
    if "random.seed(3)" not in [s.text for s in g.before]:
        g.before.append(Statement("random.seed(3)"))
    texts = ["{a} * random.random()", "{a} + random.uniform(-1, 1)", "{a} * random.randint(1, 3)"]
    g.let("torch.tanh(" + g.choose(texts).format(a=a.name) + ")", a.type.shape)


@rule("numbers")
def with_number(g: Builder) -> None:
    """Arithmetic with a carry that is a number: in the first step, or in all but that."""
    a = g.float()
    texts = ["{a} * {n}", "{a} + 0.3 * {n}", "({n} - {a}) * 0.5", "{a} / (1 + {n} * {n})"]
    # a phase shows a number's last digits
    texts += ["torch.sin({a} + 50.0 * {n})"] * 3
    text = g.choose(texts).format(a=a.name, n=g.choose(g.numbers))
    g.let(f"torch.tanh({text})", a.type.shape)


@rule("func")
def transformed(g: Builder) -> None:
    """torch.func inside a body."""
    a = g.float()
    b = g.like(a.type.shape)
    texts = [
        "torch.func.grad(lambda q: (torch.sin(q) * {b}).sum())({a})",
        "torch.func.jvp(lambda q: torch.sin(q) * q, ({a},), ({b},))[1]",
        "torch.func.vjp(lambda q: torch.tanh(q) * q, {a})[1]({b})[0]",
    ]
    if a.type.shape:
        texts += ["torch.func.vmap(lambda q: torch.sin(q) * q.mean())({a})"] * 2
    g.let("torch.tanh(" + g.choose(texts).format(a=a.name, b=b.name) + ")", a.type.shape)


@rule("inner_jvp")
def inner_tangent(g: Builder) -> None:
    """Forward mode inside a body, without the levels of other transforms around it."""
    a = g.float()
    b = g.like(a.type.shape)
    texts = [
        "torch.func.jvp(lambda q: torch.sin(q) * q, ({a},), ({b},))[1]",
        "torch.func.jvp(lambda q: torch.tanh(q) + q * q, ({b},), (torch.ones_like({b}),))[1]",
    ]
    g.let(g.choose(texts).format(a=a.name, b=b.name), a.type.shape)


@rule("aliases")
def buffer_changed(g: Builder) -> None:
    """A closed-over buffer changed in place, and perhaps read through another view of it."""
    a = g.float()
    shape = a.type.shape
    name = f"buf{len(g.before)}"
    g.before.append(
        Statement(
            f"{name} = torch.full(({', '.join(map(str, shape))}{',' * (len(shape) == 1)}), 0.5, dtype=dtype)"
        )
    )
    g.do(
        g.choose(
            [
                "{n}.mul_(0.5).add_({a}.detach())",
                "{n}.add_({a}.detach())",
                "{n}.copy_({n} * 0.9 + {a}.detach() * 0.1)",
            ]
        ).format(n=name, a=a.name)
    )
    views = ["{n}"]
    if shape and shape[0] > 0:
        row = f"row{len(g.before)}"
        g.before.append(Statement(f"{row} = {name}[0]"))
        views += [f"{row}.sum()", f"{name}.detach()", f"{row}.sum() * {name}"]
    g.let(f"torch.tanh({a.name} + " + g.choose(views).format(n=name) + ")", shape)
    g.extras.append(name)
