"""Dynamo: a scan is one node, its closures lifted to additional inputs.

Tensors that the body changes in place (BatchNorm statistics, a KV cache) become extra
carries, copied back after the loop; that serves autograd and every backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from torch_scan_hop._torch.dynamo.contexts import new_symbols_are_nobodys, sizes_may_be_unknown
from torch_scan_hop._torch.dynamo.errors import (
    Unsupported,
    own_failures_are_unsupported,
    users_error,
)
from torch_scan_hop._torch.dynamo.facts import facts_noted
from torch_scan_hop._torch.dynamo.floats import floats_are_read_outside_bodies
from torch_scan_hop._torch.dynamo.function_modes import (
    function_modes_in_force,
    function_modes_set_aside,
)
from torch_scan_hop._torch.dynamo.indexing import indices_are_captured
from torch_scan_hop._torch.dynamo.number_functions import (
    functions_take_scalars,
    kinds_of_numbers_are_known,
    numbers_are_weak,
)
from torch_scan_hop._torch.dynamo.numpy_constants import numpy_constants_are_folded
from torch_scan_hop._torch.dynamo.speculation import numbers_of_tensors_are_refused, speculate
from torch_scan_hop._torch.dynamo.trees import FlatResults
from torch_scan_hop._torch.dynamo.variables import (
    LazyVariableTracker,
    TorchHigherOrderOperatorVariable,
    VariableTracker,
    create_node,
    create_proxy,
    discard_graph_changes,
    example_value,
    example_value_or_none,
    install_body,
    known_modules,
    make_attr,
    make_traceable,
    sequence_items,
    write_back,
)
from torch_scan_hop._torch.functorch_levels import make_levels_relative, open_levels
from torch_scan_hop._torch.inference_regions import make_no_grad
from torch_scan_hop.autodiff.policy import POLICY
from torch_scan_hop.capture.cache_key import add_cache_key
from torch_scan_hop.capture.counters import branches_are_decided, check_branches
from torch_scan_hop.capture.first_steps import check_facts
from torch_scan_hop.capture.hooks_of_carries import HooksOfCarries
from torch_scan_hop.capture.index_nodes import nested_modules
from torch_scan_hop.capture.known_numbers import with_known_numbers
from torch_scan_hop.capture.mask_places import line_of_number, refuse_unknown_sizes
from torch_scan_hop.capture.no_steps import without_steps
from torch_scan_hop.capture.number_arithmetic import FUNCTIONS, of_number
from torch_scan_hop.capture.number_domains import check_after
from torch_scan_hop.capture.number_dtypes import example_arguments, with_dtypes_of_step
from torch_scan_hop.capture.purify import CapturedBody
from torch_scan_hop.capture.refusals import note_leaf
from torch_scan_hop.capture.selected_rows import compute_all_rows
from torch_scan_hop.capture.shared_memory import check_memory, reason_to_refuse
from torch_scan_hop.capture.steady import STEADY
from torch_scan_hop.capture.told import at_hand
from torch_scan_hop.capture.torchs_settings import refuse_settings
from torch_scan_hop.capture.weak_numbers import (
    WEAK,
    Marking,
    as_left_to_the_program,
    make_whole,
    numbers_among,
    read_number,
)
from torch_scan_hop.op import scan_op, scan_options
from torch_scan_hop.signature import Inputs
from torch_scan_hop.xla.if_loaded import prepare_xla_if_loaded


@dataclass(frozen=True)
class _Call:
    """A call of the operator, as Dynamo sees it."""

    combine_fn: VariableTracker
    inputs: Inputs[VariableTracker]
    reverse: bool
    checkpoint: Any
    #: positions of the carries that are Python numbers at first
    numbers: tuple[int, ...] = ()
    #: by position, those that stay numbers, with all their digits
    exact: dict[int, Any] = field(default_factory=dict)


def _call_of(
    tx: Any,
    combine_fn: VariableTracker,
    init: VariableTracker,
    xs: VariableTracker,
    additional_inputs: VariableTracker | None = None,
    reverse: VariableTracker | None = None,
    checkpoint: VariableTracker | None = None,
    **of_torchs_own: VariableTracker,
) -> _Call:
    """Return the operator's arguments by role.

    torch's own operator has more of them (in 2.15: which inputs are mutated). They are ignored,
    because the capture finds that out anew.
    """
    additional = [] if additional_inputs is None else sequence_items(tx, additional_inputs)
    return _Call(
        combine_fn,
        Inputs(sequence_items(tx, init), sequence_items(tx, xs), additional),
        False if reverse is None else reverse.as_python_constant(),
        None if checkpoint is None else checkpoint.as_python_constant(),
    )


class ScanVariable(TorchHigherOrderOperatorVariable):
    """Tracks ``torch.ops.higher_order.scan``."""

    _HOP_NAME = "torch.ops.higher_order.scan"
    has_numbers = False
    _ALLOW_FALLBACK_TO_EAGER = False
    supports_input_mutation = True
    supports_aliasing = True

    def call_function(
        self, tx: Any, args: Any, kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        # a default device, and a mode of the user's, are for what the body calls
        with own_failures_are_unsupported(), function_modes_set_aside(tx):
            return super().call_function(tx, args, kwargs)

    def _call_function(
        self, tx: Any, args: Any, kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        with (
            indices_are_captured(tx),
            floats_are_read_outside_bodies(),
            numbers_of_tensors_are_refused(),
            numpy_constants_are_folded(),
        ):
            prepare_xla_if_loaded()
            args, kwargs = LazyVariableTracker.realize_all((args, kwargs))
            has_numbers = self.has_numbers or at_hand.numbers or at_hand.reads is not None
            names = FUNCTIONS if has_numbers else {}
            weak = numbers_are_weak(tx, *WEAK, with_known_numbers)
            with (
                functions_take_scalars(of_number, names, read_number),
                weak,
                branches_are_decided(),
            ):
                return self._capture(tx, self._called_with(tx, *args, **kwargs))

    def _called_with(self, tx: Any, *args: Any, **kwargs: Any) -> _Call:
        return _call_of(tx, *args, **kwargs)

    def _operator(self) -> Any:
        return self.value

    def _check_step(self, tx: Any, carry: Any, flat: Any, results: FlatResults) -> None:
        """Do nothing: ``scan`` has looked at what a step returns, in code that Dynamo traced."""

    def _check_body(self, body: CapturedBody) -> None:
        """A step may write to whatever it is given."""

    def _capture(self, tx: Any, call: _Call) -> VariableTracker:
        given, n_carry, levels = call.inputs, len(call.inputs.carry), open_levels()
        with discard_graph_changes(tx):
            examples = example_arguments(tx, given)
        make_traceable(call.combine_fn)
        numbers = numbers_among(given.carry)
        step = Marking(call.combine_fn, numbers)
        with function_modes_in_force(tx):
            with facts_noted() as facts, kinds_of_numbers_are_known(), sizes_may_be_unknown(tx):
                flat, results, graph, lifted = speculate(tx, step, examples, self._operator())
                graphs = nested_modules(fx.GraphModule(known_modules(tx), graph))
                with new_symbols_are_nobodys(tx):
                    for module in graphs:
                        compute_all_rows(module)
                graph = graphs[0].graph
        check_branches(graph, given.xs[0])
        check_facts(tx, facts, given.carry, examples, flat, {*call.numbers, *numbers})
        self._check_step(tx, examples[:n_carry], flat, results)
        make_levels_relative(graph, levels)
        make_no_grad(graph)
        refuse_unknown_sizes(graphs)
        refuse_settings(graphs)
        inputs = [v.as_proxy() for v in given.flat()] + list(lifted)
        widened, checked = make_whole(tx, graphs[0], n_carry, numbers, inputs, call.exact)
        hooks = HooksOfCarries(tx, graph, given, lifted, _wanting_grad(given.carry))
        hooks.move(inputs, call.reverse)
        body = CapturedBody(tx, graph, n_carry, len(given.xs) + len(hooks.flags), checked)
        self._check_body(body)
        mutated = body.make_pure()
        if mutated:
            _refuse_shared_memory(tx, inputs, mutated, body)
        outputs = _call_in_graph(tx, call, body, inputs, mutated)
        outputs, written = without_steps(tx, given, outputs, mutated)
        for n, k in enumerate(written, n_carry):
            write_back(tx, inputs[k], outputs[n].as_proxy(), is_counted=k not in body.uncounted)
        carry = as_left_to_the_program(tx, outputs[:n_carry], widened, numbers)
        return results.unflatten(tx, [*carry, *outputs[n_carry + len(mutated) :]])


def _wanting_grad(init: list[VariableTracker]) -> list[bool]:
    """Return which leaves of ``init`` require grad; those of a first step are nobody else's."""
    is_ours = bool(at_hand.steady[0])
    return [not is_ours and getattr(example_value_or_none(v), "requires_grad", False) for v in init]


def _call_in_graph(
    tx: Any, call: _Call, body: CapturedBody, inputs: list[Any], mutated: list[int]
) -> list[VariableTracker]:
    """The results of the scan's node; the inputs at ``mutated`` are carries of ``body``, the last.

    ::

        inputs: carry, xs, additional
        node:   [carry, copies of the mutated ones], xs, additional without them
    """
    module = body.module()
    add_cache_key(module)
    module.meta[STEADY] = at_hand.steady
    checkpoint = call.checkpoint
    if callable(checkpoint):
        # a function is no argument of a graph node; it stays with the body
        module.meta[POLICY], checkpoint = checkpoint, None
    n_carry, n_step = body.n_carry, body.n_carry + body.n_xs
    arguments = (
        make_attr(tx, install_body(tx, "scan_body", module)),
        # copies: what autograd saves of them must not change when they are written back
        [*inputs[:n_carry], *(_cloned(tx, inputs[k]) for k in mutated)],
        inputs[n_carry:n_step],
        tuple(p for k, p in enumerate(inputs) if k >= n_step and k not in mutated),
    )
    keywords = scan_options(call.reverse, checkpoint)
    with numbers_of_tensors_are_refused(partial(line_of_number, module)):
        results = sequence_items(tx, create_node(tx, "call_function", scan_op, arguments, keywords))
    if body.checked is not None:
        check_after(tx, results.pop(), body.checked)
    return results


class ScanOfNumbersVariable(ScanVariable):
    """Tracks ``scan_of_numbers``: finds the numbers' dtypes, and then is the scan from there."""

    has_numbers = True

    def _called_with(self, tx: Any, positions: Any, *args: Any, **kwargs: Any) -> _Call:
        call = _call_of(tx, *args, **kwargs)
        numbers = [v.as_python_constant() for v in sequence_items(tx, positions)]
        inputs, staying = with_dtypes_of_step(tx, call.combine_fn, call.inputs, numbers)
        exact = {k: call.inputs.carry[k].as_proxy() for k in staying}
        at_hand.numbers |= frozenset(staying)
        return replace(call, inputs=inputs, numbers=tuple(numbers), exact=exact)

    def _operator(self) -> Any:
        return scan_op


def _refuse_shared_memory(tx: Any, inputs: Any, mutated: list[int], body: CapturedBody) -> None:
    """Refuse to capture a body that changes a tensor which another input shares memory with.

    A tensor that the body changes is carried as a copy, and a view would not see the changes.
    """
    end = body.n_carry + body.n_xs
    # init is read before anything changes
    others = [v for k, v in enumerate(inputs) if k >= end and k not in mutated]
    others = [v for v in others if isinstance(example_value(v), torch.Tensor)]
    given = ([inputs[k] for k in mutated], others, inputs[body.n_carry : end])
    if reason := reason_to_refuse(*([*map(example_value, values)] for values in given)):
        raise Unsupported(reason.format(body.line_of_change(len(mutated))))
    create_proxy(tx, "call_function", check_memory, given)


def _cloned(tx: Any, proxy: Any) -> Any:
    return create_node(tx, "call_method", "clone", (proxy,), {}).as_proxy()


class RefusalVariable(TorchHigherOrderOperatorVariable):
    """Raises what traced code says is wrong with the caller's arguments or body."""

    _HOP_NAME = "scan_refusal"

    def call_function(
        self, tx: Any, args: Any, kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        kind, message, leaf, grows = (arg.as_python_constant() for arg in args)
        error = users_error(kind, message)
        note_leaf(error, leaf, grows)
        raise error
