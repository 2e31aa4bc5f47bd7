"""Carries that are affine in themselves, or extremes: kernels parallel in time take them."""

from __future__ import annotations

from .builder import Builder
from .program import Carried

#: ``h`` the carry, ``a`` and ``b`` of xs alone, ``o`` a carry that is affine, and may be another
_AFFINE = (
    "{a} * {h} + {b}",
    "{h} * {a} - {b} / 3",
    "0.93 * {h} + 0.07 * {b}",
    "torch.lerp({h}, {b}, 0.2)",
    "torch.where({b} > 0.1, {a} * {h}, {b})",
    "torch.where({b} > 0.1, {b} - {h}, 0.5 * {h} + {b})",
    "-{h} / (1.3 + {b}.abs()) + {b}",
    "{h} + 0.1 * {b}",
    "{h} * (1.0 + 0.1 * {b})",
    "{a} * {h} + 0.2 * {o} + {b}",
    "0.3 * {o} - {b}",
    "1.9 * {a} * {h} + {b}",
    # products of which two are infinite, where four steps are not
    "torch.where({b} > 0.6, {h} * 1e160, {b} * 1e-300)",
)
_EXTREMES = ("torch.maximum({h}, {b})", "torch.minimum({b}, {h})")
_OF_XS = ("torch.sigmoid({x})", "torch.tanh({x} * 1.3)", "torch.cos({x}) * 0.9", "{x}")


def next_carry(g: Builder, carry: Carried, carries: list[Carried]) -> str | None:
    """The next value of ``carry``; None for one that is no tensor as xs are."""
    xs = [v.name for v in g.vars if v.name[0] == "x" and v.type.shape == carry.type.shape]
    if not _is_tensor(carry) or not xs:
        return None
    a, b = (g.choose(_OF_XS[:3]).format(x=g.choose(xs)), g.choose(_OF_XS).format(x=g.choose(xs)))
    if _is_extreme(g, carry):
        return g.choose(_EXTREMES).format(h=carry.name, b=b)
    affine = [c.name for c in carries if _is_tensor(c) and not _is_extreme(g, c)]
    return g.choose(_AFFINE).format(h=carry.name, a=a, b=b, o=g.choose(affine))


def _is_tensor(carry: Carried) -> bool:
    return carry.type.dtype in "fc" and carry.name[1:].isdigit()


def _is_extreme(g: Builder, carry: Carried) -> bool:
    """The same answer each time it is asked of a carry."""
    return carry.name != "c0" and (int(g.sizes[0]) + int(carry.name[1:])) % 3 == 0
