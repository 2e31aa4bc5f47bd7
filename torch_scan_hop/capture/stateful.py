"""A body whose steps leave something in objects, as a function that carries it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch.dynamo.differences import tensor_of
from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.left import ARRAY, NUMBER, TENSOR, GrowingList, appended_to
from torch_scan_hop._torch.dynamo.made_numbers import mark
from torch_scan_hop._torch.dynamo.objects import ObjectSpec, closed, opened, spec_of
from torch_scan_hop._torch.dynamo.places import Place, as_number, is_number
from torch_scan_hop._torch.dynamo.variables import (
    ConstantVariable,
    TupleVariable,
    VariableTracker,
    call_inlined,
    example_value_or_none,
    proxies_outside,
    sequence_items,
    write_back,
)
from torch_scan_hop._torch.sizes import is_exporting
from torch_scan_hop.capture.shared_containers import SharedContainers
from torch_scan_hop.capture.shared_state import SharedState, check_leaves
from torch_scan_hop.capture.told import at_hand
from torch_scan_hop.capture.twins import (
    TwinContainers,
    Twins,
    View,
    twin_containers,
    twins_among,
    view_again,
    views_among,
)
from torch_scan_hop.step import device_of, in_own_containers


class Stateful(VariableTracker):
    """``combine_fn`` as a function of ``(carry, state)``: its state at ``places`` is carried, and
    its ys are ``(y, what is appended to each of lists)``."""

    def __init__(
        self,
        combine_fn: VariableTracker,
        places: Sequence[Place],
        lists: Sequence[GrowingList],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.combine_fn = combine_fn
        self.places = tuple(places)
        self.lists = tuple(lists)
        #: of parts that a step leaves with the tensor of an earlier one: that one. What it appends
        #: to lists is behind what is at the places
        self.twins: Twins = {}
        #: of parts that are views of others: how they are made
        self.views: dict[tuple[int, int], View] = {}
        #: of what is a list, a dict or an object that the step leaves elsewhere, too: where
        self.twin_containers: TwinContainers = {}
        #: of parts of what is at the places, which are the program's tensors: None, or the tensor,
        #: for one that a step leaves as it finds it, or finds elsewhere
        self.programs: dict[tuple[int, int], VariableTracker | None] | None = None
        #: by list, what the parts of what a step appends are
        self.appended: dict[int, list[str]] = {}

    def call_function(
        self, tx: Any, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        both, x = args
        carry, carried = sequence_items(tx, both)
        before = [place.read(tx) for place in self.places]
        specs = [spec_of(value) for value in before]
        opened_now = sequence_items(tx, carried)
        state = [
            (place, *pair)
            for place, was, value in zip(self.places, before, opened_now, strict=True)
            for pair in zip(parts_left(tx, was), parts_of(tx, value), strict=True)
        ]
        shared = SharedState(tx, parts_of(tx, carry), parts_of(tx, x), state)
        now = [closed(tx, *pair) for pair in zip(opened_now, specs, strict=True)]
        containers = SharedContainers(self.places, before, now)
        self._write(tx, now)
        with appended_to(tx, self.lists) as appended:
            result = self.combine_fn.call_function(tx, [carry, x], {})
        carry, y = sequence_items(tx, call_inlined(tx, in_own_containers, result))
        left = [place.read(tx) for place in self.places]
        parts = [parts_left(tx, value) for value in left]
        self._note_twins(tx, left, parts, appended)
        ends = [*parts_of(tx, carry), *itertools.chain(*parts)]
        shared.check(ends)
        self._note_tensors_of_the_program(parts, shared, ends)
        containers.check(left, [item for new in appended for item in new.so_far()])
        stacked = TupleVariable(
            [
                self._as_tensors(tx, n, new.so_far(), (shared, ends), (carry, x))
                for n, new in enumerate(appended)
            ]
        )
        ends_at = [_left_at(tx, *pair) for pair in zip(self.places, specs, strict=True)]
        self._write(tx, before)
        carry = TupleVariable([carry, TupleVariable(ends_at)])
        return TupleVariable([carry, TupleVariable([y, stacked])])

    def _as_tensors(
        self, tx: Any, n: int, items: list[VariableTracker], state: tuple[Any, Any], given: Any
    ) -> VariableTracker:
        """Return the ``items`` that a step appends to the ``n``-th list, as tensors: they are
        stacked. The ``state`` is that of all places, and where it ends."""
        growing, (shared, ends) = self.lists[n], state
        for item in items:
            growing.check_item(item)
        kinds, tensors = [], []
        for part in parts_of(tx, TupleVariable(items)):
            kinds.append(growing.kind_of(part))
            shared.check_kept(growing, part, ends)
            check_leaves([part], "a list", growing.line)
            tensors.append(_as_tensor(tx, part, kinds[-1], *given))
        self._check_number(n, kinds)
        return call_inlined(tx, tree.unflatten, TupleVariable(items), TupleVariable(tensors))

    def _check_number(self, n: int, parts: list[str]) -> None:
        """Raise Unsupported if the steps of one block append more to a list than others."""
        if self.appended.setdefault(n, parts) != parts:
            raise Unsupported(
                f"the body appends more in some steps than in others, at {self.lists[n].line}, and "
                "what steps leave is stacked. Append in each, and drop later what is not wanted"
            )

    def _note_twins(
        self, tx: Any, left: Sequence[Any], parts: Sequence[Any], appended: Sequence[Any]
    ) -> None:
        kept = [parts_of(tx, TupleVariable(new.so_far())) for new in appended]
        self.twins = twins_among([*parts, *kept])
        self.views = views_among([*parts, *kept], proxies_outside(tx))
        self.twin_containers = twin_containers(self.places, left)
        for place, own in zip(self.places, parts, strict=True):
            check_leaves(own, str(place), place.line)

    def _note_tensors_of_the_program(
        self, parts: Sequence[Sequence[Any]], shared: SharedState, ends: Sequence[Any]
    ) -> None:
        if len(ends) != len(shared.starts):
            return  # which is refused
        keys = [(n, k) for n, own in enumerate(parts) for k in range(len(own))]
        first = len(ends) - len(keys)
        found: dict[tuple[int, int], VariableTracker | None] = {}
        for key, end, is_same in zip(
            keys, ends[first:], shared.untouched(ends)[first:], strict=True
        ):
            if is_same or (tensor_of(end) is not None and end.source is not None):
                found[key] = None if is_same else end
        before = found if self.programs is None else self.programs
        self.programs = {k: v for k, v in found.items() if k in before and before[k] is v}

    def with_known_tensors(
        self, tx: Any, values: Sequence[VariableTracker]
    ) -> list[VariableTracker]:
        """Return the ``values``, which a scan has left at the places, with the tensors that are
        the program's, which others write to, as optimisers do to parameters; and with one tensor
        where a step leaves one."""
        parts = [parts_of(tx, value) for value in values]
        olds = [parts_left(tx, place.read(tx)) for place in self.places]
        for (n, k), known in (self.programs or {}).items():
            own = olds[n][k] if known is None else known
            if len(olds[n]) == len(parts[n]) and tensor_of(own) is not None:
                parts[n][k] = own
        if not is_exporting():
            self._share(tx, parts)
        return [
            call_inlined(tx, tree.unflatten, value, TupleVariable(own))
            for value, own in zip(values, parts, strict=True)
        ]

    def _share(self, tx: Any, parts: Sequence[list[VariableTracker]]) -> None:
        for n, k in (*self.twins, *self.views):
            if n < len(parts):
                parts[n][k] = self._one(tx, (n, k), parts) or parts[n][k]

    def _one(self, tx: Any, key: tuple[int, int], parts: Sequence[list[VariableTracker]]) -> Any:
        """Return the tensor that a part is, or is a view of, and that is among the ``parts`` at the
        places or outside of the body; None for others."""
        view = self.views.get(key)
        one: Any = view.of if view else self.twins.get(key)
        if isinstance(one, tuple):
            one = parts[one[0]][one[1]] if one[0] < len(parts) else None
        return one if one is None or view is None else view_again(tx, one, view)

    def last_appended(self, tx: Any, n: int) -> VariableTracker:
        """Return of each part of what the last step appended to the ``n``-th list the tensor that
        it has left at a place, too; None for others."""
        parts = [parts_left(tx, place.read(tx)) for place in self.places]
        found = []
        for k, kind in enumerate(self.appended[n]):
            is_one = kind == TENSOR and not is_exporting()
            one = self._one(tx, (len(parts) + n, k), parts) if is_one else None
            found.append(one or ConstantVariable.create(None))
        return TupleVariable(found)

    def _write(self, tx: Any, values: Sequence[VariableTracker]) -> None:
        for place, value in zip(self.places, values, strict=True):
            place.write(tx, value)


def _left_at(tx: Any, place: Place, spec: ObjectSpec | None) -> VariableTracker:
    """Return what a step leaves at ``place``: numbers as they are carried, in double."""
    if spec_of(place.read(tx)) != spec:
        raise place.refusal()

    def in_double(_: int, part: VariableTracker) -> VariableTracker:
        if not _is_floating(part):
            return part
        return part.call_method(tx, "to", [ConstantVariable.create(torch.float64)], {})

    return with_numbers(tx, place, opened(place.read(tx)), in_double)


def _is_floating(variable: VariableTracker) -> bool:
    example = example_value_or_none(variable)
    return isinstance(example, torch.Tensor) and example.is_floating_point()


def parts_of(tx: Any, value: VariableTracker) -> list[VariableTracker]:
    return sequence_items(tx, call_inlined(tx, tree.tensors, value))


def parts_left(tx: Any, value: VariableTracker) -> list[VariableTracker]:
    """Return what is carried of a ``value`` that is left at a place."""
    return parts_of(tx, opened(value))


def with_numbers(
    tx: Any,
    place: Place,
    value: VariableTracker,
    make: Callable[[int, VariableTracker], VariableTracker],
) -> VariableTracker:
    """Return ``value`` with ``make(k, part)`` for its ``k``-th part, where there was a number."""
    olds = [] if place.before is None else parts_left(tx, place.before)
    parts = parts_of(tx, value)
    if len(olds) != len(parts) or not any(map(is_number, olds)):
        return value
    pairs = enumerate(zip(olds, parts, strict=True))
    made = [make(k, part) if is_number(old) else part for k, (old, part) in pairs]
    return call_inlined(tx, tree.unflatten, value, TupleVariable(made))


def leave(
    tx: Any, place: Place, value: VariableTracker, counts: Sequence[VariableTracker | None]
) -> None:
    """Leave at ``place``, after the scan, what the last step left there; of its parts, ``counts``
    are known."""
    if is_exporting() and place.is_buffer() and not place.must_settle():
        # an exported program returns what it makes of a buffer, if it is written to the tensor
        # itself: what Dynamo assigns after a capture goes past the hook of torch.export
        assert place.before is not None
        write_back(tx, place.before.as_proxy(), value.as_proxy())
    else:
        spec = spec_of(place.read(tx))
        numbers = with_numbers(tx, place, value, lambda k, p: counts[k] or number_after(tx, p))
        place.write(tx, closed(tx, numbers, spec))


def number_after(tx: Any, value: VariableTracker) -> VariableTracker:
    """Return the number that the scalar ``value`` is after a scan; a body goes on with the scalar,
    as with its own numbers."""
    if not at_hand.is_within:
        return as_number(tx, value)
    mark(value)
    return value


def _as_tensor(tx: Any, part: VariableTracker, kind: str, carry: Any, x: Any) -> VariableTracker:
    """Return ``part`` of what is appended to a list as a tensor, which is stacked."""
    if kind == ARRAY:
        return call_inlined(tx, _from_numpy, part)
    if kind != NUMBER:
        return part
    number = call_inlined(tx, exact_numbers, part, carry, x)
    # a tensor from here on, which keeps its digits in ys
    return number.call_method(tx, "double", [], {}) if _is_floating(number) else number


def _from_numpy(array: Any) -> torch.Tensor:
    return torch.from_numpy(array)


def exact_numbers(value: Any, init: Any, xs: Any) -> Any:
    """Return ``value`` with its numbers as scalars of all digits."""
    device = device_of(init, xs)

    def exact(leaf: Any) -> Any:
        return tree.exact_tensor(leaf, device) if isinstance(leaf, (int, float)) else leaf

    return tree.map_leaves(exact, value)
