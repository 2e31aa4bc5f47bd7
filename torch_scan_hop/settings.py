"""What a call of ``scan`` does where its arguments do not say."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch_scan_hop.errors import ScanTypeError, describe


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
                raise ScanTypeError(
                    f"set_default: no default is called {name!r}; there is {', '.join(names)}."
                )
            check_flag("set_default", name, value)
        self.before, _current = _current, dataclasses.replace(_current, **changes)

    def __enter__(self) -> set_default:
        return self

    def __exit__(self, *exc: Any) -> None:
        global _current
        _current = self.before


def check_flag(where: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ScanTypeError(f"{where}: {name} must be True or False, but got {describe(value)}.")
