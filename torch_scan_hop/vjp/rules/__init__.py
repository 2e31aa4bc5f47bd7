"""The rules that come with the package, one file per kind, gathered in `DEFAULT_RULES`."""

from __future__ import annotations

from ..table import RuleTable
from .joining import JOINING
from .linear import LINEAR
from .pointwise import CONSTANT, POINTWISE
from .views import VIEWS

DEFAULT_RULES = RuleTable({**POINTWISE, **LINEAR, **VIEWS, **JOINING}, CONSTANT)
