"""An ODE by Runge and Kutta's fourth order, whose gradient needs about sqrt(T) states."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_scan_hop import scan

STEPS, DT = 64, 0.05


def rk4(field, y: Tensor, t: Tensor) -> Tensor:
    k1 = field(y, t)
    k2 = field(y + DT / 2 * k1, t + DT / 2)
    k3 = field(y + DT / 2 * k2, t + DT / 2)
    k4 = field(y + DT * k3, t + DT)
    return y + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def make_field(w: Tensor, v: Tensor):
    return lambda y, t: torch.tanh(y @ w + torch.sin(t)) @ v - 0.1 * y


def with_scan(y0: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    field = make_field(w, v)

    def step(y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = rk4(field, y, t)
        return y, y

    times = torch.arange(STEPS, dtype=y0.dtype) * DT
    return scan(step, y0, times, checkpoint="sqrt")


def with_loop(y0: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    field, y, path = make_field(w, v), y0, []
    for k in range(STEPS):
        y = rk4(field, y, torch.tensor(k, dtype=y0.dtype) * DT)
        path.append(y)
    return y, torch.stack(path)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    sizes = ((3, 4), (4, 8), (8, 4))
    return tuple(torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in sizes)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
