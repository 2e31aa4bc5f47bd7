"""Derive things from a body once for all sizes and numbers that vary.

When a batch size, or a closed-over float, has its second value, Dynamo captures the body with a
symbol in its place. Then what is derived from the body (its derivative, its plan, and what is
derived from those) is traced with a symbol, too, and is used again wherever the guards of that
trace hold. If it cannot be traced so, or if nothing varies, it is derived for the shapes of the
call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import fx

from torch_scan_hop._torch.fakes import FakeTensorMode, detect_fake_mode
from torch_scan_hop._torch.operators import disable_proxy_modes_tracing
from torch_scan_hop._torch.symbols import Number, Symbols, open_number
from torch_scan_hop._torch.tracing import is_traced
from torch_scan_hop._torch.transforms import under_transform
from torch_scan_hop.body.cache import autocast_state, inputs_metadata, remember
from torch_scan_hop.body.step_examples import step_examples, symbolic_step_examples
from torch_scan_hop.op import Body
from torch_scan_hop.signature import Inputs

Result = TypeVar("Result")
Found = TypeVar("Found", covariant=True)
#: for each flat input of a step the name of its number, or the names of its dimensions; None for
#: one that does not vary
Varying = tuple[Any, ...]
#: makes a thing from (fake mode, examples, the symbols among them or None)
Make = Callable[[FakeTensorMode, Inputs[Any], "Symbols | None"], Result]

# a trace may be right for some sizes only; a body that wants more of them gets static ones
MAX_TRACES = 4
# sizes and numbers of so many calls are answered without a look at guards
MAX_RECENT = 16

_log = logging.getLogger(__name__)


class Derived(Protocol[Found]):
    """A thing derived from a body, which may hold symbols."""

    def at(self, numbers: tuple[Number, ...], /) -> Found:
        """Return its form for a call in which the symbols have these values."""


@dataclass(frozen=True)
class _Member(Generic[Result]):
    holds: Callable[..., bool]
    pays: Callable[..., bool]
    result: Result


@dataclass
class _Family(Generic[Result]):
    """The results that were derived for inputs which differ only in the numbers that vary."""

    members: list[_Member[Result]] = field(default_factory=list)
    n_traces: int = 0

    def find(self, numbers: Sequence[Number]) -> _Member[Result] | None:
        right = [m for m in self.members if m.holds(*numbers)]
        found = next((m for m in right if m.pays(*numbers)), None)
        if found is None and right and self.n_traces >= MAX_TRACES:
            return right[0]
        return found


def derived(
    body: Body,
    key: tuple[Any, ...],
    inputs: Inputs[Any],
    make: Make[Derived[Found]],
) -> Found:
    """Return what ``make`` derives for inputs like these, in its form for their numbers."""
    state, like = autocast_state(), inputs_metadata(inputs)
    recent: dict[Any, Found] = remember(body, (*key, "recent"), dict)
    try:
        found = recent.get((state, like))
    except TypeError:  # symbols: what is derived for them is not kept
        return _derived(body, (*key, state), inputs, like, make)
    if found is None:
        found = _derived(body, (*key, state), inputs, like, make)
        if len(recent) >= MAX_RECENT:
            recent.clear()
        recent[state, like] = found
    return found


def _derived(
    body: Body, key: tuple[Any, ...], inputs: Inputs[Any], like: Any, make: Make[Derived[Found]]
) -> Found:
    varying = _varying_of(body)
    if varying is not None and _are_plain(inputs.flat()):
        numbers = _numbers(varying, inputs)
        family_key = (*key, "any", _skeleton(varying, inputs))
        family: _Family[Derived[Found]] = remember(body, family_key, _Family)
        member = family.find(numbers)
        if member is None and family.n_traces < MAX_TRACES:
            family.n_traces += 1
            member = _trace_member(varying, inputs, make)
            if member is None or not member.holds(*numbers):
                member = None
                family.n_traces = MAX_TRACES
            else:
                family.members.insert(0, member)
        if member is not None:
            return member.result.at(numbers)

    def make_static() -> Derived[Found]:
        # whatever is asked about symbolic sizes is no operator of a trace under way
        with disable_proxy_modes_tracing():
            return make(*step_examples(inputs), None)

    return remember(body, (*key, like), make_static).at(())


def _trace_member(
    varying: Varying,
    inputs: Inputs[Any],
    make: Make[Result],
) -> _Member[Result] | None:
    """Trace with symbols; None if that fails, since a static trace will then say why."""
    try:
        symbols = Symbols()
        examples = symbolic_step_examples(symbols, varying, inputs)
        result = make(symbols.mode, examples, symbols)
        return _Member(symbols.guards(), symbols.are_near(), result)
    except Exception:
        _log.debug("a scan's body has no form for any size", exc_info=True)
        return None


# --- what varies ---


def _varying_of(body: Body) -> Varying | None:
    """Return the sizes and numbers that a trace left open; None if there are none, or no trace."""
    if not isinstance(body, fx.GraphModule):
        return None
    return remember(body, ("varying",), lambda: _find_varying(body))


def _find_varying(body: fx.GraphModule) -> Varying | None:
    found: list[Any] = []
    for node in body.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.Tensor):
            found.append(tuple(map(open_number, value.shape)))
        else:
            found.append(open_number(value))
    is_open = any(any(v) if isinstance(v, tuple) else v for v in found)
    return tuple(found) if is_open else None


def _are_plain(values: Sequence[Any]) -> bool:
    """Return True if all are real tensors and numbers, which nobody traces or transforms."""
    for value in values:
        if type(value) not in _PLAIN:
            return False
    return not under_transform() and not is_traced(values) and detect_fake_mode() is None


_PLAIN = {torch.Tensor, torch.nn.Parameter, int, float, bool, complex, type(None)}


def _shapes(inputs: Inputs[Any]) -> list[Any]:
    """Return the shapes of a step's tensors, and its numbers."""
    shapes = [*(c.shape for c in inputs.carry), *(x.shape[1:] for x in inputs.xs)]
    return shapes + [a.shape if isinstance(a, torch.Tensor) else a for a in inputs.additional]


def _numbers(varying: Varying, inputs: Inputs[Any]) -> tuple[Number, ...]:
    found: list[Number] = []
    for names, value in zip(varying, _shapes(inputs), strict=True):
        if isinstance(names, tuple):
            found += [size for size, name in zip(value, names, strict=True) if name is not None]
        elif names is not None:
            found.append(value)
    return tuple(found)


def _skeleton(varying: Varying, inputs: Inputs[Any]) -> tuple[Any, ...]:
    """Return the metadata of these inputs without what varies."""
    found: list[Any] = []
    for names, shape, value in zip(varying, _shapes(inputs), inputs.flat(), strict=True):
        if isinstance(value, torch.Tensor):
            sizes = tuple(s if name is None else None for s, name in zip(shape, names, strict=True))
            found.append((sizes, value.dtype, value.device))
        else:
            found.append((type(value), value if names is None else None))
    return tuple(found)
