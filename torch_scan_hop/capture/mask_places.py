"""Find where a mask stands in a key, and which nodes of Dynamo's graph of a body read by one."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.variables import example_value
from torch_scan_hop._torch.symbols import is_unknown_number, unknown_dims
from torch_scan_hop.capture.indexing import entries_of
from torch_scan_hop.capture.row_by_row import NotRowByRow
from torch_scan_hop.capture.user_code import users_line

READS = (operator.getitem, "__getitem__")
WRITES = (operator.setitem, "__setitem__")
MASKED_SELECTS = (torch.masked_select, "masked_select")
_POSITIONS = (torch.nonzero, "nonzero", torch.argwhere, "argwhere", torch.where)
#: by what reduces rows: what one that is left out counts as
REDUCTIONS: dict[Any, Any] = {
    torch.sum: 0, "sum": 0, torch.mean: 0, "mean": 0, torch.prod: 1, "prod": 1,
    torch.any: False, "any": False, torch.all: True, "all": True,
}  # fmt: skip
MEANS = (torch.mean, "mean")
#: what makes of the positions of rows, as ``mask.nonzero().squeeze(1)`` has them, no others
KEEPS_POSITIONS = {
    operator.getitem, "__getitem__", torch.squeeze, "squeeze", torch.flatten, "flatten", "view",
    "reshape", "long", "contiguous", "clone",
}  # fmt: skip
_CALLS = ("call_function", "call_method")


def is_tensor(node: Any) -> bool:
    return isinstance(example_value(node), torch.Tensor)


def is_differentiable(node: Any) -> bool:
    value = example_value(node)
    return is_tensor(node) and (value.is_floating_point() or value.is_complex())


def is_unknown(node: Any) -> bool:
    """Return True if the size of ``node``, or of a part of it, depends on values."""
    value = example_value(node)
    if isinstance(value, (tuple, list)):
        return any(map(is_unknown, value))
    if isinstance(value, torch.Tensor):
        return bool(unknown_dims(value))
    return is_unknown_number(value)


def is_mask(entry: Any) -> bool:
    value = example_value(entry)
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() > 0


def is_read_by_mask(node: fx.Node) -> bool:
    if node.op not in _CALLS or len(node.args) != 2 or not is_tensor(node.args[0]):
        return False
    if node.target in MASKED_SELECTS:
        return not node.kwargs
    return node.target in READS and any(map(is_mask, entries_of(node.args[1])))


def writes_one_value(node: fx.Node) -> bool:
    """Return True for ``x[mask] = value`` with a 0-d tensor, whose derivative looks for places."""
    if node.target not in WRITES or len(node.args) != 3:
        return False
    x, key, value = node.args
    entries = key if isinstance(key, tuple) else (key,)
    is_one = is_tensor(value) and example_value(value).dim() == 0 and not is_unknown(x)
    others = [entry for entry in entries if not is_mask(entry)]
    return is_one and len(entries) - len(others) == 1 and all(map(_is_basic, others))


def uses_a_mask(node: fx.Node) -> bool:
    return is_read_by_mask(node) or makes_positions(node) or writes_one_value(node)


def makes_positions(node: fx.Node) -> bool:
    """Return True for ``x.nonzero()``, in any of its forms, a tuple included."""
    if node.op not in _CALLS or node.target not in _POSITIONS or len(node.args) != 1:
        return False
    return is_tensor(node.args[0])


@dataclass(frozen=True)
class MaskPlace:
    """A mask that selects from the dimensions of ``x[basic]`` that begin with ``dim``."""

    mask: fx.Node
    dim: int = 0
    basic: tuple[Any, ...] | None = None

    @property
    def n_dims(self) -> int:
        return int(example_value(self.mask).dim())

    def rank_of_rows(self, x: Any) -> int:
        """Return how many dimensions ``x[key]`` has."""
        rank = int(example_value(x).dim())
        for entry in self.basic or ():
            rank += (entry is None) - isinstance(entry, int)
        return rank - self.n_dims + 1

    def target(self, graph: fx.Graph, x: Any) -> tuple[Any, Any]:
        """Return what the mask selects from, as it is and with rows in one dimension."""
        if self.basic is not None:
            x = graph.call_function(operator.getitem, (x, self.basic))
        if self.n_dims == 1:
            return x, x
        return x, graph.call_method("flatten", (x, self.dim, self.dim + self.n_dims - 1))


def in_dimension(graph: fx.Graph, mask: fx.Node, rank: int, dim: int) -> fx.Node:
    """Return ``mask`` so that it broadcasts to rows in dimension ``dim`` of ``rank``."""
    if example_value(mask).dim() == 1 and rank == dim + 1:
        return mask
    return graph.call_method("reshape", (mask, [1] * dim + [-1] + [1] * (rank - dim - 1)))


def broadcast(graph: fx.Graph, masked_select: fx.Node) -> list[fx.Node]:
    """Return the two tensors that ``masked_select`` reads, in one shape."""
    values = [example_value(n) for n in masked_select.args]
    found = []
    for n, value in zip(masked_select.args, torch.broadcast_tensors(*values), strict=True):
        with graph.inserting_before(masked_select):
            found.append(graph.call_method("expand", (n, value.shape)))
        found[-1].meta["example_value"] = value
    return found


def place_of(x: Any, key: Any, mask_of: dict[fx.Node, fx.Node]) -> MaskPlace:
    """Divide ``key`` into its mask and what PyTorch reads before it: ints, slices, None.

    ``mask_of`` has the masks of tensors that hold the positions where one is true.
    """
    entries = entries_of(key)
    masks = [e for e in entries if isinstance(e, fx.Node)]
    if len(masks) != 1 or not all(map(_is_basic, (e for e in entries if e is not masks[0]))):
        raise NotRowByRow("a mask beside other indices")
    index = masks[0]
    mask = mask_of.get(index, index)
    if (
        not is_mask(mask)
        or is_unknown(mask)
        or (mask is not index and example_value(index).dim() != 1)
    ):
        raise NotRowByRow("an index that is no mask")
    n_dims = example_value(mask).dim()
    taken = sum(n_dims if e is index else isinstance(e, (int, slice)) for e in entries)
    basic: list[Any] = []
    dim = position = 0
    for entry in entries:
        if entry is index:
            dim = position
            basic += [slice(None)] * n_dims
        else:
            basic.append(entry)
        in_ellipsis = example_value(x).dim() - taken
        position += {int: 0, type(Ellipsis): in_ellipsis}.get(type(entry), 1)
    is_whole = all(entry == slice(None) or entry is Ellipsis for entry in basic)
    return MaskPlace(mask, dim, None if is_whole else tuple(basic))


def _is_basic(entry: Any) -> bool:
    kinds = (int, slice, type(None), type(Ellipsis))
    return isinstance(entry, kinds) and not isinstance(entry, bool)


def is_same_mask(
    mask: fx.Node, other: fx.Node, is_written_between: Callable[[fx.Node, fx.Node], bool]
) -> bool:
    """Return True if both masks are the same values: ``h[h > 0] = f(h[h > 0])`` makes two."""
    if mask is other:
        return True
    if (mask.op, mask.target, mask.kwargs) != (other.op, other.target, other.kwargs):
        return False
    if mask.op not in _CALLS or len(mask.args) != len(other.args):
        return False
    if is_written_between(other, mask):
        return False
    return all(
        is_same_mask(a, b, is_written_between)
        if isinstance(a, fx.Node) and isinstance(b, fx.Node)
        else not isinstance(a, fx.Node) and type(a) is type(b) and a == b
        for a, b in zip(mask.args, other.args, strict=True)
    )


def call_of(node: fx.Node) -> tuple[Callable[..., Any], list[fx.Node]]:
    """Return the call of ``node`` as a function of the nodes that it reads, and those."""
    read = list(dict.fromkeys(node.all_input_nodes))
    if node.op not in _CALLS or any(n.op == "get_attr" for n in read):
        raise NotRowByRow("a module, or a graph, that is called")

    def call(*values: Any) -> Any:
        by_node = dict(zip(read, values, strict=True))
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), by_node.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    return call, read


class Values(fx.Interpreter):
    """Runs a graph on fakes, and notes in it what had an unknown size, or is new."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if is_unknown(n) or "example_value" not in n.meta:
            n.meta["example_value"] = value
        return value


def left_out(rows: torch.Tensor) -> Any:
    """Return what rows that are left out are: indices that exist, floats that have a logarithm."""
    if rows.dtype == torch.bool:
        return False
    return 1 if rows.is_floating_point() or rows.is_complex() else 0


def refuse_unknown_sizes(graphs: Iterable[fx.GraphModule]) -> None:
    """Refuse a step whose results may have any size, as a read by a mask has; it must have one."""
    for node in itertools.chain.from_iterable(module.graph.nodes for module in graphs):
        value = example_value(node)
        # what is added to its counts gives those a size, but there may be others
        is_count = node.target in (torch.bincount, "bincount") and bool(node.users)
        if isinstance(value, torch.Tensor) and (is_count or unknown_dims(value)):
            where = users_line(node.stack_trace or "")
            made_by = "a mask, nonzero, unique, bincount"
            raise Unsupported(f"a result of data-dependent size ({made_by}){where}")


def line_of_number(module: fx.GraphModule) -> str:
    """Return where a body first reads a number that the values of a tensor decide, or ""."""
    read = (n.stack_trace for n in module.graph.nodes if is_unknown_number(example_value(n)))
    return users_line(next(read, None) or "")
