"""Attributes that a step assigns to a class, and those that a class says how to assign (checked on
torch 2.9.1, 2.13.0, 2.15.0).

What a class is assigned an instance has, too, and so has a subclass. Dynamo finds there what the
class had before. And torch 2.9 does not call the setter of a property.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch._dynamo.source import AttrSource, TypeSource
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable

from torch_scan_hop._torch.dynamo.variables import GETATTR
from torch_scan_hop._torch.replaced import wrapped


@contextlib.contextmanager
def attributes_of_classes_are_found() -> Iterator[None]:
    def read_of_object(of_object: Any, self: Any, tx: Any, name: str) -> Any:
        found = None if _has_itself(tx, self, name) else _assigned(tx, type(self.value), name)
        return of_object(self, tx, name) if found is None else found

    def read_of_class(of_class: Any, self: Any, tx: Any, name: str) -> Any:
        found = _assigned(tx, self.value, name)
        return of_class(self, tx, name) if found is None else found

    with (
        wrapped(UserDefinedObjectVariable, **{GETATTR: read_of_object}),
        wrapped(UserDefinedClassVariable, **{GETATTR: read_of_class}),
        _setters_are_called(),
    ):
        yield


def _setters_are_called() -> contextlib.AbstractContextManager[None]:
    if not hasattr(UserDefinedObjectVariable, "try_get_descritor_and_setter_py_func"):
        return contextlib.nullcontext()  # torch > 2.9

    def assign(
        original: Any, self: Any, tx: Any, name: Any, value: Any, *how: Any, **named: Any
    ) -> Any:
        known = name.as_python_constant() if name.is_python_constant() else ""
        static = inspect.getattr_static(type(self.value), known, None)
        setter = static.fset if isinstance(static, property) else None
        if not isinstance(setter, types.FunctionType) or how or named:
            return original(self, tx, name, value, *how, **named)
        source = self.source and AttrSource(AttrSource(TypeSource(self.source), known), "fset")
        return UserFunctionVariable(setter, source=source).call_function(tx, [self, value], {})

    return wrapped(UserDefinedObjectVariable, method_setattr_standard=assign)


def _has_itself(tx: Any, instance: Any, name: str) -> bool:
    stored = tx.output.side_effects.store_attr_mutations.get(instance, {})
    return name in stored or name in getattr(instance.value, "__dict__", {})


def _assigned(tx: Any, cls: type, name: str) -> Any:
    """Return what the program has assigned to ``cls``, or to where it has ``name`` from; None if
    it has not."""
    mutations = tx.output.side_effects.store_attr_mutations
    stored = {v.value: s for v, s in mutations.items() if isinstance(v, UserDefinedClassVariable)}
    for kind in cls.__mro__ if stored else ():
        if name in stored.get(kind, {}):
            return stored[kind][name]
        if name in vars(kind):
            return None
    return None
