"""torch's own prototype ``scan()`` beside this one (checked on torch 2.9.1, 2.13.0, 2.15.0).

torch's tracker and its Inductor pass look up ``torch.ops.higher_order.scan`` when they run, and
find this package's operator under that name. What they capture of torch's ``scan()`` gets torch's
operator back here, unless :func:`torch_scan_hop.accelerate_torch` says that ours shall run it.
"""

from __future__ import annotations

import importlib
import threading
import types
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.eval_frame import reset_code
from torch.utils.weak import WeakIdKeyDictionary

_NAME = "scan"
_renaming = threading.RLock()


def torchs_operator() -> Any:
    """The operator that torch's Python ``scan()`` calls."""
    # torch._higher_order_ops.scan, as an attribute, is the function of that name
    return importlib.import_module("torch._higher_order_ops.scan").scan_op


def under_its_own_name(run: Callable[..., Any], *args: Any) -> Any:
    """``run(*args)``, for which ``torch.ops.higher_order.scan`` is torch's operator."""
    with _renaming:
        taken = getattr(torch.ops.higher_order, _NAME)
        setattr(torch.ops.higher_order, _NAME, torchs_operator())
        try:
            return run(*args)
        finally:
            setattr(torch.ops.higher_order, _NAME, taken)


def give_back(graph: fx.Graph, before: set[fx.Node], ours: Any) -> None:
    """Name torch's operator in the nodes of ``ours`` that are not among those ``before``."""
    for node in graph.find_nodes(op="call_function", target=ours):
        if node not in before:
            node.target = torchs_operator()


# by identity: code objects that say the same are equal, and each has a cache of its own
_code_with_torchs_scan: MutableMapping[types.CodeType, bool] = WeakIdKeyDictionary()


def remember_code(tx: Any) -> None:
    """Note that what Dynamo captures of this code depends on who runs torch's ``scan()``."""
    _code_with_torchs_scan[tx.output.root_tx.f_code] = True


def forget_captures() -> None:
    """Let Dynamo capture anew all code that called torch's ``scan()``."""
    for code in list(_code_with_torchs_scan):
        reset_code(code)
    _code_with_torchs_scan.clear()
