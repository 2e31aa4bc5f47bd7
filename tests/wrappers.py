"""What the wrappers that Inductor generates look like."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor.utils import run_and_get_code

# over a size that is known at run time only, as the index of a step is: kernels have none
LOOP = re.compile(r"^ *for (\(int64_t )?u\d+ (in|=) ", re.MULTILINE)


def loops(codes: Sequence[str]) -> list[int]:
    """For each graph, the loops over steps in its wrapper, be it Python or C++.

    A scan that is one kernel has none.
    """
    return [len(LOOP.findall(code)) for code in codes]


def run_and_count_loops(fn: Callable[..., Any], *args: Any) -> tuple[Any, list[int]]:
    """What ``fn`` gives, and the loops over steps of each graph that was compiled meanwhile."""
    result, codes = run_and_get_code(fn, *args)
    assert codes, "no graph was compiled"
    return result, loops(codes)
