"""Dynamo: a scan is one node, its closures lifted to additional inputs.

Tensors that the body changes in place (BatchNorm statistics, a KV cache) become extra
carries, copied back after the loop; that serves autograd and every backend.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from torch_scan_hop import inductor
from torch_scan_hop._torch.dynamo import (
    ConstantVariable,
    LazyVariableTracker,
    TorchHigherOrderOperatorVariable,
    Unsupported,
    VariableTracker,
    call_inlined,
    create_node,
    create_proxy,
    discard_graph_changes,
    example_value,
    graph_being_traced,
    install_body,
    known_modules,
    make_attr,
    make_traceable,
    reconstruct_outputs,
    sequence_items,
    speculate,
    users_error,
)
from torch_scan_hop._torch.dynamo_indexing import indices_are_captured
from torch_scan_hop._torch.effects import Effects
from torch_scan_hop._torch.functorch_levels import make_levels_relative, open_levels
from torch_scan_hop._torch.own_scan import give_back, remember_code
from torch_scan_hop._torch.symbols import has_unknown_size
from torch_scan_hop._torch.tracing import FakeTensorMode, fake_mode_of, mutated_inputs, run_fake
from torch_scan_hop.autodiff.policy import POLICY
from torch_scan_hop.body.fakes import like
from torch_scan_hop.capture.cache_key import add_cache_key
from torch_scan_hop.capture.index_nodes import write_indices
from torch_scan_hop.capture.shared_memory import REASON, check_memory, share_memory
from torch_scan_hop.capture.user_code import users_line
from torch_scan_hop.op import ScanOperator, scan_op, scan_options
from torch_scan_hop.settings import accelerates_torch
from torch_scan_hop.signature import output_node
from torch_scan_hop.xla.if_loaded import prepare_xla_if_loaded


def _a_slice(xs: torch.Tensor) -> torch.Tensor:
    """An example of ``xs[t]`` that says nothing about the trip count, which may be zero."""
    example = xs.new_empty_strided(xs.shape[1:], xs.stride()[1:])
    return example + xs.sum() if xs.requires_grad else example


def _arguments(
    combine_fn: Any, init: Any, xs: Any, additional_inputs: Any = None, **options: Any
) -> Any:
    return combine_fn, init, xs, additional_inputs, options


class ScanVariable(TorchHigherOrderOperatorVariable):
    """Tracks ``torch.ops.higher_order.scan``."""

    _HOP_NAME = "torch.ops.higher_order.scan"
    _ALLOW_FALLBACK_TO_EAGER = False
    supports_input_mutation = True
    supports_aliasing = True

    def _call_function(
        self, tx: Any, args: Any, kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        with indices_are_captured(tx):
            return self._capture(tx, args, kwargs)

    def _capture(self, tx: Any, args: Any, kwargs: dict[str, VariableTracker]) -> VariableTracker:
        prepare_xla_if_loaded()
        args, kwargs = LazyVariableTracker.realize_all((args, kwargs))
        combine_fn, init, xs, additional, options = _arguments(*args, **kwargs)
        init = sequence_items(tx, init)
        xs = sequence_items(tx, xs)
        additional = [] if additional is None else sequence_items(tx, additional)
        promoted = options.pop("promoted", None)
        reverse, checkpoint = (_constant(options, name) for name in ("reverse", "checkpoint"))
        if promoted is not None:
            positions = [v.as_python_constant() for v in sequence_items(tx, promoted)]
            init = _with_dtypes_of_step(tx, combine_fn, init, [xs, additional], positions)
        with discard_graph_changes(tx):
            examples = _step_examples(tx, init, xs, additional)
        make_traceable(combine_fn)
        levels = open_levels()
        _, spec, graph, lifted = speculate(tx, combine_fn, examples, self.value)
        make_levels_relative(graph, levels)
        _refuse_unknown_sizes(graph)
        body = CapturedBody(tx, graph, len(init), len(xs))
        inputs = [v.as_proxy() for v in [*init, *xs, *additional]] + list(lifted)
        inputs = body.lift_numbers(inputs)
        mutated = body.make_pure()
        if mutated:
            _refuse_shared_memory(tx, inputs, mutated, len(init))
        n_step = len(init) + len(xs)
        module = body.module()
        add_cache_key(module)
        if callable(checkpoint):
            # a function is no argument of a graph node; it stays with the body
            module.meta[POLICY], checkpoint = checkpoint, None
        name = install_body(tx, "scan_body", module)
        arguments = (
            make_attr(tx, name),
            # copies: what autograd saves of them must not change when they are written back
            [*inputs[: len(init)], *(_cloned(tx, inputs[k]) for k in mutated)],
            inputs[len(init) : n_step],
            tuple(p for k, p in enumerate(inputs) if k >= n_step and k not in mutated),
        )
        keywords = scan_options(reverse, checkpoint)
        outputs = sequence_items(tx, create_node(tx, "call_function", scan_op, arguments, keywords))
        n = len(init)
        for position, k in enumerate(mutated):
            create_node(
                tx, "call_method", "copy_", (inputs[k], outputs[n + position].as_proxy()), {}
            )
        return reconstruct_outputs(tx, [*outputs[:n], *outputs[n + len(mutated) :]], spec)


def _step_examples(
    tx: Any,
    init: list[VariableTracker],
    xs: list[VariableTracker],
    additional: list[VariableTracker],
) -> list[VariableTracker]:
    return [
        *(c if c.is_python_constant() else c.call_method(tx, "clone", [], {}) for c in init),
        *(call_inlined(tx, _a_slice, x) for x in xs),
        *additional,
    ]


def _with_dtypes_of_step(
    tx: Any,
    combine_fn: VariableTracker,
    init: list[VariableTracker],
    rest: list[list[VariableTracker]],
    positions: list[int],
) -> list[VariableTracker]:
    """``init`` in the dtypes that a step gives the carries at ``positions``.

    Those were Python numbers, and are scalars with all their digits here. A number has a kind and
    no dtype of its own: a step is told so by a number, where its operators take one, and by a
    scalar of the default dtype elsewhere. Further rounds see what these dtypes do to other numbers.
    """

    def dtypes_after(carry: list[VariableTracker]) -> dict[int, torch.dtype]:
        with discard_graph_changes(tx):
            result = combine_fn.call_function(tx, _step_examples(tx, carry, *rest), {})
            found = sequence_items(tx, sequence_items(tx, result)[0])
            return {k: example_value(found[k]).dtype for k in positions}

    def in_dtypes(dtypes: dict[int, torch.dtype]) -> list[VariableTracker]:
        cast = list(init)
        for k, dtype in dtypes.items():
            if example_value(init[k]).dtype != dtype:
                constant = ConstantVariable.create(dtype)
                cast[k] = init[k].call_method(tx, "to", [constant], {})
        return cast

    numbers = list(init)
    for k in positions:
        numbers[k] = ConstantVariable.create(_NUMBER_OF_DTYPE[example_value(init[k]).dtype])
    try:
        dtypes = dtypes_after(numbers)
    except Exception:  # an operator or method that takes no number
        dtypes = {k: _default_dtype(example_value(init[k]).dtype) for k in positions}
    for _ in range(1 + len(positions)):
        with discard_graph_changes(tx):
            carry = in_dtypes(dtypes)
            after = dtypes_after(carry)
        if after == dtypes:
            break
        dtypes = after
    return in_dtypes(dtypes)


#: a number of the kind that a widest dtype stands for
_NUMBER_OF_DTYPE = {torch.bool: True, torch.int64: 1, torch.float64: 1.0, torch.complex128: 1j}


def _default_dtype(widest: torch.dtype) -> torch.dtype:
    return torch.full((), _NUMBER_OF_DTYPE[widest]).dtype


def _refuse_shared_memory(tx: Any, inputs: list[Any], mutated: list[int], n_carry: int) -> None:
    """What a body changes is carried: as a copy, which nothing else may be a view of."""
    changed = [inputs[k] for k in mutated]
    # init is read before anything changes
    others = [v for k, v in enumerate(inputs) if k >= n_carry and k not in mutated]
    others = [v for v in others if isinstance(example_value(v), torch.Tensor)]
    if share_memory(list(map(example_value, changed)), list(map(example_value, others))):
        raise Unsupported(REASON)
    create_proxy(tx, "call_function", check_memory, (changed, others))


def _refuse_unknown_sizes(graph: fx.Graph) -> None:
    """A step's results have one size: what is read by a mask may have any at each step."""
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and has_unknown_size(value):
            where = users_line(node.stack_trace or "")
            raise Unsupported(f"a result of data-dependent size (a mask, nonzero, unique){where}")


def _cloned(tx: Any, proxy: Any) -> Any:
    return create_node(tx, "call_method", "clone", (proxy,), {}).as_proxy()


def _constant(options: dict[str, VariableTracker], name: str) -> Any:
    variable = options.get(name)
    if variable is None:
        return {"reverse": False, "checkpoint": None}[name]
    return variable.as_python_constant()


class CapturedBody:
    """The graph of a step as Dynamo captured it, made pure."""

    def __init__(self, tx: Any, graph: fx.Graph, n_carry: int, n_xs: int) -> None:
        self.tx = tx
        self.graph = graph
        self.n_carry = n_carry
        self.n_xs = n_xs
        write_indices(self.module())

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(known_modules(self.tx), self.graph, "ScanBody")

    def placeholders(self) -> list[fx.Node]:
        return self.graph.find_nodes(op="placeholder")

    def lift_numbers(self, inputs: list[Any]) -> list[Any]:
        """Read closed-over floats before the loop: Dynamo hands them in as tensors to read."""
        inputs = list(inputs)
        for k, placeholder in enumerate(self.placeholders()):
            reads = [n for n in placeholder.users if n.op == "call_method" and n.target == "item"]
            if k < self.n_carry + self.n_xs or not reads or len(reads) < len(placeholder.users):
                continue
            number = reads[0].meta["example_value"]
            inputs[k] = create_proxy(self.tx, "call_method", "item", (inputs[k],))
            inputs[k].node.meta["example_value"] = number
            placeholder.meta["example_value"] = number
            placeholder.type = None
            for read in reads:
                read.replace_all_uses_with(placeholder)
                self.graph.erase_node(read)
        return inputs

    def make_pure(self) -> list[int]:
        """Positions of the additional inputs that became carries, in their new order."""
        values = [example_value(n) for n in self.placeholders()]
        mode: FakeTensorMode = fake_mode_of(values)
        changed = mutated_inputs(self.module(), [like(mode, v) for v in values], mode)
        first_additional = self.n_carry + self.n_xs
        placeholders = self.placeholders()
        copies = {k: self._copy_at_entry(placeholders[k]) for k in sorted(changed)}
        carried = [k for k in sorted(changed) if k >= first_additional]
        for position, k in enumerate(carried):
            self._move(placeholders[k], self.n_carry + position)
        self._return_as_carries([copies[k] for k in carried])
        self._copy_for_scans(mode)
        self.graph.lint()
        return carried

    def _copy_for_scans(self, mode: FakeTensorMode) -> None:
        """A scan in the body gets a copy of what the body writes to after it.

        Its backward may read more of what it was given than the loop's would, and autograd
        counts writes.
        """
        scans = [n for n in self.graph.nodes if isinstance(n.target, ScanOperator)]
        if not scans:
            return
        effects = Effects(self.module())
        examples = [like(mode, example_value(n)) for n in self.placeholders()]
        run_fake(effects.run, examples, mode)
        order = list(effects.written)
        for scan in scans:
            later = set().union(*(effects.written[n] for n in order[order.index(scan) + 1 :]))
            for given in [n for n in scan.all_input_nodes if effects.storages[n] & later]:
                with self.graph.inserting_before(scan):
                    copy = self.graph.call_method("clone", (given,))
                copy.meta = dict(given.meta)
                scan.replace_input_with(given, copy)

    def _copy_at_entry(self, placeholder: fx.Node) -> fx.Node:
        """The body works on a copy: what it is handed is never its own to change."""
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


class RefusalVariable(TorchHigherOrderOperatorVariable):
    """Raises what traced code says is wrong with the caller's arguments or body."""

    _HOP_NAME = "scan_refusal"

    def call_function(
        self, tx: Any, args: Any, kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        kind, message = (arg.as_python_constant() for arg in args)
        raise users_error(kind, message)


def tracker_of_scan(value: Any, upstream: Any) -> Any:
    """The tracker of ``value``, an operator called scan: of ours, or of torch's own ``scan()``."""
    if isinstance(value, ScanOperator):
        return ScanVariable
    return TorchsScanVariable if accelerates_torch() else _as_torch_has_it(upstream)


class TorchsScanVariable(ScanVariable):
    """Tracks the operator of torch's own ``scan()``, and gives what it captures to ours."""

    def _call_function(
        self, tx: Any, args: Any, kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        remember_code(tx)
        return super()._call_function(tx, args, kwargs)


@functools.cache
def _as_torch_has_it(upstream: Any) -> Any:
    """torch's tracker, which would find our operator under the name of its own."""

    class OwnScanVariable(upstream):  # type: ignore[misc]
        def _call_function(self, tx: Any, *args: Any) -> VariableTracker:
            remember_code(tx)
            inductor.register()  # it lets torch's pass find torch's operator, too
            graph = graph_being_traced(tx)
            before = set(graph.nodes)
            result = super()._call_function(tx, *args)
            give_back(graph, before, scan_op)
            return result

    return OwnScanVariable
