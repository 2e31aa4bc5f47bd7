"""Torch's caches on disk of what Inductor and AOTAutograd made of a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def graph_caches(enabled: bool) -> Iterator[None]:
    """A graph that was compiled before, by whatever process, comes from the caches, or does not.

    With a hit our passes and lowerings do not run, and a backward comes with its forward: a test
    would see nothing of what it is about, or fail.
    """
    with (
        torch._inductor.config.patch(fx_graph_cache=enabled),
        torch._functorch.config.patch(enable_autograd_cache=enabled),
    ):
        yield
