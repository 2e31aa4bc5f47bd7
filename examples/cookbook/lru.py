"""A linear recurrent unit: a complex diagonal recurrence, real at both ends."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_scan_hop import scan


def eigenvalues(nu: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Inside the unit circle whatever the parameters are, and the gain that keeps h of size 1."""
    lam = torch.polar(torch.exp(-torch.exp(nu)), theta)
    return lam, torch.sqrt(1 - lam.abs() ** 2)


def with_scan(xs: Tensor, nu: Tensor, theta: Tensor, b: Tensor, c: Tensor) -> Tensor:
    lam, gain = eigenvalues(nu, theta)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = lam * h + gain * (x.to(b.dtype) @ b)
        return h, (h @ c).real

    _, ys = scan(cell, b.new_zeros(xs.shape[1], b.shape[1]), xs)
    return ys


def with_loop(xs: Tensor, nu: Tensor, theta: Tensor, b: Tensor, c: Tensor) -> Tensor:
    lam, gain = eigenvalues(nu, theta)
    h, ys = b.new_zeros(xs.shape[1], b.shape[1]), []
    for x in xs:
        h = lam * h + gain * (x.to(b.dtype) @ b)
        ys.append((h @ c).real)
    return torch.stack(ys)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    T, B, D, N = 24, 2, 3, 5
    real, cplx = torch.float64, torch.complex128
    return (
        torch.randn(T, B, D, dtype=real, requires_grad=True),
        torch.rand(N, dtype=real).sub(2).requires_grad_(),
        torch.rand(N, dtype=real).mul(3).requires_grad_(),
        torch.randn(D, N, dtype=cplx, requires_grad=True),
        torch.randn(N, D, dtype=cplx, requires_grad=True),
    )


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
