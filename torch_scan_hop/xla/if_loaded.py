"""The way into this package for code that runs without torch_xla, too."""

from __future__ import annotations

import sys

from torch_scan_hop._torch.capabilities import attempt, is_there


def prepare_xla_if_loaded() -> None:
    """Prepare for a trace of XLA tensors, if anyone has imported torch_xla."""
    if "torch_xla" in sys.modules and is_there("xla"):
        with attempt("xla"):
            from torch_scan_hop.xla.prepare import prepare  # needs torch_xla

            prepare()
