"""Operators that stand for a question in code that Dynamo traces; their trackers answer it."""

from __future__ import annotations

from typing import Any

from torch_scan_hop._torch.operators import FlatOperator


class TracedOperator(FlatOperator):
    """Never runs, and is in no graph (``registration`` has its tracker)."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise AssertionError(f"Dynamo alone meets {self.__name__}")


#: raises what traced code says is wrong (see ``refusals``)
refusal_op = TracedOperator("scan_refusal", cacheable=False)
#: A scan that begins with Python numbers, at the positions that come first. A step gives them their
#: dtypes, and only a trace of it finds those: its tracker finds them, and writes a scan.
scan_of_numbers = TracedOperator("scan_of_numbers", cacheable=False)
#: which leaves of the carry stay numbers, as the last ``scan_of_numbers`` found
staying_numbers = TracedOperator("staying_numbers", cacheable=False)
#: which of these tensors, inputs of a body, the body has changed so far
written_op = TracedOperator("scan_tensors_written", cacheable=False)
