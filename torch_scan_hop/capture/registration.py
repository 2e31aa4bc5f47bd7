"""Tell Dynamo, when it is imported, which trackers follow our operators.

The trackers themselves are imported when Dynamo meets an operator of ours, because they need all of
Dynamo, and this package needs Dynamo at the first capture only.
"""

from __future__ import annotations

from typing import Any

from torch_scan_hop._torch.capabilities import is_there
from torch_scan_hop._torch.dynamo.loading import register_trackers
from torch_scan_hop.alike.modules import complaint_op
from torch_scan_hop.capture.steady import steady_scan
from torch_scan_hop.capture.traced_operators import (
    refusal_op,
    scan_of_numbers,
    staying_numbers,
    written_op,
)
from torch_scan_hop.op import scan_op


def _of_scan(operator: Any, torchs_tracker: Any) -> Any:
    from torch_scan_hop.capture.variables import ScanVariable

    if not is_there("own_scan"):  # torch's tracker gives what it captures to ours, by its name
        return ScanVariable if operator is scan_op else torchs_tracker
    from torch_scan_hop.capture.torchs_scan import tracker_of_scan

    return tracker_of_scan(operator, torchs_tracker)


def _of_own(operator: Any, torchs_tracker: Any) -> Any:
    from torch_scan_hop.capture.layers import ComplaintVariable, WrittenVariable
    from torch_scan_hop.capture.steady_variables import SteadyScanVariable
    from torch_scan_hop.capture.variables import RefusalVariable, ScanOfNumbersVariable
    from torch_scan_hop.capture.weak_numbers import StayingNumbersVariable

    trackers: dict[Any, Any] = {
        scan_of_numbers: ScanOfNumbersVariable,
        staying_numbers: StayingNumbersVariable,
        steady_scan: SteadyScanVariable,
        refusal_op: RefusalVariable,
        complaint_op: ComplaintVariable,
        written_op: WrittenVariable,
    }
    return trackers[operator]


def register() -> None:
    """Register everything. Called once, when all that is imported with this package is there."""
    own = (scan_of_numbers, staying_numbers, steady_scan, refusal_op, complaint_op, written_op)
    register_trackers({"scan": _of_scan, **{str(op.__name__): _of_own for op in own}})
