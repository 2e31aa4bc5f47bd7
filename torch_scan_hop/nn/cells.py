"""Cells that torch.nn has not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNormLSTMCell(nn.Module):
    """An LSTM cell whose products, and whose cell state, are normalized (Ba et al., 2016).

    ::

        i, f, g, o = norm(x @ w_ih.t()) + norm(h @ w_hh.t()) + b
        c' = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h' = sigmoid(o) * tanh(norm(c'))

    Args:
        input_size, hidden_size: of ``x`` and of the states ``h`` and ``c``.
        device, dtype: of the parameters.

    Example:
        >>> cell = LayerNormLSTMCell(3, 4)
        >>> h, c = cell(torch.ones(2, 3), cell.initial_state(torch.ones(2, 3)))
        >>> h.shape
        torch.Size([2, 4])
    """

    def __init__(
        self, input_size: int, hidden_size: int, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.hidden_size = hidden_size
        self.of_x = nn.Linear(input_size, 4 * hidden_size, bias=False, **where)
        self.of_h = nn.Linear(hidden_size, 4 * hidden_size, bias=False, **where)
        self.norm_x = nn.LayerNorm(4 * hidden_size, **where)
        self.norm_h = nn.LayerNorm(4 * hidden_size, bias=False, **where)
        self.norm_c = nn.LayerNorm(hidden_size, **where)

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        zeros = self.of_h.weight.new_zeros(x.shape[0], self.hidden_size)
        return zeros, zeros

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        gates = self.norm_x(self.of_x(x)) + self.norm_h(self.of_h(h))
        i, f, g, o = gates.chunk(4, -1)
        c = F.sigmoid(f) * c + F.sigmoid(i) * torch.tanh(g)
        return F.sigmoid(o) * torch.tanh(self.norm_c(c)), c
