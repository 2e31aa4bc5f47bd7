"""Check that torch has what a shim uses, in the form in which it uses it.

A function that takes its arguments in another order, or a method that torch no longer calls where
this package overrides it, has its old name and is not what it was. ``private_names.json`` has the
names, and the forms of the torch versions that were checked, read from their signatures::

    (tx f|fn source_target=)   the arguments of a call, by position and by keyword
    [self item name]           the parameters of what is patched or overridden

Names come after the module or class that is their owner::

    "torch._C": "_len_torch_dispatch_stack _set_grad_enabled",
    "torch._ops": "key_extractor(tensors mask)"

A keyword ends in "=", "..." says that there may be more, "()" is a call with nothing, "? " one that
is made on some versions only, and "; " separates calls. ``python tests/private_names.py`` writes
the file, once on each of these versions.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import re
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_P = inspect.Parameter
# a name, with its calls and its parameters if it has any
_ENTRY = re.compile(r"([\w.]+)(?:\((.*?)\))?(?:\[(.*?)\])?(?=\s|$)")


def _by_path(table: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Return for each name of a table, by its path, how it is called and its parameters.

    >>> _by_path({"torch._C": "_a", "torch._ops": "f(()) g(x)[self x]"})
    {'torch._C._a': (None, None), 'torch._ops.f': ('()', None), 'torch._ops.g': ('x', 'self x')}
    """
    entries = ((owner, e) for owner, names in table.items() for e in _ENTRY.finditer(names))
    return {f"{owner}.{entry[1]}": (entry[2], entry[3]) for owner, entry in entries}


_TABLE = json.loads(Path(__file__).with_name("private_names.json").read_text(encoding="utf-8"))
VERSIONS: str = _TABLE["versions"]
CHECKED: str = _TABLE["checked"]
#: what some versions have not, and which have it: its shim looks first
ONLY_IN: dict[str, str] = _TABLE["only in"]
#: the names of each capability
NAMES = {capability: sorted(_by_path(names)) for capability, names in _TABLE["names"].items()}
_FORMS = _by_path(_TABLE["forms"])
CALLED = {path: sites for path, (sites, _) in _FORMS.items() if sites is not None}
REPLACED = {path: own for path, (_, own) in _FORMS.items() if own is not None}


def why_not(name: str, imports: bool = True) -> str | None:
    """Return what is wrong with ``name``, or with a method of it that is used; None if nothing is.

    Without ``imports``, only what is loaded already is looked at.
    """
    for path in (name, *_members().get(name, ())):
        reason = _why_not(path, imports) if _is_expected(path) else None
        if reason is not None:
            has_it = ONLY_IN.get(path, "").replace(" ", ", ") or VERSIONS
            return f"{reason} (torch {has_it} have it)"
    return None


@functools.cache
def _members() -> dict[str, list[str]]:
    """Return for each name that a shim uses the methods of it that are called or replaced."""
    names = {path for paths in NAMES.values() for path in paths}
    found: dict[str, list[str]] = {}
    for path in {*CALLED, *REPLACED} - names:
        owner = path.rpartition(".")[0]
        if owner in names:
            found.setdefault(owner, []).append(path)
    return found


def _is_expected(path: str) -> bool:
    """Return True if the torch that is here should have ``path``.

    It should if the checked versions next to it, the one before and the one after, have it.
    """
    versions = ONLY_IN.get(path)
    if versions is None:
        return True
    here = _minor(torch.__version__)
    older = [v for v in CHECKED.split() if _minor(v) <= here]
    newer = [v for v in CHECKED.split() if _minor(v) >= here]
    return all(v in versions.split() for v in (*older[-1:], *newer[:1]))


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _why_not(path: str, imports: bool) -> str | None:
    try:
        found = resolve(path, imports)
    except (ImportError, AttributeError):
        return f"has no {path}"
    if found is None or not (path in CALLED or path in REPLACED):
        return None
    other = why_not_of_form(found, CALLED.get(path, ""), REPLACED.get(path, ""))
    return f"has another {path}, {other}" if other else None


def resolve(path: str, imports: bool = True) -> Any:
    """Return the object that ``path`` names.

    It is None if a module of it is still to be imported, and ``imports`` is False. If another
    thread is importing one, this waits for it, or else knows nothing of what is not there yet.

    >>> resolve("torch._C._set_grad_enabled") is torch._C._set_grad_enabled
    True
    """
    where, *parts = path.split(".")
    found: Any = importlib.import_module(where)
    for part in parts:
        where = f"{where}.{part}"
        if where in sys.modules:  # a package may name a function as one of its modules
            found = importlib.import_module(where) if imports else sys.modules[where]
        elif _is_module(where, found) and part not in vars(found):
            if not imports:
                return None
            found = importlib.import_module(where)
        elif not imports and not hasattr(found, part) and _is_being_imported(found):
            return None
        else:
            found = getattr(found, part)
    return found


def _is_being_imported(found: Any) -> bool:
    return bool(getattr(getattr(found, "__spec__", None), "_initializing", False))


def _is_module(where: str, above: Any) -> bool:
    is_package = isinstance(above, types.ModuleType) and hasattr(above, "__path__")
    return is_package and importlib.util.find_spec(where) is not None


def why_not_of_form(found: Any, calls: str, replaces: str) -> str:
    """Return the form that ``found`` has instead; empty if each call fits, and its replacement
    would.

    >>> why_not_of_form(lambda a, b=1: 0, "a; a b=", "a b; a")
    ''
    >>> why_not_of_form(lambda b, a: 0, "a b", "")
    'of (b, a)'
    """
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):  # of C++: there is no telling
        return ""
    # a call that is made on some versions only looks first
    sites = [site.split() for site in calls.split("; ") if site and not site.startswith("? ")]
    fits = all(_takes(parameters, [] if site == ["()"] else site) for site in sites)
    forms = [form.split() for form in replaces.split("; ") if form]
    fits = fits and (not forms or any(_begins_with(parameters, form) for form in forms))
    return "" if fits else f"of ({', '.join(p.name for p in parameters)})"


def _takes(parameters: Sequence[_P], site: Sequence[str]) -> bool:
    """Return True if the call at ``site`` binds, each argument to the parameter that it is for."""
    given = [word.split("|") for word in site if word != "..." and not word.endswith("=")]
    keywords = {word[:-1] for word in site if word.endswith("=")}
    in_order = [p for p in parameters if p.kind in (_P.POSITIONAL_ONLY, _P.POSITIONAL_OR_KEYWORD)]
    kinds = {p.kind for p in parameters}
    if len(given) > len(in_order) and _P.VAR_POSITIONAL not in kinds:
        return False
    for k, (names, parameter) in enumerate(zip(given, in_order, strict=False)):
        others = {name for j, known in enumerate(given) if j != k for name in known}
        if parameter.name not in names and parameter.name in others:
            return False
    if not keywords <= {p.name for p in parameters} and _P.VAR_KEYWORD not in kinds:
        return False
    left = (p for p in parameters if p not in in_order[: len(given)] and p.default is p.empty)
    named = {p.name for p in left if p.kind not in (_P.VAR_POSITIONAL, _P.VAR_KEYWORD)}
    return "..." in site or named <= keywords


def _begins_with(parameters: Sequence[_P], form: Sequence[str]) -> bool:
    """Return True if the parameters begin with ``form``, and a caller may leave out all others."""
    more = parameters[len(form) :]
    variable = (_P.VAR_POSITIONAL, _P.VAR_KEYWORD)
    are_optional = all(p.default is not p.empty or p.kind in variable for p in more)
    return [p.name for p in parameters[: len(form)]] == list(form) and are_optional
