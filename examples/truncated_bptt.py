"""Truncated back-propagation through time: a scan over chunks, whose body detaches the carry.

    python examples/truncated_bptt.py

The state runs through the whole sequence; gradients stop at the borders of the chunks. So
the outer scan's step is: cut the state's history, then scan over one chunk::

    before: xs [T, ...]        h_0 -> h_1 -> ... -> h_T         gradients flow through all T steps
    after:  xs [T/k, k, ...]   h_0 -> ... -> h_k | h_k -> ...   and through at most k here
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_scan_hop import scan

Cell = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def truncated_scan(cell: Cell, init: Tensor, xs: Tensor, every: int) -> tuple[Tensor, Tensor]:
    """``scan(cell, init, xs)`` that detaches the carry before every ``every``-th step."""
    if xs.shape[0] % every:
        raise ValueError(f"{xs.shape[0]} steps are not a multiple of {every}")

    def chunk(carry: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        return scan(cell, carry.detach(), block)

    # [T, ...] -> [T/k, k, ...]: each x of the outer scan is a chunk
    blocks = xs.unflatten(0, (-1, every))
    carry, ys = scan(chunk, init, blocks)
    return carry, ys.flatten(0, 1)


def truncated_loop(cell: Cell, init: Tensor, xs: Tensor, every: int) -> tuple[Tensor, Tensor]:
    """The same as the Python loop that people write."""
    carry, ys = init, []
    for t, x in enumerate(xs):
        if t % every == 0:
            carry = carry.detach()
        carry, y = cell(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def gradients(run: Any, weights: list[Tensor], *arguments: Any) -> list[Tensor]:
    _, ys = run(*arguments)
    return list(torch.autograd.grad(ys.square().mean(), weights))


def main() -> None:
    torch.manual_seed(0)
    T, B, D, H, every = 96, 4, 8, 16, 12
    w_in = (torch.randn(D, H) * D**-0.5).requires_grad_()
    w = (torch.randn(H, H) * H**-0.5).requires_grad_()
    weights, init, xs = [w_in, w], torch.zeros(B, H), torch.randn(T, B, D)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x @ w_in + h @ w)
        return h, h

    found = gradients(truncated_scan, weights, cell, init, xs, every)
    expected = gradients(truncated_loop, weights, cell, init, xs, every)
    torch.testing.assert_close(found, expected)

    whole = gradients(scan, weights, cell, init, xs)
    assert not torch.allclose(found[1], whole[1])  # the truncation does truncate
    for name, cut, full in zip(("w_in", "w"), found, whole, strict=True):
        missing = ((cut - full).norm() / full.norm()).item()
        print(f"d{name}: equal to the loop's; {missing:.1%} off the gradient without truncation")


if __name__ == "__main__":
    main()
