"""The operator by which traced code says what is wrong (see ``refusals``)."""

from __future__ import annotations

from typing import Any

from torch_scan_hop._torch.operators import FlatOperator


class RefusalOperator(FlatOperator):
    """Never runs: Dynamo's tracker of it raises."""

    def __call__(  # type: ignore[override]
        self, kind: type[Exception], message: str, leaf: str, grows: bool
    ) -> Any:
        raise kind(message)


refusal_op = RefusalOperator("scan_refusal", cacheable=False)
