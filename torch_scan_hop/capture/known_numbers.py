"""Numbers that torch takes of Python alone, as ``training=n > 3``, a dimension and an offset.

A number that steps carry is a scalar, which no operator takes there. If counters decide branches,
they know the flags and the ints among those at the first step, and check that all steps give the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.made_numbers import is_marked
from torch_scan_hop._torch.dynamo.places import users_line
from torch_scan_hop._torch.dynamo.results_for_fakes import takes
from torch_scan_hop._torch.dynamo.variables import example_value
from torch_scan_hop._torch.operators import is_function_of_torch
from torch_scan_hop.capture.number_arguments import name_with_scalar, with_scalar
from torch_scan_hop.capture.told import at_hand
from torch_scan_hop.capture.weak_numbers import (
    OF_ALIKE,
    as_python_has_it,
    is_of_numbers,
    keeps_dtype,
)

#: whose second argument is a dimension; of a tensor there, torch 2.9 sums over all of them
_OF_A_DIMENSION = frozenset(
    "max min amax amin argmax argmin sum nansum mean median mode prod std var any all logsumexp "
    "count_nonzero softmax log_softmax cumsum cumprod sort argsort flip unsqueeze squeeze "
    "transpose".split()
)
_DIMENSION = (
    "the body gives a number that steps make to {}() as a dimension, at {}. Choose with torch.where"
)
_OF_PYTHON = (
    "the body gives a number that steps make to {}(), at {}, and torch takes a Python number there"
)


def with_known_numbers(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[fx.Proxy]
) -> Any:
    """Return the arguments with what counters say of the numbers that ``target`` does not take."""
    name = getattr(target, "__name__", target)
    if not _is_dimension(name, args, kwargs) and _takes_scalars(name, target, args, kwargs, given):
        return args, kwargs
    args, kwargs = pytree.tree_map_only(fx.Proxy, _at_first, ((*args,), kwargs))
    if _is_dimension(name, args, kwargs):
        raise Unsupported(_DIMENSION.format(name, users_line()))
    if not _takes(target, args, kwargs):
        raise Unsupported(_OF_PYTHON.format(name, users_line()))
    return args, kwargs


def _is_dimension(name: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dims = [*(args[1:2] if name in _OF_A_DIMENSION else ()), kwargs.get("dim")]
    return any(isinstance(dim, fx.Proxy) and is_marked(dim) for dim in dims)


def _takes_scalars(
    name: Any, target: Any, args: Any, kwargs: Any, given: Sequence[fx.Proxy]
) -> bool:
    is_torchs = isinstance(target, str) or is_function_of_torch(target)
    if not is_torchs or is_of_numbers(target, given) or keeps_dtype(target, kwargs):
        return True
    if name.strip("_") in OF_ALIKE or _takes(target, args, kwargs):
        return True
    return not takes(target, args, kwargs, as_python_has_it)  # nor would Python do


def _takes(target: Any, args: Any, kwargs: Any) -> bool:
    written = name_with_scalar(target, args, kwargs)
    run, taken = (with_scalar, (written, *args)) if written else (target, args)
    return takes(run, taken, kwargs, example_value)


def _at_first(proxy: fx.Proxy) -> Any:
    """Return what a flag or an int is at the first step, if counters know."""
    counters, dtype = at_hand.counters, getattr(example_value(proxy), "dtype", None)
    if counters is None or not is_marked(proxy) or dtype not in (torch.bool, torch.int64):
        return proxy
    ask = counters.decide if dtype == torch.bool else counters.position
    known = ask(proxy.node)
    return proxy if known is None else known
