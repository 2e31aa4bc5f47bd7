"""Attributes that are not there (checked on torch 2.9.1, 2.13.0, 2.15.0).

Dynamo guards the answer of ``hasattr``, but not an AttributeError that the program catches: the
graph would go on without an attribute that is there by now.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager
from typing import Any

from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from torch_scan_hop._torch.dynamo.variables import GETATTR
from torch_scan_hop._torch.replaced import wrapped

_HAS: Any = GuardBuilder.HASATTR
_NAMES_THE_OWNER = "attr" in inspect.signature(_HAS).parameters  # torch > 2.9


def guard_absence(owner: Any, name: str) -> None:
    """Trace anew when there is an attribute ``name``, which ``owner`` has not got."""
    if owner.source is None:  # made by the program itself
        return
    if _NAMES_THE_OWNER:
        install_guard(owner.source.make_guard(functools.partial(_HAS, attr=name)))
    else:
        install_guard(AttrSource(owner.source, name).make_guard(_HAS))


def absences_are_guarded() -> AbstractContextManager[None]:
    """Within, an attribute of an object that is looked for in vain is guarded."""

    def read(original: Any, self: Any, tx: Any, name: str) -> Any:
        try:
            return original(self, tx, name)
        except ObservedAttributeError:
            guard_absence(self, name)
            raise

    return wrapped(UserDefinedObjectVariable, **{GETATTR: read})
