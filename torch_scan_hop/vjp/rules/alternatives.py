"""Other rules for operations that have one already, to be swapped in by name.

rules = DEFAULT_RULES.override({torch.sin: sin_saving_cos})
"""

from __future__ import annotations

from typing import Any

import torch

from ..shapes import check_same_shape
from ..table import Rule
from .linear import sum_fwd
from .pointwise import POINTWISE, add_bwd, add_fwd, mul_bwd, mul_fwd

sin_saving_x: Rule = POINTWISE[torch.sin]
"""The default: x is often kept anyway (memory); the backward computes cos x."""

sin_saving_cos = Rule(lambda x: (torch.sin(x), torch.cos(x)), lambda cos, d: d * cos)
"""The forward computes cos x beside sin x (speed, if the two share work) and keeps it."""


def _sum_of_all_fwd(x: Any) -> Any:
    return sum_fwd(x)[0], x


sum_saving_x = Rule(_sum_of_all_fwd, lambda x, d: d.expand_as(x))
"""`torch.sum(x)` over everything: keeps x instead of its sizes, so that the code fits any size."""


def _strict_add_fwd(a: Any, b: Any, alpha: Any = 1) -> Any:
    check_same_shape("add", a, b)
    return add_fwd(a, b, alpha)


def _strict_mul_fwd(a: Any, b: Any) -> Any:
    check_same_shape("mul", a, b)
    return mul_fwd(a, b)


strict_add = Rule(_strict_add_fwd, add_bwd)
"""Refuses to broadcast: a `ValueError` that names both shapes."""

strict_mul = Rule(_strict_mul_fwd, mul_bwd)
"""Refuses to broadcast: a `ValueError` that names both shapes. For scalars there is `scale`."""
