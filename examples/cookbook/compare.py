"""What each recipe does when it is run: the scan and the loop side by side, values and gradients.

A recipe is a module with ``inputs() -> tuple of tensors``, ``with_scan(*inputs)`` and
``with_loop(*inputs)``, which return the same pytree of tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

Run = Callable[..., Any]


def values_and_gradients(run: Run, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Every tensor that ``run`` returns, and the gradient of every input that wants one."""
    inputs = pytree.tree_map_only(Tensor, _fresh, inputs)
    results = pytree.tree_leaves(run(*inputs))
    wanted = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]
    if not wanted:
        return results
    # weights that differ: a result in the wrong place must not go unseen
    total: Any = 0
    for result in results:
        if result.requires_grad:
            real = torch.view_as_real(result) if result.is_complex() else result
            weights = torch.linspace(1, 2, real.numel(), dtype=real.dtype).reshape(real.shape)
            total = total + (real * weights).sum()
    gradients = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
    return [*(r.detach() for r in results), *gradients]


def _fresh(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def largest_difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Of corresponding numbers, relative where they are large; shapes and dtypes must agree."""
    assert [(a.shape, a.dtype) for a in actual] == [(e.shape, e.dtype) for e in expected]
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        if e.numel():
            scale = e.abs().to(torch.float64).clamp(min=1.0)
            worst = max(worst, float(((a - e).abs() / scale).max()))
    return worst


def main(recipe: ModuleType | Any) -> None:
    """Compare in eager mode and compiled, and say how long a run with its gradients takes."""
    inputs = recipe.inputs()
    expected = values_and_gradients(recipe.with_loop, inputs)
    runs = {
        "loop": recipe.with_loop,
        "scan": recipe.with_scan,
        "scan, compiled": torch.compile(recipe.with_scan, fullgraph=True),
    }
    print((recipe.__doc__ or "").splitlines()[0])
    for name, run in runs.items():
        difference = largest_difference(values_and_gradients(run, inputs), expected)
        assert difference < 1e-6, f"{name}: differs from the loop by {difference}"
        start = time.perf_counter()
        values_and_gradients(run, inputs)
        seconds = time.perf_counter() - start
        print(f"  {name:<15} {seconds * 1e3:8.2f} ms   differs by {difference:.1e}")
