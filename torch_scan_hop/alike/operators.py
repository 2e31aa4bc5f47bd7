"""The question about modules that Dynamo's tracker answers in code that it traces.

The comparison looks at closures, code and memory, which Dynamo does not trace: so it gets the
objects themselves, once, and guards that ask again (see ``capture/layers``).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from torch_scan_hop._torch.operators import FlatOperator
from torch_scan_hop.alike.modules import Assigned, difference, hook_of


def differs(k: int, where: str, got: str, expected: str, fix: str = "") -> str:
    """Return the message that ``layers[k]`` has ``got`` at ``where``, a path from it on."""
    call = f"{fix} Or call" if fix else "Call"
    return (
        f"scan_layers: all layers must compute the same function of their parameters, but "
        f"layers[{k}]{where} {got}, while in layers[0] it {expected}. {call} layers[{k}] on its "
        "own, or run one scan_layers for each kind of layer."
    )


def complaint(
    first: nn.Module, layer: nn.Module, k: int, assigned: Assigned | None = None
) -> str | None:
    """Return why ``layer``, at place ``k``, cannot run as ``first`` with other tensors, or None."""
    hook = hook_of(layer)
    if hook is not None:
        return (
            f"scan_layers: one layer runs for all, and hooks of its own would too, but "
            f"layers[{k}]{hook[0]} has {hook[1]}. Register it on a module around the stack, or "
            "call the layers in a loop. (torch's older weight_norm and spectral_norm, and lazy "
            "modules that have not run, are hooks: use torch.nn.utils.parametrizations, and run "
            "lazy modules once.)"
        )
    found = difference(first, layer, assigned)
    if found is None:
        return None
    return differs(k, found.where, found.got, found.expected, found.fix)


class ComplaintOperator(FlatOperator):
    """Calls :func:`complaint`. Dynamo asks it once, with guards."""

    def __call__(self, first: nn.Module, layer: nn.Module, k: int) -> Any:  # type: ignore[override]
        return complaint(first, layer, k)


complaint_op = ComplaintOperator("scan_layer_complaint", cacheable=False)
