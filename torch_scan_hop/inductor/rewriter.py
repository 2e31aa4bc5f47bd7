"""Replace a scan in a graph by another one: of pairs, of its plan, of scalars."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.func import functionalize

from torch_scan_hop import legality
from torch_scan_hop._torch.inductor_passes import trace_decomposed
from torch_scan_hop._torch.sizes import are_all_known_equal, likely_value
from torch_scan_hop.body.carries_in import CarriesIn, arguments_of, in_graph, stacks_of, with_joined
from torch_scan_hop.body.linalg_checks import checks_after
from torch_scan_hop.body.meta_values import check_results, value_of
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.carries_in_parts import find_split_carry
from torch_scan_hop.inductor.decompositions import in_parts, write_scatters
from torch_scan_hop.inductor.inline import inline, used_outputs
from torch_scan_hop.inductor.kernels import is_on_gpu, may_be_one_kernel, may_be_small_matrices
from torch_scan_hop.inductor.pair_rules import is_complex
from torch_scan_hop.inductor.pairs import expanded, expanded_step, joined_results, needs_pairs
from torch_scan_hop.inductor.plans import PlanChoice
from torch_scan_hop.inductor.qualify import reduces_narrow_rows
from torch_scan_hop.inductor.scalars.entries import Lanes
from torch_scan_hop.inductor.scalars.interpreter import FEW_OPERATORS, MOST_OPERATORS
from torch_scan_hop.inductor.scalars.rewrite import WrittenOut, lanes_of
from torch_scan_hop.inductor.seeds import find_seeds
from torch_scan_hop.op import Body, ScanOptions, call_scan
from torch_scan_hop.rewrites import ScanPlan, current_options
from torch_scan_hop.rewrites.blocks import scan_of_blocks, whole_block_length
from torch_scan_hop.rewrites.classify import is_write, nbytes
from torch_scan_hop.rewrites.products import split_fused_products, write_outer_products
from torch_scan_hop.rewrites.sizes import lift_sizes
from torch_scan_hop.signature import Inputs

log = logging.getLogger(__name__)


class ScanRewriter:
    def __init__(self, gm: fx.GraphModule, node: fx.Node, body: fx.GraphModule) -> None:
        self.gm = gm
        self.node = node
        self.body = body
        given: Inputs[Any] = Inputs(*map(list, node.args[1:]))  # type: ignore[arg-type]
        self.signature = given.signature
        self.options = ScanOptions(**node.kwargs)  # type: ignore[arg-type]
        self.trip_count = value_of(given.xs[0]).shape[0]
        #: xs that are the carries into the steps of another scan: (init, reverse)
        self.shifted: dict[int, tuple[fx.Node, bool]] = {}
        for k, x in enumerate(given.xs):
            found = arguments_of(x)
            if found is not None:
                given.xs[k], first, reverse = found
                self.shifted[k] = first, reverse
        self.operands = [*given.flat(), *(first for first, _ in self.shifted.values())]
        self.on_gpu = is_on_gpu(map(value_of, self.operands))

    def rewrite_pairs(self) -> None:
        """Replace a scan with complex leaves by one of their parts."""
        values = [value_of(a) for a in self.operands]
        roles = self.signature.split_inputs(values[: self.signature.n_inputs])
        if not needs_pairs(self.body, roles):
            return
        complex_inputs = [is_complex(v) for v in roles.flat()]
        complex_results = [is_complex(v) for v in value_of(self.node)]

        def run(*flat: Any) -> list[Any]:
            groups = self._groups(flat)
            step = expanded_step(self.body, complex_inputs)
            reals = Inputs(
                [c.contiguous() for c in expanded(groups.carry)],
                expanded(groups.xs),
                expanded(groups.additional),
            )
            return joined_results(call_scan(step, reals, self.options), complex_results)

        self._replace_by(run, "rewrite_pairs")

    def make_functional(self) -> None:
        """Replace a scan whose steps write in place to what they made. Inductor has them fill an
        ``empty`` in parts, and that may be the same at every step, and leave the loop."""
        writes: list[Any] = list(filter(is_write, self.body.graph.nodes))
        if not writes or {node.target.namespace for node in writes} != {"aten"}:
            return  # functionalize does not take the operators of other libraries
        step = functionalize(self.body, remove="mutations")
        self._replace_by_scan("make_functional", step)

    def draw_seeds(self) -> None:
        """Replace a scan whose steps draw seeds by one that is given them."""
        found = find_seeds(self.body, self.signature)
        if found is not None:
            inputs = functools.partial(found.inputs, reverse=self.options.reverse)
            self._replace_by_scan("draw_seeds", found.step, inputs)

    def split_carry(self) -> bool:
        """Split a carry that is put together from parts, where a kernel may have them apart."""
        has_steps = not isinstance(self.trip_count, int) or self.trip_count > 1
        found = find_split_carry(self.body, self.signature) if self.on_gpu and has_steps else None
        if found is None or not current_options().one_kernel:
            return False
        self._replace_by_scan("split_carry", found.step, found.inputs, found.joined)
        return True

    def rewrite(self) -> None:
        """Replace the scan by its plan, traced on the operands' fakes, or leave it."""
        if isinstance(self.trip_count, int) and self.trip_count < 2:
            self._retrace_if_unlike()
            return
        body, signature, sizes = lift_sizes(self.body, self.signature)
        legality.run_passes(body, [split_fused_products])
        if self.on_gpu:
            write_outer_products(body, signature)
            write_scatters(body)
        used = used_outputs(self.node)
        carry = [value_of(a) for a in self.operands[: signature.n_carry]]
        plan, sums = PlanChoice(body, signature, used, self.trip_count, carry, self.on_gpu).best()
        length = self._block_length(plan)
        if plan.is_trivial() and not (self.shifted or sums):
            self._retrace_if_unlike()
            return

        def run(*flat: Any) -> list[Any]:
            groups = self._groups(flat)
            additional = [*groups.additional, *(size.of(groups) for size in sizes)]
            inputs = Inputs(groups.carry, groups.xs, additional)
            return run_plan(inputs) if sums is None else sums.run(run_plan, inputs)

        def run_plan(inputs: Inputs[Any]) -> list[Any]:
            if length != self.trip_count:
                return scan_of_blocks(plan, call_scan, inputs, self.options, length)
            return plan.run(call_scan, with_joined(inputs, in_graph), self.options)

        self._replace_by(run, "rewrite")

    def write_out(self) -> None:
        """Replace the scan by one over the entries of its tensors, if that is one kernel. The
        checks of a kernel of small matrices come after it."""
        narrow = any(map(reduces_narrow_rows, self.body.graph.nodes))
        if not current_options().one_kernel or self.trip_count == 0:
            return
        if may_be_one_kernel(self.body, self.on_gpu) and not narrow:
            return
        after = checks_after(self.body)
        in_loops = not self.on_gpu and may_be_small_matrices(after.body)
        most = FEW_OPERATORS if in_loops else MOST_OPERATORS
        found = lanes_of(after.body, self.signature, most if current_options().scalars else 0)
        body = in_parts(after.body) if found or in_loops else after.body
        for lanes in found:

            def run(*flat: Any, lanes: Lanes = lanes) -> list[Any]:
                step = WrittenOut(body, self.signature, lanes, self.options)
                found = step.run(self._joined(flat))
                return after.checked(found, self.options.reverse)

            try:
                self._replace_by(run, "write_out")
            except Refusal as why:
                log.info("%s is not written out: %s", self.node, why)
                continue
            return
        if in_loops and (after.checks or body is not after.body):
            checked = functools.partial(after.checked, reverse=self.options.reverse)
            self._replace_by_scan("checks_after", body, results=checked)

    def _groups(self, flat: Sequence[Any]) -> Inputs[Any]:
        """Return the scan's inputs; xs that are carries into steps stay such."""
        groups: Inputs[Any] = self.signature.split_inputs(flat[: self.signature.n_inputs])
        inits = flat[self.signature.n_inputs :]
        for (k, (_, reverse)), first in zip(self.shifted.items(), inits, strict=True):
            groups.xs[k] = CarriesIn(groups.xs[k], first, reverse)
        return groups

    def _joined(self, flat: Sequence[Any]) -> Inputs[Any]:
        """Return the scan's inputs; carries into steps are one node of the graph each."""
        return with_joined(self._groups(flat), in_graph)

    def _retrace_if_unlike(self) -> None:
        """Trace the body again if a pass of Inductor's gave an operand other strides."""
        roles = self.signature.inputs_of(self.body)
        groups = self._groups([value_of(a) for a in self.operands])
        slices = [x.stride()[1:] for x in stacks_of(groups.xs)]
        whole = [a.stride() if isinstance(a, torch.Tensor) else None for a in groups.additional]
        pairs = [*zip([*roles.xs, *roles.additional], [*slices, *whole], strict=True)]
        pairs += [(n, value_of(n).new_empty(value_of(n).shape).stride()) for n in roles.carry]
        read = [(value_of(n), stride) for n, stride in pairs if n.users and stride is not None]
        if not all(are_all_known_equal(value.stride(), stride) for value, stride in read):
            self._replace_by_scan("retrace", self.body)

    def _block_length(self, plan: ScanPlan) -> Any:
        if self.on_gpu or not isinstance(self.trip_count, int):
            return self.trip_count  # blocks are for what a core's cache holds
        # the carries into steps that are not read in place
        copied = [plan.roles.xs[k] for k in self.shifted]
        if may_be_one_kernel(plan.body, self.on_gpu):
            copied = [x for x in copied if plan.is_read_outside(x)]
        copied_bytes = sum(likely_value(nbytes(x)) for x in copied)
        return whole_block_length(plan, self.trip_count, copied_bytes)

    def _replace_by_scan(
        self,
        name: str,
        step: Body,
        inputs: Callable[[Inputs[Any]], Inputs[Any]] = lambda given: given,
        results: Callable[[Sequence[Any]], Any] = lambda found: found,
    ) -> None:
        """Put a scan of ``step`` in place of the scan; ``inputs`` and ``results`` say of what."""
        self._replace_by(
            lambda *flat: results(call_scan(step, inputs(self._joined(flat)), self.options)), name
        )

    def _replace_by(self, run: Any, name: str) -> None:
        """Put ``run``, a function of the operands, in place of the scan."""
        traced = trace_decomposed(run, [value_of(a) for a in self.operands])
        legality.check("replacement", name, traced)
        check_results(traced.graph, value_of(self.node))
        inline(self.gm, self.node, traced, self.operands)
