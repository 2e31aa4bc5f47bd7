"""Attributes that are not there (checked on torch 2.9.1, 2.13.0, 2.15.0).

Dynamo guards the answer of ``hasattr``, but not an AttributeError that the program catches: the
graph would go on without an attribute that is there by now.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import builtin

from torch_scan_hop._torch.replaced import replaced

_NAMES_THE_OWNER = "attr" in inspect.signature(GuardBuilder.HASATTR).parameters  # torch > 2.9


def guard_absence(owner: Any, name: str) -> None:
    """Trace anew when there is an attribute ``name``, which ``owner`` has not got."""
    if owner.source is None:  # made by the program itself
        return
    if _NAMES_THE_OWNER:
        has = functools.partial(GuardBuilder.HASATTR, attr=name)
        install_guard(owner.source.make_guard(has))
    else:
        install_guard(AttrSource(owner.source, name).make_guard(GuardBuilder.HASATTR))


@contextlib.contextmanager
def absences_are_guarded() -> Iterator[None]:
    """Within, an attribute that is looked for in vain is guarded."""
    is_function = hasattr(symbolic_convert, "generic_getattr")  # since torch 2.15
    name = "generic_getattr" if is_function else "call_getattr"
    places: list[Any] = [symbolic_convert, builtin] if is_function else [builtin.BuiltinVariable]
    original: Any = getattr(places[0], name)

    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ObservedAttributeError:
            owner, attribute = args[1:3] if is_function else args[2:4]
            if not isinstance(attribute, str):
                attribute = attribute.as_python_constant()
            guard_absence(owner.realize(), attribute)
            raise

    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(replaced(place, **{name: read}))
        yield
