"""Say in a line why a body was not traced, and what helps; remember that for its function."""

from __future__ import annotations

import functools
import re
import types
from typing import Any

import torch
import torch.utils._pytree as pytree

from torch_scan_hop import tree
from torch_scan_hop._torch.function_modes import function_modes
from torch_scan_hop.body.per_object import PerObject
from torch_scan_hop.capture.replaced_methods import replaced_module_methods, replaced_tensor_methods
from torch_scan_hop.capture.user_code import code_of, users_line
from torch_scan_hop.errors import hint_about

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
        len(pytree.SUPPORTED_NODES),  # a dataclass that is registered can be carried
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
    if isinstance(value, torch.nn.Module):
        return tuple(_named(type(module)) for module in value.modules())
    return _named(value if isinstance(value, type) else type(value))


def _named(kind: type) -> Any:
    return kind.__qualname__, id(kind)


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # not assigned yet
        return True
    return False


def _functions_named_in(fn: types.FunctionType) -> list[Any]:
    found = (fn.__globals__.get(name) for name in fn.__code__.co_names)
    return [v for v in found if isinstance(v, (types.FunctionType, torch.nn.Module))]


def remembered_reason(fn: Any, inputs: Any) -> str | None:
    """Return why ``fn``, called so with (init, xs), was not traced before; None if it may be."""
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
#: what Dynamo says in its own words, and what it means for a scan
_MEANINGS = (
    ("RemovableHandleClass.*context manager", "the body removes a hook that it registers"),
    # Dynamo may come to write down what the hook changes before this package refuses it
    (
        r"^<class '.*Variable'>.*\.register_hook\(",
        "a hook that the body registers changes what the loop keeps",
    ),
    (
        r"(saved_tensors_hooks|save_on_cpu).*skipped|skipped.*(saved_tensors_hooks|save_on_cpu)",
        "the body says how tensors are saved for its backward",
    ),
    (
        r"setattr.*type.*register_\w+_hook",
        "the body registers a hook on a module, which the loop does at every step",
    ),
    (
        "enter a `RLock`",
        "the body computes a functools.cached_property, and others may wait for it",
    ),
    ("Module-level backwards hooks", "the body calls a module that has a backward hook"),
    (r"autograd\.grad.*trace_autograd_ops", "the body calls torch.autograd.grad"),
    (r"requires_grad_\(\)`", "the body calls requires_grad_()"),
    (r"Tensor\.retain_grad\(\) with", "the body calls retain_grad()"),
    (r"as_proxy.*generator=", "the body draws from a torch.Generator of its own"),
    (
        r"(?i:data.dependent|marked as skipped).*(?<![\w.])random\.\w+\(",
        "the body draws from Python's `random`, and decides by that",
    ),
    (r"(?i:data.dependent).*gaussian_nll_loss\(", "the loss asks if a variance is negative"),
)
_FIXES = (
    (
        "a hook that the body registers changes",
        "Return a new gradient from the hook, as g * 0.5. To see the gradients of h, add zeros "
        "to it that come from xs, and look at theirs.",
    ),
    ("length of a deque", "Fill it before the scan, as in deque([zeros] * n, maxlen=n)."),
    ("cached_property", "Read it before the scan."),
    ("SimpleNamespace", "Keep it in an object of a class of your own, or in a dict."),
    ("removes a hook", "Leave the hook out: no backward comes before it is removed."),
    ("how tensors are saved", "Enter the context around the scan."),
    (
        r"module that has a backward hook|register_\w*backward_\w*hook",
        "Register the hook on a tensor in the body: module(x).register_hook(f).",
    ),
    ("registers a hook on a module", "Register it before the scan."),
    ("what the grad_fn of", "Ask if h.requires_grad, or if h.grad_fn is None."),
    (
        r"calls torch\.(set_|use_)",
        "Call it before the scan; for one tensor, name the dtype: torch.ones(3, dtype=x.dtype).",
    ),
    ("calls retain_grad", "Return the tensor in ys, and call ys.retain_grad() after the scan."),
    (
        "draws from (a torch.Generator|Python's `random`)",
        "Draw before the scan, and pass what was drawn in xs.",
    ),
    ("variance is negative", "Write it out: 0.5 * (var.log() + (y - mean) ** 2 / var).mean()."),
    (
        r"bincount\(",
        "Count into as many places as there may be: torch.zeros(n).index_add(0, i, ones).",
    ),
    (
        "data-dependent size|Dynamic shape operator",
        "Rows that a mask selects may be computed row by row, and then written by the same mask or "
        "summed. Otherwise compute all rows, and choose: h = torch.where(mask, new, h).",
    ),
    (r"print|logging|builtin.*skip", "Print after the scan, from ys, or run it under fallback."),
    (
        r"\brange\(",
        "If a tensor says how often, repeat as often as it may say, and keep what counts with "
        "torch.where(k < n, new, old).",
    ),
    (
        "specialized integer|non-scalar tensor",
        "Keep the number a tensor: an item of a list of tensors is torch.stack(tensors)[i].",
    ),
    (
        r"data.dependent|Could not (guard|extract)|\.item\(\)|unbacked",
        "Choose with torch.where, or keep the value a tensor.",
    ),
    (r"requires_grad_|autograd\.grad", "Use torch.func.grad in the body."),
    (
        "sparse",
        "Use tensor.to_dense(), or clones of its indices() and values(), and index_add.",
    ),
)


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
    explanation = [line for line in lines if line.startswith("Explanation:")]
    if explanation and len(explanation[0]) < 200:
        reason = f"{reason} ({explanation[0].removeprefix('Explanation:').strip()})"
    where = ""
    if ", at " not in reason:
        where = users_line(str(error)) or users_line(stack)
    meant = (words for pattern, words in _MEANINGS if re.search(pattern, reason + where))
    text = next(meant, reason) + where
    fixes = [fix for pattern, fix in _FIXES if re.search(pattern, text, re.IGNORECASE)]
    line = re.search(r", at (\S+:\d+: .*)", text)
    why, where = (text[: line.start()], line[1]) if line else (text, "")
    return Reason(why, where, " ".join([*fixes[:1], hint_about(error)]).strip())
