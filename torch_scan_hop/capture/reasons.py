"""Say in a line why a body was not traced, and what helps; remember that for its function."""

from __future__ import annotations

import functools
import itertools
import re
import types
from typing import Any

import torch
import torch.utils._pytree as pytree

from torch_scan_hop import tree
from torch_scan_hop._torch.function_modes import function_modes
from torch_scan_hop.body.per_object import PerObject
from torch_scan_hop.capture.reason_words import FIXES, MEANINGS
from torch_scan_hop.capture.replaced_methods import replaced_module_methods, replaced_tensor_methods
from torch_scan_hop.capture.user_code import code_of, users_line
from torch_scan_hop.errors import COUNTS_FAR, hint_about, is_far

_PLAIN = (bool, int, str, type(None))
# so many different settings are tried; a counter among them would be another one at each call
MAX_SETTINGS = 4
# so much of a list or a dict is looked at
MAX_ITEMS = 16

# So many functions with one code, which call different things, are told apart: a wrapper may be
# used all over a program.
MAX_CALLEES = 64

# Why a function was not traced: by the code that it calls, and by what it is called with and reads.
_Reasons = dict[Any, dict[Any, str]]
_refusals = PerObject[_Reasons]()
_class_numbers, _count = PerObject[int](), itertools.count()


def _plain_values(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return _kind_of(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return tuple(v if isinstance(v, _PLAIN) else type(v) for v in value[:MAX_ITEMS])
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, (type, types.ModuleType)):
        return tuple((k, v) for k, v in attributes.items() if isinstance(v, _PLAIN))
    return type(value)


def _kind_of(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf)
    return (type(leaf), leaf.dtype, leaf.dim(), leaf.layout, leaf.requires_grad)


def setting_of(fn: Any, inputs: Any) -> Any:
    """Return what may make another call traceable: plain values that ``fn`` reads, and its
    surroundings.

    A flag that turns printing off makes it another body. The kinds of ``inputs`` and the modes
    around the call belong to it, too, since what cannot be traced of one call says nothing about a
    call without them.
    """
    # here, since the package is to be imported where torch has none of these
    from torch_scan_hop._torch.transforms import in_forward_mode, under_transform

    found: list[Any] = [
        *function_modes(),
        under_transform(),
        in_forward_mode(),
        torch.is_inference_mode_enabled(),
        *replaced_module_methods(),
        *replaced_tensor_methods(),
        len(pytree.SUPPORTED_NODES),  # a class that is registered can be carried
        *map(_kind_of, tree.leaves(inputs)),
    ]
    while isinstance(fn, functools.partial):
        found += map(_plain_values, (*fn.args, *fn.keywords.values()))
        fn = fn.func
    if isinstance(fn, types.MethodType):
        found.append(_plain_values(fn.__self__))
        fn = fn.__func__
    if not isinstance(fn, types.FunctionType):
        return (*found, _plain_values(fn))
    for cell in fn.__closure__ or ():
        found.append(None if _is_empty(cell) else _plain_values(cell.cell_contents))
    names = (name for name in fn.__code__.co_names if name in fn.__globals__)
    found += [v for v in (fn.__globals__[n] for n in names) if isinstance(v, _PLAIN)]
    return (*found, *map(_plain_values, fn.__defaults__ or ()))


def callees_of(value: Any, depth: int = 4) -> Any:
    """Return a key that tells apart the code that ``value`` runs, without keeping ``value`` alive.

    A body may call a function or a layer that it is given. Then one call of it may be traced though
    another was not, and the key differs.
    """
    if isinstance(value, (*_PLAIN, torch.Tensor)) or not depth:
        return None
    if isinstance(value, functools.partial):
        return callees_of((value.func, *value.args, *value.keywords.values()), depth)
    if isinstance(value, types.MethodType):
        return callees_of((value.__self__, value.__func__), depth)
    if isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or () if not _is_empty(c)]
        return hash(value.__code__), callees_of((*cells, *_functions_named_in(value)), depth - 1)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return tuple(callees_of(v, depth - 1) for v in value[:MAX_CALLEES])
    modules = list(value.modules()) if isinstance(value, torch.nn.Module) else [value]
    kinds = tuple(_named(m if isinstance(m, type) else type(m)) for m in modules)
    return kinds, callees_of([f for m in modules for f in _functions_kept_in(m)], depth - 1)


def _functions_kept_in(value: Any) -> list[Any]:
    """Return the functions in attributes: an activation that a layer is given."""
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, (type, types.ModuleType)):
        return []
    return [
        v for v in attributes.values() if isinstance(v, (types.FunctionType, functools.partial))
    ]


def _named(kind: type) -> Any:
    # not its id, which another class may have when it is gone
    return kind.__qualname__, _class_numbers.kept_or(kind, next(_count))


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # not assigned yet
        return True
    return False


def _functions_named_in(fn: types.FunctionType) -> list[Any]:
    found = (fn.__globals__.get(name) for name in fn.__code__.co_names)
    return [v for v in found if isinstance(v, (types.FunctionType, torch.nn.Module))]


def remembered_reason(fn: Any, inputs: Any, template: Any) -> str | None:
    """Return why ``fn``, called so with (init, xs), was not traced before; None if it may be.

    Of a number in init a capture does not see the value. There is none without a ``template``.
    """
    if template is not None and any(
        type(leaf) is int and is_far(leaf) for leaf in tree.leaves(inputs[0])
    ):
        return COUNTS_FAR.format("init")
    by_callees = _refusals.get(id(code_of(fn)))
    reasons = None if by_callees is None else by_callees.get(callees_of(fn))
    if reasons is None:
        return None
    if len(reasons) >= MAX_SETTINGS:
        return next(reversed(reasons.values()))
    return reasons.get(setting_of(fn, inputs))


def remember_reason(fn: Any, setting: Any, reason: str) -> None:
    """Remember why ``fn`` was not traced; ``setting`` is what it was before it ran."""
    by_callees = _refusals.kept_or(code_of(fn), {})
    callees = callees_of(fn)
    if callees not in by_callees and len(by_callees) >= MAX_CALLEES:
        del by_callees[next(iter(by_callees))]
    by_callees.setdefault(callees, {})[setting] = reason


def forget_refusals() -> None:
    """Let every function be tried again."""
    _refusals.clear()


#: how an error begins that Dynamo shows to the user
NOT_CAPTURED = "scan: combine_fn is not captured: "
_PREAMBLE = "Got graph break/error:"

#: the advice if nothing better is known
GENERAL_FIX = "Move what cannot be traced out of the body, or write it with tensor operators."


class Reason(str):
    """A sentence that says why a body was not traced; ``explain`` shows its parts.

    >>> reason = Reason("x is odd", "cell.py:3: h + x", "Write y.")
    >>> reason, reason.where
    ('x is odd, at cell.py:3: h + x. Write y.', 'cell.py:3: h + x')
    """

    why: str
    where: str
    advice: str

    def __new__(cls, why: str, where: str = "", advice: str = "") -> Reason:
        text = f"{why}, at {where}" if where else why
        reason = super().__new__(cls, f"{text.rstrip('. ')}. {advice}" if advice else text)
        reason.why, reason.where, reason.advice = why, where, advice
        return reason


def reason_of(error: BaseException, stack: str = "") -> Reason:
    """Return why Dynamo gave up, from the line that says so.

    ``stack`` says where in the user's code, if the text of ``error`` does not yet.

    >>> reason_of(RuntimeError("It must be captured. Got graph break/error:\\n  x is odd\\n more"))
    'x is odd'
    """
    text = str(error).rpartition(_PREAMBLE)[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    # where torch is installed says nothing, and is as long as the path to it
    explanation = [
        re.sub(r"/\S*/site-packages/", "", line.removeprefix("Explanation:").strip())
        for line in lines
        if line.startswith("Explanation:")
    ]
    if explanation and len(explanation[0]) < 200:
        reason = f"{reason} ({explanation[0]})"
    where = ""
    if ", at " not in reason:
        where = users_line(str(error)) or users_line(stack)
    found = ((re.search(pattern, reason + where), words) for pattern, words in MEANINGS)
    meant = (match.expand(words) for match, words in found if match)
    text = next(meant, reason) + where
    fixes = [fix for pattern, fix in FIXES if re.search(pattern, text, re.IGNORECASE)]
    line = re.search(r", at (\S+:\d+: .*)", text)
    why, where = (text[: line.start()], line[1]) if line else (text, "")
    return Reason(why, where, " ".join([*fixes[:1], hint_about(error)]).strip())
