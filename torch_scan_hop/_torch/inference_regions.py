"""``torch.inference_mode`` in a body (checked on torch 2.9.1, 2.13.0, 2.15.0).

An object opens the mode, and puts the dispatcher's state back when it is freed. A trace that fails
while the mode is open keeps the object alive. When it is freed, later, the dispatcher is in
the state of that trace, and nothing in torch works any more. And a trace does fail there: tensors
that are made in this mode cannot be saved for a backward.

So a body's inference mode is ``no_grad``, which gives the same numbers. Nobody can tell from a
scan's results, which are tensors of their own.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

_set_grad_enabled = torch._C._set_grad_enabled


def make_no_grad(graph: fx.Graph) -> None:
    """Rewrite ``graph``, captured in the grad mode that is on now.

    ::

        guard = _enter_inference_mode(True)     # becomes _set_grad_enabled(False)
        _exit_inference_mode(guard)             # and what it was before
    """
    enabled = torch.is_grad_enabled()
    before: dict[fx.Node, bool] = {}
    for node in list(graph.nodes):
        if node.target is _set_grad_enabled:
            enabled = node.args[0]
            continue
        if node.target is _enter_inference_mode:
            before[node], enabled = enabled, not node.args[0]
        elif node.target is _exit_inference_mode:
            enabled = before[node.args[0]]
        else:
            continue
        with graph.inserting_before(node):
            graph.call_function(_set_grad_enabled, (enabled,))
    for node in reversed(list(graph.nodes)):
        if node.target in (_enter_inference_mode, _exit_inference_mode):
            graph.erase_node(node)


def is_in_no_grad(graph: fx.Graph) -> bool:
    """Return True if the last node that sets the grad mode in ``graph`` turned it off."""
    nodes = graph.find_nodes(op="call_function", target=_set_grad_enabled)
    return bool(nodes) and not nodes[-1].args[0]
