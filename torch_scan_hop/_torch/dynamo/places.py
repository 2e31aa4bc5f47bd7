"""Places where a body leaves something for its next step (torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import Unsupported
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import BaseListVariable, ListVariable, TupleVariable
from torch._dynamo.variables.misc import (
    CellVariable,
    DeletedVariable,
    NewGlobalVariable,
    PythonModuleVariable,
)
from torch._dynamo.variables.tensor import (
    NumpyNdarrayVariable,
    SymNodeVariable,
)
from torch._guards import TracingContext

from torch_scan_hop._torch.dynamo.absent import guard_absence
from torch_scan_hop._torch.dynamo.deques import MOST_TO_FILL
from torch_scan_hop._torch.dynamo.differences import (
    has_other_length,
    is_same,
    pairs_within,
    reorders,
    resizes,
    tensor_of,
)
from torch_scan_hop._torch.dynamo.errors import Turned
from torch_scan_hop._torch.dynamo.function_modes import function_modes_set_aside
from torch_scan_hop._torch.dynamo.made_numbers import is_made_number
from torch_scan_hop._torch.dynamo.objects import attribute_of, spec_of
from torch_scan_hop._torch.dynamo.variables import example_value
from torch_scan_hop._torch.sizes import is_exporting
from torch_scan_hop._torch.symbols import is_unknown_number
from torch_scan_hop.errors import COUNTS_FAR, is_far

try:
    from torch._dynamo.variables.sets import SetVariable
except ImportError:  # torch 2.9
    from torch._dynamo.variables.dicts import SetVariable  # type: ignore[attr-defined, no-redef]


#: code that is not the user's: torch's, and this package's
NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def users_line() -> str:
    """Return ``file:line (code)`` of the user's line that is being traced."""
    stack = list(TracingContext.extract_stack())
    if not stack:
        return "an unknown line"
    users = [frame for frame in stack if not frame.filename.startswith(NOT_THE_USERS)]
    frame = (users or stack)[-1]
    return f"{frame.filename}:{frame.lineno} ({frame.line})"


def refused_change(what: str, line: str) -> Unsupported:
    return Unsupported(
        f"the body changes {what}, at {line}: a scan traces a step once, so that this would happen "
        "once, or not at all. Return the value in ys, or carry it"
    )


#: dicts in which a module has what is assigned to its attributes
_OF_MODULES = ("_buffers", "_parameters", "_modules")
_CONTAINERS = (BaseListVariable, ConstDictVariable)
AN_OBJECT = "a Python object that it did not make"


def refuse_within_functions(effects: SideEffects, item: VariableTracker) -> None:
    """Raise Unsupported for a change of the program's ``item`` in a custom function, or in what is
    checkpointed: torch 2.9 forgets it, later ones fail."""
    is_programs = item.source is not None or getattr(item, "pre_existing_contents", None)
    output: Any = effects.output_graph_weakref()
    target = getattr(output.current_tracer, "source_target", None)
    if is_programs and (target == "autograd.Function" or "Checkpoint" in type(target).__name__):
        what = "an object in a custom function, or in a checkpointed one"
        raise refused_change(what, users_line())


@dataclass(frozen=True)
class Place:
    """A place where a body leaves a value for the next step: an attribute, or an item."""

    owner: VariableTracker
    name: Any
    is_item: bool
    line: str
    before: VariableTracker | None
    after: VariableTracker
    how: Sequence[Any] = field(default=(), compare=False)  # torch > 2.9: a kind of assignment
    is_rebuilt: bool = False  # an object of another class is there, or another flag in it

    def compared(self) -> Place:
        """Note what differs between objects, while the trace that has made one knows it."""
        return replace(self, is_rebuilt=spec_of(self.before) != spec_of(self.after))

    def read(self, tx: Any) -> VariableTracker:
        if self.is_item:
            return self.owner.call_method(tx, "__getitem__", [self.name], {})
        found = attribute_of(tx.output.side_effects, self.owner, self.name)
        if found is None:
            raise self.refusal()
        return found

    def write(self, tx: Any, value: VariableTracker) -> None:
        if self.is_item:
            self.owner.call_method(tx, "__setitem__", [self.name, value], {})
        else:
            tx.output.side_effects.store_attr(self.owner, self.name, value, *self.how)

    def __str__(self) -> str:
        if isinstance(self.owner, CellVariable):
            return "a nonlocal variable"
        if isinstance(self.owner, NewGlobalVariable):
            return f"the global variable {self.name!r}"
        kind = self.owner.python_type().__name__
        if isinstance(self.owner, SetVariable):
            return "what is in a set"
        if self.is_item and not self.name.is_python_constant():
            return f"an item of a {kind}"
        name = self.name.as_python_constant() if self.is_item else self.name
        if self.is_item and getattr(self.owner.source, "member", "") in _OF_MODULES:
            return f"attribute {name!r} of a module"
        return f"item {name!r} of a {kind}" if self.is_item else f"attribute {name!r} of a {kind}"

    def settling(self) -> str:
        """Return what the first step is on its own for, if :meth:`must_settle`. A list or a tuple
        that is filled changes so more than once."""
        before = None if self.before is None else self.before.realize()
        if isinstance(before, (ListVariable, TupleVariable)) and len(before.items) < MOST_TO_FILL:
            return f"{self}, with {len(before.items)} items"
        return str(self)

    def is_temporary(self) -> bool:
        """Return True if nothing was there, and the step deletes what it leaves there."""
        return self.before is None and isinstance(self.after, DeletedVariable)

    def is_buffer(self) -> bool:
        return self.is_item and getattr(self.owner.source, "member", "") == "_buffers"

    def is_like(self, other: Place) -> bool:
        same_name = is_same(self.name, other.name)
        return self.owner is other.owner and self.is_item == other.is_item and same_name

    def is_in(self, places: Sequence[Place]) -> bool:
        return any(self.is_like(place) for place in places)

    def must_settle(self) -> bool:
        """Return True if the first step changes the kind, shape or dtype of the value."""
        before, after = self.before, self.after
        if before is None or reorders(before, after):  # nothing was there, or in another order
            return True
        if self.is_rebuilt:
            return True
        number, next_number = number_of(before), number_of(after)
        if number is not None and is_made_number(after):  # made of what a step reads as a number
            made: torch.dtype = example_value(after).dtype
            is_int = isinstance(number, (int, torch.SymInt))
            return made != torch.int64 if is_int else not made.is_floating_point
        if number is not None and next_number is not None:
            return isinstance(number, int) and isinstance(next_number, float)
        if (
            before.is_python_constant()
            or after.is_python_constant()
            or has_other_length(before, after)
        ):
            return True
        one, other = tensor_of(before), tensor_of(after)
        if one is not None and other is not None:
            return one.shape != other.shape or one.dtype != other.dtype
        within = (replace(self, before=b, after=a) for b, a in pairs_within(before, after))
        carried = (p for p in within if not (_is_mode(p.before) or _is_mode(p.after)))
        return (one is None) != (other is None) or any(p.must_settle() for p in carried)

    def check(self, part: VariableTracker) -> None:
        """Raise Unsupported if ``part`` of what is left there cannot be carried."""
        is_numpys = isinstance(part.realize(), NumpyNdarrayVariable)  # a tensor to Dynamo
        check_start([number_of(part)], f"{self}, at {self.line},")
        if is_number(part) or (tensor_of(part) is not None and not is_numpys):
            return
        python_type = part.realize().python_type()
        kind = python_type.__name__
        advice = "Keep it apart from what changes, in an attribute of its own."
        if issubclass(python_type, torch.nn.Module):
            advice = "Call each that may be there, and choose: torch.where(flag, a(x), b(x))."
        if is_numpys:
            kind = "value of NumPy"
            advice = "Keep a tensor there, as torch.from_numpy(array), or a Python number."
        raise Unsupported(f"the body leaves a {kind} in {self}, at {self.line}. {advice}")

    def check_owner(self) -> None:
        """Raise Unsupported for a global variable that Dynamo does not find again in the next step,
        and for a list or a dict that others have, too; guard that nothing is there if nothing is.
        """
        after = self.after.realize()
        if isinstance(after, _CONTAINERS) and not isinstance(after, TupleVariable):
            if after.source is not None and after is not self.before:
                kind = after.python_type().__name__
                raise refused_change(f"which {kind} of the program's is {self}", self.line)
        is_new = self.before is None
        is_new_global = is_new and isinstance(self.owner, PythonModuleVariable)
        if is_new_global or isinstance(self.owner, NewGlobalVariable):
            raise Unsupported(
                f"the body assigns to {self}, at {self.line}, which Dynamo does not find again in "
                "the next step. Keep it in an object, or in a dict"
            )
        if is_new:
            guard_absence(self.owner, self.name)

    def is_turned(self) -> bool:
        return _is_mode(self.before) and _is_mode(self.after)

    def is_resized(self) -> bool:
        return resizes(self.before, self.after)

    def refusal(self) -> Unsupported:
        if self.is_turned():
            return Turned(
                f"the body turns {self} at {self.line}, and a scan traces a step once. Turn a "
                "tensor, as in flag = ~flag, and choose with torch.where(flag, new, old)"
            )
        if self.is_resized():
            return Unsupported(
                f"the body leaves {self} of another size at each step, at {self.line}, and what a "
                "scan carries keeps its size. What no step reads may be appended to a list: "
                "kept.append(h). Else write to a tensor of all steps, as table[n] = h"
            )
        if self.name == "training":
            return Unsupported(
                f"the body changes {self} from step to step, at {self.line}, and a scan traces a "
                "step once. Compute both, and choose: torch.where(flag, F.dropout(h), h)"
            )
        return refused_change(str(self), self.line)


def _is_mode(variable: VariableTracker | None) -> bool:
    return variable is not None and variable.is_python_constant() and number_of(variable) is None


def number_of(variable: VariableTracker | None) -> int | float | None:
    """Return the number that is counted or scaled from step to step; None for a flag."""
    variable = None if variable is None else variable.realize()
    if isinstance(variable, SymNodeVariable):
        return variable.sym_num
    if variable is None or not variable.is_python_constant():
        return None
    value = variable.as_python_constant()
    return value if type(value) in (int, float) else None


def check_start(numbers: Iterable[Any], where: str = "init") -> None:
    """Raise Unsupported for an int from which a step may count past what a scalar holds. What an
    exported program has not as a constant is a size."""
    kinds: Any = int if is_exporting() else (int, torch.SymInt)
    for number in numbers:
        if isinstance(number, kinds) and not is_unknown_number(number) and is_far(number):
            raise Unsupported(COUNTS_FAR.format(where))


def is_number(variable: VariableTracker | None) -> bool:
    """Return True for a number, also for one of the body of a scan."""
    return number_of(variable) is not None or (variable is not None and is_made_number(variable))


def as_number(tx: Any, value: VariableTracker) -> VariableTracker:
    """Return the Python number that the scalar ``value`` is, when the program runs, within
    :func:`scalars_are_read`. No mode sees it: in a loop, the last step has read it.

    A graph returns a float as a tensor, which Dynamo makes last, and remembers. Since torch 2.13
    a default device would turn that tensor into None.
    """
    with function_modes_set_aside(tx):
        number = value.call_method(tx, "item", [], {})
        if isinstance(number, SymNodeVariable) and number.python_type() is float:
            number.as_tensor(tx, torch.float64)
        return number


@contextlib.contextmanager
def scalars_are_read(tx: Any) -> Iterator[None]:
    """``tensor.item()`` is a symbol; torch 2.9 refuses it in whole graphs, too."""
    shape_env = tx.output.shape_env
    shape_env.settings = replace(shape_env.settings, allow_scalar_outputs=True)
    config: Any = dynamo_config
    with config.patch(capture_scalar_outputs=True):
        yield
