"""A spiking network: leaky neurons that fire and reset, trained by a surrogate gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_scan_hop import scan

LEAK, THRESHOLD = 0.9, 1.0


class Spike(torch.autograd.Function):
    """A step whose derivative is taken to be that of a fast sigmoid."""

    @staticmethod
    def forward(ctx, above):
        ctx.save_for_backward(above)
        return (above > 0).to(above.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (above,) = ctx.saved_tensors
        return gradient / (1 + 5 * above.abs()) ** 2


def with_scan(currents: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    def step(carry: tuple[Tensor, Tensor], current: Tensor):
        potential, spikes = carry
        potential = LEAK * potential + current @ w + spikes @ u - THRESHOLD * spikes
        spikes = Spike.apply(potential - THRESHOLD)
        return (potential, spikes), (spikes, potential)

    zeros = currents.new_zeros(currents.shape[1], len(u))
    return scan(step, (zeros, zeros), currents)[1]


def with_loop(currents: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    potential = spikes = currents.new_zeros(currents.shape[1], len(u))
    found, potentials = [], []
    for current in currents:
        potential = LEAK * potential + current @ w + spikes @ u - THRESHOLD * spikes
        spikes = Spike.apply(potential - THRESHOLD)
        found.append(spikes)
        potentials.append(potential)
    return torch.stack(found), torch.stack(potentials)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    T, B, D, N = 30, 2, 5, 8
    sizes = ((T, B, D), (D, N), (N, N))
    scales = (1.0, 0.5, 0.3)
    pairs = zip(sizes, scales, strict=True)
    return tuple((torch.randn(*s, dtype=torch.float64) * k).requires_grad_() for s, k in pairs)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
