"""Choose what the loop's source calls for each operator, and which calls write where.

Some get a place to write to, others write to a part of a value where it lies, and some compute
where they did in the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.sizes import likely_bytes
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import viewed
from torch_scan_hop.body.part_writes import PART_OF, WRITE_OF, is_fresh, is_large, writes_in_place
from torch_scan_hop.signature import Inputs, Outputs

aten = torch.ops.aten


def _bindings(names: str) -> dict[Any, Callable[..., Any]]:
    """Return for operators their bindings, which parse arguments in C++.

    >>> _bindings("add.Tensor tanh")[aten.tanh.default] is torch.tanh
    True
    """
    parts = [name.partition(".") for name in names.split()]
    return {getattr(getattr(aten, p), o or "default"): getattr(torch, p) for p, _, o in parts}


_ELEMENTWISE = _bindings(
    "add.Tensor sub.Tensor mul.Tensor div.Tensor neg addcmul sigmoid tanh exp log sin cos sqrt "
    "rsqrt maximum minimum abs sign floor erf log1p expm1 reciprocal clamp clamp_min clamp_max "
    "pow.Tensor_Scalar pow.Tensor_Tensor relu"
)


def _overloads(names: str, keyword: str) -> dict[Any, tuple[Callable[..., Any], str]]:
    packets = [getattr(aten, name) for name in names.split()]
    return {packet.default: (getattr(packet, keyword)._op, keyword) for packet in packets}


_GRADIENTS = _overloads("tanh_backward sigmoid_backward threshold_backward", "grad_input")
#: what writes the results of these to a place, and the argument that the place is
_OVERLOADS: dict[Any, tuple[Callable[..., Any], str]] = {
    aten.relu.default: (torch.clamp_min, "0, out"),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out._op, "grad_input"),
    **_GRADIENTS,
    **_overloads(
        "silu_backward gelu_backward softplus_backward leaky_relu_backward elu_backward "
        "hardtanh_backward hardsigmoid_backward",
        "grad_input",
    ),
    **_overloads("silu gelu softplus leaky_relu elu hardtanh hardsigmoid", "out"),
}
#: may write over any operand of the result's shape; addmm over what it adds to
ELEMENTWISE = _ELEMENTWISE.keys() | _GRADIENTS.keys()


def _sum(value: torch.Tensor, **named: Any) -> torch.Tensor:
    return torch.sum(value, (), **named)  # only a sum over dimensions, or none, takes out=


_WITH_OUT = (
    _ELEMENTWISE
    | _bindings(
        "mm bmm baddbmm addmm mv cat stack amax amin sum.dim_IntList mean.dim logsumexp cumsum "
        "_softmax _log_softmax _log_softmax_backward_data where.self gather index_select "
        "scatter_add index_add "
        "tril triu logical_and logical_or logical_not bitwise_and.Tensor bitwise_or.Tensor "
        "gt.Scalar gt.Tensor ge.Scalar ge.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor "
        "eq.Scalar eq.Tensor ne.Scalar ne.Tensor"
    )
    | {aten.sum.default: _sum}
)
#: these take None for memory of their own
WITH_OUT_OR_NONE = _WITH_OUT.keys()
#: compute into memory that they are given
WITH_OUT = _WITH_OUT.keys() | _OVERLOADS.keys()
WITHOUT_OUT = _bindings(
    "t permute reshape unsqueeze squeeze.dim select.int unsafe_split.Tensor split_with_sizes clone "
    "rsub.Scalar mean _softmax_backward_data"
)


def binding(target: Any) -> Callable[..., Any]:
    fast = _WITH_OUT.get(target) or WITHOUT_OUT.get(target)
    if fast is not None:
        return fast
    # past OpOverload.__call__, which is Python
    return getattr(target, "_op", target)


def call_of(node: fx.Node) -> Callable[..., Any]:
    if node.target is aten.index.Tensor and is_at_one_place(node):
        return _part_at
    return _with_part_at if is_written_at_one_place(node) else binding(node.target)


def call_into(node: fx.Node, place: str) -> tuple[Callable[..., Any], str]:
    """Return what computes ``node`` into the memory at ``place``, and the argument that says so."""
    call, keyword = _OVERLOADS.get(node.target) or (call_of(node), "out")
    return call, f"{keyword}={place}"


def is_written_at_one_place(node: fx.Node) -> bool:
    """Return True for :func:`is_at_one_place` of a write that takes the place of what is there."""
    return node.target is aten.index_put.default and len(node.args) == 3 and is_at_one_place(node)


def is_at_one_place(node: fx.Node) -> bool:
    """Return True for a read or write at integers, one for each of the first dimensions.

    Python's ``value[i, j]`` makes a view there, which takes a third of the time that the operator
    takes, for which such integers are indices like any others.
    """
    value, indices = value_of(node.args[0]), node.args[1]
    assert isinstance(indices, (list, tuple))
    return (
        value.device.type == "cpu"
        and value.is_contiguous()
        and all(i is not None and _is_integer(value_of(i)) for i in indices)
    )


def _is_integer(index: torch.Tensor) -> bool:
    whole = not index.is_floating_point() and index.dtype is not torch.bool
    return whole and index.dim() == 0 and index.device.type == "cpu"


def _part_at(value: torch.Tensor, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    return value[tuple(indices)].clone()


def write_part_at(
    value: torch.Tensor, indices: Sequence[torch.Tensor], source: torch.Tensor
) -> torch.Tensor:
    value[tuple(indices)] = source
    return value


def _with_part_at(
    value: torch.Tensor, indices: Sequence[torch.Tensor], source: torch.Tensor
) -> torch.Tensor:
    return write_part_at(value.clone(), indices, source)


def can_write_to(node: fx.Node, like: torch.Tensor) -> bool:
    """Return True if ``node`` may compute straight into a contiguous slot like ``like``."""
    if node.target not in WITH_OUT or "out" in node.kwargs:
        return False
    return bool(value_of(node).dtype == like.dtype)


def calls_in_place(
    graph: fx.Graph,
    roles: Inputs[fx.Node],
    outputs: Outputs[fx.Node],
    own: Collection[fx.Node],
    lent: Collection[fx.Node],
    copied: Collection[fx.Node],
) -> dict[fx.Node, Callable[..., Any]]:
    """Return for each such write the function to call with the arguments of its node.

    The memory of ``own`` inputs is the loop's; that of ``lent`` results is not; ``copied`` results
    are copied where they are made.
    """
    own = {*own, *_own_carries(roles, outputs, lent)}
    return {node: _call(node) for node in writes_in_place(graph, own, lent, _pays, copied)}


def parts_read_in_place(
    graph: fx.Graph, writes: Collection[fx.Node], copied: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the reads at one place whose part is read where it lies.

    Their readers make results of their own, before the step writes to anything in place.
    """
    writes_before: dict[fx.Node, int] = {}
    unfit: set[fx.Node] = set()
    n_writes = 0
    for node in graph.nodes:
        n_writes += node in writes
        for part in writes_before.keys() & node.all_input_nodes:
            is_in_time = is_fresh(node) and writes_before[part] == n_writes
            if not (part in copied if node.op == "output" else is_in_time):
                unfit.add(part)
        if node.target is aten.index.Tensor and is_at_one_place(node):
            writes_before[node] = n_writes
    return writes_before.keys() - unfit


def _call(write: fx.Node) -> Callable[..., Any]:
    if is_written_at_one_place(write):
        return write_part_at
    if write.target in WRITE_OF:
        return binding(WRITE_OF[write.target])
    part_of = binding(PART_OF[write.target])

    def write_part(value: Any, source: Any, *where: Any, **named: Any) -> Any:
        part_of(value, *where, **named).copy_(source)
        return value

    return write_part


def _own_carries(
    roles: Inputs[fx.Node], outputs: Outputs[fx.Node], lent: Collection[fx.Node]
) -> list[fx.Node]:
    """Return the carries that steps make anew, in memory of their own, which is no row of ys."""
    memory = [viewed(after) for after in outputs.carry]
    pairs = zip(roles.carry, outputs.carry, strict=True)
    return [
        carry
        for carry, after in pairs
        if is_fresh(after) and after not in lent and memory.count(after) == 1
    ]


def _pays(write: fx.Node) -> bool:
    """Return True if copying the value takes longer than a call or two, or the operator longer than
    Python's ``value[i] = source``."""
    example = value_of(write)
    return example.device.type == "cpu" and (is_large(example) or is_written_at_one_place(write))


# --- small values that the next step computes in the same memory ---

# new memory costs a small operator a quarter of its time
SMALL_BYTES = 2**16
MOST_BYTES = 2**19  # of all of them, which is what caches hold


def renewed_values(
    graph: fx.Graph,
    carry: Collection[fx.Node],
    may_be: Callable[[fx.Node], bool],
    is_new: Callable[[fx.Node], bool],
) -> list[fx.Node]:
    """Return those that ``may_be`` and whose memory no carry shares, which the next step reads.

    A node that ``is_new`` shares no memory with its operands.
    """
    shared = {*carry}
    for node in reversed(graph.nodes):
        if node in shared and not is_new(node):
            shared.update(node.all_input_nodes)
    found = []
    room = MOST_BYTES
    for node in graph.nodes:
        if node not in shared and may_be(node) and _is_small(value_of(node)):
            room -= likely_bytes(value_of(node))
            if room < 0:
                break
            found.append(node)
    return found


def _is_small(value: torch.Tensor) -> bool:
    return value.device.type == "cpu" and likely_bytes(value) <= SMALL_BYTES
