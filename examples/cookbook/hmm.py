"""A hidden Markov model: the likelihood of what was seen, and the likeliest path (Viterbi)."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_scan_hop import scan


def with_scan(seen: Tensor, start: Tensor, move: Tensor, emit: Tensor) -> tuple[Tensor, Tensor]:
    """``seen``: [T, B] symbols; logits ``start``: [S], ``move``: [S, S], ``emit``: [S, V]."""
    start, move, emit = (torch.log_softmax(p, -1) for p in (start, move, emit))

    def forward(alpha: Tensor, symbol: Tensor) -> tuple[Tensor, None]:
        alpha = torch.logsumexp(alpha[:, :, None] + move, 1)
        return alpha + emit[:, symbol].T, None

    def best(delta: Tensor, symbol: Tensor) -> tuple[Tensor, Tensor]:
        delta, came_from = (delta[:, :, None] + move).max(1)
        return delta + emit[:, symbol].T, came_from

    def back(state: Tensor, came_from: Tensor) -> tuple[Tensor, Tensor]:
        return came_from.gather(1, state[:, None])[:, 0], state

    first = start + emit[:, seen[0]].T
    alpha, _ = scan(forward, first, seen[1:])
    delta, pointers = scan(best, first.detach(), seen[1:])
    state, path = scan(back, delta.argmax(-1), pointers, reverse=True)
    return torch.logsumexp(alpha, -1), torch.cat([state[None], path])


def with_loop(seen: Tensor, start: Tensor, move: Tensor, emit: Tensor) -> tuple[Tensor, Tensor]:
    start, move, emit = (torch.log_softmax(p, -1) for p in (start, move, emit))
    alpha = delta = start + emit.T[seen[0]]
    pointers = []
    for symbol in seen[1:]:
        alpha = torch.logsumexp(alpha[:, :, None] + move, 1) + emit.T[symbol]
        delta, came_from = (delta[:, :, None] + move).max(1)
        delta = delta + emit.T[symbol]
        pointers.append(came_from)
    path = [delta.argmax(-1)]
    for came_from in reversed(pointers):
        path.append(came_from[torch.arange(len(path[-1])), path[-1]])
    return torch.logsumexp(alpha, -1), torch.stack(path[::-1])


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    S, V, T, B = 4, 6, 14, 3
    logits = (torch.randn(S), torch.randn(S, S), torch.randn(S, V))
    return torch.randint(V, (T, B)), *(p.double().requires_grad_() for p in logits)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
