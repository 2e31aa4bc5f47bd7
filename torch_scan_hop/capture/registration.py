"""Tell Dynamo, when it is imported, which trackers follow our operators.

The trackers themselves are imported when Dynamo meets an operator of ours, because they need all of
Dynamo, and this package needs Dynamo at the first capture only.
"""

from __future__ import annotations

from typing import Any

from torch_scan_hop._torch.capabilities import is_there
from torch_scan_hop._torch.dynamo.loading import register_trackers
from torch_scan_hop.op import scan_op


def _of_scan(operator: Any, torchs_tracker: Any) -> Any:
    from torch_scan_hop.capture.variables import ScanVariable

    if not is_there("own_scan"):  # torch's tracker gives what it captures to ours, by its name
        return ScanVariable if operator is scan_op else torchs_tracker
    from torch_scan_hop.capture.torchs_scan import tracker_of_scan

    return tracker_of_scan(operator, torchs_tracker)


def _of_refusal(operator: Any, torchs_tracker: Any) -> Any:
    from torch_scan_hop.capture.variables import RefusalVariable

    return RefusalVariable


def _of_scan_of_numbers(operator: Any, torchs_tracker: Any) -> Any:
    from torch_scan_hop.capture.variables import ScanOfNumbersVariable

    return ScanOfNumbersVariable


def _of_staying_numbers(operator: Any, torchs_tracker: Any) -> Any:
    from torch_scan_hop.capture.variables import StayingNumbersVariable

    return StayingNumbersVariable


def _of_steady_scan(operator: Any, torchs_tracker: Any) -> Any:
    from torch_scan_hop.capture.steady_variables import SteadyScanVariable

    return SteadyScanVariable


def _of_complaint(operator: Any, torchs_tracker: Any) -> Any:
    from torch_scan_hop.capture.layers import ComplaintVariable

    return ComplaintVariable


def _of_written(operator: Any, torchs_tracker: Any) -> Any:
    from torch_scan_hop.capture.layers import WrittenVariable

    return WrittenVariable


def register() -> None:
    """Register everything. Called once, when all that is imported with this package is there."""
    register_trackers(
        {
            "scan": _of_scan,
            "scan_of_numbers": _of_scan_of_numbers,
            "staying_numbers": _of_staying_numbers,
            "scan_steady": _of_steady_scan,
            "scan_refusal": _of_refusal,
            "scan_layer_complaint": _of_complaint,
            "scan_tensors_written": _of_written,
        }
    )
