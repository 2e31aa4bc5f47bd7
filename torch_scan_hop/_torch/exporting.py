"""torch.export makes a program, and runs one (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from torch_scan_hop._torch.replaced import wrap
from torch_scan_hop._torch.sizes import is_exporting
from torch_scan_hop._torch.tracing import is_exporting_to_onnx

log = logging.getLogger(__name__)


def is_making_a_program() -> bool:
    """Return True if an export is under way whose readers this package does not know.

    ONNX's exporter is known, and so is Inductor, which compiles ahead of time: both give False.
    """
    return is_exporting() and not is_exporting_to_onnx() and not _is_compiling_ahead_of_time()


def _is_compiling_ahead_of_time() -> bool:
    virtualized: Any = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and bool(virtualized.V.aot_compilation)


def before_a_program_runs(rewrite: Callable[[fx.GraphModule], None]) -> None:
    """Have ``rewrite`` change, in place, every module that ``ExportedProgram.module()`` makes.

    torch runs that module, and compiles it, decomposes it and exports it to ONNX.
    """

    def module(make: Any, self: ExportedProgram, *args: Any, **kwargs: Any) -> Any:
        made = make(self, *args, **kwargs)
        try:
            rewrite(made)
        except Exception:
            log.warning("an exported program runs as others would run it", exc_info=True)
            made = make(self, *args, **kwargs)
        return made

    wrap(ExportedProgram, module=module)
