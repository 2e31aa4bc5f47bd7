"""Dynamo when it is imported, by whomever (checked on torch 2.9.1, 2.13.0, 2.15.0).

Importing ``torch._dynamo`` takes one to three seconds, and a program that only defines its cells
needs nothing of it. So it is imported at the first capture, and what is to be registered with it
waits for that.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from torch_scan_hop._torch.isolation import isolated

_DYNAMO = "torch._dynamo"
_HOPS = "torch._dynamo.variables.higher_order_ops"

#: the class of the tracker of an operator, given torch's own for operators of that name
TrackerOf = Callable[[Any, Any], Any]


def register_trackers(trackers: Mapping[str, TrackerOf]) -> None:
    """Let each of ``trackers`` pick the tracker of operators of its name: at once if Dynamo is
    loaded, or as soon as it is."""
    # in this order: a thread that imports Dynamo between the two is not missed
    sys.meta_path.insert(0, _Finder(lambda: _register(trackers)))
    if _DYNAMO in sys.modules:
        _register(trackers)


def load_dynamo() -> None:
    """Import Dynamo, if nobody has, outside of the caller's modes and transforms."""
    if _DYNAMO not in sys.modules:
        with isolated(), torch._C.DisableTorchFunction():
            importlib.import_module(_DYNAMO)


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


def _register(trackers: Mapping[str, TrackerOf]) -> None:
    classes = importlib.import_module(_HOPS)._hop_name_to_variable_class
    for name, tracker_of in trackers.items():
        if getattr(classes.get(name), "tracker_of", None) is not tracker_of:
            classes[name] = _picker(tracker_of, classes.get(name))


def _picker(tracker_of: TrackerOf, upstream: Any) -> Callable[..., Any]:
    def pick(value: Any, source: Any = None, **kwargs: Any) -> Any:
        return tracker_of(value, upstream)(value, source, **kwargs)

    pick.tracker_of = tracker_of  # type: ignore[attr-defined]
    return pick
