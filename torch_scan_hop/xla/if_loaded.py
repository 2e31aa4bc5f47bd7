"""The way into this package for code that runs without torch_xla, too."""

from __future__ import annotations

import sys


def prepare_xla_if_loaded() -> None:
    """XLA tensors may be about to be traced, if anyone has imported torch_xla."""
    if "torch_xla" in sys.modules:
        from torch_scan_hop.xla.prepare import prepare  # needs torch_xla

        prepare()
