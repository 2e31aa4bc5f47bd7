"""Bidirectional layers: two of them, of any cell, the second of which reads both directions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_scan_hop.nn import Bidirectional, Recurrent, Stack

T, B, D, H = 10, 3, 2, 4
cells = [[nn.LSTMCell(size, H).double() for _ in range(2)] for size in (D, 2 * H)]
layers = Stack([Bidirectional(Recurrent(a), Recurrent(b, reverse=True)) for a, b in cells])


def with_scan(xs: Tensor) -> tuple[Tensor, Tensor]:
    ys, states = layers(xs)
    (h, _), (h_back, _) = states[-1]
    return ys, torch.cat([h, h_back], 1)


def with_loop(xs: Tensor) -> tuple[Tensor, Tensor]:
    for forward, backward in cells:
        there = _states(forward, [*xs])
        back = _states(backward, [*xs][::-1])[::-1]
        xs = torch.stack([torch.cat(pair, 1) for pair in zip(there, back, strict=True)])
    return xs, torch.cat([there[-1], back[0]], 1)


def _states(cell: nn.LSTMCell, xs: list[Tensor]) -> list[Tensor]:
    h = c = xs[0].new_zeros(B, H)
    states = []
    for x in xs:
        h, c = cell(x, (h, c))
        states.append(h)
    return states


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (torch.randn(T, B, D, dtype=torch.float64, requires_grad=True),)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
