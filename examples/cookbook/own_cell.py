"""A cell of one's own as a layer: a leaky unit with layer norm, over a ragged batch.

The cell says what a step is and where it starts; lengths, directions and dropout are the layer's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_scan_hop.nn import Recurrent

T, B, D, H = 12, 4, 3, 5
lengths = torch.tensor([12, 5, 1, 8])


class Leaky(nn.Module):
    """``(x, state) -> (y, state)``; the state may be any pytree of ``[B, ...]``."""

    def __init__(self) -> None:
        super().__init__()
        self.of_x, self.of_h = nn.Linear(D, 2 * H), nn.Linear(H, 2 * H, bias=False)
        self.norm, self.norm_y = nn.LayerNorm(2 * H), nn.LayerNorm(H)
        self.start = nn.Parameter(torch.full((H,), 0.1))

    def initial_state(self, x: Tensor) -> Tensor:
        return self.start.expand(len(x), H)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate = self.norm(self.of_x(x) + self.of_h(h)).chunk(2, -1)
        h = torch.lerp(h, torch.tanh(candidate), torch.sigmoid(gate))
        return self.norm_y(h), h


cell = Leaky().double()
layer = Recurrent(cell)


def with_scan(xs: Tensor) -> tuple[Tensor, Tensor]:
    return layer(xs, lengths=lengths)


def with_loop(xs: Tensor) -> tuple[Tensor, Tensor]:
    padded, last = [], []
    for b, n in enumerate(lengths.tolist()):
        h, ys = cell.initial_state(xs[0, b : b + 1]), []
        for x in xs[:n, b : b + 1]:
            y, h = cell(x, h)
            ys.append(y)
        padded.append(nn.functional.pad(torch.cat(ys), (0, 0, 0, T - n)))
        last.append(h)
    return torch.stack(padded, 1), torch.cat(last)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (torch.randn(T, B, D, dtype=torch.float64, requires_grad=True),)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
