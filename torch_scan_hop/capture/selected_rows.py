"""Reads by a mask, and what is computed of them, done for all rows.

``h[mask]`` has as many rows as the mask is true for, which only the device knows. Where what
follows is done row by row, and ends in a write by the same mask or in a sum, the same is computed
of all rows, and selected at the end::

    rows = h[mask]                  rows = where(mask, h, 1)
    h[mask] = cell(rows)     ->     h.copy_(where(mask, cell(rows), h))

Rows that the mask leaves out are ones where they are read, and are thrown away where they are
written. Their gradients are zeros: ``where`` drops them at both ends. In between, a row of ones may
have an infinite derivative, and zero times that is NaN. It stays in its row, but for operands that
all rows share (a weight): those are selected, or what is made of them is, so that such a row passes
nothing on to them.

``mask.nonzero()`` is read and written at as the mask is. What is not known to be done row by row
(``capture/row_by_row``) leaves the graph as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.dynamo.variables import example_value
from torch_scan_hop._torch.effects import Effects
from torch_scan_hop._torch.fakes import fake_mode_of
from torch_scan_hop._torch.sizes import likely_value
from torch_scan_hop._torch.symbols import is_unknown_number
from torch_scan_hop._torch.tracing import run_fake, trace
from torch_scan_hop.body.copies import copied
from torch_scan_hop.body.step_examples import like
from torch_scan_hop.capture.mask_places import (
    KEEPS_POSITIONS,
    MASKED_SELECTS,
    MEANS,
    READS,
    REDUCTIONS,
    WRITES,
    Values,
    broadcast,
    call_of,
    in_dimension,
    is_differentiable,
    is_read_by_mask,
    is_same_mask,
    is_tensor,
    is_unknown,
    left_out,
    makes_positions,
    place_of,
    uses_a_mask,
    writes_one_value,
)
from torch_scan_hop.capture.row_by_row import NotRowByRow, check_rows, products_of_a_row, rows_of
from torch_scan_hop.capture.told import at_hand


def compute_all_rows(module: fx.GraphModule) -> None:
    """Rewrite the reads by masks in the graph of ``module``, or leave it as it is."""
    if not any(map(uses_a_mask, module.graph.nodes)):
        return
    rewritten = copied(module)
    try:
        _AllRows(rewritten).rewrite()
    except NotRowByRow:
        return
    module.graph = rewritten.graph


class _AllRows:
    """Rewrites one graph of Dynamo's."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.nodes = list(self.graph.nodes)
        self.order = {node: k for k, node in enumerate(self.nodes)}
        #: by the symbol of their number: the mask that chooses rows
        self.masks: dict[str, fx.Node] = {}
        #: tensors of rows in which those that are left out are ones, or pass on no gradient
        self.is_selected: set[Any] = set()
        #: the masks of tensors that hold the positions of rows
        self.mask_of: dict[Any, fx.Node] = {}
        self.erased: set[fx.Node] = set()
        self.products = 0
        self.counts: list[Any] = []
        #: masks and positions that must stay what they are, each with the node that needs it
        self.kept: list[tuple[fx.Node, fx.Node]] = []
        examples = [example_value(n) for n in self.graph.find_nodes(op="placeholder")]
        self.mode = fake_mode_of(examples)
        self.examples = [like(self.mode, v) for v in examples]
        self.effects = Effects(module)
        run_fake(self.effects.run, self.examples, self.mode)

    def rewrite(self) -> None:
        for node in self.nodes:
            if node in self.erased:
                pass
            elif is_read_by_mask(node):
                self._read(node)
            elif makes_positions(node):
                self._number_rows(node)
            elif writes_one_value(node) or any(map(is_unknown, (node, *node.all_input_nodes))):
                self._follow(node)
        changes = (self._is_written(m, self.nodes[self.order[n] + 1 :]) for m, n in self.kept)
        if any(changes) or not all(map(is_unknown_number, self.counts)):
            raise NotRowByRow("a mask that changes, or rows whose number a shape decides")
        self.graph.lint()
        self.module.recompile()
        run_fake(Values(self.module).run, self.examples, self.mode)

    def _follow(self, node: fx.Node) -> None:
        """Rewrite ``node``, which reads selected rows, or writes one value to them."""
        if node.op == "output":
            raise NotRowByRow("a result")
        if node.target in WRITES:
            self._write(node)
        elif is_unknown_number(example_value(node)):
            return  # a size, which is another now; who reads it is looked at
        elif node.target in READS and is_tensor(node.args[0]) and not is_unknown(node.args[0]):
            self._read(node)
        elif not is_unknown(node) and node.target in REDUCTIONS:
            self._reduce(node)
        else:
            if node.target in KEEPS_POSITIONS and node.args[0] in self.mask_of:
                self.mask_of[node] = self.mask_of[node.args[0]]
                self.kept.append((node, node))
            if node.target is not operator.getitem or is_tensor(node.args[0]):
                self._operator(node)
            elif node.args[0] in self.is_selected:
                self._select_after(node)

    # --- rows ---

    def _rows(self, node: Any) -> tuple[int, fx.Node]:
        """Return the dimension of the rows in ``node``, and their mask."""
        rows = rows_of(example_value(node))
        if rows is None or rows[1] not in self.masks:
            raise NotRowByRow("rows of an unknown mask")
        return rows[0], self.masks[rows[1]]

    def _number_rows(self, node: fx.Node) -> None:
        """Write ``mask.nonzero()`` as the positions of all rows."""
        x, in_tuple = node.args[0], not is_tensor(node)
        rows = rows_of(example_value(node)[0] if in_tuple else example_value(node))
        if is_unknown(x) or example_value(x).dim() != 1 or rows is None:
            raise NotRowByRow("positions in several dimensions")
        with self.graph.inserting_before(node):
            mask = self.graph.call_method("ne", (x, 0))
            size = self.graph.call_method("size", (x, 0))
            device = {"device": example_value(x).device}
            positions = self.graph.call_function(torch.arange, (size,), device)
            if not in_tuple:
                positions = self.graph.call_method("unsqueeze", (positions, 1))
        mask.meta["example_value"] = run_fake(lambda v: v.ne(0), [example_value(x)], self.mode)
        for replaced in list(node.users) if in_tuple else [node]:
            if in_tuple and replaced.target is not operator.getitem:
                raise NotRowByRow("positions in a tuple")
            self._replace(replaced, positions)
        if in_tuple:
            self.graph.erase_node(node)
        self.masks[rows[1]] = self.mask_of[positions] = mask
        self.kept.append((node, node))

    def _read(self, node: fx.Node) -> None:
        x, key = node.args[:2]
        self.kept += [(n, node) for n in node.all_input_nodes[1:] if n in self.order]
        if node.target in MASKED_SELECTS:
            x, key = broadcast(self.graph, node)
        place = place_of(x, key, self.mask_of)
        rows = rows_of(example_value(node))
        if rows is None or is_unknown(x):
            raise NotRowByRow("a read of what was read by a mask")
        self.masks.setdefault(rows[1], place.mask)
        self.counts.append(example_value(node).shape[rows[0]])
        with self.graph.inserting_before(node):
            _, flat = place.target(self.graph, x)
            mask = in_dimension(self.graph, place.mask, example_value(node).dim(), rows[0])
            found = self._where(mask, flat, left_out(example_value(node)))
        self._replace(node, found)
        self.is_selected.add(found)

    def _where(self, mask: fx.Node, value: Any, otherwise: Any) -> fx.Node:
        return self.graph.call_function(torch.where, (mask, value, otherwise))

    def _replace(self, node: fx.Node, found: fx.Node) -> None:
        found.meta = dict(node.meta)
        node.replace_all_uses_with(found)
        self.graph.erase_node(node)
        self.erased.add(node)

    # --- what is done with rows ---

    def _operator(self, node: fx.Node) -> None:
        call, tensors = call_of(node)
        made = trace(call, [like(self.mode, example_value(n)) for n in tensors], self.mode)
        is_pointwise = check_rows(made)
        for symbol, count in products_of_a_row(made):
            self.products += count * likely_value(example_value(self.masks[symbol]).numel())
        if self.products > at_hand.most_products:
            raise NotRowByRow("large products of rows that the mask may leave out")
        floats = [n for n in tensors if is_differentiable(n)]
        shared = [n for n in floats if not is_unknown(n)]
        if is_pointwise or not shared:
            for n in shared:
                if (
                    example_value(n).dim() == 0
                    and example_value(n).dtype != example_value(node).dtype
                ):
                    raise NotRowByRow("a number whose dtype would count")
                self._select_before(node, n, *self._rows(node))
            return
        if self.effects.written[node]:
            raise NotRowByRow("a product in place")
        for n in floats:
            if is_unknown(n) and n not in self.is_selected:
                self._select_before(node, n, *self._rows(n))
        if is_tensor(node):
            self._select_after(node)
        else:
            self.is_selected.add(node)  # its elements are

    def _select_before(self, node: fx.Node, operand: fx.Node, dim: int, mask: fx.Node) -> None:
        """Let ``node`` read ``operand`` so that rows that are left out pass it no gradient."""
        rank = example_value(operand if is_unknown(operand) else node).dim()
        with self.graph.inserting_before(node):
            found = self._where(in_dimension(self.graph, mask, rank, dim), operand, 1)
        node.replace_input_with(operand, found)

    def _select_after(self, node: fx.Node) -> None:
        if not is_differentiable(node):
            return
        dim, chosen = self._rows(node)
        with self.graph.inserting_before(node.next):
            mask = in_dimension(self.graph, chosen, example_value(node).dim(), dim)
            found = self._where(mask, node, 1)
        found.meta = dict(node.meta)
        node.replace_all_uses_with(found, delete_user_cb=lambda user: user is not found)
        self.is_selected.add(found)

    # --- where rows end ---

    def _write(self, node: fx.Node) -> None:
        x, key, value = node.args
        place = place_of(x, key, self.mask_of)
        if is_unknown(x):
            raise NotRowByRow("a write to what was read by a mask")
        rank = place.rank_of_rows(x)
        self._check_value(value, place.mask, rank - place.dim)
        with self.graph.inserting_before(node):
            target, flat = place.target(self.graph, x)
            mask = in_dimension(self.graph, place.mask, rank, place.dim)
            if is_tensor(value):
                value = self.graph.call_method("to", (value, example_value(x).dtype))
            chosen = self._where(mask, value, flat)
            if place.n_dims > 1:
                chosen = self.graph.call_method("view_as", (chosen, target))
            self.graph.call_method("copy_", (target, chosen))
        self.graph.erase_node(node)

    def _check_value(self, value: Any, mask: fx.Node, from_end: int) -> None:
        """Refuse a value whose rows are not those of ``mask``, or not the last but ``from_end``."""
        shape = getattr(example_value(value), "shape", ())
        if is_unknown(value):
            dim, chosen = self._rows(value)
            is_same = is_same_mask(mask, chosen, self._is_written_between)
            if not is_same or len(shape) - dim != from_end:
                raise NotRowByRow("rows of another mask, or in another dimension")
        elif len(shape) >= from_end and shape[-from_end] != 1:
            raise NotRowByRow("a value of a fixed size")

    def _reduce(self, node: fx.Node) -> None:
        rows, *args = node.args
        if len(node.all_input_nodes) != 1:
            raise NotRowByRow(str(node.target))
        dim, chosen = self._rows(rows)
        with self.graph.inserting_before(node):
            mask = in_dimension(self.graph, chosen, example_value(rows).dim(), dim)
            selected = self._where(mask, rows, REDUCTIONS[node.target])
            target = "sum" if node.target in MEANS else node.target
            kind = "call_method" if isinstance(target, str) else "call_function"
            found = self.graph.create_node(kind, target, (selected, *args), node.kwargs)
            if node.target in MEANS:
                kept = self.graph.call_method("expand_as", (mask, selected))
                count = self.graph.call_method("sum", (kept, *args), node.kwargs)
                found = self.graph.call_function(operator.truediv, (found, count))
        self._replace(node, found)

    def _is_written(self, read: fx.Node, nodes: list[fx.Node]) -> bool:
        return any(self.effects.written[n] & self.effects.storages[read] for n in nodes)

    def _is_written_between(self, first: fx.Node, last: fx.Node) -> bool:
        if first not in self.order or last not in self.order:
            return True
        between = self.nodes[self.order[first] : self.order[last] + 1]
        return any(self._is_written(n, between) for n in (first, *first.all_input_nodes))
