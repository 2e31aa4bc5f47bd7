"""Modules as Dynamo meets them (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch._C._dynamo.guards import GuardManager
from torch._dynamo.guards import install_guard
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserMethodVariable
from torch._guards import Guard

from torch_scan_hop._torch.replaced import wrapped

#: torch > 2.9 says where in the user's code a guard comes from
TAKES_THE_STACK = "arg2" in (GuardManager.add_lambda_guard.__doc__ or "")

Check = Callable[[nn.Module, nn.Module], bool]


def methods_have_functions() -> AbstractContextManager[None]:
    """Dynamo finds what it denies a method: ``getattr(method, "__func__", None)``.

    A module asks so if its ``register_buffer`` is torch's when a buffer is assigned to. Else it
    looks at the signature, which Dynamo cannot trace for a module that is made in the trace.
    """

    def has_attribute(original: Any, self: Any, tx: Any, name: str) -> Any:
        if name in ("__func__", "__self__"):
            return ConstantVariable.create(True)
        return original(self, tx, name)

    return wrapped(UserMethodVariable, call_obj_hasattr=has_attribute)


class NotConstant:
    """Stands for a value that is assigned in the trace, and known when the program runs."""


def module_of(tx: Any, variable: VariableTracker) -> nn.Module:
    """Return the module that stands behind ``variable``."""
    key = getattr(variable, "module_key", None)
    module = getattr(variable, "value", None) if key is None else tx.output.get_submodule(key)
    assert isinstance(module, nn.Module), type(variable)
    return module


def assigned_so_far(tx: Any, module: nn.Module) -> dict[int, dict[str, Any]]:
    """Return, by the id of a submodule, the attributes that the program has assigned to it.

    Dynamo makes assignments when the program runs: the modules do not have them yet.
    """
    effects = tx.output.side_effects
    found: dict[int, dict[str, Any]] = {}
    for part in module.modules():
        variable = effects.id_to_variable.get(id(part))
        stored: Mapping[str, VariableTracker] = effects.store_attr_mutations.get(variable, {})
        if stored:
            found[id(part)] = {name: _constant(value) for name, value in stored.items()}
    return found


def _constant(value: VariableTracker) -> Any:
    return value.as_python_constant() if value.is_python_constant() else NotConstant()


def guard_on_module(
    variable: VariableTracker, module: nn.Module, like: nn.Module, check: Check
) -> None:
    """Trace anew when ``check(like, module)`` no longer holds for what ``variable`` stands for."""
    source = variable.source
    if source is None:  # made by the program itself
        return
    reference, met = weakref.ref(like), weakref.ref(module)

    def holds(given: Any) -> bool:
        other = reference()
        if given is met():
            return True  # still_holds has asked
        return other is not None and isinstance(given, nn.Module) and check(other, given)

    def still_holds(_: Any) -> bool:
        one, other = reference(), met()
        return one is None or other is None or check(one, other)

    def LAYERS_ALIKE(builder: Any, guard: Guard) -> None:
        text = [f"scan_layers: {guard.originating_source!r} is another layer than it was"]
        stack = (guard.user_stack,) if TAKES_THE_STACK else ()
        builder.get_guard_manager(guard).add_lambda_guard(holds, text, *stack)
        # Dynamo skips the guards of a module none of whose dicts were assigned to; what is in a
        # list, or in an object, may have changed all the same
        builder.guard_manager.root.add_lambda_guard(still_holds, text, *stack)

    install_guard(source.make_guard(LAYERS_ALIKE))
