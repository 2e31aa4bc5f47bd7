"""Other rules for operations that have one already, to be swapped in by name.

rules = DEFAULT_RULES.override({torch.sin: sin_saving_cos})
"""

from __future__ import annotations

from typing import Any

import torch

from ..shapes import check_same_shape
from ..table import Rule, saving_arguments
from .pointwise import POINTWISE, add, add_bwd, mul_bwd

sin_saving_x: Rule = POINTWISE[torch.sin]
"""The default: x is often kept anyway (memory); the backward computes cos x."""

sin_saving_cos = Rule(lambda x: (torch.sin(x), torch.cos(x)), lambda cos, d: d * cos)
"""The forward computes cos x beside sin x (speed, if the two share work) and keeps it."""


sum_saving_x = Rule(lambda x: (torch.sum(x), x), lambda x, d: d.expand_as(x))
"""`torch.sum(x)` over everything: keeps x instead of its sizes, so that the code fits any size."""


def _strict_add(a: Any, b: Any, alpha: Any) -> Any:
    check_same_shape("add", a, b)
    return add(a, b, alpha)


def _strict_mul(a: Any, b: Any) -> Any:
    check_same_shape("mul", a, b)
    return a * b


strict_add = saving_arguments(_strict_add, add_bwd)
"""Refuses to broadcast: a `ValueError` that names both shapes."""

strict_mul = saving_arguments(_strict_mul, mul_bwd)
"""Refuses to broadcast: a `ValueError` that names both shapes. For scalars there is `scale`."""
