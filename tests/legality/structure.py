"""A graph of operators that can be run, with the inputs and outputs that its signature says."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from legality import IllegalRewrite
from torch_scan_hop._torch.operators import HigherOrderOperator, OpOverload
from torch_scan_hop._torch.sizes import are_known_equal
from torch_scan_hop.body.cache import SYMBOLS
from torch_scan_hop.signature import Signature, results_of

# modules of the functions that compute with sizes
_OF_NUMBERS = {"_operator", "builtins", "math", "torch", "torch.fx.experimental.sym_node"}


def outputs_of(module: fx.GraphModule) -> list[Any]:
    return pytree.tree_leaves(results_of(module.graph))


def check_structure(where: str, module: fx.GraphModule, signature: Signature | None = None) -> None:
    try:
        module.graph.lint()
    except Exception as error:
        raise IllegalRewrite(f"{where}: the graph is not well-formed: {error}") from error
    for node in module.graph.nodes:
        _check_target(where, node)
    if signature is not None:
        check_arity(where, module, signature.n_inputs, signature.n_carry)


def _check_target(where: str, node: fx.Node) -> None:
    if node.op in ("placeholder", "output", "get_attr"):
        return
    if node.op == "call_function" and _is_operator(node):
        return
    raise IllegalRewrite(
        f"{where}: {node}: expected an operator of torch (an OpOverload or a higher-order one) or "
        f"arithmetic on sizes, got {node.op} of {node.target}"
    )


def _is_operator(node: fx.Node) -> bool:
    if isinstance(node.target, (OpOverload, HigherOrderOperator)):
        return True
    if node.target is operator.getitem:
        return True
    of_number = isinstance(node.meta.get("val"), (bool, int, float, *SYMBOLS))
    return of_number and getattr(node.target, "__module__", None) in _OF_NUMBERS


def check_arity(
    where: str, module: fx.GraphModule, n_inputs: int, n_carry: int, n_outputs: int | None = None
) -> None:
    """``n_carry``: the first inputs and outputs, which agree in dtype, shape and device."""
    placeholders = module.graph.find_nodes(op="placeholder")
    outputs = outputs_of(module)
    if len(placeholders) != n_inputs:
        names = ", ".join(n.name for n in placeholders)
        raise IllegalRewrite(
            f"{where}: expected {n_inputs} inputs, got {len(placeholders)}: {names}"
        )
    enough = len(outputs) >= n_carry if n_outputs is None else len(outputs) == n_outputs
    if not enough:
        expected = f"at least {n_carry}" if n_outputs is None else n_outputs
        raise IllegalRewrite(f"{where}: expected {expected} outputs, got {len(outputs)}: {outputs}")
    for before, after in zip(placeholders[:n_carry], outputs, strict=False):
        check_same_kind(where, after, value_of(after), value_of(before), "the carry into a step")


def value_of(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def check_same_kind(where: str, node: Any, got: Any, expected: Any, expected_is: str) -> None:
    """Of one dtype, shape and device."""
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor):
        if isinstance(got, torch.Tensor) != isinstance(expected, torch.Tensor):
            raise IllegalRewrite(
                f"{where}: {node}: expected {describe(expected)}, like {expected_is}, got "
                f"{describe(got)}"
            )
        return
    if (
        got.dtype != expected.dtype
        or got.device.type != expected.device.type
        or not may_be_same(got.shape, expected.shape)
    ):
        raise IllegalRewrite(
            f"{where}: {node}: expected {describe(expected)}, like {expected_is}, got "
            f"{describe(got)}"
        )


def may_be_same(sizes: Any, others: Any) -> bool:
    """Whether nothing shows that they differ: symbols of two traces cannot be compared."""
    if len(sizes) != len(others):
        return False
    return all(
        a == b
        for a, b in zip(sizes, others, strict=True)
        if isinstance(a, int) and isinstance(b, int)
    )


def strides_agree(strides: Any, others: Any, shape: Any) -> bool:
    """Where there is more than one element to find."""
    rows = zip(strides, others, shape, strict=True)
    return all(are_known_equal(a, b) or are_known_equal(n, 1) for a, b, n in rows)


def describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{list(value.shape)} on {value.device.type}"
