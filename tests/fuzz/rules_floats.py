"""Python floats that the program is given: symbols in a compiled one that is for any of them."""

from __future__ import annotations

from .builder import Builder, rule

READS = (
    "{a} * {f}", "{f} - {a}", "{f} / ({a}.abs() + 1)", "{a} / ({f} + 2)", "({a}.abs() + 0.5) ** {f}",
    "{a}.clamp(max={f})", "{a}.clamp(-1 - {f}, 1 + {f})", "torch.where({a} > {f}, {a}, {f})",
    "torch.full_like({a}, {f}) * {a}", "{a}.masked_fill({a} < {f}, {f})",
    "torch.add({a}, {b}, alpha={f})", "torch.addcmul({a}, {b}, {a}, value={f})",
    "torch.lerp({a}, {b}, {f})", "F.leaky_relu({a}, {f})", "F.celu({a}, {f} + 2)",
    "{a} * (1 - {f} * 2) / (3 + {f})", "{a} * -{f} + {a}.numel() * {f}",
    "({a} > {f}).to(dtype) * {f} + {a}", "{a} * ({f} + {a}.dim())", "torch.tensor({f}, dtype=dtype) + {a}",
)  # fmt: skip


@rule("floats")
def reads_a_float(g: Builder) -> None:
    a = g.float()
    b = g.like(a.type.shape)
    text = g.choose(READS).format(a=a.name, b=b.name, f=g.choose(g.floats))
    g.let(text, a.type.shape)
