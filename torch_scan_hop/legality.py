"""Rewrites report here what they made, and tests check it.

What a rewrite may assume of a graph, and must leave as it found it, is stated in the checker of the
tests (``tests/legality``), which stands in ``check_after_each`` while they run. In production
nothing does.

The last graphs that are checked are those of ``inductor.body.destination_passing`` (its writes are
declared) and ``eager.fuse.fused``. What comes after is text: eager's source, whose ``out=``
write over values that end there, and Inductor's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

#: None in production: then a rewrite spends one comparison on this
check_after_each: Any = None


def check(what: str, name: str, *args: Any, **kwargs: Any) -> None:
    """Hand what the rewrite ``name`` made to the checker's method ``what``."""
    if check_after_each is not None:
        getattr(check_after_each, what)(name, *args, **kwargs)


def checked(name: str, module: fx.GraphModule, *args: Any, **kwargs: Any) -> fx.GraphModule:
    """Return ``module``, as the rewrite ``name`` made it, once ``Checker.graph`` has seen it."""
    check("graph", name, module, *args, **kwargs)
    return module


def run_passes(module: fx.GraphModule, passes: Sequence[Callable[[fx.Graph], None]]) -> None:
    """Run rewrites of one graph, one after the other, and check each under its name."""
    for rewrite in passes:
        rewrite(module.graph)
        checked(rewrite.__name__, module)
