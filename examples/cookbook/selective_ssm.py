"""A selective state space model (Mamba's recurrence): the step size and B, C depend on x."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_scan_hop import scan


def with_scan(x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """``x``, ``dt``: [T, B, D]; ``a_log``: [D, N]; ``b``, ``c``: [T, B, N]; ``d``: [D]."""
    a = -torch.exp(a_log)

    def cell(state: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x, dt, b, c = now
        dt = F.softplus(dt)[..., None]
        state = torch.exp(dt * a) * state + dt * b[:, None, :] * x[..., None]
        return state, (state * c[:, None, :]).sum(-1) + d * x

    _, ys = scan(cell, x.new_zeros(*x.shape[1:], a.shape[-1]), (x, dt, b, c))
    return ys


def with_loop(x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    a, ys = -torch.exp(a_log), []
    state = x.new_zeros(*x.shape[1:], a.shape[-1])
    for t in range(len(x)):
        step = F.softplus(dt[t])[..., None]
        state = torch.exp(step * a) * state + step * b[t][:, None, :] * x[t][..., None]
        ys.append(torch.einsum("bdn,bn->bd", state, c[t]) + d * x[t])
    return torch.stack(ys)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    T, B, D, N = 20, 2, 6, 4
    sizes = ((T, B, D), (T, B, D), (D, N), (T, B, N), (T, B, N), (D,))
    return tuple(torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in sizes)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
