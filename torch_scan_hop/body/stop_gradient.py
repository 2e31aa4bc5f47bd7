"""Mark where gradients stop in a body, by an operator that traces keep.

Only autograd knows ``detach`` and ``no_grad``, and a trace below autograd loses them: torch >= 2.15
writes ``alias`` for the first, and the second never was an operator. But a derived body (vmapped,
with tangents, with residuals) is traced and then differentiated again. So derived bodies are traced
from ``with_stops(body)``, which has ``torch_scan_hop.stop_gradient`` in their place. Graphs that
are not differentiated again drop it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from torch_scan_hop import legality
from torch_scan_hop._torch.operators import OpOverload, below_autograd, past_module_hooks
from torch_scan_hop._torch.transforms import make_dual, unpack_dual
from torch_scan_hop.body.meta_values import replace_by_source
from torch_scan_hop.body.own_operators import own_operator


def _copy(value: Tensor, reverse_only: bool) -> Tensor:
    return value.clone()


def _under_autograd(value: Tensor, reverse_only: bool) -> Tensor:
    primal, tangent = unpack_dual(value)
    with below_autograd():
        out = stop_gradient(primal, reverse_only)
        if not reverse_only or tangent is None:
            return out
        stopped_tangent = stop_gradient(tangent, reverse_only)
    return make_dual(out, stopped_tangent)


stop_gradient = own_operator(
    "stop_gradient(Tensor value, bool reverse_only) -> Tensor",
    {"CompositeExplicitAutograd": _copy, "Autograd": _under_autograd},
)


@torch.library.register_vmap("torch_scan_hop::stop_gradient")
def _vmapped(info: Any, in_dims: Any, value: Tensor, reverse_only: bool) -> tuple[Tensor, Any]:
    return stop_gradient(value, reverse_only), in_dims[0]


def is_stop(node: fx.Node) -> bool:
    return node.target is stop_gradient


def with_stops(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``body`` with a mark on each use of a value that gradients do not pass through."""

    def marked(*args: Any) -> Any:
        with torch.enable_grad(), _MarkStops() as marks:
            return pytree.tree_map(marks.used, past_module_hooks(body)(*args))

    return marked


_DETACHES = {
    Tensor.detach,
    torch.detach,
    torch.ops.aten.detach.default,
    Tensor.data.__get__,  # type: ignore[attr-defined]
}
_WRITES = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__",
    "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__",
    "__irshift__",
}  # fmt: skip
#: operators that return views, but where ``reshape`` and ``flatten`` copy
VIEWS = {
    "__getitem__", "__get__", "as_strided", "chunk", "diagonal", "expand", "expand_as", "flatten",
    "movedim", "moveaxis", "narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes",
    "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view",
    "view_as",
}  # fmt: skip


class _MarkStops(TorchFunctionMode):
    """Leave stopped values as they are, aliases included, and mark their *uses*."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: dict[int, tuple[Tensor, bool]] = {}  # the tensor, so that its id stays its
        self.marked: dict[tuple[int, int], Tensor] = {}

    def used(self, value: Any) -> Any:
        if id(value) not in self.stopped:
            return value
        version = (id(value), value._version)
        if version not in self.marked:
            tensor, reverse_only = self.stopped[id(value)]
            self.marked[version] = stop_gradient(tensor, reverse_only)
        return self.marked[version]

    def _stop(self, result: Any, reverse_only: bool, args: Any = ()) -> None:
        given = {id(a) for a in pytree.tree_leaves(args)}
        for value in pytree.tree_leaves(result):
            if id(value) in given:
                continue  # ``contiguous()`` of what is so: gradients flow as they did
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                self.stopped[id(value)] = (value, reverse_only)

    def _write_to(self, target: Any) -> None:
        """Let gradients reach what is written into a stopped value, but not its old contents."""
        root = _root(target)
        aliases = [known for known in self.stopped.values() if _root(known[0]) is root]
        for value, reverse_only in aliases:
            if not reverse_only:  # the memory is that of a value whose gradients do not stop
                raise RuntimeError(
                    "a detached tensor is written to in place, with a value that requires grad"
                )
            with torch.no_grad():
                value.copy_(stop_gradient(value, reverse_only))
            del self.stopped[id(value)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_aten = isinstance(func, OpOverload)
        name = func._schema.name.rpartition("::")[2] if is_aten else getattr(func, "__name__", "")
        if func in _DETACHES:
            result = func(*args, **kwargs)
            self._stop(result, reverse_only=False)
        elif name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            target, *sources = args
            sources = pytree.tree_map(self.used, sources)
            leaves = pytree.tree_leaves((sources, kwargs))
            if torch.is_grad_enabled() and any(getattr(v, "requires_grad", False) for v in leaves):
                self._write_to(target)
            result = func(target, *sources, **kwargs)
        elif name in VIEWS:
            known = [self.stopped[id(a)] for a in pytree.tree_leaves(args) if id(a) in self.stopped]
            result = func(*args, **kwargs)
            if known or not torch.is_grad_enabled():
                self._stop(result, all(reverse_only for _, reverse_only in known), args)
        else:
            args, kwargs = pytree.tree_map(self.used, (args, kwargs))
            result = func(*args, **kwargs)
            if not torch.is_grad_enabled():
                self._stop(result, reverse_only=True, args=(args, kwargs))
        return result


def _root(value: Any) -> Any:
    return value._base if isinstance(value, Tensor) and value._is_view() else value


def drop_stops(module: fx.GraphModule) -> None:
    """Drop the marks in a graph that is not differentiated again, and in its bodies."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            found = part.graph.find_nodes(op="call_function", target=stop_gradient)
            for node in found:
                replace_by_source(node, node.args[0])  # type: ignore[arg-type]
            if found:
                part.recompile()
    legality.checked("drop_stops", module)
