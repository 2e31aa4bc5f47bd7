"""Rows that a mask selects: computed row by row, and written back or summed."""

from __future__ import annotations

from .builder import Builder, rule
from .program import Shape, size_text
from .rules_write import buffer

#: of a row of any shape, and of one with dimensions
ANY = (
    "torch.tanh({r})", "{r} * 0.7", "torch.sqrt({r}.abs())", "{r}.abs().add(0.1).log()",
    "torch.where({r} > 0.0137, {r}, -0.5 * {r})", "{r}.clone().mul_(0.5)", "torch.sin({r}) + {other}",
    "{r} * {scale}", "torch.atan({r} / {scale})", "{r} - {r}.mean(0)",
)  # fmt: skip
WITH_DIMS = (
    "{r}.softmax(-1)", "{r} - {r}.mean(-1, keepdim=True)", "{r}.flip(-1)", "{r}.cumsum(-1) * 0.3",
    "torch.tanh({r} @ {square})", "F.layer_norm({r}, ({n},), {last})", "torch.tanh({r} * {last})",
    "torch.atan({r} / {r}.norm(dim=-1, keepdim=True))", "torch.cat({r}.tensor_split(2, -1)[::-1], -1)",
    "{r}.unsqueeze(-1).expand(*[-1] * {r}.dim(), 2).mean(-1)",
)  # fmt: skip
#: of several rows: such a body is a loop
ACROSS = ("{r}.cumsum(0) * 0.3", "{r}.sort(0).values", "{r}.flip(0)")
SUMS = (
    "torch.tanh({r}.sum())", "torch.sin({r}.mean().nan_to_num())", "{r}.abs().clamp(max=1).prod()",
    "({r} > 0.0137).any().to(dtype)", "torch.tanh({r}.sum() / 2)",
)  # fmt: skip


@rule("masks")
def selected(g: Builder) -> None:
    z = buffer(g, 1, 3)
    shape = z.type.shape
    dim = g.choose(range(min(2, len(shape))))
    rank = 2 if dim + 2 <= len(shape) and g.chance(0.3) else 1
    m = g.like(shape[dim : dim + rank], "b").name
    if rank == 1 and g.chance(0.3):
        g.do(f"at_{m} = " + g.choose([f"{m}.nonzero().squeeze(1)", f"torch.where({m})[0]"]))
        m = f"at_{m}"
    key = ", ".join([":"] * dim + [m])
    source = z.name if g.chance(0.4) else g.like(shape).name
    other = f"{g.like(shape).name}[{key}]"
    r = f"rows_{g.name()}"
    g.do(f"{r} = {source}[{key}]")
    for _ in range(g.choose([1, 2, 3, 4])):
        g.do(f"{r} = " + _step(g, r, other, shape[dim + rank :]))
    if g.chance(0.5):
        g.do(f"{z.name}[{key}] {g.choose(['=', '=', '+=', '*='])} {r}")
    if g.chance(0.5):
        g.let(g.choose(SUMS).format(r=r), ())
    elif g.chance(0.5):
        g.do(f"{z.name}[{key}] *= 0.5")


def _step(g: Builder, r: str, other: str, inner: Shape) -> str:
    scale = g.like(())
    if g.chance(0.03):
        return g.choose(ACROSS).format(r=r)
    if not inner or g.chance(0.4):
        return g.choose(ANY).format(r=r, other=other, scale=scale.name)
    n = inner[-1]
    return g.choose(WITH_DIMS).format(
        r=r, square=g.like((n, n)).name, last=g.like((n,)).name, n=size_text((n,)).strip("(),")
    )
