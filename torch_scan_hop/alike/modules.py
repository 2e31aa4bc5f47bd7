"""Walk two layers side by side, and say how they differ.

The comparison looks at closures, code and memory, which Dynamo does not trace. So traced code calls
an operator, whose tracker (``capture/layers``) compares the objects themselves, once, and guards
that they stay alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from torch_scan_hop._torch.modules import class_of, hooks_of, own_attributes
from torch_scan_hop._torch.operators import FlatOperator
from torch_scan_hop.alike.values import Comparison, Difference

#: attributes that a program being traced has assigned and not yet stored, by the module's id
Assigned = Mapping[int, Mapping[str, Any]]


def _hook_of(layer: nn.Module) -> tuple[str, str] | None:
    """Return the first hook in ``layer``, and where: ``(".linear", "a forward hook, log")``."""
    for name, module in layer.named_modules():
        for kind, hook in hooks_of(module):
            called = getattr(hook, "__qualname__", type(hook).__name__)
            return _path(name), f"{kind}, {called}"
    return None


def _difference(first: nn.Module, layer: nn.Module, assigned: Assigned | None = None) -> Any:
    """Return the first difference of two layers, but for the values of their tensors, or None."""
    if first is layer:
        return None
    mine = dict(first.named_modules(remove_duplicate=False))
    theirs = dict(layer.named_modules(remove_duplicate=False))
    registered = [t for m in (first, layer) for t in (*m.parameters(), *m.buffers())]
    compared = Comparison([(mine[n], theirs[n]) for n in mine if n in theirs], registered)
    try:
        for where, one, other in _in_both("", mine, theirs):
            _check_modules(compared, where, one, other, assigned or {})
        if list(mine) != list(theirs):
            raise Difference("", "has its submodules in another order", "has them in an order")
    except Difference as found:
        return found
    return None


def _in_both(
    where: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    for name in [*mine, *(n for n in theirs if n not in mine)]:
        place = f"{where}{_path(name)}"
        if name not in theirs:
            raise Difference(place, "is missing", "exists")
        if name not in mine:
            raise Difference(place, "exists", "is missing")
        yield place, mine[name], theirs[name]


def _check_modules(
    compared: Comparison, where: str, mine: nn.Module, theirs: nn.Module, assigned: Assigned
) -> None:
    kinds = [class_of(module) for module in (mine, theirs)]
    if kinds[0] is not kinds[1]:
        expected, got = (kind.__name__ for kind in kinds)
        more = " of another class of that name" if expected == got else ""
        raise Difference(where, f"is a {got}{more}", f"is a {expected}")
    attributes = [{**own_attributes(m), **assigned.get(id(m), {})} for m in (mine, theirs)]
    for place, one, other in _in_both(where, *attributes):
        compared.check(place, one, other)


def _path(name: str) -> str:
    return f".{name}" if name else ""


# --- what is said ---


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
    hook = _hook_of(layer)
    if hook is not None:
        return (
            f"scan_layers: one layer runs for all, and hooks of its own would too, but "
            f"layers[{k}]{hook[0]} has {hook[1]}. Register it on a module around the stack, or "
            "call the layers in a loop. (torch's older weight_norm and spectral_norm, and lazy "
            "modules that have not run, are hooks: use torch.nn.utils.parametrizations, and run "
            "lazy modules once.)"
        )
    found = _difference(first, layer, assigned)
    if found is None:
        return None
    return differs(k, found.where, found.got, found.expected, found.fix)


class ComplaintOperator(FlatOperator):
    """Calls :func:`complaint`. Dynamo asks it once, with guards."""

    def __call__(self, first: nn.Module, layer: nn.Module, k: int) -> Any:  # type: ignore[override]
        return complaint(first, layer, k)


complaint_op = ComplaintOperator("scan_layer_complaint", cacheable=False)
