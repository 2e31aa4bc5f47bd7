"""Bounds are checked in threads, and reported outside of them (torch 2.9.1, 2.13.0, 2.15.0).

Inductor's kernels check an index that comes from a tensor where they read at it. In a kernel that
runs on several threads, the exception leaves an OpenMP region, and that ends the process. In
graphs with a scan, where every step may index by a token or a counter, the thread leaves the
element out instead, and the function raises when all threads are done.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from torch import fx
from torch._inductor.codegen.cpp import KernelGroup
from torch._inductor.virtualized import V

from torch_scan_hop._torch.replaced import wrap

_CHECK = re.compile(r'^(\s*)(\w*TORCH_CHECK)\((.*), ("index out of bounds[^"]*")\);$')
_FLAG = "scan_out_of_bounds"


_MARK = "torch_scan_hop.holds_a_scan"


def mark_as_holding_a_scan(module: fx.GraphModule) -> None:
    """Let kernels of this graph, and of the graphs in it, be written as those of scans are."""
    module.meta[_MARK] = True


@functools.cache
def report_outside_of_threads() -> None:
    """Report what threads found outside of them, in the kernels of marked graphs."""

    def codegen_group(original: Any, self: KernelGroup, *args: Any, **kwargs: Any) -> Any:
        source = original(self, *args, **kwargs)
        return checked_outside(source) if holds_a_scan(V.graph) else source

    wrap(KernelGroup, codegen_group=codegen_group)


def holds_a_scan(lowering: Any) -> bool:
    """Return True if this graph, or one that it is in, is marked."""
    while lowering is not None:
        if _MARK in getattr(getattr(lowering, "module", None), "meta", ()):
            return True
        lowering = getattr(lowering, "parent", None)
    return False


def checked_outside(source: str) -> str:
    """Return the function in ``source``, changed to raise for what its threads found.

    >>> print(checked_outside('''void kernel()
    ... {
    ...     #pragma omp parallel
    ...     {
    ...         for(long x=0; x<4; x+=1)
    ...         {
    ...             TORCH_CHECK((0 <= tmp0) & (tmp0 < 4L), "index out of bounds: 0 <= tmp0 < 4L");
    ...         }
    ...     }
    ... }
    ... '''))
    void kernel()
    {
    std::atomic<bool> scan_out_of_bounds{false};
        #pragma omp parallel
        {
            for(long x=0; x<4; x+=1)
            {
                if (!((0 <= tmp0) & (tmp0 < 4L))) { scan_out_of_bounds = true; continue; }
            }
        }
    TORCH_CHECK(!scan_out_of_bounds, "index out of bounds: 0 <= tmp0 < 4L");
    }
    <BLANKLINE>
    """
    lines, header = source.split("\n"), ""
    blocks: list[tuple[str, int]] = []
    checks: list[re.Match[str]] = []
    for k, line in enumerate(lines):
        text = line.strip()
        found = _CHECK.match(line)
        if found and _in_threads(blocks):
            space, _, condition, _ = found.groups()
            lines[k] = f"{space}if (!({condition})) {{ {_FLAG} = true; continue; }}"
            checks.append(found)
        elif text == "{":
            blocks.append((header, k))
        elif text.startswith("}") and blocks:
            _, first = blocks.pop()
            if not blocks and checks:
                _, check, _, message = checks[0].groups()
                lines[first] += f"\nstd::atomic<bool> {_FLAG}{{false}};"
                lines[k] = f"{check}(!{_FLAG}, {message});\n{line}"
                checks = []
        header = text or header
    return "\n".join(lines)


def _in_threads(blocks: list[tuple[str, int]]) -> bool:
    """Return True if the block is in a loop within a parallel region of OpenMP, and in no lambda of
    it.

    Then ``continue`` goes on with the next iteration of that loop.
    """
    headers = [header for header, _ in blocks]
    parallel = [k for k, header in enumerate(headers) if header.startswith("#pragma omp parallel")]
    if not parallel:
        return False
    inner = headers[parallel[-1] + 1 :]
    loops = [k for k, header in enumerate(inner) if header.startswith("for")]
    lambdas = [k for k, header in enumerate(inner) if "[&]" in header]
    return bool(loops) and (not lambdas or loops[-1] > lambdas[-1])
