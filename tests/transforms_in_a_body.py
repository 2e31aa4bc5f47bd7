"""Steps ``(weight, carry, x) -> carry`` that call ``torch.func`` and ``torch.vmap``."""

from __future__ import annotations

import torch
from torch import func


def _sine_of_product(a, b):
    return torch.sin(a * b)


STEPS = {
    "grad": lambda w, c, x: c - 0.1 * func.grad(lambda p: (torch.sin(p * w) * x).sum())(c),
    "vjp": lambda w, c, x: func.vjp(lambda p: torch.sin(p * w), c)[1](x)[0],
    "jvp": lambda w, c, x: func.jvp(lambda p: torch.sin(p * w), (c,), (x,))[1],
    "jacrev": lambda w, c, x: func.jacrev(lambda p: torch.sin(p * w))(c) @ x,
    "hessian": lambda w, c, x: func.hessian(lambda p: torch.sin(p * w).sum())(c) @ x,
    "vmap": lambda w, c, x: torch.vmap(_sine_of_product)(c, w) + x,
    "vmap_of_grad": lambda w, c, x: torch.vmap(func.grad(_sine_of_product))(c, w) + x,
}
