"""A captured body made pure: what it changes in place becomes a carry, or a copy of its own."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.variables import example_value, known_modules
from torch_scan_hop._torch.effects import Effects, versions_of
from torch_scan_hop._torch.fakes import FakeTensorMode, fake_mode_of
from torch_scan_hop._torch.functorch_levels import is_wrapped
from torch_scan_hop._torch.symbols import SYMBOLS
from torch_scan_hop._torch.tracing import mutated_inputs, run_fake
from torch_scan_hop.body.step_examples import like
from torch_scan_hop.capture.index_nodes import nested_modules, write_indices
from torch_scan_hop.capture.user_code import users_line
from torch_scan_hop.op import ScanOperator
from torch_scan_hop.signature import output_node


class CapturedBody:
    """The graph of a step as Dynamo captured it, made pure.

    ``checked``: on what line numbers may be others than Python's, of which the last y tells.
    """

    def __init__(
        self, tx: Any, graph: fx.Graph, n_carry: int, n_xs: int, checked: str | None = None
    ) -> None:
        self.tx = tx
        self.graph = graph
        self.n_carry = n_carry
        self.n_xs = n_xs
        self.checked = checked
        for module in nested_modules(self.module()):
            _write_powers_of_negatives(module)
            _refuse_new_memory(module)
        write_indices(self.module())

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(known_modules(self.tx), self.graph, "ScanBody")

    def placeholders(self) -> list[fx.Node]:
        return self.graph.find_nodes(op="placeholder")

    def make_pure(self) -> list[int]:
        """Make the body pure; return positions of inputs that became carries, in their order."""
        changed = self.written_placeholders()
        self.uncounted = self._uncounted(changed)
        first_additional = self.n_carry + self.n_xs
        placeholders = self.placeholders()
        copies = {k: self._copy_at_entry(placeholders[k]) for k in sorted(changed)}
        carried = [k for k in sorted(changed) if k >= first_additional]
        for position, k in enumerate(carried):
            self._move(placeholders[k], self.n_carry + position)
        self._return_as_carries([copies[k] for k in carried])
        if self.uncounted:
            _copy_read_statistics(self.module())
        self._copy_for_scans()
        _erase_unread_sizes(self.graph)
        self._unwrap_examples()
        self.graph.lint()
        return carried

    def written_placeholders(self) -> set[int]:
        """Return the positions of the inputs that the body changes in place."""
        values, mode = self._examples()
        return set(mutated_inputs(self.module(), [like(mode, v) for v in values], mode))

    def _uncounted(self, written: set[int]) -> set[int]:
        """Return which of the inputs that the body writes to have the versions of before.

        Running statistics of norms are, and what is written by way of ``tensor.data``.
        """
        if not written:
            return set()
        values, mode = self._examples()
        examples = [like(mode, v) for v in values]
        before = versions_of(examples)
        run_fake(self.module(), examples, mode)
        after = versions_of(examples)
        return {k for k in written if after[k] == before[k]}

    def line_of_change(self, n_carried: int) -> str:
        """Return where the body, made pure, changes one of the inputs that became carries, as
        ``, at file:line: code``."""
        effects = Effects(self.module())
        values, mode = self._examples()
        run_fake(effects.run, [like(mode, v) for v in values], mode)
        carried = self.placeholders()[self.n_carry : self.n_carry + n_carried]
        copies = [user for node in carried for user in node.users]
        written = set().union(*(effects.storages[node] for node in copies))
        changing = (node for node, storages in effects.written.items() if storages & written)
        return next(filter(None, (users_line(n.stack_trace or "") for n in changing)), "")

    def _examples(self) -> tuple[list[Any], FakeTensorMode]:
        values = [example_value(n) for n in self.placeholders()]
        return values, fake_mode_of(values)

    def _copy_for_scans(self) -> None:
        """Give a scan in the body a copy of what the body writes to after it.

        The scan's backward may read more of its inputs than the loop's would, and autograd counts
        writes to them.
        """
        scans = [n for n in self.graph.nodes if isinstance(n.target, ScanOperator)]
        if not scans:
            return
        effects = Effects(self.module())
        values, mode = self._examples()
        examples = [like(mode, v) for v in values]
        run_fake(effects.run, examples, mode)
        order = list(effects.written)
        for scan in scans:
            later = set().union(*(effects.written[n] for n in order[order.index(scan) + 1 :]))
            for given in [n for n in scan.all_input_nodes if effects.storages[n] & later]:
                with self.graph.inserting_before(scan):
                    copy = self.graph.call_method("clone", (given,))
                copy.meta = dict(given.meta)
                scan.replace_input_with(given, copy)

    def _unwrap_examples(self) -> None:
        """Dynamo asks placeholders for sizes; under ``vmap`` they have no symbolic ones."""
        values, mode = self._examples()
        for node, value in zip(self.placeholders(), values, strict=True):
            if isinstance(value, torch.Tensor) and is_wrapped(value):
                node.meta["example_value"] = like(mode, value)

    def _copy_at_entry(self, placeholder: fx.Node) -> fx.Node:
        """Let the body work on a copy, because what it is handed is not its own to change."""
        last = self.placeholders()[-1]
        with self.graph.inserting_after(last):
            copy = self.graph.call_method("clone", (placeholder,))
        copy.meta = dict(placeholder.meta)
        placeholder.replace_all_uses_with(copy, lambda user: user is not copy)
        return copy

    def _move(self, placeholder: fx.Node, position: int) -> None:
        others = [n for n in self.placeholders() if n is not placeholder]
        others[position].prepend(placeholder)

    def _return_as_carries(self, values: list[fx.Node]) -> None:
        output: Any = output_node(self.graph)
        results = list(output.args[0])
        output.args = ((*results[: self.n_carry], *values, *results[self.n_carry :]),)


# By which argument, the sixth, a norm says if it writes to the statistics, and its default.
_IS_WRITING = {F.batch_norm: ("training", False), F.instance_norm: ("use_input_stats", True)}


def _copy_read_statistics(body: fx.GraphModule) -> None:
    """Give norms that read running statistics copies of them.

    Another norm may write to them later in a step. Autograd does not count that, so that the
    derivative of the first one would read what the other has written.
    """
    for module in nested_modules(body):
        for node in [n for n in module.graph.nodes if n.target in _IS_WRITING]:
            name, default = _IS_WRITING[node.target]
            if node.args[5] if len(node.args) > 5 else node.kwargs.get(name, default):
                continue
            named = (node.kwargs.get(f"running_{which}") for which in ("mean", "var"))
            for given in {n for n in (*node.args[1:3], *named) if isinstance(n, fx.Node)}:
                with module.graph.inserting_before(node):
                    copy = module.graph.call_method("clone", (given,))
                copy.meta = dict(given.meta)
                node.replace_input_with(given, copy)
        module.recompile()


def _erase_unread_sizes(graph: fx.Graph) -> None:
    """Erase what Dynamo read of sizes while it traced: steps that run as written would read them
    again."""
    for node in reversed(graph.nodes):
        reads_size = node.target in ("size", torch.ops.aten.sym_size.int)
        is_pythons = getattr(node.target, "__module__", None) == operator.eq.__module__
        is_number = isinstance(node.meta.get("example_value"), (int, torch.Size, *SYMBOLS))
        if is_number and (reads_size or is_pythons) and not node.users:
            graph.erase_node(node)


def _write_powers_of_negatives(module: fx.GraphModule) -> None:
    """Let the code say ``(-2.0) ** x``, which FX writes as ``-2.0 ** x``."""
    for node in module.graph.find_nodes(op="call_function", target=operator.pow):
        if isinstance(node.args[0], (int, float)) and node.args[0] < 0:
            node.target = torch.pow
            module.recompile()


def _refuse_new_memory(module: fx.GraphModule) -> None:
    """Refuse a tensor that takes the memory of another: a scan carries no such write."""
    for node in module.graph.nodes:
        if getattr(node.target, "__name__", node.target) in ("set_", "shallow_copy_data_"):
            raise Unsupported(
                "the body assigns to the data of a tensor, which gives it other memory"
                f"{users_line(node.stack_trace or '')}. Write to its own, with tensor.copy_(value) "
                "under torch.no_grad()"
            )
