"""The scan that PyTorch users reach for: five lines of Python, one operator."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from torch_scan_hop._torch.capabilities import attempt as _attempt
from torch_scan_hop._torch.capabilities import is_there as _is_there
from torch_scan_hop._torch.capabilities import require as _require
from torch_scan_hop.errors import NonFiniteError
from torch_scan_hop.fallback import NotTraceableError, fallback
from torch_scan_hop.progress_bar import progress
from torch_scan_hop.schedule.policy import Binomial
from torch_scan_hop.settings import accelerate_torch, set_default
from torch_scan_hop.versions import show_versions, warn_of_unknown_torch

warn_of_unknown_torch()

if _is_there("operator"):
    with _attempt("operator"):
        from torch_scan_hop import dispatch as _dispatch  # noqa: F401  (registers the kernels)
        from torch_scan_hop.api import scan
        from torch_scan_hop.capture import registration as _trackers
        from torch_scan_hop.debugging import debug
        from torch_scan_hop.explain import Explanation, explain
        from torch_scan_hop.layers import scan_layers

        _trackers.register()
if not _is_there("operator"):
    from torch_scan_hop.plain import (  # type: ignore[assignment]
        Explanation,
        debug,
        explain,
        scan,
        scan_layers,
    )

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

if _TYPE_CHECKING:
    from torch_scan_hop import graphs as graphs
    from torch_scan_hop import nn as nn
    from torch_scan_hop import vjp as vjp
else:

    def __getattr__(name: str) -> _Any:
        """Import modules that the README names, and that few need, when they are asked for."""
        if name in ("graphs", "nn", "vjp"):
            if name == "graphs":
                _require("capture")
            return _importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
