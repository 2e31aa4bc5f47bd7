"""Reductions of Inductor's that a kernel of this package makes (checked on torch 2.9.1, 2.13.0,
2.15.0).

Import it only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch._inductor import ir

from torch_scan_hop._torch.replaced import replaced


@contextlib.contextmanager
def reductions_made_by(make: Callable[[Mapping[str, Any]], Any]) -> Iterator[None]:
    """Let ``make`` make reductions, of Inductor's arguments for them.

    Where it returns None the reduction is Inductor's, which needs a buffer.
    """
    original = ir.Reduction.create

    def create(cls: Any, **how: Any) -> Any:
        made = make(how)
        return original(**how) if made is None else made

    with replaced(ir.Reduction, create=classmethod(create)):
        yield
