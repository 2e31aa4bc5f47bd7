"""The questions that a body asks of its tensors without an operator (torch 2.9.1, 2.13.0, 2.15.0).

``h.requires_grad``, ``h.is_leaf`` and ``h is h0`` are answered when a body is traced, once for all
its steps.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import Unsupported
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.tensor import TensorVariable

from torch_scan_hop._torch.dynamo.left import MUTABLE
from torch_scan_hop._torch.dynamo.places import NOT_THE_USERS, users_line
from torch_scan_hop._torch.dynamo.variables import GETATTR, example_value, example_value_or_none
from torch_scan_hop._torch.replaced import replaced, wrapped

# attributes that tell a leaf that requires grad from the result of an operator
_OF_LEAVES = frozenset({"grad", "grad_fn", "is_leaf", "retains_grad"})


class _GradFunction(VariableTracker):
    """``h.grad_fn`` of what an operator made: not None, and that is all that is known of it."""

    def _refuse(self, *args: Any) -> Any:
        raise Unsupported(f"the body asks what the grad_fn of a tensor is, at {users_line()}")

    call_method: Any = _refuse
    python_type: Any = _refuse
    has_unpack_var_sequence: Any = _refuse
    var_getattr: Any = _refuse
    tp_getattro_impl: Any = _refuse


def grad_functions_are_known() -> AbstractContextManager[None]:
    """``h.grad_fn is None`` is answered, where Dynamo would give up."""

    def grad_fn(original: Any, self: TensorVariable, tx: Any) -> Any:
        return _GradFunction() if self.has_grad_fn else original(self, tx)

    return wrapped(TensorVariable, method_attr_grad_fn=grad_fn)


@dataclass(eq=False)
class Facts:
    """The questions that a body asked. torch's own code asks, too, but acts the same either way."""

    grad: bool = False
    leaf: bool = False
    #: tensors whose type the body asked for, or if they are a certain number; and the lines
    kinds: list[tuple[Any, str]] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)
    #: tensors that the body has made and given an attribute of its own, and the lines
    tagged: list[tuple[Any, str]] = field(default_factory=list)
    compared: list[tuple[Any, Any]] = field(default_factory=list)
    #: lists, dicts and objects, of which the body asked if one `is` the other; and the lines
    containers: list[tuple[VariableTracker, VariableTracker, str]] = field(default_factory=list)
    #: carries of scans within the body, and what those begin with
    begun: list[tuple[Any, Any]] = field(default_factory=list)

    def change(self, tx: Any, init: VariableTracker, example: VariableTracker, after: Any) -> bool:
        """Return True if an answer that the body asked for changes after the first step of a carry.

        ``init`` is the caller's carry, ``example`` what the body was traced with, and ``after``
        what the body made of ``example``.
        """
        if init.is_python_constant() or after.is_python_constant():
            return False  # a number, of which torch 2.9 has no example
        first, later = example_value(init), example_value(after)
        if not isinstance(first, torch.Tensor) or not isinstance(later, torch.Tensor):
            return False
        if (self.grad or self.leaf) and first.requires_grad != later.requires_grad:
            return True
        if self.leaf and first.requires_grad and first.is_leaf:
            return True
        if self.kinds and getattr(init, "class_type", torch.Tensor) is not torch.Tensor:
            return True
        if any(_has(tx, init, name) for name in self.attributes):
            return True
        given = example_value(example)
        for around in _noting:
            around.begun.append((given, first))
        pairs = [*self.compared, *((b, a) for a, b in self.compared)]
        return any(self._origin(a) is given and b is first for a, b in pairs)

    def are_one(self, asked: Sequence[VariableTracker], others: Sequence[VariableTracker]) -> bool:
        """Return True if the body asked if two of the tensors ``asked`` are one, as the two of
        ``others`` in their places are."""
        values, theirs = (list(map(example_value_or_none, v)) for v in (asked, others))

        def are_there(pair: tuple[Any, Any]) -> bool:
            places = ([k for k, value in enumerate(values) if value is one] for one in pair)
            return any(
                j != k and theirs[j] is not None and theirs[j] is theirs[k]
                for j, k in itertools.product(*places)
            )

        return any(map(are_there, self.compared))

    def check_untagged(self, values: Sequence[VariableTracker]) -> None:
        """Raise Unsupported if a step leaves one that it has given an attribute."""
        for value, line in self.tagged:
            if any(example_value_or_none(other) is value for other in values):
                raise Unsupported(
                    f"the body assigns to an attribute of a tensor that it made and leaves, at "
                    f"{line}: what a scan returns has no such attribute. Keep the value beside the "
                    "tensor"
                )

    def note_containers(self, one: VariableTracker, other: VariableTracker) -> None:
        if isinstance(one, MUTABLE) and isinstance(other, MUTABLE):
            self.containers.append((one, other, users_line()))

    def line_of_kind(self, example: VariableTracker) -> str:
        """Return the line on which the body asked for the type of ``example``; "" for none."""
        if example.is_python_constant():
            return ""
        given = example_value(example)
        return next((line for value, line in self.kinds if self._origin(value) is given), "")

    def _origin(self, value: Any) -> Any:
        """Return the value with which an inner scan begins, for a carry of that scan."""
        origins = [first for carry, first in self.begun if carry is value]
        return self._origin(origins[0]) if origins else value


def _is_number(variable: VariableTracker) -> bool:
    if not variable.is_python_constant():
        return False
    return isinstance(variable.as_python_constant(), (bool, int, float, complex))


def _has(tx: Any, variable: VariableTracker, name: str) -> bool:
    try:
        getattr(variable, GETATTR)(tx, name)
    except Exception:
        return False
    return True


# the facts of the bodies that are being traced, the outermost first
_noting: list[Facts] = []


def facts_at_hand() -> Facts:
    """Return the facts of the innermost body; none where only its numbers are asked for."""
    return _noting[-1] if _noting else Facts()


@contextlib.contextmanager
def facts_noted() -> Iterator[Facts]:
    """Note facts while a body is traced."""
    facts = Facts()
    call = BuiltinVariable.call_function

    def note_attribute(read: Any, self: TensorVariable, tx: Any, name: str) -> Any:
        if is_users(tx):
            facts.grad = facts.grad or name == "requires_grad"
            facts.leaf = facts.leaf or name in _OF_LEAVES
            if not hasattr(torch.Tensor, name):
                facts.attributes.add(name)
        return read(self, tx, name)

    @functools.wraps(call)
    def note_comparison(self: BuiltinVariable, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in (operator.is_, operator.is_not, isinstance, type) and is_users(tx):
            tensors = [a for a in args if isinstance(a.realize(), TensorVariable)]
            if tensors and (self.fn in (isinstance, type) or any(map(_is_number, args))):
                facts.kinds.append((example_value(tensors[0]), users_line()))
            if len(tensors) == 2:
                facts.compared.append((example_value(tensors[0]), example_value(tensors[1])))
            if self.fn in (operator.is_, operator.is_not):
                facts.note_containers(*(arg.realize() for arg in args))
        return call(self, tx, args, kwargs)

    handlers = symbolic_convert.compare_op_handlers  # their methods were bound before
    noting = {
        name: functools.partial(note_comparison, BuiltinVariable(fn))
        for name, fn in (("is", operator.is_), ("is not", operator.is_not))
    }
    _noting.append(facts)
    try:
        with (
            wrapped(TensorVariable, **{GETATTR: note_attribute}),
            _tags_noted(facts),
            replaced(BuiltinVariable, call_function=note_comparison),
            replaced(symbolic_convert, compare_op_handlers={**handlers, **noting}),
        ):
            yield facts
    finally:
        _noting.remove(facts)


def _tags_noted(facts: Facts) -> AbstractContextManager[None]:
    def note_tag(store: Any, self: SideEffects, item: Any, name: str, *rest: Any, **k: Any) -> None:
        if isinstance(item, TensorVariable) and not (item.source or hasattr(torch.Tensor, name)):
            facts.tagged.append((example_value(item), users_line()))
        store(self, item, name, *rest, **k)

    return wrapped(SideEffects, store_attr=note_tag)


def is_users(tx: Any) -> bool:
    return not tx.f_code.co_filename.startswith(NOT_THE_USERS)


def tells_numbers(tx: Any) -> bool:
    """Return True in code that is to see a number as Python does: the user's, and of torch's its
    distributions, whose dtype and batch shape follow from what they are made of, and a module that
    is told to train by a flag."""
    return is_users(tx) or tx.f_code.co_filename.startswith(_SEE_NUMBERS)


_SEE_NUMBERS = (torch.distributions.__path__[0], torch.nn.modules.module.__file__)
