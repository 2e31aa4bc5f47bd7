"""A guard on each method that a body calls (checked on torch 2.9.1, 2.13.0, 2.15.0).

Dynamo guards what an object is, but not what its class says that a method does: a method that is
replaced, by a patch in a test or by IPython's autoreload, would run as it was when a body was
captured.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
from collections.abc import Iterator
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, TypeSource
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable


@contextlib.contextmanager
def methods_are_guarded() -> Iterator[None]:
    """While a body is traced."""
    original = InliningInstructionTranslator.build_inline_tracer

    def build_inline_tracer(parent: Any, func: Any, args: Any, *rest: Any, **named: Any) -> Any:
        _guard_method(getattr(func, "fn", None), args)
        return original(parent, func, args, *rest, **named)

    translator: Any = InliningInstructionTranslator
    translator.build_inline_tracer = staticmethod(build_inline_tracer)
    try:
        yield
    finally:
        translator.build_inline_tracer = staticmethod(original)


def _guard_method(fn: Any, args: Any) -> None:
    """Where ``fn`` is a method of the first of ``args``."""
    if not isinstance(fn, types.FunctionType) or not args:
        return
    owner = args[0].realize()
    if not isinstance(owner, UserDefinedObjectVariable) or owner.source is None:
        return
    name = _name_in(type(owner.value), fn)
    if name is not None:
        method = AttrSource(TypeSource(owner.source), name)
        install_guard(method.make_guard(GuardBuilder.CLOSURE_MATCH))


def _name_in(cls: type, fn: types.FunctionType) -> str | None:
    """What ``cls`` calls ``fn``, which may have been defined under another name."""
    known = (n for c in cls.__mro__ for n, value in vars(c).items() if _function(value) is fn)
    names = itertools.chain([fn.__name__], known)
    return next((n for n in names if _function(inspect.getattr_static(cls, n, None)) is fn), None)


def _function(value: Any) -> Any:
    return value.fget if isinstance(value, property) else value
