"""Buffers that a body makes, and everything that writes: by slices, by index, by mask."""

from __future__ import annotations

from .builder import Builder, NoOperandError, rule
from .program import Size, Type, Var, size_text

MAKE = [
    "torch.zeros({s}, dtype=dtype)",
    "torch.zeros({s}, dtype=dtype)",
    "torch.ones({s}, dtype=dtype)",
    "torch.full(({s},), 0.3, dtype=dtype)",
    "torch.zeros_like({a})",
    "torch.ones_like({a})",
    "torch.empty_like({a}).fill_(0.2)",
    "{a}.new_zeros({s})",
    "{a}.new_full(({s},), 0.5)",
    "torch.empty({s}, dtype=dtype).zero_()",
    "{a}.clone()",
    "{a} * 0.5",
]


def buffer(g: Builder, low: int = 1, high: int = 3) -> Var:
    """Something of the body's own to write to."""
    if g.chance(0.3):
        try:
            return g.float(low, high, fresh=True)
        except NoOperandError:
            pass
    a = g.float(low, high)
    text = g.choose(MAKE).format(a=a.name, s=size_text(a.type.shape))
    return g.let(text, a.type.shape)


@rule("buffers")
def made(g: Builder) -> None:
    ways = [
        "torch.arange({n}, dtype=dtype) * 0.1",
        "torch.linspace(-1, 1, {n}, dtype=dtype)",
        "torch.zeros({n}, dtype=dtype)",
        "torch.eye({n}, dtype=dtype)",
    ]
    n = g.size()
    text = g.choose(ways)
    g.let(text.format(n=n), (n, n) if "eye" in text else (n,))


@rule("buffers")
def filled_by_slices(g: Builder) -> None:
    """``z = empty(...); z[:1] = a; z[1:] = b``."""
    a = g.float(1, 2)
    b = g.like(a.type.shape)
    make = g.choose(
        ["torch.empty({s}, dtype=dtype)", "torch.empty_like({a})", "torch.zeros({s}, dtype=dtype)"]
    )
    z = g.let(make.format(s=size_text(a.type.shape), a=a.name), a.type.shape)
    g.do(f"{z.name}[:1] = {a.name}[:1]")
    g.do(f"{z.name}[1:] = {b.name}[1:] * 0.5")


@rule("buffers")
def filled_by_index(g: Builder) -> None:
    """``z = zeros; z[i] = a; h + z``."""
    a = g.float(0, 2)
    n = g.size()
    i = g.index(n)
    shape = (n, *a.type.shape)
    z = g.let(f"torch.zeros({size_text(shape)}, dtype=dtype)", shape)
    texts = [
        "{z}[{i}] = {a}",
        "{z}[{i}] += {a}",
        "{z}.index_fill_(0, {i}, 0.7)",
        "{z}[{i}].add_({a})",
    ]
    g.do(g.choose(texts).format(z=z.name, i=i.name, a=a.name))


WRITE = [
    "{z}.add_({a})",
    "{z}.sub_({a}, alpha=0.5)",
    "{z}.mul_({a})",
    "{z}.mul_(0.5)",
    "{z}.copy_({a})",
    "{z} += {a}",
    "{z} *= 0.7",
    "{z} -= {a} * 0.5",
    "{z}.clamp_(-0.9137, 0.9137)",
    "{z}.add_(0.1137).relu_()",
    "{z}.tanh_()",
    "{z}.sigmoid_()",
    "{z}.zero_()",
    "{z}.fill_(0.4)",
    "{z}.neg_()",
    "{z}.div_({a} * {a} + 1)",
    "{z}.lerp_({a}, 0.3)",
    "{z}.addcmul_({a}, {a}, value=0.2)",
    "{z}[...] = {a}",
    "{z}[:] = {a} * 0.5",
    "torch.add({a}, 0.1, out={z})",
]


@rule("inplace")
def written(g: Builder) -> None:
    z = buffer(g, 0)
    a = g.like(z.type.shape)
    g.do(g.choose(WRITE[:-1]).format(z=z.name, a=a.name))


@rule("inplace")
def written_where_it_stands(g: Builder) -> None:
    """On the carry, on x, or on any view: allowed wherever autograd allows it in the loop."""
    z = g.float(0, 3)
    a = g.like(z.type.shape)
    if z.name[0] == "w":  # closed over: for the feature "aliases"
        raise NoOperandError
    g.do(g.choose(WRITE[:12]).format(z=z.name, a=a.name))


PARTS = [
    "{z}[0] = {r}",
    "{z}[-1] += {r}",
    "{z}[:1] = {r}",
    "{z}[1:].add_({a}[1:])",
    "{z}[1:] = {a}[:-1]",
    "{z}[:-1] *= 0.5",
    "{z}[::2] = {a}[::2]",
    "{z}[..., 0] = 0.3",
    "{z}[..., -1] += {a}[..., 0]",
    "{z}[..., 1:] = {a}[..., :-1]",
    "{z}.narrow(0, 0, 1).mul_(0.5)",
    "{z}.select(-1, 0).add_({a}.select(-1, -1))",
    "{z}.select(0, -1).copy_({r})",
    "{z}.transpose(0, -1)[0] = 0.2",
    "{z}.view(-1)[0] = 0.6",
    "{z}.unbind(0)[0].mul_(0.3)",
    "{z}.chunk(2, 0)[0].add_(0.2)",
    "{z}.flatten()[:1].add_(0.1)",
]


@rule("buffers")
def part_written(g: Builder) -> None:
    z = buffer(g)
    a = g.like(z.type.shape)
    r = g.like(z.type.shape[1:])
    # what torch copies from memory that overlaps is not defined
    source = f"{a.name}.clone()" if a.name == z.name else a.name
    g.do(g.choose(PARTS).format(z=z.name, a=source, r=r.name))


@rule("buffers")
def diagonal_written(g: Builder) -> None:
    z = buffer(g, 2, 2)
    texts = [
        "{z}.diagonal().add_(0.3)",
        "{z}.fill_diagonal_(0.2)",
        "{z}.diagonal().copy_({a}.diagonal())",
        "{z}.T[0] = {a}[:, 0]",
        "{z}.t().mul_(0.5)",
    ]
    g.do(g.choose(texts).format(z=z.name, a=g.like(z.type.shape).name))


INDEXED = [
    "{z}[{i}] = {a}",
    "{z}[{i}] = 0.3",
    "{z}[{i}] += {a}",
    "{z}[{i}] *= 0.5",
    "{z}.index_fill_(0, {i}, 0.4)",
    "{z} = {z}.index_fill(0, {i}, 0.4)",
    "{z} = torch.index_put({z}, ({i},), {a})",
    "{z} = {z}.index_put(({i},), {a}, accumulate=True)",
    "{z}.index_put_(({i},), {a}, accumulate=True)",
]


@rule("indexing")
def written_at_step(g: Builder) -> None:
    z = buffer(g)
    i = g.index(z.type.shape[0])
    a = g.like(z.type.shape[1:])
    texts = [*INDEXED, "{z}[{i}].add_({a})", "{z}[{i}].copy_({a})"]
    _write(g, g.choose(texts), z, i, a)


@rule("indexing")
def written_column(g: Builder) -> None:
    z = buffer(g, 2, 3)
    shape = z.type.shape
    i = g.index(shape[1])
    a = g.like((shape[0], *shape[2:]))
    texts = ["{z}[:, {i}] = {a}", "{z}[:, {i}] += {a}", "{z}[:, {i}] = 0.2"]
    _write(g, g.choose(texts), z, i, a)


@rule("indexing")
def written_rows(g: Builder) -> None:
    """By a 1-d index with repeats: only sums are determined."""
    z = buffer(g)
    i = g.index(z.type.shape[0], 1)
    a = g.like((*i.type.shape, *z.type.shape[1:]))
    texts = [
        "{z} = {z}.index_add(0, {i}, {a})",
        "{z}.index_add_(0, {i}, {a}, alpha=0.5)",
        "{z} = torch.index_put({z}, ({i},), {a}, accumulate=True)",
        "{z}.index_put_(({i},), {a}, accumulate=True)",
        "{z}[{i}] = 0.25",
        "{z} = {z}.index_fill(0, {i}, 0.3)",
        "{z}.index_fill_(0, {i}, 0.3)",
        "{z} = {z}.index_reduce(0, {i}, {a}, 'mean')",
        "{z} = {z}.index_copy(0, {i}[:1], {a}[:1])",
    ]
    _write(g, g.choose(texts), z, i, a)


def _write(g: Builder, text: str, z: Var, i: Var, a: Var) -> None:
    line = text.format(z=z.name, i=i.name, a=a.name)
    if not text.startswith("{z} = "):
        g.do(line)
    else:
        g.let(line.removeprefix(f"{z.name} = "), z.type.shape)


@rule("indexing")
def scattered(g: Builder) -> None:
    z = buffer(g, 1, 2)
    shape = z.type.shape
    i = g.index(shape[-1], 1)
    new = (*shape[:-1], *i.type.shape)
    a = g.like(new)
    where = f"{i.name}.expand({size_text(new)})"
    texts = [
        "{z} = {z}.scatter_add(-1, {i}, {a})",
        "{z}.scatter_add_(-1, {i}, {a})",
        "{z} = {z}.scatter(-1, {i}, 0.4)",
        "{z}.scatter_(-1, {i}, 0.4)",
        "{z} = {z}.scatter_reduce(-1, {i}, {a}, 'sum')",
        "{z} = {z}.scatter_reduce(-1, {i}, {a}, 'mean', include_self=False)",
    ]
    _write(g, g.choose(texts), z, Var(where, i.type), a)


@rule("indexing")
def scattered_once(g: Builder) -> None:
    """One place per row, so that plain scatter is determined."""
    z = buffer(g, 2, 2)
    rows, columns = z.type.shape
    i = g.index(columns, 1)
    if i.type.shape != (rows,):
        raise NoOperandError
    a = g.like((rows,))
    texts = [
        "{z} = {z}.scatter(1, {i}[:, None], {a}[:, None])",
        "{z}[torch.arange({n}), {i}] = {a}",
        "{z}[torch.arange({n}), {i}] += {a}",
    ]
    _write(g, g.choose(texts).replace("{n}", str(rows)), z, i, a)


MASKED = [
    "{z}[{m}] = 0.3",
    "{z}[{m}] = 0",
    "{z}[{z} > 0.0137] = 0",
    "{z}[{z} > 0.0137] *= 0.5",
    "{z}.masked_fill_({m}, 0.2)",
    "{z} = {z}.masked_fill({m}, 0.2)",
    "{z} = torch.where({m}, {a}, {z})",
    "{z} = torch.masked_scatter({z}, {m}, {a})",
    "{z}[{m}] = {a}[{m}]",
    "{z}[{m}] += {a}[{m}]",
]


@rule("indexing")
def written_by_mask(g: Builder) -> None:
    z = buffer(g)
    m = g.like(z.type.shape, "b")
    a = g.like(z.type.shape)
    text = g.choose(MASKED[:8] if g.chance(0.8) else MASKED).replace("{m}", m.name)
    _write(g, text, z, m, a)


@rule("indexing")
def rows_by_mask(g: Builder) -> None:
    z = buffer(g, 2, 3)
    m = g.like(z.type.shape[:1], "b")
    g.do(g.choose(["{z}[{m}] = 0.3", "{z}[{m}] *= 0.5"]).format(z=z.name, m=m.name))


@rule("buffers")
def counted(g: Builder) -> None:
    """An integer buffer written by scatter: histograms of tokens."""
    i = g.find(lambda t: t.dtype == "i" and len(t.shape) == 1 and t.high > 0)
    n = Size(i.type.high, str(i.type.high))
    z = Var(g.name(), Type((n,), "i", high=0))
    g.statements.append(_defining(z, f"torch.zeros({n}, dtype=torch.long)"))
    g.do(f"{z.name}.scatter_add_(0, {i.name}, torch.ones_like({i.name}))")
    g.let(f"{z.name}.to(dtype) * 0.2", (n,))


def _defining(z: Var, text: str):
    from .program import Statement

    return Statement(f"{z.name} = {text}", (z,))


@rule("fills")
def filled_with_a_value(g: Builder) -> None:
    """A new buffer filled, in part, with one value of this step's x: known before the loop.

    Detached: torch has no derivative of that for fakes.
    """
    a = g.find(lambda t: t.dtype == "f" and not t.fresh)
    if a.name[0] != "x":
        raise NoOperandError
    n, m = g.size(), g.size()
    texts = [
        ("torch.zeros({n}, dtype=dtype).index_fill(0, torch.arange({n})[::2], {a}.detach().mean())", (n,)),
        ("torch.zeros({n}, {m}, dtype=dtype).index_fill(1, torch.arange({m})[:1], {a}.detach().mean())",
         (n, m)),
        ("torch.ones({n}, dtype=dtype).masked_fill(torch.arange({n}) < 2, {a}.detach().mean())", (n,)),
        ("torch.full_like({a}, 0.3).index_fill_(-1, torch.zeros(1).long(), {a}.detach().mean())",
         a.type.shape),
    ]  # fmt: skip
    text, shape = g.choose(texts if a.type.shape else texts[:3])
    g.let(text.format(a=a.name, n=n, m=m), shape)


@rule("fills")
def traced(g: Builder) -> None:
    """The sum of a diagonal, whose gradient is a write into zeros."""
    a = g.float(2, 2)
    g.let(f"torch.tanh(torch.trace({a.name}))", ())
