"""What a call of ``scan`` does where its arguments do not say."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch_scan_hop._torch.own_scan import forget_captures
from torch_scan_hop.errors import ScanTypeError, describe
from torch_scan_hop.refusals import refused


@dataclass(frozen=True)
class Defaults:
    compile: bool = False


_current = Defaults()


def defaults() -> Defaults:
    """The defaults in force."""
    return _current


class set_default:
    """Set what scans do by default: from here on, or for a while as a context.

    Args:
        compile: whether scans in eager mode are compiled by Inductor (False at first); see
            ``compile`` of :func:`torch_scan_hop.scan`.

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
        global _current
        names = [field.name for field in dataclasses.fields(Defaults)]
        for name, value in changes.items():
            if name not in names:
                raise refused(
                    ScanTypeError,
                    f"set_default: no default is called {name!r}; there is {', '.join(names)}.",
                )
            check_flag("set_default", name, value)
        self.before, _current = _current, dataclasses.replace(_current, **changes)

    def __enter__(self) -> set_default:
        return self

    def __exit__(self, *exc: Any) -> None:
        global _current
        _current = self.before


_accelerates_torch = False


def accelerates_torch() -> bool:
    """Whether torch's own ``scan()`` runs on this package's operator."""
    return _accelerates_torch


class accelerate_torch:
    """Let torch's own prototype ``scan()`` run on this package's operator: a setting, or a context.

    Programs that call the ``scan`` of torch's prototypes, as TorchRL's recurrent modules
    do, get our gradients, rewrites and Inductor loops unchanged, in eager mode, under
    ``torch.compile`` and ``torch.export``. What was captured before is captured anew.

    Args:
        on: True, or False to leave torch's ``scan()`` as torch has it (so it is at first).

    Raises:
        TypeError: ``on`` is not a bool.

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
        self.before = _accelerates_torch
        _set_accelerates_torch(on)

    def __enter__(self) -> accelerate_torch:
        return self

    def __exit__(self, *exc: Any) -> None:
        _set_accelerates_torch(self.before)


def _set_accelerates_torch(on: bool) -> None:
    global _accelerates_torch
    if on != _accelerates_torch:
        _accelerates_torch = on
        forget_captures()


def check_flag(where: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise refused(
            ScanTypeError, f"{where}: {name} must be True or False, but got {describe(value)}."
        )
