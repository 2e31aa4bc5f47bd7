"""Prepare torch and torch_xla for tracing a scan over XLA tensors.

The first capture of a scan after torch_xla was imported calls this, whoever imported it.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import fx

from torch_scan_hop._torch import xla as _xla
from torch_scan_hop.op import ScanOperator


@functools.cache
def prepare() -> None:
    _xla.before_openxla_compiles(close_over_bodies)
    _xla.let_fakes_describe_wrapped_tensors()
    _xla.let_fakes_know_the_device()
    _xla.let_gradients_through_mark_sharding()
    _xla.let_composites_have_derivatives()


class ClosedScan:
    """``scan`` with its body bound: the same body, and so the same cached program, every time."""

    def __init__(self, op: ScanOperator, body: Any) -> None:
        self.op = op
        self.body = body
        self.__name__ = "scan"

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.op(self.body, *args, **options)


def close_over_bodies(module: fx.GraphModule) -> None:
    """Replace ``scan(get_attr body, ...)`` by ``scan'(...)``.

    The openxla backend compiles the graph in parts and leaves ``get_attr`` nodes out of them,
    so a body would become an argument of a part, which takes only tensors.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if not isinstance(node.target, ScanOperator):
            continue
        attribute, *rest = node.args
        node.target = ClosedScan(node.target, getattr(module, attribute.target))
        node.args = tuple(rest)
        if not attribute.users:
            graph.erase_node(attribute)
    module.recompile()
