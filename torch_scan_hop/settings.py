"""Defaults for what the arguments of a call of ``scan`` leave open."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_scan_hop._torch.capabilities import require
from torch_scan_hop.capture.refusals import refused
from torch_scan_hop.errors import ScanTypeError, describe


class Setting:
    """Puts a value in force when it is made, until the context ends if it is used as one."""

    def __init__(self, put: Callable[[Any], None], before: Any, value: Any) -> None:
        self._put, self._before = put, before
        put(value)

    def __enter__(self) -> Setting:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._put(self._before)


@dataclass(frozen=True)
class Defaults:
    compile: bool = False
    detect_nonfinite: bool = False


_current = Defaults()


def defaults() -> Defaults:
    """Return the defaults in force."""
    return _current


def _set_defaults(changed: Defaults) -> None:
    global _current
    _current = changed


class set_default(Setting):
    """Set what scans do by default: from here on, or for a while as a context.

    Args:
        compile: whether scans in eager mode are compiled by Inductor (False at first); see
            ``compile`` of :func:`torch_scan_hop.scan`.
        detect_nonfinite: whether the results of each scan are looked at, and a nan or an inf that
            was not in its inputs is a :class:`torch_scan_hop.NonFiniteError` (False at first). In
            eager mode the scan is run once more, as :func:`torch_scan_hop.debug` runs it, to name
            the step and the operator. In a compiled or exported program it is an assertion, which
            names the leaf. A nan that a later step removes from the carry, and that is in no y, is
            not seen.

    Raises:
        TypeError: a default that does not exist, or a value of another type.

    Example:
        >>> with set_default(compile=True):
        ...     defaults().compile
        True
        >>> defaults().compile
        False
    """

    def __init__(self, **changes: Any) -> None:
        names = [field.name for field in dataclasses.fields(Defaults)]
        for name, value in changes.items():
            if name not in names:
                raise refused(
                    ScanTypeError,
                    f"set_default: no default is called {name!r}; there is {', '.join(names)}.",
                )
            check_flag("set_default", name, value)
        super().__init__(_set_defaults, _current, dataclasses.replace(_current, **changes))


_accelerates_torch = False
#: called when that changes
on_change_of_owner: list[Callable[[], None]] = []


def accelerates_torch() -> bool:
    """Return True if torch's own ``scan()`` runs on this package's operator."""
    return _accelerates_torch


class accelerate_torch(Setting):
    """Let torch's own prototype ``scan()`` run on this package's operator: a setting, or a context.

    Programs that call the ``scan`` of torch's prototypes, as TorchRL's recurrent modules
    do, get this package's gradients, rewrites and Inductor loops without a change, in eager mode,
    under ``torch.compile`` and ``torch.export``. What was captured before is captured anew.

    Args:
        on: True, or False to leave torch's ``scan()`` as torch has it (so it is at first).

    Raises:
        TypeError: ``on`` is not a bool.
        CapabilityMissing: this torch lacks what that needs.

    Example:
        >>> import torch
        >>> torchs_scan = getattr(torch, "_higher_order_ops").scan
        >>> with accelerate_torch():
        ...     h, hs = torchs_scan(lambda h, x: (h + x, h * x), torch.zeros(2), torch.ones(3, 2))
        >>> h, accelerates_torch()
        (tensor([3., 3.]), False)
    """

    def __init__(self, on: bool = True) -> None:
        check_flag("accelerate_torch", "on", on)
        if on:
            require("own_scan")
        super().__init__(_set_accelerates_torch, _accelerates_torch, on)


def _set_accelerates_torch(on: bool) -> None:
    global _accelerates_torch
    if on != _accelerates_torch:
        _accelerates_torch = on
        for call in on_change_of_owner:
            call()


def check_flag(where: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise refused(
            ScanTypeError, f"{where}: {name} must be True or False, but got {describe(value)}."
        )
