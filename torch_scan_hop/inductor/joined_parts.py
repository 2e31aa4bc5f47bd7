"""Complex ys that a kernel writes number by number, and not part by part.

To Inductor a complex scan is one of real and imaginary parts (``pairs``). torch would join their ys
in another pass over memory, shared by threads that wait for one another. A kernel that makes both
parts of a number writes them side by side instead.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.inductor import called_as_it_is
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.own_operators import own_operator
from torch_scan_hop.op import scan_op

aten = torch.ops.aten

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
