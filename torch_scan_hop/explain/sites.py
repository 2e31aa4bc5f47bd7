"""The scans of a graph, with what each is given and what users call that."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.sizes import likely_bytes, likely_value
from torch_scan_hop.capture.replay import closure_of, names_of
from torch_scan_hop.capture.steady import STEADY
from torch_scan_hop.op import ScanOperator, scans_in
from torch_scan_hop.signature import Inputs

NameOf = Callable[[fx.Node], str]


@dataclass(frozen=True)
class Site:
    """One scan: its body, fakes of its inputs, and names of all of them."""

    name: str
    body: fx.GraphModule
    operands: Inputs[Any]
    names: Inputs[str]
    ys: tuple[str, ...]
    reverse: bool = False
    checkpoint: Any = None
    #: what init is called in the graph around the scan
    init: tuple[str, ...] = ()

    @property
    def settled(self) -> tuple[str, ...]:
        """The leaves that differ after the first step, which then runs on its own."""
        return self._steady()[0]

    @property
    def places(self) -> tuple[str, ...]:
        """The places in objects where steps leave something for one another."""
        return self._steady()[1]

    def _steady(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.body.meta.get(STEADY, ((), ()))  # type: ignore[no-any-return]

    @property
    def trip_count(self) -> Any:
        return self.operands.trip_count

    @property
    def steps(self) -> str:
        """The trip count, or ``T = ...`` with what it was when it was traced."""
        is_known = isinstance(self.trip_count, int)
        return str(self.trip_count) if is_known else f"T = {self.n_steps}"

    @property
    def n_steps(self) -> int:
        """The trip count, or what it was when it was traced."""
        return likely_value(self.trip_count)


def recorded(node: Any) -> Any:
    """Return the fake that stands for a node's value; a number is itself."""
    if not isinstance(node, fx.Node):
        return node
    return node.meta.get("val", node.meta.get("example_value"))


def graphs_in(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Return ``gm`` and the graphs in it (of cond, of checkpoint), but no bodies of scans."""
    yield gm
    bodies = {node.args[0] for node, _ in scans_in(gm)}
    for node in gm.graph.find_nodes(op="get_attr"):
        child = operator.attrgetter(str(node.target))(gm)
        if isinstance(child, fx.GraphModule) and node not in bodies:
            yield from graphs_in(child)


def site_of(node: fx.Node, body: fx.GraphModule, name_of: NameOf, name: str) -> Site:
    """Return the scan of ``body`` at ``node``, with names as the graph has them."""
    carry, xs, additional = (list(group) for group in node.args[1:])  # type: ignore[arg-type]
    operands = Inputs(*([recorded(n) for n in group] for group in (carry, xs, additional)))
    n_ys = len(recorded(node)) - len(carry)
    names = Inputs(
        _indexed("carry", len(carry)),
        _indexed("x", len(xs)),
        [_name(n, name_of) for n in additional],
    )
    options: dict[str, Any] = dict(node.kwargs)
    return Site(
        name,
        body,
        operands,
        names,
        tuple(_indexed("y", n_ys)),
        options.get("reverse", False),
        options.get("checkpoint"),
        tuple(_name(n, name_of) for n in carry),
    )


def _indexed(root: str, count: int) -> list[str]:
    """
    >>> _indexed("x", 1), _indexed("x", 2)
    (['x'], ['x[0]', 'x[1]'])
    """
    return [root] if count == 1 else [f"{root}[{k}]" for k in range(count)]


def _name(value: Any, name_of: NameOf) -> str:
    return name_of(value) if isinstance(value, fx.Node) else str(value)


def namer(names: dict[str, str]) -> NameOf:
    """Return what names a value after the placeholder that it is a copy or another shape of."""

    def name_of(node: fx.Node) -> str:
        seen = node
        while seen.op != "placeholder":
            given = seen.all_input_nodes
            if len(given) != 1 or isinstance(seen.target, ScanOperator):
                return node.name
            seen = given[0]
        return names.get(seen.name, seen.name)

    return name_of


def readable(source: str, fn: Any = None) -> str:
    """Return Dynamo's name of a captured value as a user would write it in ``fn``.

    >>> readable("__import___main__.weights['in']")
    "weights['in']"
    >>> readable("combine_fn.args[0]._modules['cell']._parameters['weight']")
    'self.cell.weight'
    """
    source = re.sub(r"[GL]\['__import_\w+?'\]\.|__import_\w+?\.", "", source)
    source = re.sub(r"L\['(\w+)'\]", r"\1", source)
    own = r"\bcombine_fn(?:\.func)?\.__closure__\[(\d+)\]\.cell_contents"
    source = re.sub(own, _cell_of(fn), source)
    source = _with_cells_named(source, fn)
    source = re.sub(r"\bcombine_fn\.args\[0\]", "self", source)
    source = re.sub(r"\bcombine_fn\.keywords\['(\w+)'\]", r"\1", source)
    source = re.sub(r"\b(?:combine_fn|fn\.__self__|fn)\.", "", source)
    return re.sub(r"\.?_(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", source).lstrip(".")


def _cell_of(fn: Any) -> Callable[[re.Match[str]], str]:
    names = names_of(fn)
    return lambda found: names[int(found[1])] if int(found[1]) < len(names) else found[0]


_CELL = re.compile(r"\b(\w+)\.__closure__\[(\d+)\]\.cell_contents")


def _with_cells_named(source: str, fn: Any) -> str:
    """Name variables of closed-over functions: ``inner.__closure__[0]`` is ``inner.w``."""
    known = closure_of(fn)
    found = _CELL.search(source)
    while found is not None:
        inner = known.get(found[1])
        names, k = names_of(inner), int(found[2])
        name = names[k] if k < len(names) else f"<{k}>"
        known = {**known, **closure_of(inner)}
        source = f"{source[: found.start()]}{found[1]}.{name}{source[found.end() :]}"
        found = _CELL.search(source)
    return source


def renamed(site: Site, carry: Sequence[str], xs: Sequence[str], ys: Sequence[str]) -> Site:
    """Return ``site`` with the pytree paths of its leaves. Further carries are closed-over tensors
    that the body writes to, and further ys what it appends to lists."""
    ys = [*ys, *("appended to a list" for _ in site.ys[len(ys) :])]
    written = [f"{name} (written)" for name in site.init[len(carry) :]]
    names = Inputs([*carry, *written], [*xs], site.names.additional)
    return replace(site, names=names, ys=tuple(ys))


def nbytes_of(value: Any) -> int:
    return likely_bytes(value) if isinstance(value, torch.Tensor) else 0
