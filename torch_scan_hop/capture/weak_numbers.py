"""What a number that steps carry is to the operators that meet a tensor with it: weak, as a Python
number is.

It is a scalar tensor in the body's graph. Among tensors with dimensions such a scalar decides as
little as a number does, but among scalars it is one of them: an int64 beside an int8, or a float64
beside a float32. So there it takes the dtype that the operator would have computed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop import tree
from torch_scan_hop._torch.dynamo.made_numbers import NUMBER, is_marked, mark
from torch_scan_hop._torch.dynamo.results_for_fakes import result_dtype
from torch_scan_hop._torch.dynamo.variables import (
    ConstantVariable,
    TensorVariable,
    TorchHigherOrderOperatorVariable,
    TupleVariable,
    VariableTracker,
    create_node,
    example_value,
)
from torch_scan_hop._torch.operators import is_function_of_torch
from torch_scan_hop.capture.number_arguments import name_with_scalar, with_scalar
from torch_scan_hop.capture.number_arithmetic import (
    ARITHMETIC,
    IN_PLACE,
    is_symbol,
    make_exact,
    value_of,
)
from torch_scan_hop.capture.told import at_hand, in_a_body

#: operators with two operands, or with more that are alike; by name, of functions and methods
OF_ALIKE = frozenset(
    "add iadd sub isub rsub mul imul div truediv itruediv true_divide floordiv ifloordiv "
    "floor_divide mod imod remainder fmod pow ipow and or xor lshift rshift eq ne lt le gt ge "
    "bitwise_and bitwise_or bitwise_xor clamp clamp_min clamp_max where stack".split()
)


def mark_numbers(variables: Sequence[VariableTracker], positions: Sequence[int]) -> None:
    """Note that those of a step's arguments are numbers that steps carry."""
    for k in positions:
        if not variables[k].is_python_constant():
            mark(variables[k], k)


def numbers_among(carry: Sequence[VariableTracker]) -> list[int]:
    """Return which leaves of ``carry`` are numbers in the loop. In a body, a scan may be a part of
    the one around it, and then it is given them as numbers; else none of its leaves is one."""
    numbers = [k for k in at_hand.numbers if k < len(carry)]
    if at_hand.is_in_body:
        numbers = [k for k in numbers if not carry[k].is_python_constant()]
        numbers = [k for k in numbers if is_marked(carry[k].as_proxy())]
    return numbers


class Marking(VariableTracker):
    """``combine_fn`` on flat arguments, of which those at ``positions`` are numbers."""

    def __init__(
        self, combine_fn: VariableTracker, positions: Sequence[int], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.combine_fn, self.positions = combine_fn, tuple(positions)

    def call_function(
        self, tx: Any, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        mark_numbers(args, self.positions)
        with in_a_body():
            return self.combine_fn.call_function(tx, [*args], kwargs)


class StayingNumbersVariable(TorchHigherOrderOperatorVariable):
    """Tracks ``staying_numbers``."""

    _HOP_NAME = "staying_numbers"

    def call_function(
        self, tx: Any, args: Any, kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        flags = [k in at_hand.numbers for k in range(len(args))]
        return TupleVariable([ConstantVariable.create(flag) for flag in flags])


def make_whole(
    tx: Any,
    body: fx.GraphModule,
    n_carry: int,
    numbers: Sequence[int],
    inputs: list[fx.Proxy],
    exact: Mapping[int, fx.Proxy],
) -> tuple[dict[int, torch.dtype], str | None]:
    """Do as :func:`make_exact`, also with the numbers of a body around this one that are among
    ``inputs``, and give the body in double what it takes so; ``exact`` are inputs with all digits,
    in the place of some."""
    outer = {k: inputs[k] for k in range(n_carry, len(inputs)) if is_marked(inputs[k])}
    whole = {**exact, **outer}
    widened, checked = make_exact(body, n_carry, [*numbers, *outer], whole)
    for k in widened:
        inputs[k] = _as_dtype(tx, whole[k], torch.float64).as_proxy()
    return widened, checked


def as_left_to_the_program(
    tx: Any,
    carry: Sequence[VariableTracker],
    widened: Mapping[int, torch.dtype],
    numbers: Sequence[int],
) -> list[VariableTracker]:
    """Return the ``carry`` after a scan: what was ``widened`` for its digits has its dtype again,
    and numbers stay such in the body of another scan, whose next one may go on with them."""
    left = [
        _as_dtype(tx, leaf.as_proxy(), widened[k]) if k in widened else leaf
        for k, leaf in enumerate(carry)
    ]
    if at_hand.is_in_body:
        for k in numbers:
            mark(left[k])
    return left


def _as_dtype(tx: Any, proxy: fx.Proxy, dtype: torch.dtype) -> VariableTracker:
    return create_node(tx, "call_method", "to", (proxy, dtype), {})


def in_dtype(number: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the number in the dtype that an operator computes in with it."""
    return number.to(dtype)


def note_number(made: fx.Proxy, given: Sequence[fx.Proxy]) -> None:
    """Note that ``made`` is a number if it is arithmetic of numbers alone."""
    if is_of_numbers(made.node.target, given):
        made.node.meta[NUMBER] = None


def is_of_numbers(target: Any, given: Sequence[fx.Proxy]) -> bool:
    return target in ARITHMETIC and all(is_marked(p) or is_symbol(p.node) for p in given)


def read_number(tx: Any, variable: VariableTracker) -> VariableTracker | None:
    """Return the number that a tensor of one element holds; None for what is a number already, and
    where that is refused."""
    reads = at_hand.reads
    if reads is None or not at_hand.is_in_body or not isinstance(variable, TensorVariable):
        return None
    value = example_value(variable)
    is_one = all(isinstance(size, int) and size == 1 for size in value.shape)
    if not is_one or value.is_complex() or is_marked(variable.as_proxy()):
        return None
    reads.append(variable)
    kind = tree.kind_of(value.dtype)
    given = (variable.as_proxy(), _of_numbers_alone(kind))
    made = create_node(tx, "call_function", value_of, given, {})
    mark(made)
    return made


def dtype_of_numbers(
    written: str,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Sequence[fx.Proxy],
) -> torch.dtype | None:
    """Return the dtype in which ``target`` computes with the numbers among ``given``, all that it
    is given; None if it may have them as they are.

    ``written``: the name by which :func:`with_scalar` runs in its place.
    """
    name = getattr(target, "__name__", target)
    if written or not isinstance(name, str) or name.strip("_") not in OF_ALIKE:
        return _dtype_that_gives(written, target, args, kwargs, given)
    tensors = [example_value(p) for p in given if not is_marked(p)]
    if name == "where":  # the condition decides nothing
        tensors = [t for t in tensors if isinstance(t, torch.Tensor) and t.dtype != torch.bool]
    numbers = [example_value(p) for p in given if is_marked(p)]
    values = [*tensors, *numbers]
    if name == "stack":  # ys of an unrolled step
        return _of_numbers_alone(max(tree.kind_of(n.dtype) for n in numbers))
    if not tensors:
        return _dtype_that_gives(written, target, args, kwargs, given)
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None
    together, kind = tensors[0].dtype, max(tree.kind_of(n.dtype) for n in numbers)
    for tensor in tensors[1:]:
        together = torch.promote_types(together, tensor.dtype)
    if kind > tree.kind_of(together):  # of float64 and a complex number, complex128
        return torch.result_type(torch.empty(1, dtype=together), tree.NUMBERS[kind](1))
    return together if all(tensor.dim() == 0 for tensor in tensors) else None


def _dtype_that_gives(
    written: str, target: Any, args: Any, kwargs: Any, given: Sequence[fx.Proxy]
) -> torch.dtype | None:
    """Return the dtype that numbers must have for a result in the dtype that ``target`` gives for
    Python's; None if that is the one they have."""
    is_known = isinstance(target, str) or is_function_of_torch(target)
    if not is_known or keeps_dtype(target, kwargs):
        return None
    if is_of_numbers(target, given):
        return None
    run, taken = (with_scalar, (written, *args)) if written else (target, args)
    expected = result_dtype(target, args, kwargs, as_python_has_it)
    if expected in (None, result_dtype(run, taken, kwargs, example_value)):
        return None
    return expected


def as_python_has_it(proxy: fx.Proxy) -> Any:
    value = example_value(proxy)
    return tree.NUMBERS[tree.kind_of(value.dtype)](1) if is_marked(proxy) else value


def keeps_dtype(target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return True for an operator whose result has the dtype of an operand, since it writes to that
    or indexes it."""
    name = getattr(target, "__name__", target).removesuffix("__")
    keeping = ("_", "setitem", "getitem", "select", "narrow")
    return target in IN_PLACE or name.endswith(keeping) or "out" in kwargs


def _of_numbers_alone(kind: int) -> torch.dtype:
    return torch.full((), tree.NUMBERS[kind](1)).dtype


def carry_of(node: fx.Node) -> int | None:
    """Return which leaf of the carry ``node`` is, if it is a number that steps carry."""
    k: int | None = node.meta.get(NUMBER)
    return k


#: for ``numbers_are_weak``
WEAK = (
    dtype_of_numbers,
    in_dtype,
    note_number,
    name_with_scalar,
    with_scalar,
    IN_PLACE,
)
