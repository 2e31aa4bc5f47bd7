"""Graph passes on scans, before Inductor lowers them."""

from __future__ import annotations

from torch import fx


def prepare_scans(gm: fx.GraphModule) -> None:
    """Runs after Inductor's own post-grad passes, on every graph."""
