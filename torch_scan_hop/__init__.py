"""The scan that PyTorch users reach for: five lines of Python, one operator."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from torch_scan_hop import dispatch as _dispatch  # noqa: F401  (registers the kernels)
from torch_scan_hop.api import scan
from torch_scan_hop.capture import registration as _trackers
from torch_scan_hop.debugging import NonFiniteError, debug
from torch_scan_hop.explain import Explanation, explain
from torch_scan_hop.fallback import NotTraceableError, fallback
from torch_scan_hop.layers import scan_layers
from torch_scan_hop.progress_bar import progress
from torch_scan_hop.schedule.policy import Binomial
from torch_scan_hop.settings import accelerate_torch, set_default
from torch_scan_hop.versions import show_versions, warn_of_unknown_torch

__all__ = [
    "Binomial",
    "Explanation",
    "NonFiniteError",
    "NotTraceableError",
    "accelerate_torch",
    "debug",
    "explain",
    "fallback",
    "progress",
    "scan",
    "scan_layers",
    "set_default",
    "show_versions",
]
__version__ = "0.1.0"

warn_of_unknown_torch()
_trackers.register()

if _TYPE_CHECKING:
    from torch_scan_hop import graphs as graphs
    from torch_scan_hop import vjp as vjp
else:

    def __getattr__(name: str) -> _Any:
        """Modules that the README names, and that few need: imported when they are asked for."""
        if name in ("graphs", "vjp"):
            return _importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
