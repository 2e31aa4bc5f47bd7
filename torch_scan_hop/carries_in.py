"""The carries into the steps, read off the stack of those out of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class CarriesIn:
    """``init`` and all but the last row of ``stack``; backwards, ``init`` comes last.

    A span that does not reach ``init`` is a view.

    >>> carries = CarriesIn(torch.tensor([1, 2, 3]), torch.tensor(0), reverse=False)
    >>> carries.whole(), carries[1:3]
    (tensor([0, 1, 2]), tensor([1, 2]))
    >>> CarriesIn(torch.tensor([1, 2, 3]), torch.tensor(0), reverse=True)[1:3]
    tensor([3, 0])
    """

    stack: torch.Tensor
    init: torch.Tensor
    reverse: bool

    @property
    def shape(self) -> torch.Size:
        return self.stack.shape

    def __getitem__(self, span: slice) -> torch.Tensor:
        start, stop = span.start, span.stop
        if self.reverse:
            rows = self.stack[start + 1 : stop + 1]
            if stop < self.stack.shape[0]:
                return rows
            return torch.cat([rows, self.init.unsqueeze(0)])
        if start > 0:
            return self.stack[start - 1 : stop - 1]
        return torch.cat([self.init.unsqueeze(0), self.stack[: stop - 1]])

    def whole(self) -> Any:
        """All of them; right for a trip count of zero, too, and under any transform."""
        trip_count, first = self.stack.shape[0], self.init.unsqueeze(0)
        if self.reverse:
            return torch.cat([self.stack, first])[1:]
        return torch.cat([first, self.stack])[:trip_count]
