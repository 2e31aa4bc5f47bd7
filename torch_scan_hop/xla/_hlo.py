"""A scan's HLO module from its body's: the typed face of the extension ``torch_scan_hop._C``.

The extension is optional (see ``setup.py``): only XLA needs it, so its absence is
an error here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

#: Roles of the body's parameters beside carries, whose role is their index.
SLICED = -1
INVARIANT = -2


class ExtensionNotBuiltError(ImportError):
    """``torch_scan_hop`` was installed without its C++ extension."""

    def __init__(self) -> None:
        super().__init__(
            "scan on XLA devices needs the C++ extension torch_scan_hop._C, which was not built "
            "when torch_scan_hop was installed. Install a C++17 compiler (Debian: `apt install "
            "g++`), then `pip install --force-reinstall --no-deps torch_scan_hop` (in a "
            "checkout: `pip install -e .`)."
        )


def _extension() -> ModuleType:
    try:
        return import_module("torch_scan_hop._C")
    except ImportError as error:
        raise ExtensionNotBuiltError from error


def assemble_scan(
    body: bytes, n_carry: int, length: int, reverse: bool, roles: Sequence[int], name: str = "scan"
) -> bytes:
    """Return the ``HloModuleProto`` of the scan whose body is ``body``; both are serialized.

    ``body: (parameters by role) -> (*carries, *ys)``, a flat tuple of arrays, becomes
    ``scan: (*carries, *other body parameters in body order) -> (*final carries, *stacked ys)``.
    A role is the index of a carry, ``SLICED`` (stacked to ``[length, ...]`` in the scan) or
    ``INVARIANT``. ``length`` is at least 1: the caller deals with empty scans. ``name`` is part
    of XLA's compilation cache key, so keep it constant.

    Raises ``ValueError`` if the module is malformed or does not fit the roles.
    """
    module: bytes = _extension().assemble_scan(body, n_carry, length, reverse, roles, name)
    return module
