"""The carries into the steps, read from the stack of the carries out of them.

A backward needs the carries into the steps, and the forward has returned the carries out of them.
The first are the second, moved by one step, with ``init`` in front. Making that a stack of its own
would copy everything, so this module puts it off. :class:`CarriesIn` stands for the moved stack
where one function calls another, and the operator ``torch_scan_hop::carries_in`` does in the graph
of a backward. Eager mode reads spans of the stack as views; Inductor's kernels of whole loops read
it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_scan_hop._torch.dtensors import (
    Stretches,
    is_dtensor,
    laid_out,
    layout_of,
    shard_of,
    stretches_of,
)
from torch_scan_hop._torch.operators import below_autograd
from torch_scan_hop._torch.transforms import has_tangents
from torch_scan_hop.body.own_operators import own_operator
from torch_scan_hop.signature import Inputs


@dataclass(frozen=True)
class CarriesIn:
    """``init``, then all but the last row of ``stack``; for a backward scan ``init`` comes last.

    A span that does not reach ``init`` is a view.

    >>> carries = CarriesIn(torch.tensor([1, 2, 3, 4]), torch.tensor(0), reverse=False)
    >>> carries.whole(), carries[1:3]
    (tensor([0, 1, 2, 3]), tensor([1, 2]))
    >>> carries.edges(2)
    tensor([0, 2])
    >>> CarriesIn(torch.tensor([1, 2, 3]), torch.tensor(0), reverse=True)[1:3]
    tensor([3, 0])
    """

    stack: Tensor
    init: Tensor
    reverse: bool

    @property
    def shape(self) -> torch.Size:
        return self.stack.shape

    def __getitem__(self, span: slice) -> Tensor:
        first = span.stop == self.stack.shape[0] if self.reverse else span.start == 0
        if first:
            return CarriesIn(self.stack[span], self.init, self.reverse).whole()
        back = -1 if self.reverse else 1
        return self.stack[span.start - back : span.stop - back]

    def whole(self) -> Tensor:
        """Return all carries as one stack; for any trip count, zero too, and any transform."""
        rows = _joined(self.stack, self.init, self.reverse)
        return rows[1:] if self.reverse else rows[: self.stack.shape[0]]

    def edges(self, length: int) -> Tensor:
        """Return for each block of ``length`` steps the carry into it."""
        if self.reverse:
            return _joined(self.stack[length::length], self.init, True)
        return _joined(self.stack[length - 1 : -1 : length], self.init, False)


def stacks_of(xs: Sequence[Tensor | CarriesIn]) -> list[Tensor]:
    """Return for each x a tensor that exists already, with the shape and dtype of the x."""
    return [x.stack if isinstance(x, CarriesIn) else x for x in xs]


def with_joined(
    inputs: Inputs[Any], join: Callable[[CarriesIn], Tensor] = CarriesIn.whole
) -> Inputs[Any]:
    """Return a scan's inputs with each :class:`CarriesIn` among xs joined to a tensor."""
    if CarriesIn not in map(type, inputs.xs):
        return inputs
    xs = [join(x) if isinstance(x, CarriesIn) else x for x in inputs.xs]
    return Inputs(inputs.carry, xs, inputs.additional)


def with_stacks(inputs: Inputs[Any]) -> Inputs[Any]:
    """Apply :func:`stacks_of` to the xs of a scan's inputs."""
    return with_joined(inputs, lambda carries: carries.stack)


def _joined(rows: Tensor, edge: Tensor, reverse: bool) -> Tensor:
    first = edge.unsqueeze(0)
    return torch.cat([rows, first] if reverse else [first, rows])


def _kernel(stack: Tensor, init: Tensor, after: Tensor, reverse: bool) -> Tensor:
    return CarriesIn(stack, init, reverse).whole()


def _under_autograd(stack: Tensor, init: Tensor, after: Tensor, reverse: bool) -> Tensor:
    differentiated = torch.is_grad_enabled() and (stack.requires_grad or init.requires_grad)
    if differentiated or has_tangents((stack, init)):
        return _kernel(stack, init, after, reverse)
    with below_autograd():
        return carries_in_op(stack, init, after, reverse)


# The graph of a step is cut into a forward and a backward where the least is saved; as far as
# torch can tell this stack is as good to save as the one it is made of, and nearer. That it
# depends on a cotangent (``_after``) makes it the backward's.
carries_in_op = own_operator(
    "carries_in(Tensor stack, Tensor init, Tensor _after, bool reverse) -> Tensor",
    {
        "CompositeExplicitAutograd": _kernel,
        "Autograd": _under_autograd,
        "FuncTorchBatched": _kernel,
    },
)


def in_graph(carries: CarriesIn, after: Tensor | None = None) -> Tensor:
    """Return ``carries.whole()`` as one node, which a compiler may read in place. ``after``: a
    cotangent, where torch is yet to cut the graph into a forward and a backward."""
    stack, init = carries.stack, carries.init
    after = stack if after is None else after
    if not is_dtensor(stack):
        return carries_in_op(stack, init, after, carries.reverse)
    layout = layout_of(stack)
    init = shard_of(laid_out(init, layout.of_slice()))
    stretches = stretches_of([layout], stack.shape[0])
    if stretches is not None:
        init = _before_this_stretch(shard_of(stack), init, carries.reverse, stretches)
    return layout.join(carries_in_op(shard_of(stack), init, shard_of(after), carries.reverse))


def _before_this_stretch(
    shard: Tensor, init: Tensor, reverse: bool, stretches: Stretches
) -> Tensor:
    """Return the carry into this rank's first step: the last of the rank before, or ``init``."""
    last = shard[:1] if reverse else shard[-1:]
    edge = last[0] if stretches.steps_of(stretches.rank) else init
    edges = stretches.gathered(edge.contiguous())
    before = stretches.rank + (1 if reverse else -1)
    if not 0 <= before < stretches.count or not stretches.steps_of(before):
        return init
    return edges[before]


def is_in_graph(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is carries_in_op


def arguments_of(node: Any) -> tuple[fx.Node, fx.Node, bool] | None:
    """Return (stack, init, reverse) of a ``carries_in`` node."""
    if not is_in_graph(node):
        return None
    stack, init, _, reverse = node.args
    return stack, init, reverse  # type: ignore[return-value]
