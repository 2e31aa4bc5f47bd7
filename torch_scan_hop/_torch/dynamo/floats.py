"""Choose where Dynamo reads floats that vary (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._dynamo.variables.builder import VariableBuilder

from torch_scan_hop._torch.replaced import replaced, wrapped


def floats_are_read_outside_bodies() -> AbstractContextManager[None]:
    """A float that varies is a tensor to read: it is read in the program's own graph.

    Dynamo reads it, as a tensor, in the graph of the body that meets it first, and remembers the
    number. Another body that meets it would get a node of that graph, which is not around it.
    """

    def wrap(wrap_symfloat: Any, self: Any, value: float) -> Any:
        output = self.tx.output
        with replaced(output, tracers=output.tracers[:1]):
            return wrap_symfloat(self, value)

    return wrapped(VariableBuilder, wrap_symfloat=wrap)
