"""Errors of singular matrices, as values in a functional graph.

``linalg.solve``, ``inv``, ``cholesky`` and their like end with ``_linalg_check_errors(info)``: an
operator without a result, which raises. Nothing in a graph depends on it, so it may be lost when a
body is cut in parts. Also, torch >= 2.13 calls it an effect, and orders effects by tokens, which a
loop's body has none of. Here the check is a value, which is added to the result of the
factorisation::

    before: result, info = inv_ex(A); _linalg_check_errors(info); use(result)
    after:  result, info = inv_ex(A); use(result + linalg_check(info))      # zero, or raises
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_scan_hop._torch.fakes import fake_like_number
from torch_scan_hop.body.copies import copied
from torch_scan_hop.body.meta_values import replace, value_of
from torch_scan_hop.body.own_operators import own_operator
from torch_scan_hop.signature import output_node, results_of

aten = torch.ops.aten
raise_if_failed = aten._linalg_check_errors.default

# torch 2.9 drops an operator without a result where nothing reads one
fx.node.has_side_effect(raise_if_failed)


def _checked(info: Tensor, name: str, is_matrix: bool, reverse: bool = False) -> Tensor:
    raise_if_failed(info, name, is_matrix=is_matrix)
    return torch.zeros((), dtype=info.dtype, device=info.device)


def _unchecked(info: Tensor, name: str, is_matrix: bool, reverse: bool = False) -> Tensor:
    """Return zero for fakes, and on XLA, where inf and nan in results tell of a singular matrix."""
    return torch.zeros((), dtype=info.dtype, device=info.device)


def _checked_of_steps(info: Tensor, name: str, is_matrix: bool, reverse: bool) -> Tensor:
    """Check ``info`` of all steps, and raise the error of the step that ran first."""
    failed = torch.nonzero(info.reshape(len(info), -1).any(1)) if info.numel() else info
    if failed.numel():
        _checked(info[failed[-1 if reverse else 0, 0]], name, is_matrix)
    return torch.zeros((), dtype=info.dtype, device=info.device)


linalg_check = own_operator(
    "linalg_check(Tensor info, str name, bool is_matrix) -> Tensor",
    {"CPU": _checked, "CUDA": _checked, "XLA": _unchecked},
    fake=_unchecked,
)
# of what is the same at all steps, though work for all of them at once reads it
linalg_check_in_steps = own_operator(
    "linalg_check_in_steps(Tensor info, str name, bool is_matrix, bool reverse) -> Tensor",
    {"CPU": _checked, "CUDA": _checked, "XLA": _unchecked},
    fake=_unchecked,
)
linalg_check_of_steps = own_operator(
    "linalg_check_of_steps(Tensor info, str name, bool is_matrix, bool reverse) -> Tensor",
    {"CPU": _checked_of_steps, "CUDA": _checked_of_steps},
    fake=_unchecked,
)


@torch.library.register_vmap("torch_scan_hop::linalg_check")
def _vmapped(info: Any, in_dims: Any, value: Tensor, name: str, is_matrix: bool) -> Any:
    return linalg_check(value, name, False), None


@torch.library.register_vmap("torch_scan_hop::linalg_check_in_steps")
def _over_steps(
    info: Any, in_dims: Any, value: Tensor, name: str, is_matrix: bool, reverse: bool
) -> Any:
    return linalg_check_of_steps(value.movedim(in_dims[0], 0), name, is_matrix, reverse), None


def thread_linalg_checks(graph: fx.Graph) -> None:
    """Make each check in ``graph`` a value on which the checked results depend."""
    for node in graph.find_nodes(op="call_function", target=raise_if_failed):
        _thread(graph, node)


@dataclass(frozen=True)
class ChecksAfter:
    """``body`` without its checks, which returns what they are about as more ys, in order."""

    body: fx.GraphModule
    checks: Sequence[tuple[str, bool]]

    def checked(self, results: Sequence[Any], reverse: bool) -> list[Any]:
        """Return the results of the scan that was asked for, of those of a scan of ``body``."""
        n = len(results) - len(self.checks)
        found = list(results[:n])
        for info, (name, is_matrix) in zip(results[n:], self.checks, strict=True):
            zero = linalg_check_of_steps(info, name, is_matrix, reverse)
            found = [r + zero if r.is_floating_point() else r for r in found]
        return found


def checks_after(body: fx.GraphModule) -> ChecksAfter:
    """Leave the checks of a step to what comes after the loop, so that no loop needs an exit."""
    copy = copied(body)
    found: list[tuple[fx.Node, tuple[str, bool]]] = []
    for check in copy.graph.find_nodes(op="call_function", target=linalg_check):
        info, name, is_matrix = check.args
        found.append((info, (name, is_matrix)))
        for user in list(check.users):
            replace(user, next(a for a in user.args if a is not check))
        copy.graph.erase_node(check)
    results = (*results_of(copy.graph), *(info for info, _ in found))
    output_node(copy.graph).args = (results,)
    copy.recompile()
    return ChecksAfter(copy, [about for _, about in found])


def _thread(graph: fx.Graph, check: fx.Node) -> None:
    info: Any = check.args[0]
    name = check.args[1]
    is_matrix = bool(check.kwargs.get("is_matrix", False))
    with graph.inserting_before(check):
        zero = graph.call_function(linalg_check, (info, name, is_matrix))
        zero.meta["val"] = fake_like_number(value_of(info))
    for result in _results_beside(info):
        users = [u for u in result.users if u > check]
        if not users:
            continue
        with graph.inserting_after(max(zero, result)):
            checked = graph.call_function(aten.add.Tensor, (result, zero))
            checked.meta = dict(result.meta)
        for user in users:
            user.replace_input_with(result, checked)
    graph.erase_node(check)


def _results_beside(info: fx.Node) -> list[fx.Node]:
    """Return the floating-point results of the operator that gave this ``info``."""
    if info.target is not operator.getitem:
        return []
    producer: Any = info.args[0]
    elements = [u for u in producer.users if u.target is operator.getitem and u is not info]
    return [e for e in elements if value_of(e).dtype.is_floating_point or value_of(e).is_complex()]
