"""Pointwise work, products, reductions, linear algebra, casts and complex numbers."""

from __future__ import annotations

from .builder import Builder, NoOperandError, count, replaced, rule, without
from .program import Size, Var, size_text

# Each keeps values of a few units at a few units, and has no kink at a value that may occur.
UNARY = [
    "torch.tanh({a})",
    "torch.sin({a})",
    "torch.cos({a}) * 0.7",
    "torch.sigmoid({a})",
    "F.gelu({a})",
    "F.silu({a})",
    "F.softplus({a})",
    "F.elu({a} - 0.0137)",
    "F.relu({a} + 0.1137)",
    "F.leaky_relu({a} + 0.0737, 0.2)",
    "torch.exp(-{a} * {a})",
    "torch.log1p({a} * {a})",
    "torch.sqrt({a} * {a} + 0.5)",
    "torch.rsqrt({a} * {a} + 1.5)",
    "torch.reciprocal({a} * {a} + 1.0)",
    "torch.abs({a} + 0.0713)",
    "torch.square({a}) * 0.3",
    "torch.erf({a})",
    "torch.atan({a})",
    "torch.clamp({a}, -1.0137, 0.7713)",
    "{a}.clamp(min=-0.4137)",
    "0.5 * {a} + 0.25",
    "1 - {a}",
    "-{a}",
    "{a} / 2",
    "{a} ** 2 * 0.2",
    "{a}.pow(3).tanh()",
    "torch.expm1({a} * 0.3)",
    "torch.nan_to_num({a})",
    "torch.where({a} > 0.0137, {a}, {a} * 0.1)",
    "torch.asinh({a})",
    "F.logsigmoid({a})",
    "F.mish({a})",
    "torch.sinc({a} + 3.0137) + {a} * 0.1",
]

BINARY = [
    "{a} + {b}",
    "{a} - {b} * 0.5",
    "{a} * torch.tanh({b})",
    "torch.sigmoid({a}) * {b}",
    "{a} / ({b} * {b} + 1)",
    "torch.atan2({a}, {b} * {b} + 1)",
    "torch.maximum({a}, {b} + 0.0137)",
    "torch.minimum({a}, {b} - 0.0137)",
    "torch.where({a} > {b} + 0.0137, {a}, {b} * 0.5)",
    "torch.lerp({a}, {b}, 0.3)",
    "torch.addcmul({a}, {b}, {b}, value=0.1)",
    "torch.addcdiv({a}, {b}, {b} * {b} + 1)",
    "torch.hypot({a} + 3.1, {b})",
    "torch.logaddexp({a}, {b})",
    "torch.stack([{a}, {b}]).mean(0)",
    "torch.add({a}, {b}, alpha=0.5)",
    "torch.sub({a}, {b}, alpha=0.25)",
    "F.mse_loss({a}, {b}, reduction='none') * 0.2",
    "F.smooth_l1_loss({a}, {b} * 0.1, reduction='none')",
    "torch.xlogy({a}, {b} * {b} + 1)",
    "torch.heaviside({a} - 0.0137, {b}.detach()) * {b}",
]


@rule("pointwise")
def unary(g: Builder) -> None:
    a = g.float()
    g.let(g.choose(UNARY).format(a=a.name), a.type.shape)


@rule("pointwise")
def binary(g: Builder) -> None:
    a = g.float()
    b = g.like(a.type.shape)
    g.let(g.choose(BINARY).format(a=a.name, b=b.name), a.type.shape)


@rule("pointwise")
def broadcast(g: Builder) -> None:
    """A row, a column or a scalar beside a matrix."""
    a = g.float(1, 3)
    b = g.find(lambda t: t.dtype == "f" and _broadcasts(t.shape, a.type.shape))
    g.let(g.choose(BINARY[:9]).format(a=a.name, b=b.name), a.type.shape)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    tail = to[len(to) - len(shape) :] if shape else ()
    return len(shape) <= len(to) and all(s in (1, t) for s, t in zip(shape, tail, strict=True))


@rule("pointwise")
def gated(g: Builder) -> None:
    a = g.float()
    b, c = g.like(a.type.shape), g.like(a.type.shape)
    g.let(f"torch.sigmoid({a.name}) * {b.name} + 0.3 * {c.name}", a.type.shape)


@rule("pointwise")
def closed_number(g: Builder) -> None:
    a = g.float()
    text = g.choose(["{a} * {n}", "{a} + {n}", "torch.full_like({a}, {n}) * {a}"])
    g.let(text.format(a=a.name, n=f"{g.number():.4f}"), a.type.shape)


# --- products ---


@rule("products")
def matrix_product(g: Builder) -> None:
    a = g.float(1, 3)
    k = a.type.shape[-1]
    w = g.find(lambda t: t.dtype == "f" and len(t.shape) == 2 and t.shape[0] == k)
    texts = [
        "{a} @ {w}",
        "torch.matmul({a}, {w})",
        "F.linear({a}, {w}.t())",
        "F.linear({a}, {w}.T)",
    ]
    if len(a.type.shape) == 2:
        texts += ["torch.mm({a}, {w})", "{a}.mm({w})", "torch.einsum('bi,io->bo', {a}, {w})"]
    g.bounded(g.choose(texts).format(a=a.name, w=w.name), (*a.type.shape[:-1], w.type.shape[1]))


@rule("products")
def transposed_product(g: Builder) -> None:
    a = g.float(2, 3)
    k = a.type.shape[-1]
    w = g.find(lambda t: t.dtype == "f" and len(t.shape) == 2 and t.shape[1] == k)
    texts = ["F.linear({a}, {w})", "{a} @ {w}.T", "torch.einsum('...i,oi->...o', {a}, {w})"]
    g.bounded(g.choose(texts).format(a=a.name, w=w.name), (*a.type.shape[:-1], w.type.shape[0]))


@rule("products")
def with_bias(g: Builder) -> None:
    a = g.float(2, 2)
    k = a.type.shape[1]
    w = g.find(lambda t: t.dtype == "f" and len(t.shape) == 2 and t.shape[0] == k)
    b = g.like((w.type.shape[1],))
    texts = [
        "torch.addmm({b}, {a}, {w})",
        "F.linear({a}, {w}.t(), {b})",
        "torch.addmm({b}, {a}, {w}, beta=0.5, alpha=0.3)",
    ]
    text = g.choose(texts).format(a=a.name, b=b.name, w=w.name)
    g.bounded(text, (a.type.shape[0], w.type.shape[1]))


@rule("cells")
def gate(g: Builder) -> None:
    """A carry times a weight of its width, as in recurrent cells; or two of them at once."""
    carries = [v for v in g.vars if v.name[0] == "c" and v.type.dtype == "f"]
    c = g.choose([v for v in carries if len(v.type.shape) == 2])
    n, k = c.type.shape
    weights = [v for v in g.vars if v.name[0] == "w" and v.type.shape == (k, k)]
    w, u = g.choose(weights), g.choose(weights)
    v = g.like((n, k))
    texts = [
        "torch.sigmoid({c} @ {w} + {v})",
        "torch.tanh({v} - F.linear({c}, {w}))",
        "torch.tanh(({c} * torch.sigmoid({v})) @ {w} + {v} @ {u})",
        "torch.tanh(torch.cat([{c}, {v}], -1) @ torch.cat([{w}, {u}], 0))",
        "torch.tanh(({c} @ torch.cat([{w}, {u}], 1) + 0.1).chunk(2, -1)[1] + {v})",
    ]
    text = g.choose(texts).format(c=c.name, w=w.name, u=u.name, v=v.name)
    g.let(text, (n, k))


@rule("cells")
def gate_of_a_made_weight(g: Builder) -> None:
    """A carry times what the step makes of weights, whose gradients go back through that."""
    carries = [v for v in g.vars if v.name[0] == "c" and v.type.dtype == "f"]
    c = g.choose([v for v in carries if len(v.type.shape) == 2])
    n, k = c.type.shape
    weights = [v for v in g.vars if v.name[0] == "w" and v.type.shape == (k, k)]
    w, u = g.choose(weights), g.choose(weights)
    made = [
        "torch.softmax({w}, -1)",
        "({w} @ {u})",
        "({w} + 0.5 * {u} @ {w}.mT)",
        "(torch.tanh({w}) * {u}.sum())",
        "({w}.tril() - {u}.tril(-1).mT)",
        "({u} * {w} / (1 + {w}.norm(dim=-1, keepdim=True)))",
    ]
    weight = g.choose(made).format(w=w.name, u=u.name)
    g.let(f"torch.tanh({c.name} @ {weight} + {g.like((n, k)).name})", (n, k))


@rule("products")
def batched_product(g: Builder) -> None:
    a = g.float(3, 3)
    n, _, k = a.type.shape
    b = g.find(lambda t: t.dtype == "f" and len(t.shape) == 3 and t.shape[0] == n)
    rows, columns = b.type.shape[1:]
    if rows == k:
        texts, out = (
            ["torch.bmm({a}, {b})", "{a} @ {b}", "torch.einsum('nij,njk->nik', {a}, {b})"],
            columns,
        )
    elif columns == k:
        texts, out = ["{a} @ {b}.mT", "torch.einsum('nij,nkj->nik', {a}, {b})"], rows
    else:
        raise NoOperandError
    g.bounded(g.choose(texts).format(a=a.name, b=b.name), (n, a.type.shape[1], out))


@rule("products")
def outer_product(g: Builder) -> None:
    a, b = g.float(1, 1), g.float(1, 1)
    texts = ["torch.outer({a}, {b})", "torch.einsum('i,j->ij', {a}, {b})", "{a}[:, None] * {b}"]
    g.let(g.choose(texts).format(a=a.name, b=b.name), (*a.type.shape, *b.type.shape))


@rule("products")
def batched_outer(g: Builder) -> None:
    """The fast weights of linear attention."""
    a = g.float(2, 2)
    n = a.type.shape[0]
    b = g.find(lambda t: t.dtype == "f" and len(t.shape) == 2 and t.shape[0] == n)
    texts = ["torch.einsum('bi,bj->bij', {a}, {b})", "{a}.unsqueeze(-1) * {b}.unsqueeze(1)"]
    if count(a.type.shape) * b.type.shape[1] > 4000:
        raise NoOperandError
    g.let(g.choose(texts).format(a=a.name, b=b.name), (*a.type.shape, b.type.shape[1]))


@rule("products")
def vector_product(g: Builder) -> None:
    a = g.float(1, 2)
    b = g.like((a.type.shape[-1],))
    texts = ["{a} @ {b}", "torch.matmul({a}, {b})"]
    texts += ["torch.mv({a}, {b})"] if len(a.type.shape) == 2 else ["torch.dot({a}, {b})"]
    g.bounded(g.choose(texts).format(a=a.name, b=b.name), a.type.shape[:-1])


@rule("products")
def layer(g: Builder) -> None:
    a = g.float(2, 2)
    n = a.type.shape[-1]
    if n < 2:
        raise NoOperandError
    texts = ["F.layer_norm({a}, ({n},), eps=0.1)", "F.layer_norm({a}, ({n},), {w}, {w}, eps=0.1)"]
    g.let(g.choose(texts).format(a=a.name, n=n, w=g.like((n,)).name), a.type.shape)


@rule("reductions")
def group_norm(g: Builder) -> None:
    """Its backward takes one layout alone."""
    a = g.float(2)
    n = a.type.shape[-1]
    if n < 2:
        raise NoOperandError
    rows = f"{a.name}.reshape(1, -1, {n}).movedim(-1, 1)"
    groups = g.choose([1, n])
    g.let(
        f"F.group_norm({rows}, {groups}, eps=0.1).movedim(1, -1).reshape({a.name}.shape)",
        a.type.shape,
    )


@rule("products")
def convolution(g: Builder) -> None:
    """Along the last dimension, padded to the same size."""
    a = g.float(2, 2)
    w = g.let(
        f"{g.float(1).name}.reshape(-1)[:1].reshape(1, 1, 1).expand(1, 1, 3) * 0.5", (1, 1, 3)
    )
    g.bounded(f"F.conv1d({a.name}.unsqueeze(1), {w.name}, padding=1).squeeze(1)", a.type.shape)


@rule("products")
def attention(g: Builder) -> None:
    q = g.float(2, 3)
    text = f"F.scaled_dot_product_attention({q.name}, {q.name}, torch.tanh({q.name}))"
    g.let(
        text if g.chance(0.5) else f"torch.softmax({q.name} @ {q.name}.mT, -1) @ {q.name}",
        q.type.shape,
    )


# --- reductions ---

REDUCE = [
    "{a}.sum({d}) * 0.3",
    "{a}.mean({d})",
    "torch.amax({u}, {d})",
    "{u}.amin({d})",
    "torch.max({u}, {d}).values",
    "{u}.min({d})[0]",
    "torch.logsumexp({a}, {d})",
    "({a} * {a} + 0.1).sum({d}).sqrt()",
    "torch.linalg.vector_norm({a} + 0.5, dim={d})",
    "torch.norm({a} + 0.5, dim={d})",
    "({a} * 0.2 + 1).prod({d}).tanh()",
    "{u}.median({d}).values",
    "torch.tanh({u}).sort({d}).values.mean({d})",
    "torch.var({a}, {d}, unbiased=False)",
]

KEEP = [
    "torch.softmax({a}, {d})",
    "torch.log_softmax({a}, {d}) * 0.3",
    "torch.cumsum({a}, {d}).tanh()",
    "{a} - {a}.mean({d}, keepdim=True)",
    "{a} / ({a}.abs().sum({d}, keepdim=True) + 1)",
    "F.normalize({a} + 0.5, dim={d})",
    "torch.logcumsumexp({a}, {d})",
    "torch.cummax({u}, {d}).values",
    "torch.sort({u}, {d}).values",
    "torch.sort({u}, {d}, descending=True)[0]",
    "torch.cumprod({a} * 0.2 + 1, {d}).tanh()",
    "F.glu(torch.cat([{a}, {a} * 0.5], {d}), {d})",
]


NORMS = [
    "torch.softmax({a}, -1)",
    "{a} - {a}.mean(-1, keepdim=True)",
    "{a} / ({a}.abs().sum(-1, keepdim=True) + 1)",
    "F.layer_norm({a}, ({n},), eps=0.1)",
    "torch.tanh(({u}).amax(-1, keepdim=True) - {a} * 0.5)",
    "{a} - torch.logsumexp({a}, -1, keepdim=True)",
    "{a} * torch.var({a}, -1, keepdim=True, unbiased=False).tanh()",
    "torch.where({a} > 3 + ({u}).min(-1, keepdim=True).values, {a} * 0.5, {a})",
    "torch.softmax(torch.cat([{a}, {b}], -1), -1)[..., {n}:] + {a}",
    "F.pad(({a} / (1 + {b}.square().mean(-1, keepdim=True)))[..., 1:], (0, 1)) * {b}",
    "{a} * ({b} * {a}).sum(-1, keepdim=True).tanh()",
]


@rule("norms")
def of_rows(g: Builder) -> None:
    """What is known of a row, in each of its elements."""
    a = g.float(2, 3)
    n, b = a.type.shape[-1], g.like(a.type.shape)
    text = g.choose(NORMS).format(a=a.name, b=b.name, n=n, u=g.untied(a))
    g.let(text, a.type.shape)


@rule("reductions")
def reduce(g: Builder) -> None:
    a = g.float(1, 3)
    axis = g.axis(a.type.shape)
    text = g.choose(REDUCE).format(a=a.name, u=g.untied(a), d=g.axis_text(axis, len(a.type.shape)))
    g.let(text, without(a.type.shape, axis))


@rule("reductions")
def keep(g: Builder) -> None:
    a = g.float(1, 3)
    axis = g.axis_text(g.axis(a.type.shape), len(a.type.shape))
    g.let(g.choose(KEEP).format(a=a.name, u=g.untied(a), d=axis), a.type.shape)


@rule("reductions")
def reduce_all(g: Builder) -> None:
    a = g.float(1, 3)
    texts = [
        "{a}.mean()",
        "torch.sin({a}.sum())",
        "({a} * {a} + 0.1).sum().sqrt().tanh()",
        "{u}.max()",
    ]
    g.let(g.choose(texts).format(a=a.name, u=g.untied(a)), ())


@rule("reductions")
def top(g: Builder) -> None:
    a = g.float(1, 2)
    n = a.type.shape[-1]
    k = g.choose([1, 2])
    if n < k:
        raise NoOperandError
    g.let(
        f"torch.topk({g.untied(a)}, {k}, -1).values",
        replaced(a.type.shape, len(a.type.shape) - 1, k),
    )


@rule("reductions")
def position(g: Builder) -> None:
    """An index that depends on the data."""
    a = g.float(1, 2)
    g.let(f"{g.untied(a)}.argmax(-1)", a.type.shape[:-1], "i", high=a.type.shape[-1])


# --- linear algebra ---


def _conditioned(g: Builder) -> tuple[Var, int]:
    """A symmetric matrix near the identity, made of a vector or matrix in scope."""
    n = g.choose([s for s in g.sizes if s <= 4])
    a = g.like((n, n))
    m = g.let(f"torch.eye({n}, dtype=dtype) * 2 + 0.2 * torch.tanh({a.name} + {a.name}.T)", (n, n))
    return m, n


@rule("linalg")
def solve(g: Builder) -> None:
    m, n = _conditioned(g)
    b = g.like((n, n)) if g.chance(0.5) else g.like((n,))
    g.let(f"torch.linalg.solve({m.name}, {b.name})", b.type.shape)


@rule("linalg")
def decompose(g: Builder) -> None:
    m, n = _conditioned(g)
    # diagonally dominant, whatever n is up to 4
    spd = f"({m.name} + torch.eye({n}, dtype=dtype) * 2)"
    texts = [
        "torch.linalg.inv({m})",
        "torch.linalg.cholesky({s})",
        "torch.cholesky_solve(torch.eye({n}, dtype=dtype), torch.linalg.cholesky({s}))",
        "torch.linalg.matrix_exp({m} * 0.1)",
        "torch.linalg.solve_triangular({m}, torch.eye({n}, dtype=dtype), upper=True)",
        "torch.linalg.qr({s})[0]",
        "torch.linalg.lu_factor({s})[0]",
        "torch.linalg.eigvalsh({s} + torch.diag(torch.arange({n}, dtype=dtype))).diag()",
        "torch.linalg.pinv({s})",
        "torch.inverse({s})",
    ]
    g.let(g.choose(texts).format(m=m.name, s=spd, n=n), (n, n))


@rule("linalg")
def determinant(g: Builder) -> None:
    m, _ = _conditioned(g)
    texts = [
        "torch.det({m})",
        "torch.linalg.slogdet({m})[1]",
        "torch.logdet({m})",
        "torch.trace({m})",
    ]
    g.let("torch.sin(" + g.choose(texts).format(m=m.name) + ")", ())


# --- casts ---


@rule("casts")
def round_trip(g: Builder) -> None:
    a = g.float()
    texts = [
        "{a}.float().to(dtype)",
        "({a} * 3.7 + 0.213).long().to(dtype) * 0.1 + {a}",
        "({a} > 0.0137).to(dtype) * {a}",
        "({a} > 0.0137).long() * {a}",
        "{a} + ({a} * 2.3 + 0.117).int() * 0.1",
        "torch.round({a} * 3 + 0.0713) * 0.1 + {a}",
        "torch.floor({a} * 2 + 0.0713) * 0.2",
        "{a}.to(torch.float32).double().to(dtype) * 0.9",
        "({a} + 0.0713).sign() * {a}",
        "torch.where(({a} > 0.0137) & ~({a} > 0.9137), {a}, 0.1)",
        "torch.where({a}.bool(), {a}, 0.1) + {a}",
    ]
    g.let(g.choose(texts).format(a=a.name), a.type.shape)


@rule("casts")
def to_integers(g: Builder) -> None:
    a = g.float(0, 2)
    n = g.choose([s for s in (*g.sizes, Size(5, "5"))])
    g.let(f"({a.name} * 3.7 + 9.213).long() % {n}", a.type.shape, "i", high=n)


@rule("casts")
def to_mask(g: Builder) -> None:
    a = g.float(0, 3)
    texts = [
        "{a} > 0.0137",
        "{a} <= -0.0713",
        "({a} > 0.0137) ^ ({a} < 0.5137)",
        "torch.isfinite({a})",
    ]
    g.let(g.choose(texts).format(a=a.name), a.type.shape, "b")


@rule("casts")
def integers(g: Builder) -> None:
    a = g.find(lambda t: t.dtype == "i" and t.high > 0)
    texts = ["({a} + 1) % {n}", "({a} * 2 + 1) % {n}", "torch.clamp({a}, max={n} - 1)"]
    n = g.size()
    g.let(g.choose(texts).format(a=a.name, n=n), a.type.shape, "i", high=n)


@rule("casts")
def from_integers(g: Builder) -> None:
    a = g.find(lambda t: t.dtype in "ib")
    texts = ["torch.sin({a}.to(dtype))", "{a}.to(dtype) * 0.1"]
    g.let(g.choose(texts).format(a=a.name), a.type.shape)


# --- complex ---


def _complex(g: Builder) -> Var:
    try:
        return g.find(lambda t: t.dtype == "c")
    except NoOperandError:
        a = g.float(0, 2)
        b = g.like(a.type.shape)
        texts = [
            "torch.complex({a}, {b})",
            "torch.polar(torch.sigmoid({a}), {b})",
            "{a} + 0.5j * {b}",
            "{a}.to(cdtype) * torch.exp(1j * {b})",
            "torch.view_as_complex(torch.stack([{a}, {b}], -1))",
        ]
        return g.let(g.choose(texts).format(a=a.name, b=b.name), a.type.shape, "c")


@rule("complex")
def complex_unary(g: Builder) -> None:
    z = _complex(g)
    texts = ["{z} * (0.5 + 0.3j)", "{z}.conj()", "{z} * {z}.conj() * 0.3", "torch.exp({z} * 0.3)",
             "{z} / (1 + {z} * {z}.conj())", "torch.sin({z} * 0.5)", "-{z}", "{z}.conj() * 0.7j"]  # fmt: skip
    g.let(g.choose(texts).format(z=z.name), z.type.shape, "c", fresh=False)


@rule("complex")
def complex_binary(g: Builder) -> None:
    z = _complex(g)
    w = g.find(lambda t: t.dtype in "cf" and t.shape == z.type.shape)
    texts = ["{z} * {w} * 0.5", "{z} + {w}", "{z} - {w}.conj()"]
    g.let(g.choose(texts).format(z=z.name, w=w.name), z.type.shape, "c")


@rule("complex")
def complex_product(g: Builder) -> None:
    z = g.find(lambda t: t.dtype == "c" and 1 <= len(t.shape) <= 2)
    n = z.type.shape[-1]
    w = g.find(lambda t: t.dtype in "fc" and len(t.shape) == 2 and t.shape[0] == n)
    out = (*z.type.shape[:-1], w.type.shape[1])
    texts = ["0.3 * ({z} @ {w}.to(cdtype))", "({z} @ {w}.to(cdtype)).conj() * 0.2"]
    g.let(g.choose(texts).format(z=z.name, w=w.name), out, "c")


@rule("complex")
def to_real(g: Builder) -> None:
    z = _complex(g)
    texts = ["{z}.real", "{z}.imag", "{z}.conj().imag", "({z} + 3.1).abs()", "({z} + 3.1).angle()",
             "torch.view_as_real({z})[..., 0]", "torch.view_as_real({z}).sum(-1)",
             "torch.real({z} * {z})", "torch.view_as_real({z}.conj().resolve_conj())[..., 1]"]  # fmt: skip
    g.let("torch.tanh(" + g.choose(texts).format(z=z.name) + ")", z.type.shape)


@rule("complex")
def transformed(g: Builder) -> None:
    a = g.float(1, 2)
    n = a.type.shape[-1]
    texts = ["torch.fft.fft({a}).real * 0.3", "torch.fft.ifft(torch.fft.fft({a}) * 0.5).real",
             "torch.fft.irfft(torch.fft.rfft({a}) * (0.5 + 0.2j), n={n})"]  # fmt: skip
    g.let(g.choose(texts).format(a=a.name, n=n), a.type.shape)


@rule("casts")
def copied(g: Builder) -> None:
    a = g.float()
    texts = ["{a}.clone()", "{a}.contiguous()", "{a}.to(dtype)", "{a}.reshape({s})", "+{a}"]
    text = g.choose(texts)
    g.let(text.format(a=a.name, s=size_text(a.type.shape)), a.type.shape, fresh="clone" in text)
