"""Things derived from a body graph, kept for as long as that graph lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from torch_scan_hop.signature import Inputs

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

Result = TypeVar("Result")

_derived: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


class _Symbol:
    """A symbolic number: it belongs to one trace, so no key that holds it is ever found."""

    __hash__ = None  # type: ignore[assignment]


def metadata(value: Any, drop_leading: bool = False) -> Any:
    """Return what a trace depends on in ``value``: for xs, that is not the trip count."""
    if not isinstance(value, torch.Tensor):
        return _Symbol() if isinstance(value, SYMBOLS) else (type(value), value)  # 1 == True
    shape = tuple(value.shape)[1 if drop_leading else 0 :]
    return (shape, value.dtype, value.device)


def inputs_metadata(inputs: Inputs[Any]) -> tuple[Any, ...]:
    return (
        _all_metadata(inputs.carry),
        _all_metadata(inputs.xs, drop_leading=True),
        _all_metadata(inputs.additional),
    )


def _all_metadata(values: Sequence[Any], drop_leading: bool = False) -> tuple[Any, ...]:
    """Return :func:`metadata` of each value, in one call: every call of a scan asks for all."""
    first = 1 if drop_leading else 0
    return tuple(
        [
            (tuple(value.shape)[first:], value.dtype, value.device)
            if isinstance(value, torch.Tensor)
            else metadata(value)
            for value in values
        ]
    )


_AUTOCAST_DEVICES = ("cpu", "cuda", "xla", "xpu", "mps", "hpu", "mtia")


def autocast_state() -> tuple[Any, ...]:
    """Return the global state that a trace depends on: every device's autocast, defaults, flags."""
    return (
        *[
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
            for device in _AUTOCAST_DEVICES
        ],
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


def remember(body: Any, key: tuple[Any, ...], make: Callable[[], Result]) -> Result:
    """Return ``make()``, or what it gave before for this body and key.

    A body that is not a module, or a key that holds symbols (they belong to one trace), is
    not remembered.
    """
    if not isinstance(body, torch.nn.Module):
        return make()
    known = _derived.get(body)
    if known is None:
        known = _derived[body] = {}
    try:
        return known[key]
    except TypeError:  # symbols, also those of a shape, have no hash
        return make()
    except KeyError:
        pass  # made outside, where it is not "during handling of a KeyError"
    known[key] = found = make()
    return found
