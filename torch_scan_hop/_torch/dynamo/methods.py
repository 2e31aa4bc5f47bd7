"""A guard on each method that a body calls (checked on torch 2.9.1, 2.13.0, 2.15.0).

Dynamo guards what an object is, but not what its class says that a method does: a method that is
replaced, by a patch in a test or by IPython's autoreload, would run as it was when a body was
captured.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from contextlib import AbstractContextManager
from typing import Any

from torch._dynamo.exc import Unsupported
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, GlobalStateSource, TypeSource
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import Guard, TracingContext
from torch.nn.modules import module as module_hooks

from torch_scan_hop._torch.dynamo.modules import TAKES_THE_STACK
from torch_scan_hop._torch.module_calls import users_module_call
from torch_scan_hop._torch.replaced import replaced


def methods_are_guarded() -> AbstractContextManager[None]:
    """While a body is traced."""
    original = InliningInstructionTranslator.build_inline_tracer

    @functools.wraps(original)
    def build_inline_tracer(parent: Any, func: Any, args: Any, *rest: Any, **named: Any) -> Any:
        _guard_method(getattr(func, "fn", None), args)
        return original(parent, func, args, *rest, **named)

    inlined = staticmethod(build_inline_tracer)
    return replaced(InliningInstructionTranslator, build_inline_tracer=inlined)


def _guard_method(fn: Any, args: Any) -> None:
    """Guard ``fn`` if it is a method of the first argument; for a module, its hooks as well."""
    if not isinstance(fn, types.FunctionType) or not args:
        return
    owner = args[0].realize()
    if isinstance(owner, UnspecializedNNModuleVariable):
        if users_module_call() is not None:
            raise Unsupported(
                "torch.nn.Module.__call__ has been replaced, and a trace calls modules without it. "
                "Register a hook on all modules (torch.nn.modules.module), or replace forward"
            )
        _guard_hooks_of_all_modules()
    if not isinstance(owner, UserDefinedObjectVariable) or owner.source is None:
        return
    name = _name_in(type(owner.value), fn)
    if name is not None:
        method = AttrSource(TypeSource(owner.source), name)
        install_guard(method.make_guard(GuardBuilder.CLOSURE_MATCH))


# The hooks of all modules, by number: a new hook has a new number. The one that export registers
# watches assignments, and is set aside while a body is captured.
_HOOKS = [
    hooks
    for name, hooks in vars(module_hooks).items()
    if name.startswith("_global_") and name.endswith("_hooks") and "registration" not in name
]


def _hooks_of_all_modules() -> list[Any]:
    return [users_module_call(), *map(tuple, _HOOKS)]


def _guard_hooks_of_all_modules() -> None:
    before = _hooks_of_all_modules()

    def HOOKS_OF_ALL_MODULES(builder: Any, guard: Guard) -> None:
        text = ["torch.nn.Module: the hooks on all modules are those that there were"]
        stack = (guard.user_stack,) if TAKES_THE_STACK else ()
        root = builder.guard_manager.root
        root.add_lambda_guard(lambda _: _hooks_of_all_modules() == before, text, *stack)

    guards = TracingContext.get().guards_context.dynamo_guards
    if all(getattr(g.create_fn, "__name__", "") != "HOOKS_OF_ALL_MODULES" for g in guards):
        install_guard(GlobalStateSource().make_guard(HOOKS_OF_ALL_MODULES))


def _name_in(cls: type, fn: types.FunctionType) -> str | None:
    """Return the name under which ``cls`` has ``fn``, which may be defined under another one."""
    known = (n for c in cls.__mro__ for n, value in vars(c).items() if _function(value) is fn)
    names = itertools.chain([fn.__name__], known)
    return next((n for n in names if _function(inspect.getattr_static(cls, n, None)) is fn), None)


def _function(value: Any) -> Any:
    return value.fget if isinstance(value, property) else value
