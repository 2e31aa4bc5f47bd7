"""Dynamo: torch's own ``scan()``, as torch captures it or, accelerated, as a scan of ours."""

from __future__ import annotations

import functools
from typing import Any

from torch_scan_hop._torch.dynamo.errors import UncapturedHigherOrderOpError
from torch_scan_hop._torch.dynamo.torchs_scan import (
    check_step,
    mark_bodies_of,
)
from torch_scan_hop._torch.dynamo.trees import FlatResults
from torch_scan_hop._torch.dynamo.variables import VariableTracker, example_value
from torch_scan_hop._torch.own_scan import (
    forget_captures,
    is_torchs,
    remember_code,
    torchs_operator,
)
from torch_scan_hop.capture.purify import CapturedBody
from torch_scan_hop.capture.variables import ScanVariable
from torch_scan_hop.op import ScanOperator, scan_op
from torch_scan_hop.settings import accelerates_torch, on_change_of_owner

on_change_of_owner.append(forget_captures)


def tracker_of_scan(value: Any, upstream: Any) -> Any:
    """Return the tracker of ``value``, an operator called scan: ours, or torch's own ``scan()``."""
    as_torch_has_it = _as_torch_has_it(upstream)
    if isinstance(value, ScanOperator):
        return functools.partial(ScanByNameVariable, as_torch_has_it)
    return TorchsScanVariable if accelerates_torch() else as_torch_has_it


class ScanByNameVariable(ScanVariable):
    """Tracks ``torch.ops.higher_order.scan``, which graphs of torch's ``scan()`` call, too."""

    def __init__(self, as_torch_has_it: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.as_torch_has_it = as_torch_has_it

    def call_function(
        self, tx: Any, args: Any, kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        # torch's tracker does not take what its own operator is told of a body that writes
        if args and not kwargs and is_torchs(getattr(args[0].realize(), "value", None)):
            torchs = self.as_torch_has_it(torchs_operator(), None)
            return torchs.call_function(tx, args, kwargs)
        return super().call_function(tx, args, kwargs)


class TorchsScanVariable(ScanVariable):
    """Tracks the operator of torch's own ``scan()``, and gives what it captures to ours.

    What a step returns is checked as torch does it; what it returns may alias, as in ours.
    """

    def _call_function(
        self, tx: Any, args: Any, kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        remember_code(tx)
        return super()._call_function(tx, args, kwargs)

    def _called_with(self, tx: Any, *args: Any, **kwargs: Any) -> Any:
        call = super()._called_with(tx, *args, **kwargs)
        lengths = [example_value(x).shape[0] for x in call.inputs.xs]
        if any(length != lengths[0] for length in lengths):  # as torch says from 2.15 on
            raise UncapturedHigherOrderOpError(
                f"scan: all xs must have one size along dim, but theirs are {lengths}."
            )
        return call

    def _check_step(self, tx: Any, carry: Any, flat: Any, results: FlatResults) -> None:
        check_step(tx, carry, results.unflatten(tx, flat))

    def _check_body(self, body: CapturedBody) -> None:
        if any(k < body.n_carry + body.n_xs for k in body.written_placeholders()):
            raise UncapturedHigherOrderOpError(
                "scan: combine_fn must not write to its carry or to its slice of xs. Return the "
                "new carry, or write to a copy."
            )


@functools.cache
def _as_torch_has_it(upstream: Any) -> Any:
    """Return torch's tracker, made to remember what it captured."""
    mark_bodies_of(scan_op)

    class OwnScanVariable(upstream):  # type: ignore[misc]
        def _call_function(self, tx: Any, *args: Any) -> VariableTracker:
            remember_code(tx)
            return super()._call_function(tx, *args)

    return OwnScanVariable
