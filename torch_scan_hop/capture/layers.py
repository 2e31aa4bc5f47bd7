"""Dynamo's trackers of questions about layers, and about what is written to."""

from __future__ import annotations

from typing import Any

from torch import fx

from torch_scan_hop._torch.dynamo.modules import assigned_so_far, guard_on_module, module_of
from torch_scan_hop._torch.dynamo.variables import (
    ConstantVariable,
    LazyVariableTracker,
    TorchHigherOrderOperatorVariable,
    VariableTracker,
    graph_being_traced,
)
from torch_scan_hop.alike.modules import complaint
from torch_scan_hop.capture.purify import CapturedBody
from torch_scan_hop.capture.user_code import PACKAGE


class ComplaintVariable(TorchHigherOrderOperatorVariable):
    """Compares layers as Dynamo traces the question, and guards that they stay alike."""

    _HOP_NAME = "scan_layer_complaint"

    def call_function(
        self, tx: Any, args: Any, kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        of_first, of_layer, k = LazyVariableTracker.realize_all(args)
        first, layer = module_of(tx, of_first), module_of(tx, of_layer)
        assigned = assigned_so_far(tx, first) | assigned_so_far(tx, layer)
        text = complaint(first, layer, k.as_python_constant(), assigned)
        if text is None and not assigned:
            guard_on_module(
                of_layer, layer, first, lambda one, other: complaint(one, other, 0) is None
            )
        return ConstantVariable.create(text)


class WrittenVariable(TorchHigherOrderOperatorVariable):
    """Tells what is written to, by the graph of the body as far as it goes."""

    _HOP_NAME = "scan_tensors_written"

    def call_function(
        self, tx: Any, args: Any, kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        nodes = [tensor.as_proxy().node for tensor in LazyVariableTracker.realize_all(args)]
        graph = graph_being_traced(tx)
        so_far = fx.Graph()
        so_far.graph_copy(graph, {})
        so_far.output(())
        body = CapturedBody(tx, so_far, 0, 0)
        written = body.written_placeholders()
        places = {node: k for k, node in enumerate(graph.find_nodes(op="placeholder"))}
        return ConstantVariable.create(tuple(places[node] in written for node in nodes))


def is_layers(combine_fn: VariableTracker) -> bool:
    """Return True if ``combine_fn`` is the body of ``scan_layers``.

    Each layer has attributes of its own there, and one layer stands for all of them.
    """
    code = getattr(getattr(combine_fn, "get_code", lambda: None)(), "co_filename", "")
    return str(code) == f"{PACKAGE}/layers.py"
