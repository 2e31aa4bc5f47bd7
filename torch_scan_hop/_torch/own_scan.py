"""torch's own prototype ``scan()`` beside this one (checked on torch 2.9.1, 2.13.0, 2.15.0).

``torch.ops.higher_order.scan`` is this package's operator, and torch's graphs call it by that
name: in the code that FX writes, in Dynamo's tracker, in Inductor's pass, in the translators of
ONNX and others. Their bodies carry a mark, by which the operator hands the call to torch's, whose
rules at each key are as torch has them. What has lost its mark runs on ours: the results are the
same.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from torch_scan_hop._torch.replaced import ambient, replaced, wrap


def torchs_operator() -> Any:
    """Return the operator that torch's Python ``scan()`` calls."""
    # torch._higher_order_ops.scan, as an attribute, is the function of that name
    return importlib.import_module("torch._higher_order_ops.scan").scan_op


#: ``meta`` is kept when a module is copied, and is part of the keys of torch's caches
_MARK = "torch_scan_hop: body of torch's scan()"


def mark_as_torchs(body: fx.GraphModule) -> None:
    body.meta[_MARK] = str(torch.get_default_dtype())


def is_torchs(body: Any) -> bool:
    """Return True if ``body`` was captured of a call of torch's own ``scan()``."""
    return isinstance(body, fx.GraphModule) and _MARK in body.meta


# the operator that a node of torch's names, while torch looks for a node of its own operator
_state = ambient(recorded_as=None)


def name_in_graphs(ours: Any) -> None:
    """Let what make_fx records of torch's operator name ``ours``, as Dynamo's graphs do."""
    operator = torchs_operator()
    record = operator.python_key_table[ProxyTorchDispatchMode]

    @functools.wraps(record)
    def record_by_name(mode: Any, *args: Any, **kwargs: Any) -> Any:
        results = record(mode, *args, **kwargs)
        for node in mode.tracer.graph.find_nodes(op="call_function", target=operator):
            mark_as_torchs(getattr(mode.tracer.root, str(node.args[0].target)))
            node.target = _state.recorded_as or ours
        return results

    operator.python_key_table[ProxyTorchDispatchMode] = record_by_name
    _find_what_is_functionalized()


def _find_what_is_functionalized() -> None:
    """Let torch 2.15 find the node of a call whose body writes, by the operator that it has."""
    from torch._higher_order_ops import auto_functionalize

    def find(materialize: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        with replaced(_state, recorded_as=getattr(op, "_op", None)):
            return materialize(op, *args, **kwargs)

    if hasattr(auto_functionalize, "materialize_callable_in_args"):
        wrap(auto_functionalize, materialize_callable_in_args=find)


# Keys are compared by identity: equal code objects have caches of their own.
_code_with_torchs_scan: MutableMapping[types.CodeType, bool] = WeakIdKeyDictionary()


def remember_code(tx: Any) -> None:
    """Note that what Dynamo captures of this code depends on who runs torch's ``scan()``."""
    _code_with_torchs_scan[tx.output.root_tx.f_code] = True


def forget_captures() -> None:
    """Let Dynamo capture anew all code that called torch's ``scan()``."""
    from torch._C._dynamo.eval_frame import reset_code

    for code in list(_code_with_torchs_scan):
        reset_code(code)
    _code_with_torchs_scan.clear()
