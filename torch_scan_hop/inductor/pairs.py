"""Complex numbers as pairs of reals, before Inductor sees a scan.

Inductor has no complex arithmetic: each operator on complex values is a call of torch's kernel.
Views of complex buffers are such calls, too, so Inductor does not know in which order a loop writes
its results through views of one buffer. A pair of real tensors has all that a real tensor has:
fused loops, one-kernel paths, products with real matrices. So every complex carry, x, additional
input and y becomes two::

    before: (h, x, lam) -> (lam * h + x, y)
    after:  (h_re, h_im, x_re, x_im, lam_re, lam_im)
                -> (lam_re * h_re - lam_im * h_im + x_re, ..., y_re, y_im)

An operator without a rule here is called, within a step, on the complex value of its pair.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from torch_scan_hop._torch.inductor import called_as_it_is
from torch_scan_hop.body.carries_in import CarriesIn, in_graph
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.own_operators import own_operator
from torch_scan_hop.inductor.pair_rules import RULES, Interleaved, Pair, is_complex, split
from torch_scan_hop.op import scan_op
from torch_scan_hop.signature import Inputs, results_of

aten = torch.ops.aten

# --- ys that are put together again ---

# torch would join the parts of ys in another pass over memory, shared by threads that wait for one
# another. A kernel that makes both parts of a number writes them side by side instead.
joined_parts = own_operator(
    "joined_parts(Tensor re, Tensor im) -> Tensor",
    {"CompositeExplicitAutograd": torch.complex},
    torch.complex,
)


def mark_joined_parts(gm: fx.GraphModule) -> None:
    """Mark on the scans of ``gm`` which of their ys are the two parts of one tensor."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.complex.default):
        if _are_ys_of_a_scan(*node.args):
            node.target = joined_parts


def _are_ys_of_a_scan(re: Any, im: Any) -> bool:
    """Return True if both are ys of one scan, one after the other, and nothing else reads them."""
    if any(part.target is not operator.getitem for part in (re, im)):
        return False
    (scan, first), (other, second) = re.args, im.args
    if scan.target is not scan_op or other is not scan or second != first + 1:
        return False
    n_carry = len(scan.args[1])
    return (
        first >= n_carry
        and value_of(re).device.type == "cpu"
        and all(_is_read_once(scan, position) for position in (first, second))
    )


def _is_read_once(scan: fx.Node, position: int) -> bool:
    readers = [user for user in scan.users if user.args[1] == position]
    return len(readers) == 1 and len(readers[0].users) == 1


def positions_of_joined(scan: fx.Node) -> list[int]:
    """Return positions of real parts among a scan's results; their imaginary parts follow."""
    return [
        part.args[1]  # type: ignore[misc]
        for part in scan.users
        if any(user.target is joined_parts and user.args[0] is part for user in part.users)
    ]


def lower_joined_parts(re: Any, im: Any) -> Any:
    """Lower to the complex stack, if a kernel has written both parts into one."""
    return re if re.get_dtype().is_complex else called_as_it_is(aten.complex.default, re, im)


# --- running a body on pairs ---


def _is_about_pairs(node: fx.Node, args: Any) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(map(is_complex, values)) or any(
        isinstance(v, (Pair, Interleaved)) for v in pytree.tree_leaves(args)
    )


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, (Pair, Interleaved)) else value


def _is_copy_for_inductor(node: fx.Node) -> bool:
    """Return True for ``x + 0``, a copy without lazy bits, by which Inductor adds complex tensors
    as rows of reals. An addition of pairs would hide that a carry is only added to."""
    return (
        node.target is torch.ops.aten.add.Tensor
        and type(node.args[1]) is int
        and node.args[1] == 0
        and not node.kwargs
        and all(user.target is torch.ops.aten.view.dtype for user in node.users)
    )


class PairInterpreter(fx.Interpreter):
    """Runs a body with a pair for each complex value; under a trace, it writes the body anew."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return split(super().run_node(n))
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if not _is_about_pairs(n, (args, kwargs)) or n.target is operator.getitem:
            return super().run_node(n)
        if _is_copy_for_inductor(n):
            return args[0]
        rule = RULES.get(n.target)
        if rule is not None:
            try:
                return rule(*args, **kwargs)
            except (NotImplementedError, TypeError, AttributeError):
                pass  # not for these arguments
        args, kwargs = pytree.tree_map(_whole, (args, kwargs))
        return pytree.tree_map(split, n.target(*args, **kwargs))  # type: ignore[operator]


# --- a scan ---


def needs_pairs(body: fx.GraphModule, operands: Inputs[Any]) -> bool:
    """Return True if an input or a result of the body is complex."""
    values = [r.meta.get("val") for r in results_of(body.graph) if isinstance(r, fx.Node)]
    return any(map(is_complex, (*operands.flat(), *values)))


def expanded(values: Sequence[Any]) -> list[Any]:
    """Return two values for each complex one; carries into steps are split part by part."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, CarriesIn):
            pairs = zip(expanded([value.stack]), expanded([value.init]), strict=True)
            found += [in_graph(CarriesIn(stack, init, value.reverse)) for stack, init in pairs]
            continue
        pair = split(value)
        found += [pair.re, pair.im] if isinstance(pair, Pair) else [pair]
    return found


def expanded_step(body: fx.GraphModule, is_complex_input: Sequence[bool]) -> Callable[..., Any]:
    """Return ``body`` with two inputs for each complex one, and two results likewise."""

    def step(*flat: Any) -> tuple[Any, ...]:
        rest = iter(flat)
        inputs = [Pair(next(rest), next(rest)) if c else next(rest) for c in is_complex_input]
        results: list[Any] = []
        for result in PairInterpreter(body).run(*inputs, enable_io_processing=False):
            if isinstance(result, Interleaved):
                result = result.whole()
            results += [result.re, result.im] if isinstance(result, Pair) else [result]
        return tuple(results)

    return step


def joined_results(results: Sequence[Any], is_complex_result: Sequence[bool]) -> list[Any]:
    """Join each two of ``results`` that were one complex value."""
    rest = iter(results)
    return [torch.complex(next(rest), next(rest)) if c else next(rest) for c in is_complex_result]
