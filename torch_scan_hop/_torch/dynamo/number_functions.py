"""Functions of Python that a trace calls with a number of a body (torch 2.9.1, 2.13.0, 2.15.0).

Such a number is a scalar tensor, whose value Dynamo would read for ``math.exp(n)`` and ``int(n)``.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.builder import SourcelessBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from torch_scan_hop._torch.dynamo.facts import tells_numbers
from torch_scan_hop._torch.dynamo.function_modes import function_modes_set_aside
from torch_scan_hop._torch.dynamo.made_numbers import (
    beside_complex,
    is_made_number,
    is_marked,
    with_ints_for_flags,
)
from torch_scan_hop._torch.dynamo.number_identity import identity_is_refused
from torch_scan_hop._torch.dynamo.number_items import item_at, numbers_in
from torch_scan_hop._torch.dynamo.variables import (
    ConstantVariable,
    TupleVariable,
    create_node,
    example_value,
)
from torch_scan_hop._torch.replaced import replaced, wrapped


@contextlib.contextmanager
def functions_take_scalars(
    call: Callable[..., Any], names: Mapping[Any, str], read: Callable[[Any, Any], Any]
) -> Iterator[None]:
    """The graph has ``call(name, scalar)``, where a function in ``names`` is called with one; more
    of them, if it has more names. ``read(tx, tensor)`` is the number that a tensor holds, or None
    if it may not be read."""

    def call_function(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        number = numbers_in(tx, self, read) if self.name in _READ and not args else None
        return original(self, tx, args, kwargs) if number is None else number

    with (
        wrapped(GetAttrVariable, call_function=call_function),
        wrapped(BuiltinVariable, call_function=_taking("fn", call, names, read)),
        wrapped(TorchInGraphFunctionVariable, call_function=_taking("value", call, names, read)),
    ):
        yield


def _taking(attribute: str, call: Any, names: Mapping[Any, str], read: Any) -> Any:
    def call_function(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        fn = getattr(self, attribute)
        if fn is operator.getitem and names:
            item = item_at(tx, args, read)
            return original(self, tx, args, kwargs) if item is None else item
        args = beside_complex(tx, fn, args)
        known = names.get(fn) if len(args) == _OPERANDS.get(fn, 1) and not kwargs else None
        if known is not None and fn not in _OF_NUMBERS_ALONE:  # int(t) of [7], too
            numbers = [read(tx, arg.realize()) for arg in args]
            args = [a if n is None else n for a, n in zip(args, numbers, strict=True)]
        if known is None or not any(_is_scalar(arg.realize()) for arg in args):
            return original(self, tx, args, kwargs)
        given = [arg.as_proxy() for arg in args]
        made = [create_node(tx, "call_function", call, (n, *given), {}) for n in known.split()]
        return made[0] if len(made) == 1 else TupleVariable(made)

    return call_function


_READ = ("item", "tolist")
#: functions that refuse a tensor
_OF_NUMBERS_ALONE = {divmod, round, math.trunc}
#: of functions with several
_OPERANDS = {divmod: 2, math.pow: 2}


def _is_scalar(variable: Any) -> bool:
    if not isinstance(variable, TensorVariable):
        return False
    value = example_value(variable)
    return bool(value.dim() == 0 and not value.is_complex())


@contextlib.contextmanager
def kinds_of_numbers_are_known() -> Iterator[None]:
    """``isinstance(n, int)``, ``type(n)`` and ``hasattr(n, "shape")`` of a number are answered as
    Python does, and no tensor of its value is taken for it; this package and most of torch see the
    tensor that it is.

    Arithmetic of numbers alone is Python's: a TorchFunctionMode (a default device, torch.export's
    own, a user's) does not see it.
    """

    def call_function(original: Any, self: BuiltinVariable, tx: Any, args: Any, kwargs: Any) -> Any:
        asks = self.fn in (isinstance, type) and args and tells_numbers(tx)
        if asks and is_made_number(args[0]) and _is_scalar(args[0].realize()):
            kind = _kind_of(example_value(args[0]).dtype)
            if self.fn is type:
                return SourcelessBuilder.create(tx, kind)
            args = [ConstantVariable.create(kind(1)), *args[1:]]
        if _are_numbers(args):
            with function_modes_set_aside(tx):
                return original(self, tx, args, kwargs)
        return original(self, tx, args, kwargs)

    def has_attribute(has: Any, self: TensorVariable, tx: Any, name: str) -> Any:
        if tells_numbers(tx) and is_made_number(self):
            kind = _kind_of(example_value(self).dtype)
            return ConstantVariable.create(hasattr(kind, name))
        return has(self, tx, name)

    with (
        wrapped(BuiltinVariable, call_function=call_function),
        wrapped(TensorVariable, call_obj_hasattr=has_attribute),
        identity_is_refused(),
    ):
        yield


def _is_jump() -> bool:
    """Return True if Dynamo is at a jump, which asks of a number if it is 0."""
    tx: Any = InstructionTranslator.current_tx().output.current_tx
    return "JUMP" in tx.current_instruction.opname


@contextlib.contextmanager
def comparisons_are_known(decide: Callable[[TensorVariable], bool | None]) -> Iterator[None]:
    """Python branches on a scalar as ``decide`` says, if it knows."""

    def as_python_constant(of_tensor: Any, self: TensorVariable) -> Any:
        asks = _is_scalar(self) and (example_value(self).dtype == torch.bool or _is_jump())
        decided = decide(self) if asks else None
        return of_tensor(self) if decided is None else decided

    with wrapped(TensorVariable, as_python_constant=as_python_constant):
        yield


def _are_numbers(variables: Sequence[Any]) -> bool:
    """Return True if these are numbers, one of them a body's."""

    def is_known(variable: Any) -> bool:
        return isinstance(variable, SymNodeVariable) or variable.is_python_constant()

    # asked first: nothing else of a trace is looked into
    if not any(map(is_made_number, variables)):
        return False
    return all(is_made_number(v) or is_known(v.realize()) for v in variables)


def _kind_of(dtype: torch.dtype) -> type:
    if dtype == torch.bool:
        return bool
    return float if dtype.is_floating_point else int


#: ``(name of with_scalar or "", target, args, kwargs, proxies among them)``: the dtype that the
#: numbers among those take, or None
DtypeOf = Callable[[str, Any, Any, Any, list[fx.Proxy]], Any]


@contextlib.contextmanager
def numbers_are_weak(
    tx: Any,
    dtype_of: DtypeOf,
    in_dtype: Callable[..., Any],
    note: Callable[[fx.Proxy, list[fx.Proxy]], None],
    name_with_scalar: Callable[[Any, Any, Any], str],
    with_scalar: Callable[..., Any],
    out_of_place: Mapping[Any, Any],
    with_known: Callable[..., Any],
) -> Iterator[None]:
    """Numbers that a node of the graphs is given are first ``in_dtype(number, dtype_of(...))``.

    The node is ``with_scalar(name, ...)`` if ``name_with_scalar(target, args, kwargs)`` is a name,
    of the arguments that torch takes: ``with_known(target, args, kwargs, proxies)``.
    ``n += 1`` makes a new number, by what is ``out_of_place`` for ``iadd``.
    """
    output, original = tx.output, tx.output.create_proxy

    def create_proxy(
        kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any
    ) -> Any:
        given: list[fx.Proxy] = []
        pytree.tree_map_only(fx.Proxy, given.append, (args, kwargs))
        if not kind.startswith("call_") or not any(map(is_marked, given)):
            return original(kind, target, args, kwargs, *rest, **named)
        if args and isinstance(args[0], fx.Proxy) and is_marked(args[0]):
            target = out_of_place.get(target, target)
            if target in _BOUND:  # by a symbol; Dynamo leaves it to Python, which would compare
                args, kwargs, target = args[:1], {_BOUND[target]: args[1]}, torch.clamp
        args = with_ints_for_flags(original, target, args, given)
        args, kwargs = with_known(target, args, kwargs, given)
        name = name_with_scalar(target, args, kwargs)
        dtype = dtype_of(name, target, args, kwargs, given)
        if name:
            kind, target, args = "call_function", with_scalar, (name, *args)

        def adapted(proxy: fx.Proxy) -> fx.Proxy:
            return _cast(original, in_dtype, proxy, dtype) if is_marked(proxy) else proxy

        args, kwargs = pytree.tree_map_only(fx.Proxy, adapted, (args, kwargs))
        made = original(kind, target, args, kwargs, *rest, **named)
        note(made, given)
        return made

    with replaced(output, create_proxy=create_proxy), _tensors_are_made_of_numbers():
        yield


def _cast(create_proxy: Any, in_dtype: Any, proxy: fx.Proxy, dtype: Any) -> fx.Proxy:
    example = example_value(proxy)
    if dtype is None or example.dtype == dtype:
        return proxy
    made: fx.Proxy = create_proxy("call_function", in_dtype, (proxy, dtype), {})
    made.node.meta["example_value"] = example.to(dtype)
    return made


#: of clamp, by the function of two numbers
_BOUND: dict[Any, str] = {max: "min", min: "max"}


@contextlib.contextmanager
def _tensors_are_made_of_numbers() -> Iterator[None]:
    """``torch.full`` is a node if it is given a number, which decides its dtype; Dynamo reads it,
    or fills an empty tensor of the default dtype. ``torch.as_tensor(n > 3)`` of a symbol, of which
    Dynamo makes no tensor, is one of the flag, which is guarded. And a number is no tensor."""

    def call_function(original: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value in _ASK_FOR_TENSORS and tells_numbers(tx) and _are_numbers(args):
            return ConstantVariable.create(False)
        if self.value not in _MAKE_TENSORS:
            return original(self, tx, args, kwargs)
        given = [v.realize() for v in (*args, *kwargs.values())]
        if self.value is torch.full:
            if any(map(is_made_number, given)):
                args, kwargs = pytree.tree_map(
                    operator.methodcaller("as_proxy"), ((*args,), kwargs)
                )
                return create_node(tx, "call_function", torch.full, args, kwargs)
        elif given and isinstance(getattr(given[0], "sym_num", None), torch.SymBool):
            args = [ConstantVariable.create(given[0].evaluate_expr(tx.output)), *args[1:]]
        return original(self, tx, args, kwargs)

    with wrapped(TorchInGraphFunctionVariable, call_function=call_function):
        yield


_MAKE_TENSORS = (torch.full, torch.tensor, torch.as_tensor)
_ASK_FOR_TENSORS = (torch.is_tensor, torch.overrides.is_tensor_like)
