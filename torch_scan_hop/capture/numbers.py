"""A scan that begins with Python numbers, which take the dtypes that a step gives them.

Only a trace of the step finds those dtypes. So traced code calls an operator, and tells it where
the numbers are. Dynamo's tracker of that operator (``variables.ScanOfNumbersVariable``) finds the
dtypes, and writes a scan to the graph.
"""

from __future__ import annotations

from typing import Any

from torch_scan_hop._torch.operators import FlatOperator


class ScanOfNumbersOperator(FlatOperator):
    """Never runs, and is in no graph."""

    def __call__(self, positions: list[int], *args: Any, **options: Any) -> Any:  # type: ignore[override]
        raise AssertionError("Dynamo alone meets scan_of_numbers")


class StayingNumbersOperator(FlatOperator):
    """Says which leaves of the carry stay numbers, as the last ``scan_of_numbers`` found."""

    def __call__(self, *leaves: Any) -> tuple[bool, ...]:  # type: ignore[override]
        raise AssertionError("Dynamo alone meets staying_numbers")


staying_numbers = StayingNumbersOperator("staying_numbers", cacheable=False)
scan_of_numbers = ScanOfNumbersOperator("scan_of_numbers", cacheable=False)
