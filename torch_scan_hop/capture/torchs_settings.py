"""Settings of torch's that a body changes: they are refused.

A loop computes with the new default dtype from there on, and leaves it so. The graph of a body is
traced anew for each derivative and each rewrite, operator by operator, and would lose such a call.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop.capture.user_code import users_line

#: by the names of the functions in a graph, what the user has written
_SETTERS = {
    "set_default_dtype": "torch.set_default_dtype",
    "set_float32_matmul_precision": "torch.set_float32_matmul_precision",
    "_set_deterministic_algorithms": "torch.use_deterministic_algorithms",
}


def refuse_settings(graphs: Iterable[fx.GraphModule]) -> None:
    """Raise if one of the graphs changes a setting."""
    for graph in graphs:
        for node in graph.graph.nodes:
            name = getattr(node.target, "__name__", "")
            if node.op == "call_function" and name in _SETTERS:
                where = users_line(node.stack_trace or "")
                raise Unsupported(f"the body calls {_SETTERS[name]}{where}")
