"""Views, layouts and everything that reads by an index."""

from __future__ import annotations

from .builder import Builder, NoOperandError, count, plus, product, replaced, rule, times, without
from .program import Shape, Size, size_text


@rule("views")
def transposed(g: Builder) -> None:
    a = g.float(2, 3)
    shape = a.type.shape
    if len(shape) == 2:
        texts = ["{a}.t()", "{a}.T", "{a}.transpose(0, 1)", "{a}.mT.contiguous()"]
        g.let(g.choose(texts).format(a=a.name), shape[::-1], fresh=False)
        return
    order = list(range(3))
    g.rng.shuffle(order)
    new = tuple(shape[k] for k in order)
    g.let(f"{a.name}.permute({', '.join(map(str, order))})", new, fresh=False)


@rule("views")
def reshaped(g: Builder) -> None:
    a = g.float(1, 3)
    shape = a.type.shape
    flat: Shape = (product(shape),)
    options = [("{a}.reshape(-1)", flat), ("{a}.flatten()", flat)]
    if len(shape) == 3:
        flat = (times(shape[0], shape[1]), shape[2])
        options += [(f"{{a}}.reshape({size_text(flat)})", flat), ("{a}.flatten(0, 1)", flat)]
    if len(shape) == 2:
        options += [(f"{{a}}.reshape({shape[1]}, {shape[0]})", shape[::-1])]
        options += [(f"{{a}}.contiguous().view({shape[1]}, {shape[0]})", shape[::-1])]
    text, new = g.choose(options)
    g.let(text.format(a=a.name), new, fresh=False)


@rule("views")
def new_axis(g: Builder) -> None:
    a = g.float(0, 2)
    axis = g.choose(range(len(a.type.shape) + 1))
    new = (*a.type.shape[:axis], 1, *a.type.shape[axis:])
    g.let(f"{a.name}.unsqueeze({axis})", new, fresh=False)


@rule("views")
def squeezed(g: Builder) -> None:
    a = g.find(lambda t: t.dtype == "f" and 1 in t.shape)
    axis = a.type.shape.index(1)
    g.let(f"{a.name}.squeeze({axis})", without(a.type.shape, axis), fresh=False)


@rule("views")
def expanded(g: Builder) -> None:
    a = g.float(0, 2)
    n = g.size()
    new = (n, *a.type.shape)
    if count(new) > 2000:
        raise NoOperandError
    texts = [f"{{a}}.expand({size_text(new)})", f"{{a}}.broadcast_to(({size_text(new)}))",
             f"{{a}}.repeat({n}, {', '.join('1' * len(a.type.shape))})",
             f"torch.stack([{{a}}] * {n})"]  # fmt: skip
    g.let(g.choose(texts).format(a=a.name), new, fresh=False)


REARRANGE = [
    "{a}.flip({d})",
    "torch.roll({a}, 1, {d})",
    "torch.roll({a}, -2, {d})",
    "torch.cat(torch.chunk({a}, 2, {d})[::-1], {d})",
    "torch.cat({a}.split(2, {d}), {d})",
    "torch.stack({a}.unbind({d}), {d})",
    "torch.stack([v * 0.5 for v in {a}.unbind({d})], {d})",
    "{a}.movedim({d}, 0).contiguous().movedim(0, {d})",
    "{a}.narrow({d}, 0, {n})",
    "{a}.transpose({d}, 0).clone().transpose(0, {d})",
    "torch.cat([{a}.narrow({d}, 1, {n} - 1), {a}.narrow({d}, 0, 1)], {d})",
]


@rule("views")
def rearranged(g: Builder) -> None:
    a = g.float(1, 3)
    axis = g.axis(a.type.shape)
    text = g.choose(REARRANGE).format(a=a.name, d=axis, n=a.type.shape[axis])
    g.let(text, a.type.shape, fresh=False)


@rule("views")
def parts(g: Builder) -> None:
    """Both halves of a doubled value, as gates are made."""
    a = g.float(1, 2)
    axis = len(a.type.shape) - 1
    b = g.like(a.type.shape)
    both = g.let(
        f"torch.cat([{a.name}, {b.name}], {axis})",
        replaced(a.type.shape, axis, times(2, a.type.shape[axis])),
    )
    ways = ["{a}.chunk(2, -1)", "{a}.split({n}, -1)", "{a}.tensor_split(2, -1)"]
    halves = g.let(g.choose(ways).format(a=both.name, n=a.type.shape[axis]), (), "tuple")
    for k in range(2):
        g.let(f"{halves.name}[{k}]", a.type.shape, fresh=False)


@rule("views")
def joined(g: Builder) -> None:
    a = g.float(1, 2)
    axis = g.axis(a.type.shape)
    b = g.like(a.type.shape)
    n = times(2, a.type.shape[axis])
    if count(a.type.shape) > 1000:
        raise NoOperandError
    text = g.choose(
        ["torch.cat([{a}, {b}], {d})", "torch.cat(({a} * 0.5, torch.zeros_like({b})), {d})"]
    )
    g.let(text.format(a=a.name, b=b.name, d=axis), replaced(a.type.shape, axis, n))


@rule("views")
def padded(g: Builder) -> None:
    a = g.float(1, 2)
    n = a.type.shape[-1]
    options = [
        ("F.pad({a}, (1, 1))", plus(n, 2)),
        ("F.pad({a}, (1, -1))", n),
        ("F.pad({a}, (0, 2), value=0.3)", plus(n, 2)),
    ]
    text, new = g.choose(options)
    g.let(text.format(a=a.name), (*a.type.shape[:-1], new))


@rule("views")
def diagonals(g: Builder) -> None:
    a = g.float(1, 2)
    shape = a.type.shape
    if len(shape) == 1:
        g.let(g.choose(["torch.diag({a})", "torch.diag_embed({a})"]).format(a=a.name), shape * 2)
        return
    n = min(shape, key=int)
    options = [("{a}.diagonal()", (n,)), ("torch.diagonal({a}, 0, 0, 1)", (n,)), ("torch.trace({a}).tanh()", ()),
               ("torch.tril({a})", shape), ("torch.triu({a}, 1)", shape), ("{a}.diagonal().sum()", ())]  # fmt: skip
    text, new = g.choose(options)
    g.let(text.format(a=a.name), new, fresh=False)


@rule("views")
def strided(g: Builder) -> None:
    a = g.float(1, 1)
    n = a.type.shape[0]
    if n < 3:
        raise NoOperandError
    if g.chance(0.5):
        g.let(f"{a.name}.unfold(0, 2, 1)", (Size(n - 1, f"({n} - 1)"), 2), fresh=False)
    else:
        # elements that share their memory are read alone: torch does not say what a write to them is
        overlapping = f"torch.as_strided({a.name}.clone(), (2, 2), (1, 1), 0).clone()"
        g.let(overlapping, (2, 2), fresh=False)


@rule("views")
def special_layouts(g: Builder) -> None:
    a = g.float(2, 2)
    texts = ["torch.kron({a}, torch.ones(1, 1, dtype=dtype))", "torch.rot90({a}, 2)", "torch.fliplr({a})",
             "{a}.repeat_interleave(1, 0)", "{a}.unflatten(0, (-1, 1)).squeeze(1)", "{a}.T.contiguous().T",
             "torch.swapaxes({a}, 0, 1).T", "{a}.view({s})", "{a}.type_as({a})", "{a}.view_as({a})"]  # fmt: skip
    g.let(g.choose(texts).format(a=a.name, s=size_text(a.type.shape)), a.type.shape, fresh=False)


# --- reads by index ---


@rule("indexing")
def constant_index(g: Builder) -> None:
    a = g.float(1, 3)
    shape = a.type.shape
    options = [
        ("{a}[0]", shape[1:]),
        ("{a}[-1]", shape[1:]),
        ("{a}[..., 0]", shape[:-1]),
        ("{a}.select(-1, -1)", shape[:-1]),
    ]
    if len(shape) > 1:
        options += [("{a}[:, 0]", (shape[0], *shape[2:])), ("{a}[0, -1]", shape[2:])]
    text, new = g.choose(options)
    g.let(text.format(a=a.name), new, fresh=False)


@rule("indexing")
def sliced(g: Builder) -> None:
    a = g.float(1, 3)
    n = a.type.shape[0]
    if n < 2:
        raise NoOperandError
    rest, less = a.type.shape[1:], Size(n - 1, f"({n} - 1)")
    options = [("{a}[1:]", (less, *rest)), ("{a}[:-1]", (less, *rest)), ("{a}[:1]", (1, *rest)),
               ("{a}[::2]", (Size((n + 1) // 2, f"(({n} + 1) // 2)"), *rest)),
               ("{a}.narrow(0, 1, {n} - 1)", (less, *rest)), ("{a}[-1:]", (1, *rest))]  # fmt: skip
    text, new = g.choose(options)
    g.let(text.format(a=a.name, n=n), new, fresh=False)


@rule("indexing")
def read_at_step(g: Builder) -> None:
    """By a 0-d integer tensor: a step counter, a token."""
    a = g.float(1, 3)
    shape = a.type.shape
    i = g.index(shape[0])
    options = [("{a}[{i}]", shape[1:]), ("torch.index_select({a}, 0, {i})", (1, *shape[1:])),
               ("{a}[{i}.unsqueeze(0)]", (1, *shape[1:])), ("torch.select({a}, 0, {i})", shape[1:]),
               ("{a}.narrow(0, {i}, 1)", (1, *shape[1:]))]  # fmt: skip
    if len(shape) == 2:
        options += [("F.embedding({i}, {a})", shape[1:])]
    text, new = g.choose(options[:3] if g.chance(0.6) else options)
    g.let(text.format(a=a.name, i=i.name), new, fresh=False)


@rule("indexing")
def read_column(g: Builder) -> None:
    a = g.float(2, 3)
    shape = a.type.shape
    i = g.index(shape[1])
    new = (shape[0], *shape[2:])
    options = [("{a}[:, {i}]", new), ("{a}.select(1, {i})", new)]
    j = g.index(shape[0])
    options += [("{a}[{j}, {i}]", shape[2:])]
    text, new = g.choose(options)
    g.let(text.format(a=a.name, i=i.name, j=j.name), new, fresh=False)


@rule("indexing")
def read_rows(g: Builder) -> None:
    """By a 1-d integer tensor."""
    a = g.float(1, 3)
    shape = a.type.shape
    i = g.index(shape[0], 1)
    (n,) = i.type.shape
    new = (n, *shape[1:])
    options = [("{a}[{i}]", new), ("torch.index_select({a}, 0, {i})", new), ("{a}[{i}, ...]", new)]
    if len(shape) == 2:
        options += [("F.embedding({i}, {a})", new), ("F.one_hot({i}, {r}).to(dtype) @ {a}", new)]
    if len(shape) >= 2:
        other = (*shape[:1], n, *shape[2:])
        k = g.index(shape[1], 1)
        other = (shape[0], *k.type.shape, *shape[2:])
        options += [(f"{{a}}[:, {k.name}]", other), (f"{{a}}.index_select(1, {k.name})", other)]
    text, new = g.choose(options)
    g.let(text.format(a=a.name, i=i.name, r=shape[0]), new)


@rule("indexing")
def read_pairs(g: Builder) -> None:
    """Two index tensors at once, and arange with an index: a token's probability per row."""
    a = g.float(2, 2)
    rows, columns = a.type.shape
    i = g.index(columns, 1)
    (n,) = i.type.shape
    if n == rows:
        options = ["{a}[torch.arange({n}), {i}]", "{a}.gather(1, {i}.unsqueeze(1)).squeeze(1)",
                   "torch.take_along_dim({a}, {i}[:, None], 1)[:, 0]"]  # fmt: skip
    else:
        options = ["{a}[{i} % {r}, {i}]"]
    text = g.choose(options).format(a=a.name, i=i.name, n=n, r=rows)
    g.let(text, (n,))


@rule("indexing")
def gathered(g: Builder) -> None:
    a = g.float(1, 2)
    shape = a.type.shape
    i = g.index(shape[-1], 1)
    (n,) = i.type.shape
    new = (*shape[:-1], n)
    where = f"{i.name}.expand({size_text(new)})"
    texts = ["torch.gather({a}, -1, {w})", "torch.take_along_dim({a}, {w}, -1)"]
    g.let(g.choose(texts).format(a=a.name, w=where), new)


@rule("indexing")
def masked_read(g: Builder) -> None:
    a = g.float(1, 2)
    m = g.like(a.type.shape, "b")
    texts = ["torch.sin({a}[{m}].sum())", "{a}.masked_select({m}).sum().tanh()"]
    soft = [
        "torch.where({m}, {a}, 0.0)",
        "{a}.masked_fill({m}, 0.5)",
        "{a} * {m}",
        "{a}.masked_fill({m}, float('-inf')).softmax(-1).nan_to_num()",
    ]
    if g.chance(0.15):
        g.let(g.choose(texts).format(a=a.name, m=m.name), ())
    else:
        g.let(g.choose(soft).format(a=a.name, m=m.name), a.type.shape)
