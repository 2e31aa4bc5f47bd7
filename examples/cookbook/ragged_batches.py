"""Ragged batches: sequences of many lengths in one padded batch, in both directions.

The loop beside it runs each sequence alone: padding reaches no state and no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_scan_hop.nn import Bidirectional, Recurrent

T, B, D, H = 12, 5, 3, 4
lengths = torch.tensor([12, 7, 1, 9, 4])
forward, backward = nn.GRUCell(D, H).double(), nn.GRUCell(D, H).double()
layer = Bidirectional(Recurrent(forward), Recurrent(backward, reverse=True))


def with_scan(xs: Tensor) -> tuple[Tensor, Tensor]:
    ys, (last, last_back) = layer(xs, lengths=lengths)
    return ys, torch.cat([last, last_back], 1)


def with_loop(xs: Tensor) -> tuple[Tensor, Tensor]:
    padded, last = [], []
    for b, n in enumerate(lengths.tolist()):
        own = [x[None] for x in xs[:n, b]]
        there = _states(forward, own)
        back = _states(backward, own[::-1])[::-1]
        ys = torch.cat([torch.cat(there), torch.cat(back)], 1)
        padded.append(nn.functional.pad(ys, (0, 0, 0, T - n)))
        last.append(torch.cat([there[-1], back[0]], 1))
    return torch.stack(padded, 1), torch.cat(last)


def _states(cell: nn.GRUCell, xs: list[Tensor]) -> list[Tensor]:
    h, states = xs[0].new_zeros(1, H), []
    for x in xs:
        h = cell(x, h)
        states.append(h)
    return states


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (torch.randn(T, B, D, dtype=torch.float64, requires_grad=True),)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
