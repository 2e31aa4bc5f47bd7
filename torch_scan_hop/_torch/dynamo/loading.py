"""Dynamo when it is imported, by whomever (checked on torch 2.9.1, 2.13.0, 2.15.0).

Importing ``torch._dynamo`` takes one to three seconds, and a program that only defines its cells
needs nothing of it. So it is imported at the first capture, and what is to be registered with it
waits for that.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch_scan_hop._torch.capabilities import (
    attempt,
    find_out_whether_captures,
    require,
    why_off,
)
from torch_scan_hop._torch.isolation import isolated, torch_functions_disabled

_DYNAMO = "torch._dynamo"
_HOPS = "torch._dynamo.variables.higher_order_ops"

#: the class of the tracker of an operator, given torch's own for operators of that name
TrackerOf = Callable[[Any, Any], Any]


_trackers: dict[str, TrackerOf] = {}


def register_trackers(trackers: Mapping[str, TrackerOf]) -> None:
    """Let each of ``trackers`` pick the tracker of operators of its name: at once if Dynamo is
    loaded, or as soon as it is."""
    _trackers.update(trackers)
    # in this order: a thread that imports Dynamo between the two is not missed
    sys.meta_path.insert(0, _Finder(_register))
    if _DYNAMO in sys.modules:
        _register()


def load_dynamo() -> None:
    """Import Dynamo, if nobody has, outside of the caller's modes and transforms."""
    if _DYNAMO not in sys.modules:
        with isolated(), torch_functions_disabled():
            importlib.import_module(_DYNAMO)
        _register()  # if its loader had no hook


class _Finder:
    """Finds Dynamo as others do, and runs ``then`` when its module has been executed.

    It stays on ``sys.meta_path``: taking it out would move the others while a thread goes through.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _DYNAMO:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                with contextlib.suppress(AttributeError):  # a loader that takes no hook
                    _run_after(spec.loader, self._then)
                return spec
        return None


def _run_after(loader: Any, then: Callable[[], None]) -> None:
    """Let the next execution of a module by ``loader``, which is that module's own, end in this."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        then()

    loader.exec_module = exec_module


def _register() -> None:
    """Register the trackers, and let no error or warning reach the code that imports Dynamo.

    That code may hold no scan at all.
    """
    # whatever is under way imports Dynamo, maybe in the middle of something: nothing more now
    with contextlib.suppress(Warning), attempt("capture"):
        if find_out_whether_captures(imports=False):
            _register_all()


def _register_all() -> None:
    classes = importlib.import_module(_HOPS)._hop_name_to_variable_class
    for name, tracker_of in _trackers.items():
        if getattr(classes.get(name), "tracker_of", None) is not tracker_of:
            classes[name] = _picker(tracker_of, classes.get(name))


def _picker(tracker_of: TrackerOf, upstream: Any) -> Callable[..., Any]:
    def pick(value: Any, source: Any = None, **kwargs: Any) -> Any:
        if not find_out_whether_captures():
            _refuse()
        return tracker_of(value, upstream)(value, source, **kwargs)

    pick.tracker_of = tracker_of  # type: ignore[attr-defined]
    return pick


def _refuse() -> None:
    """Refuse a program that is being traced: it asks here, first of all, if scans are captured."""
    unsupported = getattr(importlib.import_module("torch._dynamo.exc"), "Unsupported", None)
    if unsupported is not None:  # Python runs this call, and traces no scan of the next
        raise unsupported(f"torch_scan_hop: capture is switched off: {why_off('capture')}")
    require("capture")
