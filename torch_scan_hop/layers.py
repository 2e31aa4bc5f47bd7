"""``scan_layers``: a stack of equal layers as one scan over their parameters.

The loop's body is one layer, so a compiler sees one layer whatever the depth::

    carry: the layers' input          xs: each parameter and buffer, stacked to [n_layers, ...]
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torch_scan_hop.api import scan
from torch_scan_hop.capture.refusals import refused
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

    Takes the call of ``torch_xla.experimental.scan_layers.scan_layers``, on any device.
    Gradients flow to the parameters of every layer. Buffers that a layer changes in its forward
    (batch norm statistics) are changed in that layer.

    Args:
        layers: modules of one class, with the same configuration and parameters of the same
            shapes. Each maps ``input_data`` to something of its structure, shapes and dtypes.
        input_data: a tensor or a pytree of tensors. A tuple is unpacked for layers that take as
            many arguments, ``forward(x, y)``, as torch_xla does; otherwise it is one argument.
        partition_fn: accepted and ignored: use ``checkpoint``.
        is_layer_pure: accepted and ignored: guards tell whether a trace can be reused.
        checkpoint: as for :func:`torch_scan_hop.scan`; ``"full"`` keeps one activation per layer.

    Raises:
        TypeError, ValueError: a layer differs from the first; the message says which and how.

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
    first = modules[0]
    parameters = _stacked([dict(m.named_parameters()) for m in modules])
    buffers = _stacked([dict(m.named_buffers()) for m in modules])
    unpacks = isinstance(input_data, tuple) and _takes(first, input_data)

    def apply(carry: Any, tensors: tuple[dict[str, Any], dict[str, Any]]) -> tuple[Any, Any]:
        given, state = tensors
        state = {name: value.clone() for name, value in state.items()}
        arguments = tuple(carry) if unpacks else (carry,)
        output = torch.func.functional_call(first, {**given, **state}, arguments)
        _check_output(carry, output)
        return output, state

    output, after = scan(
        apply, input_data, (parameters, buffers), length=len(modules), checkpoint=checkpoint
    )
    _write_back(modules, after)
    return output


def _check_output(taken: Any, returned: Any) -> None:
    """The next layer takes what this one returns; a scan would speak of its carry."""
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
    return {name: torch.stack([t[name] for t in tensors]) for name in tensors[0]}


def _write_back(modules: list[nn.Module], stacks: Tensors) -> None:
    with torch.no_grad():
        for k, module in enumerate(modules):
            for name, buffer in module.named_buffers():
                buffer.copy_(stacks[name][k])


# --- are they the same layer? ---


def _check_same(first: nn.Module, layer: nn.Module, k: int) -> None:
    if not isinstance(layer, nn.Module):
        raise refused(
            ScanTypeError,
            f"scan_layers: layers must be modules, but layers[{k}] is {describe(layer)}.",
        )
    others = dict(layer.named_modules())
    for name, module in first.named_modules():
        where = f"layers[{k}]" + (f".{name}" if name else "")
        if name not in others:
            raise _differs(k, where, "is missing", "exists")
        _check_same_module(k, where, module, others[name])
    mine, theirs = _tensors(first), _tensors(layer)
    for name in [*mine, *theirs]:
        where = f"layers[{k}].{name}"
        if name not in mine or name not in theirs:
            raise _differs(k, where, "exists" if name in theirs else "is missing", "does not match")
        if describe(mine[name]) != describe(theirs[name]):
            raise _differs(k, where, f"is {describe(theirs[name])}", f"is {describe(mine[name])}")


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _check_same_module(k: int, where: str, expected: nn.Module, got: nn.Module) -> None:
    if type(expected) is not type(got):
        raise _differs(k, where, f"is a {type(got).__name__}", f"is a {type(expected).__name__}")
    theirs = _configuration(got)
    for name, value in _configuration(expected).items():
        if name not in theirs or theirs[name] != value:
            raise _differs(k, f"{where}.{name}", f"is {theirs.get(name)!r}", f"is {value!r}")


def _configuration(module: nn.Module) -> dict[str, Any]:
    """Plain values among the attributes: a dropout's p, a norm's eps, training or not."""
    plain = (bool, int, float, str, tuple, type(None))
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, plain) and not name.startswith("_")
    }


def _differs(k: int, where: str, got: str, expected: str) -> ScanValueError:
    return refused(
        ScanValueError,
        f"scan_layers: all layers must compute the same function of their parameters, but {where} "
        f"{got}, while in layers[0] it {expected}. Call layers[{k}] on its own, or run one "
        "scan_layers for each kind of layer.",
    )
