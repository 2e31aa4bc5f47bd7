"""What is recorded of each value (``meta["val"]``) is what running its operator gives.

Rewrites decide by recorded dtypes, shapes and strides, and compilers lower by them. A node is
held against its inputs' records, one at a time: by induction all are what the placeholders give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from legality import IllegalRewrite
from legality.structure import strides_agree
from torch_scan_hop._torch.operators import OpOverload
from torch_scan_hop._torch.sizes import are_all_known_equal, are_known_equal
from torch_scan_hop.body.cache import SYMBOLS
from torch_scan_hop.body.meta_values import recorded_arguments, run_node

# how many sizes, or values, these have, only data can tell
_OF_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


@dataclass(frozen=True)
class Layout:
    """What is checked of a tensor."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]

    @staticmethod
    def of(value: Any) -> Any:
        """Of what is no tensor, that it is none."""
        if not isinstance(value, torch.Tensor):
            return None
        return Layout(value.dtype, value.device, tuple(value.shape), tuple(value.stride()))

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)} with strides {list(self.stride)} on {self.device}"

    def agrees(self, other: Layout) -> bool:
        """Strides count where they say where anything is."""
        if self.dtype != other.dtype or self.device != other.device:
            return False
        if not are_all_known_equal(self.shape, other.shape):
            return False
        if self.device.type == "xla" or any(are_known_equal(n, 0) for n in self.shape):
            return True
        return strides_agree(self.stride, other.stride, self.shape)


class Values:
    """Checks graphs; what an operator gives for inputs of a kind is asked once."""

    def __init__(self) -> None:
        self.known: dict[Any, list[Any]] = {}
        #: those whose sizes are symbols, which belong to one trace
        self.known_of_traces: dict[Any, list[Any]] = {}

    def check(self, where: str, module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if _is_checked(node):
                _compare(where, node, node.meta.get("val"), self._expected(where, node))

    def _expected(self, where: str, node: fx.Node) -> list[Any]:
        key = _Key()
        # torch.ones(2) depends on the default dtype
        given = map(key.of, recorded_arguments(node))
        arguments = (node.target, torch.get_default_dtype(), *given)
        known = self.known_of_traces if key.has_symbols else self.known
        try:
            return known[arguments]
        except KeyError:
            pass
        except TypeError:  # an argument that has no hash
            return _layouts(where, node)
        known[arguments] = expected = _layouts(where, node)
        return expected


def _is_checked(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False  # a higher-order operator's results are checked with its body
    if target._schema.is_mutable or _OF_DATA.intersection(target.tags):
        return False
    return all(_has_value(n) for n in node.all_input_nodes)


def _has_value(node: fx.Node) -> bool:
    return node.op == "get_attr" or node.meta.get("val") is not None


def _layouts(where: str, node: fx.Node) -> list[Any]:
    """What running ``node`` on fakes gives."""
    try:
        result = run_node(node)
    except Exception as error:
        raise IllegalRewrite(
            f"{where}: {node} ({node.target}): expected to run on the examples of its inputs, got "
            f"{type(error).__name__}: {error}"
        ) from error
    return [Layout.of(v) for v in pytree.tree_leaves(result)]


class _Key:
    """Arguments as a key: metadata for tensors, expressions for symbols."""

    def __init__(self) -> None:
        self.has_symbols = False

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            sizes = (*value.shape, *value.stride(), value.storage_offset())
            flags = (value.dtype, value.device, value.is_conj(), value.is_neg(), value.dim())
            return (*map(self.of, sizes), *flags)
        if isinstance(value, SYMBOLS):
            self.has_symbols = True
            return (type(value), value.node.expr, id(value.node.shape_env))
        if isinstance(value, (list, tuple)):
            return tuple(map(self.of, value))
        if isinstance(value, dict):
            return tuple((k, self.of(v)) for k, v in value.items())
        return (type(value), value)  # 1 == True


def _compare(where: str, node: fx.Node, recorded: Any, expected: Sequence[Any]) -> None:
    found = [Layout.of(v) for v in pytree.tree_leaves(recorded)]
    agree = len(found) == len(expected) and all(
        got is want if got is None or want is None else got.agrees(want)
        for got, want in zip(found, expected, strict=True)
    )
    if not agree:
        raise IllegalRewrite(
            f"{where}: {node} ({node.target}): running it gives {_told(expected)}, its record says "
            f"{_told(found)}"
        )


def _told(layouts: Sequence[Any]) -> str:
    return ", ".join(str(v or "a number") for v in layouts)
