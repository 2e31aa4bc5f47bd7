"""Remove what ONNX's ``Scan`` cannot take: a policy, and a step that returns what it closes over.

torch's exporter translates a scan's node and its body; this runs before it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.meta_values import call_recorded
from torch_scan_hop.op import ScanOptions
from torch_scan_hop.signature import Inputs, output_node


def fit_for_onnx(body: fx.GraphModule, inputs: Inputs[Any], options: ScanOptions) -> ScanOptions:
    """Change ``body`` in place, and drop the policy, since an ONNX program has no backward."""
    closed_over = inputs.signature.inputs_of(body).additional
    output = output_node(body.graph)
    results: Any = output.args[0]
    if not set(results).isdisjoint(closed_over):
        with body.graph.inserting_before(output):
            clone = torch.ops.aten.clone.default
            results = [call_recorded(clone, r) if r in closed_over else r for r in results]
        output.args = (tuple(results),)
        body.recompile()
    return dataclasses.replace(options, checkpoint=None)
