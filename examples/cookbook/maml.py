"""Learning to learn (MAML): gradient steps inside, as a scan, and the gradient through them."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_scan_hop import scan

STEPS, RATE = 5, 0.1
Weights = dict[str, Tensor]


def loss(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    hidden = torch.tanh(x @ weights["w1"] + weights["b1"])
    return ((hidden @ weights["w2"] - y) ** 2).mean()


def updated(weights: Weights, x: Tensor, y: Tensor) -> Weights:
    gradients = torch.func.grad(loss)(weights, x, y)
    return {name: w - RATE * gradients[name] for name, w in weights.items()}


def with_scan(w1: Tensor, b1: Tensor, w2: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """``xs``, ``ys``: [tasks, examples, ...]. Returns each task's loss after learning."""

    def after_learning(x: Tensor, y: Tensor) -> Tensor:
        def step(weights: Weights, _: None) -> tuple[Weights, None]:
            return updated(weights, x, y), None

        weights, _ = scan(step, {"w1": w1, "b1": b1, "w2": w2}, length=STEPS)
        return loss(weights, x, y)

    return torch.vmap(after_learning)(xs, ys)


def with_loop(w1: Tensor, b1: Tensor, w2: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    losses = []
    for x, y in zip(xs, ys, strict=True):
        weights = {"w1": w1, "b1": b1, "w2": w2}
        for _ in range(STEPS):
            value = loss(weights, x, y)
            gradients = torch.autograd.grad(value, list(weights.values()), create_graph=True)
            weights = {
                name: w - RATE * g for (name, w), g in zip(weights.items(), gradients, strict=True)
            }
        losses.append(loss(weights, x, y))
    return torch.stack(losses)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    weights = (torch.randn(2, 6) / 2, torch.zeros(6), torch.randn(6, 1) / 6**0.5)
    xs = torch.randn(3, 10, 2, dtype=torch.float64)
    return *(w.double().requires_grad_() for w in weights), xs, xs.prod(-1, keepdim=True)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
