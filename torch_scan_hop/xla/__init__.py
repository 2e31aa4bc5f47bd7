"""Scan on XLA devices: the body becomes HLO, the scan one ``While`` around it.

``graph``    the body as a functional graph of ATen operators, traced on fakes
``program``  functions and loops lowered to HLO, and how to call them
``prepare``  prepares torch for tracing XLA tensors
``lower``    the XLA kernel of the operator: programs cached with their body, and called; of a body
             that torch_xla cannot lower, each step runs on its own

Only those steps run anything on the device, or send to it or read from it, before the caller's
graph is executed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_scan_hop.xla.lower import lower_scan

__all__ = ["lower_scan"]


def __getattr__(name: str) -> Any:
    """``lower_scan`` needs torch_xla, other modules of this package do not."""
    if name == "lower_scan":
        from torch_scan_hop.xla.lower import lower_scan

        return lower_scan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
