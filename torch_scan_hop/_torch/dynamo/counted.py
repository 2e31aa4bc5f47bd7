"""Counters of modules, from which a program is not compiled anew at each count (checked on torch
2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import functools
import types
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch._dynamo.variables import builder
from torch.utils.weak import WeakIdKeyDictionary

from torch_scan_hop._torch.dynamo.places import Place, is_number
from torch_scan_hop._torch.replaced import replaced

#: the attributes that scans count on, by the function that is compiled
_counters: MutableMapping[types.CodeType, set[str]] = WeakIdKeyDictionary()


def note_counters(tx: Any, places: Sequence[Place]) -> None:
    """Note that the attributes among ``places`` where a scan leaves numbers are counters."""
    names = {p.name for p in places if not p.is_item and is_number(p.before)}
    _counters.setdefault(tx.output.root_tx.f_code, set()).update(names)


def counters_vary(tx: Any) -> AbstractContextManager[None]:
    """Noted counters are ints that may vary, though Dynamo takes a module's ints for constants."""
    attributes = _counters.get(tx.output.root_tx.f_code, set())
    original = builder.is_int_specialization_case

    @functools.wraps(original)
    def is_constant(value: Any, source: Any) -> bool:
        if getattr(source, "member", None) in attributes and _is_of_module(source):
            return False
        return bool(original(value, source))

    return replaced(builder, is_int_specialization_case=is_constant)


def _is_of_module(source: Any) -> bool:
    found: Any = source.guard_source  # a method until torch 2.9
    return bool((found() if callable(found) else found).is_unspecialized_nn_module())
