"""Hypergradients: the validation loss's gradient to learning rate and decay, through training."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_scan_hop import scan


def gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Of the mean square error of a linear model."""
    return 2 * x.T @ (x @ w - y) / len(x)


def with_scan(rate: Tensor, decay: Tensor, w: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """``xs``: [steps, batch, D]; the last batch is the one to validate on."""

    def step(carry: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor]):
        w, momentum = carry
        momentum = 0.9 * momentum + gradient(w, *batch) + decay.exp() * w
        return (w - rate.exp() * momentum, momentum), None

    (w, _), _ = scan(step, (w, torch.zeros_like(w)), (xs[:-1], ys[:-1]), checkpoint=4)
    return ((xs[-1] @ w - ys[-1]) ** 2).mean()


def with_loop(rate: Tensor, decay: Tensor, w: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    momentum = torch.zeros_like(w)
    for x, y in zip(xs[:-1], ys[:-1], strict=True):
        momentum = 0.9 * momentum + gradient(w, x, y) + decay.exp() * w
        w = w - rate.exp() * momentum
    return ((xs[-1] @ w - ys[-1]) ** 2).mean()


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    rate = torch.tensor(-4.0, dtype=torch.float64, requires_grad=True)
    decay = torch.tensor(-3.0, dtype=torch.float64, requires_grad=True)
    w = torch.zeros(4, dtype=torch.float64)
    xs = torch.randn(21, 8, 4, dtype=torch.float64)
    return rate, decay, w, xs, xs @ torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
