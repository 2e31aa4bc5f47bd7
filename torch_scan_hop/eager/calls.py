"""Choose what the loop's source calls for each operator, and which calls get a place to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_scan_hop.body.meta_values import value_of

aten = torch.ops.aten

# bindings that parse their arguments in C++, and take out=
WITH_OUT: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.neg.default: torch.neg,
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.stack.default: torch.stack,
    aten.addmm.default: torch.addmm,
    aten.addcmul.default: torch.addcmul,
    aten.sigmoid.default: torch.sigmoid,
    aten.tanh.default: torch.tanh,
    aten.exp.default: torch.exp,
    aten.log.default: torch.log,
    aten.sin.default: torch.sin,
    aten.cos.default: torch.cos,
    aten.sqrt.default: torch.sqrt,
    aten.rsqrt.default: torch.rsqrt,
    aten.maximum.default: torch.maximum,
    aten.minimum.default: torch.minimum,
    aten.sum.dim_IntList: torch.sum,
}
#: may write over any operand of the result's shape; addmm over what it adds to
ELEMENTWISE = WITH_OUT.keys() - {
    aten.mm.default,
    aten.bmm.default,
    aten.cat.default,
    aten.stack.default,
    aten.addmm.default,
    aten.sum.dim_IntList,
}
WITHOUT_OUT: dict[Any, Callable[..., Any]] = {
    aten.t.default: torch.t,
    aten.permute.default: torch.permute,
    aten.reshape.default: torch.reshape,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.relu.default: torch.relu,
    aten.where.self: torch.where,
    aten.rsub.Scalar: torch.rsub,
}


def binding(target: Any) -> Callable[..., Any]:
    fast = WITH_OUT.get(target) or WITHOUT_OUT.get(target)
    if fast is not None:
        return fast
    # past OpOverload.__call__, which is Python
    return getattr(target, "_op", target)


def can_write_to(node: fx.Node, like: torch.Tensor) -> bool:
    """Return True if ``node`` may compute straight into a contiguous slot like ``like``."""
    if node.target not in WITH_OUT or "out" in node.kwargs:
        return False
    inputs = [n.meta.get("val") for n in node.all_input_nodes]
    dtypes = {v.dtype for v in inputs if isinstance(v, torch.Tensor)}
    return dtypes == {like.dtype} and value_of(node).dtype == like.dtype
