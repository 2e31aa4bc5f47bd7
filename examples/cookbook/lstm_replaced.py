"""nn.LSTM replaced: its own weights in a scan, so that the cell can be changed from here on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_scan_hop import scan

T, B, D, H = 25, 4, 5, 7
lstm = nn.LSTM(D, H, batch_first=True).double()


def with_scan(xs: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def cell(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, c = state
        gates = F.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0)
        gates = gates + F.linear(h, lstm.weight_hh_l0, lstm.bias_hh_l0)
        i, f, g, o = gates.chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h, c), h

    (h, c), hs = scan(cell, (h0, c0), xs, dim=1)  # batch_first: time is dimension 1
    return hs, h, c


def with_loop(xs: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hs, (h, c) = lstm(xs, (h0[None], c0[None]))
    return hs, h[0], c[0]


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    sizes = ((B, T, D), (B, H), (B, H))
    return tuple(torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in sizes)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
