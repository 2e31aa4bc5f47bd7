"""Choose where Dynamo reads floats that vary (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch._dynamo.variables.builder import VariableBuilder


@contextlib.contextmanager
def floats_are_read_outside_bodies() -> Iterator[None]:
    """Read a float that varies in the program's own graph.

    Dynamo reads it, as a tensor, in the graph of the body that meets it first, and remembers the
    number. Another body that meets it would get a node of that graph, which is not around it.
    """
    wrap_symfloat = VariableBuilder.wrap_symfloat

    @functools.wraps(wrap_symfloat)
    def wrap(self: Any, value: float) -> Any:
        output = self.tx.output
        tracers = output.tracers
        output.tracers = tracers[:1]
        try:
            return wrap_symfloat(self, value)
        finally:
            output.tracers = tracers

    VariableBuilder.wrap_symfloat = wrap  # type: ignore[method-assign]
    try:
        yield
    finally:
        VariableBuilder.wrap_symfloat = wrap_symfloat  # type: ignore[method-assign]
