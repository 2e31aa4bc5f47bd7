"""``scan_layers``: a stack of equal layers as one scan over their parameters.

The loop's body is one layer, so a compiler sees one layer whatever the depth::

    carry: the layers' input          xs: each parameter and buffer, stacked to [n_layers, ...]
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torch_scan_hop._torch.modules import holding
from torch_scan_hop.alike.modules import complaint_op, differs
from torch_scan_hop.api import scan
from torch_scan_hop.capture.refusals import refused
from torch_scan_hop.capture.traced_operators import written_op
from torch_scan_hop.errors import ScanTypeError, ScanValueError, describe

Tensors = Mapping[str, torch.Tensor]


def scan_layers(
    layers: Iterable[nn.Module],
    input_data: Any,
    partition_fn: Any = None,
    is_layer_pure: bool = False,
    *,
    checkpoint: Any = None,
) -> Any:
    """``nn.Sequential(*layers)(input_data)``, traced and compiled as one layer in a loop.

    It is called as ``torch_xla.experimental.scan_layers.scan_layers`` is, and runs on any device.
    Gradients flow to the parameters of every layer. Buffers that a layer changes in its forward
    (batch norm statistics) are changed in that layer; others are not written to. Layers with equal
    parametrizations (``weight_norm``) are equal.

    Args:
        layers: modules of one class, with equal attributes (compared deeply: containers, functions
            with their closures, objects, tensors by value), parameters of the same shapes and no
            hooks. Each maps ``input_data`` to something of its structure, shapes and dtypes. A
            parameter or buffer may be one tensor in all layers.
        input_data: a tensor or a pytree of tensors. A tuple is unpacked for layers that take as
            many arguments, ``forward(x, y)``, as torch_xla does; otherwise it is one argument.
        partition_fn: accepted and ignored: use ``checkpoint``.
        is_layer_pure: accepted and ignored: guards tell whether a trace can be reused.
        checkpoint: as for :func:`torch_scan_hop.scan`; ``"full"`` keeps one activation per layer.

    Raises:
        TypeError, ValueError: a layer differs from the first, or cannot be shown not to, or has
            hooks; the message says which and how.

    Example:
        >>> layers = [nn.Linear(4, 4) for _ in range(3)]
        >>> x = torch.ones(2, 4)
        >>> bool(torch.allclose(scan_layers(layers, x), nn.Sequential(*layers)(x)))
        True
    """
    modules = list(layers)
    if not modules:
        return input_data
    for k, layer in enumerate(modules):
        _check_same(modules[0], layer, k)
    parameters = _stacked([dict(m.named_parameters()) for m in modules])
    buffers = _stacked([dict(m.named_buffers()) for m in modules])
    unpacks = isinstance(input_data, tuple) and _takes(modules[0], input_data)
    # a body that cannot be traced runs in Python, step by step: there each layer runs itself
    in_python = itertools.cycle(modules)

    def apply(carry: Any, tensors: tuple[dict[str, Any], dict[str, Any]]) -> tuple[Any, Any]:
        arguments = tuple(carry) if unpacks else (carry,)
        if torch.compiler.is_dynamo_compiling():
            output, changed = _run(modules[0], tensors, arguments)
        else:
            output, changed = next(in_python)(*arguments), {}
        _check_output(carry, output)
        return output, changed

    output, after = scan(
        apply, input_data, (parameters, buffers), length=len(modules), checkpoint=checkpoint
    )
    _write_back(modules, after)
    return output


def _run(
    layer: nn.Module, tensors: tuple[Tensors, Tensors], arguments: tuple[Any, ...]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Run ``layer`` with these tensors; return its output, and the buffers that it changed."""
    parameters, buffers = tensors
    given = {**parameters, **buffers}
    with holding(layer, given):
        output = layer(*arguments)
        after = dict(layer.named_buffers())
    written = written_op(*given.values()) if given else ()
    changed = {name for name, is_written in zip(given, written, strict=True) if is_written}
    for name in parameters:
        if name in changed:
            raise refused(
                ScanValueError,
                f"scan_layers: a layer's forward must not change its parameters, but that of "
                f"layers[0] changes {name} in place. Make it a buffer, or call the layers in a "
                "loop.",
            )
    return output, {n: after[n] for n in buffers if n in changed or after[n] is not given[n]}


def _check_output(taken: Any, returned: Any) -> None:
    """Raise if an output cannot be the next layer's input; a scan would speak of its carry."""
    if not isinstance(taken, torch.Tensor) or not isinstance(returned, torch.Tensor):
        return
    if taken.shape != returned.shape:
        raise refused(
            ScanValueError,
            f"scan_layers: a layer must return what it takes, but layers[0] takes "
            f"{describe(taken)} and returned {describe(returned)}. Call layers that change the "
            "shape on their own.",
        )


def _takes(layer: nn.Module, arguments: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(layer.forward).bind(*arguments)
    except TypeError:
        return False
    return True


def _stacked(tensors: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack the layers' tensors by name, except a tensor that all layers share.

    A shared one is closed over, and changes step by step.
    """
    first = tensors[0]
    own = [name for name in first if not all(t[name] is first[name] for t in tensors)]
    return {name: torch.stack([t[name] for t in tensors]) for name in own}


def _write_back(modules: list[nn.Module], stacks: Tensors) -> None:
    """Write back the buffers that the layers' forward has changed.

    Others are left alone, because they may be tensors that nobody can write to.
    """
    buffers = [dict(module.named_buffers()) for module in modules]
    for name in stacks:
        _check_not_shared(name, [of[name] for of in buffers])
    for k, of_layer in enumerate(buffers):
        for name, stack in stacks.items():
            # no torch.no_grad() around it: torch.export makes that a module of no results, which
            # it saves, and does not load
            of_layer[name].detach().copy_(stack[k].detach())


def _check_not_shared(name: str, buffers: list[torch.Tensor]) -> None:
    """Raise if some layers share a buffer and others do not.

    A buffer of all layers needs no stack. A stack of one that two layers share would give each of
    them a copy.
    """
    for k, buffer in enumerate(buffers):
        for i in range(k):
            if buffers[i] is buffer:
                raise refused(
                    ScanValueError,
                    f"scan_layers: a buffer that a forward changes must belong to one layer or to "
                    f"all, but {name} is one tensor in layers[{i}] and layers[{k}], and another in "
                    "others. Give each layer a tensor of its own.",
                )


# --- are they the same layer? ---


def _check_same(first: nn.Module, layer: nn.Module, k: int) -> None:
    if not isinstance(layer, nn.Module):
        raise refused(
            ScanTypeError,
            f"scan_layers: layers must be modules, but layers[{k}] is {describe(layer)}.",
        )
    text = complaint_op(first, layer, k)
    if text is not None:
        raise refused(ScanValueError, text)
    mine, theirs = _tensors(first), _tensors(layer)
    for name in [*mine, *theirs]:
        if name not in mine or name not in theirs:
            got, expected = "exists" if name in theirs else "is missing", "does not match"
        elif describe(mine[name]) != describe(theirs[name]):
            got, expected = f"is {describe(theirs[name])}", f"is {describe(mine[name])}"
        else:
            continue
        raise refused(ScanValueError, differs(k, f".{name}", got, expected))


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
