"""The rules that come with the package, one file per kind, gathered in `DEFAULT_RULES`."""

from __future__ import annotations

from ..table import RuleTable
from .alternatives import sin_saving_cos, sin_saving_x, strict_add, strict_mul, sum_saving_x
from .joining import JOINING
from .linear import LINEAR
from .pointwise import CONSTANT, POINTWISE
from .views import VIEWS

DEFAULT_RULES = RuleTable({**POINTWISE, **LINEAR, **VIEWS, **JOINING}, CONSTANT)

__all__ = [
    "DEFAULT_RULES",
    "sin_saving_cos",
    "sin_saving_x",
    "strict_add",
    "strict_mul",
    "sum_saving_x",
]
