"""A graph as values of Inductor's IR, without buffers (checked on torch 2.9.1, 2.13.0, 2.15.0).

Import it only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import config, ir
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering
from torch._inductor.subgraph_lowering import SubgraphLoweringException as NotPointwise
from torch._inductor.virtualized import V

from torch_scan_hop._torch.replaced import replaced


class InlineLowering(PointwiseSubgraphLowering):
    """Values as functions of an index, without buffers; NotPointwise if one is needed.

    Within ``fresh_values``, the code of one kernel, each is computed once per place, however many
    others read it. Elsewhere nothing is kept: a value is a variable of the kernel at hand.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, root_graph_lowering=V.graph)
        self.n_nodes = len(gm.graph.nodes)
        self._computed: dict[Any, Any] | None = None
        self._in_order: list[Any] = []

    def lower(self, inputs: Sequence[Any]) -> list[Any]:
        never = 10**9
        inline = config.patch(
            realize_reads_threshold=never,
            realize_opcount_threshold=never,
            realize_acc_reads_threshold=never,
        )
        # a GraphLowering in all that lowerings ask of it
        handler: Any = self
        with (
            inline,
            # values that are read often stay inline
            replaced(ir.StorageBox, should_realize_on_reuse=lambda *_, **__: False),
            V.set_graph_handler(handler),
            _deep_recursion(self.n_nodes),
        ):
            self.run(*inputs)
        return list(self.graph_outputs or ())

    def register_buffer(self, *_: Any, **__: Any) -> Any:
        raise NotPointwise(f"{self._current_op} makes one")

    def run_node(self, n: fx.Node) -> Any:
        size = n.meta.get("val")
        if isinstance(size, torch.SymInt) and n.op != "placeholder":
            return size.node.expr
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(target, "_opname", "")
        is_random = name in ("inductor_random", "inductor_randint")
        if name == "inductor_randint":  # its bounds are expressions
            args = (*map(sympy.sympify, args[:2]), *args[2:])
        # Inductor gives each random number a buffer; it is the same wherever it is computed again
        inline = replaced(ir.StorageBox, realize=lambda _: None)
        with inline if is_random else contextlib.nullcontext():
            out = super().call_function(target, args, kwargs)
        for value in out if isinstance(out, (list, tuple)) else [out]:
            self.compute_once(value)
        return out

    def compute_once(self, value: Any) -> None:
        box = getattr(value, "data", None)
        data = getattr(box, "data", None)
        if isinstance(box, ir.StorageBox) and isinstance(data, ir.Pointwise):
            object.__setattr__(data, "inner_fn", self._once(data, data.inner_fn))
            self._in_order.append(data)

    def _once(self, data: Any, inner_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def fn(index: Any) -> Any:
            if self._computed is None:  # a lowering asks; what others read twice would double
                with self.fresh_values():
                    return fn(index)
            key = (id(data), tuple(index))
            if key not in self._computed:
                self._computed[key] = inner_fn(index)
            return self._computed[key]

        return fn

    def compute_in_order(self, index: Sequence[Any], size: Sequence[Any]) -> None:
        """Compute all values of ``size``, operands first, so that not a thousand calls nest."""
        for data in self._in_order:
            if list(data.get_size()) == list(size):
                data.inner_fn(index)

    def fresh_values(self) -> contextlib.AbstractContextManager[None]:
        """Compute values anew within, and forget them afterwards."""
        return replaced(self, _computed={})

    def scope_of_values(self) -> contextlib.AbstractContextManager[None]:
        """Use values that were computed outside, and forget those that are computed within."""
        outside = self._computed
        return replaced(self, _computed=None if outside is None else dict(outside))


@contextlib.contextmanager
def _deep_recursion(n_nodes: int) -> Iterator[None]:
    """Raise Python's recursion limit, since some lowerings ask for all values that one reads."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, min(1000 + 4 * n_nodes, 20_000)))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
