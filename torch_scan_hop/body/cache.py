"""Things derived from a body graph, kept for as long as that graph lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torch_scan_hop._torch.symbols import SYMBOLS
from torch_scan_hop.body.per_object import PerObject
from torch_scan_hop.signature import Inputs

Result = TypeVar("Result")

_derived = PerObject[dict[Any, Any]]()


class _Symbol:
    """A symbolic number: it belongs to one trace, so no key that holds it is ever found."""

    __hash__ = None  # type: ignore[assignment]


def metadata(value: Any) -> Any:
    """Return what a trace depends on in ``value``."""
    if not isinstance(value, torch.Tensor):
        return _Symbol() if isinstance(value, SYMBOLS) else (type(value), value)  # 1 == True
    return (tuple(value.shape), value.dtype, value.device)


def inputs_metadata(inputs: Inputs[Any]) -> tuple[Any, ...]:
    """Return :func:`metadata` of each input, behind the counts of carries and xs, in one loop
    without calls, since every call of a scan asks for it."""
    n_carry, n_xs = len(inputs.carry), len(inputs.xs)
    found: list[Any] = [n_carry, n_xs]
    for k, value in enumerate([*inputs.carry, *inputs.xs, *inputs.additional], -n_carry):
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            found.append((shape[1:] if 0 <= k < n_xs else shape, value.dtype, value.device))
        else:
            found.append(metadata(value))
    return tuple(found)


_AUTOCAST_DEVICES = ("cpu", "cuda", "xla", "xpu", "mps", "hpu", "mtia")


def autocast_state() -> tuple[Any, ...]:
    """Return the global state that a trace depends on: every device's autocast, defaults, flags."""
    enabled = tuple(map(torch.is_autocast_enabled, _AUTOCAST_DEVICES))
    return (
        *(map(_autocast_dtype, _AUTOCAST_DEVICES, enabled) if True in enabled else enabled),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _autocast_dtype(device: str, is_enabled: bool) -> Any:
    return is_enabled and torch.get_autocast_dtype(device)


def remember_for(
    body: Any, name: str, inputs: Inputs[Any], about: Any, make: Callable[[], Result]
) -> Result:
    """Return ``make()``, kept for inputs like these and for what else it is ``about``."""
    return remember(body, (name, inputs_metadata(inputs), autocast_state(), about), make)


def remember(body: Any, key: tuple[Any, ...], make: Callable[[], Result]) -> Result:
    """Return ``make()``, or what it gave before for this body and key, if the body is a module and
    the key holds no symbols, which belong to one trace."""
    if not isinstance(body, torch.nn.Module):
        return make()
    known = _derived.get(id(body))
    if known is None:
        known = _derived.keep(body, {})
    try:
        return known[key]
    except TypeError:  # symbols, also those of a shape, have no hash
        return make()
    except KeyError:
        pass  # made outside, where it is not "during handling of a KeyError"
    known[key] = found = make()
    return found
