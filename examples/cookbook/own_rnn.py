"""A recurrent network with a cell of one's own: a minimal gated unit with layer normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_scan_hop import scan


def step(h: Tensor, x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    gate, candidate = (F.layer_norm(x @ w + h @ u, (2 * h.shape[-1],))).chunk(2, -1)
    gate = torch.sigmoid(gate)
    return (1 - gate) * h + gate * torch.tanh(candidate)


def with_scan(xs: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = step(h, x, w, u)
        return h, h

    return scan(cell, xs.new_zeros(xs.shape[1], u.shape[0]), xs)


def with_loop(xs: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    h, hs = xs.new_zeros(xs.shape[1], u.shape[0]), []
    for x in xs:
        h = step(h, x, w, u)
        hs.append(h)
    return h, torch.stack(hs)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    T, B, D, H = 30, 4, 3, 8
    xs = torch.randn(T, B, D, dtype=torch.float64)
    w = (torch.randn(D, 2 * H, dtype=torch.float64) / D**0.5).requires_grad_()
    u = (torch.randn(H, 2 * H, dtype=torch.float64) / H**0.5).requires_grad_()
    return xs, w, u


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
