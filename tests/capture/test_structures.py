"""A cell whose carry and y have one structure in one call and another in the next: what is known
of trees without being traced is guarded, too."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from oracle import randn

from torch_scan_hop import scan, tree
from torch_scan_hop.reference import scan_loop

One = namedtuple("One", "a b")
Other = namedtuple("Other", "a b")
Turned = namedtuple("Turned", "b a")


class Checked(namedtuple("Checked", "a b")):
    def __new__(cls, a: Any, b: Any) -> Any:
        return super().__new__(cls, a, b * 1)


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    b: Any
    a: Any = None


@dataclasses.dataclass
class Slotted:
    __slots__ = ("a", "b")
    a: Any
    b: Any


@dataclasses.dataclass
class Doubled(Plain):
    c: Any = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        self.b = self.b * 2  # made anew by steps, so at each; a scan makes none


def _of(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, dict) else getattr(value, name)


def cell(carry: Any, x: Any) -> tuple[Any, Any]:
    """Take one step of a carry of any structure, whose like is the y."""
    if isinstance(carry, torch.Tensor):
        return carry * 0.5 + x, x
    if type(carry) in (tuple, list):
        parts = [part if part is None else cell(part, x)[0] for part in carry]
        return type(carry)(parts), [(parts[0], None), {"x": x, 1: parts[-1]}]
    a, b = cell(_of(carry, "a"), x)[0], cell(_of(carry, "b"), x + 1)[0]
    if isinstance(carry, dict):
        kind = OrderedDict if isinstance(carry, OrderedDict) else dict
        new = kind({"b": b, "a": a})  # in another order: it is found by key
        return new, {"a": new, "y": b}
    new = type(carry)(a=a, b=b)
    return new, (type(carry)(a=b, b=x), new)


def z() -> Any:
    return randn(3)


MAKERS = (
    *(lambda: (z(), z()), lambda: [z(), z()], lambda: (z(), None), lambda: (z(), (z(), z()))),
    *(lambda: {"a": z(), "b": z()}, lambda: {"b": z(), "a": z()}, lambda: (z(), [z(), z()])),
    *(lambda: OrderedDict(a=z(), b=z()), z, lambda: (z(),)),
    *(lambda: One(z(), z()), lambda: Other(z(), z()), lambda: Turned(z(), z())),
    *(lambda: Checked(z(), z()), lambda: Plain(z(), z()), lambda: Frozen(z(), z())),
    *(lambda: Slotted(z(), z()), lambda: Doubled(z(), z()), lambda: One({"a": z(), "b": z()}, z())),
    *(lambda: {"a": One(z(), z()), "b": z()}, lambda: {"a": Plain(z(), z()), "b": z()}),
    *(lambda: Plain(Frozen(z(), z()), z()), lambda: Plain(z(), {"a": z(), "b": z()})),
)


def described(value: Any) -> Any:
    """Return the types and keys of a tree, in order."""
    parts = tree.children(value)
    if parts is None:
        return None if value is None else value.dtype
    return type(value), [(suffix, described(part)) for suffix, part in parts]


@pytest.mark.filterwarnings("ignore:.*was captured anew")
@pytest.mark.parametrize("way", ["eager", "compiled"])
@torch._dynamo.config.patch(recompile_limit=64)
def test_each_structure_gives_what_the_loop_gives(way):
    xs = randn(4, 3)
    run: Any = scan
    if way == "compiled":
        run = torch.compile(scan, backend="aot_eager", fullgraph=True)
    for make in (*MAKERS, *MAKERS[::-1]):
        init = make()
        leaves = [leaf.requires_grad_() for leaf in tree.tensors(init)]
        found = []
        for loop in (run, lambda fn, init, xs: scan_loop(fn, init, xs, 4, False)):
            results = loop(cell, init, xs)
            total = sum((k + 1.5) * v.cos().sum() for k, v in enumerate(tree.tensors(results)))
            found.append((results, torch.autograd.grad(total, leaves)))
        (ours, ours_grads), (loops, loops_grads) = found
        assert described(ours) == described(loops)
        pairs = zip(tree.tensors(ours), tree.tensors(loops), strict=True)
        for one, other in (*pairs, *zip(ours_grads, loops_grads, strict=True)):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
