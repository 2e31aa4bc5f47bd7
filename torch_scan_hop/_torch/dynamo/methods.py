"""Guards on the methods that a body calls (checked on torch 2.9.1, 2.13.0, 2.15.0).

Dynamo guards what an object is, but not what its class says that a method does: a method that is
replaced, by a patch in a test or by IPython's autoreload, would run as it was when a body was
captured.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import Unsupported
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, GlobalSource, GlobalStateSource, TypeSource
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable
from torch._guards import Guard, TracingContext
from torch.nn.modules import module as module_hooks

from torch_scan_hop._torch.dynamo.modules import TAKES_THE_STACK
from torch_scan_hop._torch.dynamo.variables import GETATTR
from torch_scan_hop._torch.replaced import replaced, wrapped
from torch_scan_hop.capture.replaced_methods import (
    module_methods,
    replaced_module_methods,
    replaced_tensor_methods,
)


@contextlib.contextmanager
def methods_are_guarded() -> Iterator[None]:
    """Guard, while a body is traced, the methods that it calls."""
    _guard_methods_of_tensors()
    of_tensors = replaced_tensor_methods()
    original = InliningInstructionTranslator.build_inline_tracer

    @functools.wraps(original)
    def build_inline_tracer(parent: Any, func: Any, args: Any, *rest: Any, **named: Any) -> Any:
        fn = getattr(func, "fn", None)
        if isinstance(fn, types.FunctionType):
            _refuse_methods_of_tensors(fn.__code__, of_tensors)
            _guard_method(fn, args)
            _guard_function(parent.output, func, fn, args)
        return original(parent, func, args, *rest, **named)

    def read_object(read: Any, self: Any, tx: Any, name: str) -> Any:
        if self.source is None:  # made by the program itself
            _guard_name(type(self.value), name)
        return read(self, tx, name)

    def read_class(read: Any, self: Any, tx: Any, name: str) -> Any:
        _guard_name(type(self.value), name)
        _guard_name(self.value, name)
        return read(self, tx, name)

    inlined = staticmethod(build_inline_tracer)
    config: Any = dynamo_config
    with (
        config.patch(skip_guards_on_constant_func_defaults=False),  # True in torch 2.9
        replaced(InliningInstructionTranslator, build_inline_tracer=inlined),
        wrapped(UserDefinedClassVariable, **{GETATTR: read_class}),
        wrapped(UserDefinedObjectVariable, **{GETATTR: read_object}),
    ):
        yield


# the modules of classes that nobody changes
_NOT_REPLACED = ("builtins", "abc", "enum", "typing", "torch_scan_hop")


def _owner(cls: type, name: str) -> type | None:
    """Return the class that ``cls`` has ``name`` from."""
    return next((kind for kind in cls.__mro__ if name in vars(kind)), None)


def _guard_name(cls: type, name: str) -> None:
    """Guard what ``cls`` has by ``name``, if a user may replace it and it is no state."""
    owner = _owner(cls, name)
    if owner is None or _package(owner.__module__) in _NOT_REPLACED:
        return
    if not isinstance(value := vars(owner)[name], torch.Tensor):
        _guarded_names().add(cls, name, owner, value)


def _refuse_methods_of_tensors(code: types.CodeType, of_tensors: Mapping[str, Any]) -> None:
    """Refuse a body that may call a method of all tensors which has been replaced."""
    for name in of_tensors:
        if name in code.co_names or _is_of_operator(name):
            raise Unsupported(
                f"torch.Tensor.{name} has been replaced, and a trace calls torch's. Call a "
                "function of your own"
            )


def _is_of_operator(name: str) -> bool:
    words = (name, name.replace("__r", "__", 1), name.replace("__i", "__", 1))
    return name.startswith("__") and any(hasattr(operator, word) for word in words)


def _guard_function(output: Any, func: Any, fn: types.FunctionType, args: Any) -> None:
    """Guard the code of ``fn`` if Dynamo does not: that of a class method, or of a function that it
    knows no source of, as of a method of an object that the program has made. By the source that
    ``func`` gets, its defaults and what it closes over are guarded, too."""
    of_class = bool(args) and isinstance(args[0].realize(), UserDefinedClassVariable)
    is_known = func.get_source() is not None
    if (is_known and not of_class) or _package(fn.__module__ or "") in (*_NOT_REPLACED, "torch"):
        return
    source = GlobalSource(output.install_global_by_id("scan_function", fn))
    install_guard(source.make_guard(GuardBuilder.CLOSURE_MATCH))
    if not is_known:
        getattr(func, "im_func", func).get_source = lambda: source  # torch 2.15: of a method


def _package(module: str) -> str:
    return module.partition(".")[0]


def _guard_method(fn: types.FunctionType, args: Any) -> None:
    """Guard ``fn`` if it is a method of the first argument; for a module, its hooks as well."""
    if not args:
        return
    owner = args[0].realize()
    if isinstance(owner, UnspecializedNNModuleVariable):
        for replacement in replaced_module_methods():
            raise Unsupported(
                f"torch.nn.Module.{replacement} has been replaced, and a trace calls modules "
                "without it. Register a hook on all modules (torch.nn.modules.module), or replace "
                "forward"
            )
        _guard_hooks_of_all_modules()
    if not isinstance(owner, UserDefinedObjectVariable):
        return
    name = _name_in(type(owner.value), fn)
    if name is None:
        return
    if owner.source is None:  # made by the program itself
        _guard_name(type(owner.value), name)
    else:
        method = AttrSource(TypeSource(owner.source), name)
        install_guard(method.make_guard(GuardBuilder.CLOSURE_MATCH))
        found = inspect.getattr_static(type(owner.value), name)
        if isinstance(found, property):  # whose code torch 2.9 does not guard
            method = AttrSource(method, "fget" if found.fget is fn else "fset")
            install_guard(method.make_guard(GuardBuilder.CLOSURE_MATCH))


# The hooks of all modules, by number: a new hook has a new number. The one that export registers
# watches assignments, and is set aside while a body is captured.
_HOOKS = [
    hooks
    for name, hooks in vars(module_hooks).items()
    if name.startswith("_global_") and name.endswith("_hooks") and "registration" not in name
]


def _hooks_of_all_modules() -> list[Any]:
    return [tuple(hooks) for hooks in _HOOKS]


def _guard_hooks_of_all_modules() -> None:
    hooks, methods, users = _hooks_of_all_modules(), module_methods(), replaced_module_methods()
    had_hooks = any(hooks)

    def are_same(_: Any) -> bool:
        # a tracer of torch's may have put its own there
        same = module_methods() == methods or replaced_module_methods() == users
        if not same or not (had_hooks or any(_HOOKS)):
            return same
        return _hooks_of_all_modules() == hooks

    _guard_that(are_same, "torch.nn.Module: the hooks on all modules are those that there were")


def _guard_methods_of_tensors() -> None:
    methods = vars(torch.Tensor)
    before = tuple(methods.values())
    text = "torch.Tensor: its methods are those that there were"
    _guard_that(lambda _: tuple(methods.values()) == before, text)


class _Names:
    """Names of classes, and what they were when the body was traced.

    Every call asks whether they still are, so that it asks by plain lookups.
    """

    def __init__(self) -> None:
        self.orders: dict[type, tuple[type, ...]] = {}
        self.values: list[tuple[Mapping[str, Any], str, Any]] = []

    def add(self, cls: type, name: str, owner: type, value: Any) -> None:
        self.orders[cls] = cls.__mro__
        before = itertools.takewhile(lambda kind: kind is not owner, cls.__mro__)
        self.values += [(vars(kind), name, _ABSENT) for kind in before]
        self.values.append((vars(owner), name, value))

    def are_the_same(self, _: Any) -> bool:
        for cls, order in self.orders.items():
            if cls.__mro__ is not order:
                return False
        for namespace, name, value in self.values:
            if namespace.get(name, _ABSENT) is not value:
                return False
        return True


_ABSENT = object()
_names: MutableMapping[Any, _Names] = weakref.WeakKeyDictionary()


def _guarded_names() -> _Names:
    """Return the names that the trace at hand guards, to which more may be added."""
    known = _names.setdefault(TracingContext.get(), _Names())
    _guard_that(known.are_the_same, "what classes say that a name is has not changed")
    return known


def _guard_that(holds: Callable[[Any], bool], text: str) -> None:
    """Trace anew when ``holds`` is no longer True, of anything; ``text`` says what it asks, once
    in a trace."""

    def STATE_OF_CLASSES(builder: Any, guard: Guard) -> None:
        stack = (guard.user_stack,) if TAKES_THE_STACK else ()
        builder.guard_manager.root.add_lambda_guard(holds, [text], *stack)

    STATE_OF_CLASSES.__doc__ = text
    guards = TracingContext.get().guards_context.dynamo_guards
    if all(getattr(g.create_fn, "__doc__", "") != text for g in guards):
        install_guard(GlobalStateSource().make_guard(STATE_OF_CLASSES))


def _name_in(cls: type, fn: types.FunctionType) -> str | None:
    """Return the name under which ``cls`` has ``fn``, which may be defined under another one."""
    known = (n for c in cls.__mro__ for n, value in vars(c).items() if _runs(value, fn))
    names = itertools.chain([fn.__name__], known)
    return next((n for n in names if _runs(inspect.getattr_static(cls, n, None), fn)), None)


def _runs(value: Any, fn: types.FunctionType) -> bool:
    return fn in (value.fget, value.fset) if isinstance(value, property) else value is fn
